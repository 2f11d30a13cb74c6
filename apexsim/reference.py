"""The replay rules once more, in plain Python and straight from bundle and profile: slow, simple, for differential tests.

Nothing here is shared with the kernels: tables are read row by row and the profile is asked for every price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from apexsim.cost import CostProfile
from apexsim.traces import Bundle


@dataclass
class Block:
    """One replayed block."""

    position: int
    drafted: int
    accepted: int
    emitted: int
    committed: int
    seconds: float


@dataclass(frozen=True)
class Request:
    """One request as lists: index p - 1 holds position p."""

    length: int
    prompt: int
    accepted: dict[str, list[int]]
    drafted: dict[str, list[int]]


def requests(bundle: Bundle) -> Iterator[Request]:
    """The requests of an every-position bundle, in order."""
    columns = {
        f"{c}.{m}": bundle.positions[f"{c}.{m}"].to_list() for m in bundle.methods for c in ("accepted", "drafted")
    }
    start = 0
    for length, prompt in bundle.requests.select("output_tokens", "prompt_tokens").iter_rows():
        end = start + max(length - 1, 0)
        yield Request(
            length,
            prompt,
            {m: columns[f"accepted.{m}"][start:end] for m in bundle.methods},
            {m: columns[f"drafted.{m}"][start:end] for m in bundle.methods},
        )
        start = end


class Reference:
    """Replays one request at a time.

    Args:
        bundle: An every-position trace.
        profile: What blocks cost.
        configured: Methods the engine has configured: each pays its sync where it is not used.
    """

    def __init__(self, bundle: Bundle, profile: CostProfile, configured: tuple[str, ...]) -> None:
        self.profile = profile
        self.prices = {m: profile.method(m, bundle.meta["methods"][m]["kind"]) for m in configured}

    def block(self, request: Request, p: int, method: str | None, k: int) -> Block:
        """The block at p with a method and depth; depth 0 is plain decoding."""
        context = request.prompt + p
        left = request.length - p
        sync = sum(price.sync_s for m, price in self.prices.items() if m != method or k == 0)
        if k == 0 or method is None:
            seconds = self.profile.verify.seconds(1, context) + self.profile.overhead_s + sync
            return Block(p, 0, 0, 1, 0, seconds)
        price = self.prices[method]
        drafted = min(k, request.drafted[method][p - 1])
        accepted = min(drafted, request.accepted[method][p - 1])
        emitted = min(accepted + 1, left)
        verify = self.profile.verify.seconds(drafted + 1, context)
        draft = price.draft.seconds(k, context) + price.verify_share * verify
        overhead = self.profile.overhead_s if price.overhead_s is None else price.overhead_s
        tail = draft if self.profile.tail_draft and emitted == left else 0.0
        committed = min(accepted, emitted)
        return Block(p, drafted, accepted, emitted, committed, draft + verify + overhead + sync + tail)

    def replay(self, request: Request, act: Callable[[int], tuple[str | None, int]]) -> list[Block]:
        """All blocks of a request; ``act`` gives (method, depth) at p."""
        blocks = []
        p = 1
        while p < request.length:
            block = self.block(request, p, *act(p))
            blocks.append(block)
            p += block.emitted
        return blocks

    def constant(self, request: Request, method: str | None, k: int) -> list[Block]:
        """All blocks of a request with one method and depth."""
        return self.replay(request, lambda p: (method, k))

    def oracle(self, request: Request, depths: tuple[int, ...], step_s: float, waste_weight: float) -> float:
        """The least objective of the request over all sequences of actions, by recursion from its end."""
        to_go = {request.length: 0.0}
        for p in range(request.length - 1, 0, -1):
            blocks = [self.block(request, p, m, k) for m in self.prices for k in depths if k > 0]
            if 0 in depths:
                blocks.append(self.block(request, p, None, 0))
            to_go[p] = min(
                b.seconds / step_s + waste_weight * (b.drafted - b.committed) + to_go[p + b.emitted] for b in blocks
            )
        return to_go.get(1, 0.0)
