"""APEX (arXiv:2610.07780): a router per request and a depth controller per block, trained from traces. ``docs/apex.md``."""

from __future__ import annotations

from apexsim.errors import PolicyError
from apexsim.objective import PROFILES
from apexsim.protocol import Policy
from policies import Context, register
from policies.apex.checkpoint import PARTS, load
from policies.apex.policy import Apex


def _register(profile: str) -> None:
    name = f"apex-{profile}"

    @register(
        name,
        family="apex",
        signals=("accepted",),
        source="arXiv:2610.07780",
        variants=lambda name, space: [],  # it needs a checkpoint, and none is shipped
        trained=True,
    )
    def build(context: Context, args: tuple[str, ...]) -> Policy:
        if len(args) > 1:
            raise PolicyError(f"policy {name!r} takes one method at most, got {':'.join(args)!r}")
        method = context.one_method(name, args) if args else None
        if context.checkpoint is None:
            raise PolicyError(
                f"policy {name!r} needs a checkpoint: {name}@DIR, from: apexsim train apex BUNDLE --profile {profile} --out DIR"
            )
        checkpoint = load(context.checkpoint)
        if checkpoint.profile != profile:
            raise PolicyError(
                f"{context.checkpoint}: profile is {checkpoint.profile!r}; policy {name!r} needs {profile!r}"
            )
        for part in PARTS:
            if part not in checkpoint.parts:
                raise PolicyError(f"{context.checkpoint}: has no {part}: apexsim train apex-{part} makes it")
        router, depth = (checkpoint.parts[part].network for part in PARTS)
        policy = Apex(context.space, checkpoint.methods, checkpoint.depths, router, depth, method)
        policy.signals = tuple(dict.fromkeys(s for part in PARTS for s in checkpoint.parts[part].inputs.signals))
        policy.trained_on = ", ".join(name for name, _ in checkpoint.bundles)
        policy.trained_requests = checkpoint.trained_on
        return policy


for _profile in PROFILES:
    _register(_profile)
