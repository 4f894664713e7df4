"""What the server takes in: replies with numbers, combined as the run says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from idiolect.engine.attacks import Attack, held_as
from idiolect.engine.reduce import Reduction, copied
from idiolect.engine.robust import Rule
from idiolect.engine.work import Reply
from idiolect.errors import ClientError, UsageError
from idiolect.method import Slots, Up
from idiolect.tree import Tree

ON_BAD_REPLY = ("drop", "stop", "accept")


@dataclass(frozen=True)
class Reception:
    """How a run takes replies in. `bad`: what to do with one that has NaN or inf in it; `rule`: what stands in the
    place of the mean; `attack`, `attackers`: who sends something else, simulated."""

    bad: str = "drop"
    rule: Rule | None = None
    attack: Attack | None = None
    attackers: frozenset[int] = field(default_factory=frozenset)
    seed: int = 0

    def begin(self, name: str, server: Slots, round: int) -> Reduction:
        """An empty reduction of one exchange's replies."""
        if self.rule is None and self.attack is None:
            return Reduction(name, server)
        return Gathered(name, server, self, round)

    def fault(self, name: str, reply: Reply, round: int) -> str | None:
        """Why a reply is refused; None if it is not."""
        if self.bad == "accept" or reply.up is None:
            return None
        parts = {"up.mean": reply.up.mean, "up.sum": reply.up.sum, "up.rows": reply.up.rows, "mine": reply.mine or {}}
        entries = {f"{part}[{slot!r}]": value for part, slots in parts.items() for slot, value in slots.items()}
        if all_finite([t for value in entries.values() for t in _floats(value).values()]):
            return None
        where = next(f"{entry} {k}".rstrip() for entry, v in entries.items() for k, t in _floats(v).items() if _odd(t))
        if self.bad == "stop":
            raise ClientError(
                f"{name}: the reply of client {reply.client} in round {round} has NaN or inf in {where}. Take a "
                "smaller learning rate, or let such replies be dropped (on_bad_reply=drop)."
            )
        return f"NaN or inf in {where}"


class Gathered(Reduction):
    """All replies are held until the last is there: an attacker may look at the others, and a rule needs them all."""

    def __init__(self, name: str, server: Slots, how: Reception, round: int) -> None:
        super().__init__(name, server)
        self.how, self.round = how, round
        self.replies: list[tuple[int, Up]] = []
        self.sizes: dict[int, float] = {}

    def add(self, client: int, up: Up, weight: float) -> None:
        mean, sum_, rows = ({k: copied(v) for k, v in kind.items()} for kind in (up.mean, up.sum, up.rows))
        self.replies.append((client, Up(mean, sum_, rows, up.weight)))
        self.sizes[client] = weight
        self.weights[client] = weight if up.weight is None else up.weight

    def result(self) -> Up:
        if self.how.attack is not None:
            self.how.attack.corrupt(self.replies, self.how.attackers, self.server, self.how.seed, self.round)
        self.weights = {}
        for client, up in self.replies:
            super().add(client, up, self.sizes[client])
        mean = self.mean if self.how.rule is None else self._by(self.how.rule)
        found = super().result()
        return Up(mean=mean, sum=found.sum, rows=found.rows, weight=found.weight)

    def _by(self, rule: Rule) -> dict[str, Any]:
        ups = [up for _, up in self.replies]
        if len(ups) < rule.least:
            raise UsageError(
                f"{self.name}: reduce={rule} needs {rule.least} replies, round {self.round} has {len(ups)}; take "
                "another reduction, or more participants."
            )
        held = {slot: held_as(value, self.server.get(slot)) for slot, value in ups[0].mean.items()}
        places = [(slot, k) for slot, value in held.items() for k in _entries(value)]
        updates = [
            torch.stack([_entries(up.mean[slot])[k] - _entries(held[slot])[k] for up in ups]) for slot, k in places
        ]
        weights = torch.tensor([self.weights[client] for client, _ in self.replies], dtype=torch.float64)
        shares = weights / weights.sum() if weights.sum() > 0 else torch.full_like(weights, 1 / len(weights))
        found: dict[str, dict[str, Tensor]] = {slot: {} for slot in held}
        for (slot, k), update in zip(places, rule(updates, shares), strict=True):
            found[slot][k] = _entries(held[slot])[k] + update
        return {slot: Tree(v) if isinstance(held[slot], Tree) else v[""] for slot, v in found.items()}


def all_finite(tensors: list[Tensor]) -> bool:
    """No NaN and no inf. Their sums of magnitudes tell in one pass; where one overflows, the numbers themselves."""
    if not tensors:
        return True
    norms = torch.stack([n.double() for n in torch._foreach_norm(tensors, 1)])
    return bool(norms.isfinite().all()) or all(not _odd(t) for t in tensors)


def _odd(t: Tensor) -> bool:
    return not bool(t.isfinite().all())


def _entries(value: Any) -> Mapping[str, Tensor]:
    return value if isinstance(value, Tree) else {"": value}


def _floats(value: Any) -> dict[str, Tensor]:
    return {k: t.detach() for k, t in _entries(value).items() if t.is_floating_point() and t.numel()}
