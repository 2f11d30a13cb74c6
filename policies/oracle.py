"""Hindsight oracles: what a controller of each class could reach if it knew the outcome of every draft (sim only)."""

from __future__ import annotations

from apexsim.errors import PolicyError
from apexsim.hindsight import Hindsight
from apexsim.program import Program
from apexsim.protocol import ActionSpace
from apexsim.replay import Plan, Planner
from policies import Context, register

FORMS = "oracle, oracle:method, oracle:depth:METHOD, oracle:request"


class Oracle:
    """The optimum of one class, by dynamic programming over the recorded outcomes."""

    def __init__(self, kind: str, methods: tuple[str, ...], known: Hindsight | None) -> None:
        self.kind = kind
        self.methods = methods
        self.scope = {"oracle": "switch", "depth": "depth"}.get(kind, "method")
        self.known = known

    def plan(self, program: Program) -> Plan:
        hindsight = self.known if self.known and self.known.program is program else Hindsight(program)
        if self.kind == "depth":
            return hindsight.depth(self.methods[0])
        return {"oracle": hindsight.switch, "method": hindsight.method, "request": hindsight.request}[self.kind]()


def _variants(name: str, space: ActionSpace) -> list[str]:
    return [name, f"{name}:method", *(f"{name}:depth:{m}" for m in space.methods), f"{name}:request"]


@register("oracle", family="oracle", source="dynamic programming in hindsight", live=False, variants=_variants)
def build_oracle(context: Context, args: tuple[str, ...]) -> Planner:
    kind = args[0] if args else "oracle"
    if kind == "depth" and len(args) == 2:
        return Oracle("depth", (context.one_method("oracle:depth", args[1:]),), context.test)
    if args not in ((), ("method",), ("request",)):
        raise PolicyError(f"policy {':'.join(('oracle', *args))!r} is unknown; allowed: {FORMS}")
    return Oracle(kind, context.space.methods, context.test)
