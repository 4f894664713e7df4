"""What the server takes in: replies with numbers, combined as the run says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from idiolect.engine.attacks import Attack, held_as
from idiolect.engine.finite import all_finite, bad_numbers, first_odd, floats
from idiolect.engine.reduce import Reduction, copied
from idiolect.engine.robust import Rule
from idiolect.engine.work import Reply, checked
from idiolect.errors import ClientError, ContractError, UsageError
from idiolect.method import Slots, Up
from idiolect.tree import Tree, entries

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
        plain = self.rule is None and (self.attack is None or not self.attack.sends)
        return Reduction(name, server) if plain else Gathered(name, server, self, round)

    def fault(self, name: str, reply: Reply, round: int) -> str | None:
        """Why a reply is refused for its numbers; None if it is not."""
        if self.bad == "accept" or reply.sound or (fault := bad_numbers(reply.up, reply.mine)) is None:
            return None
        if self.bad == "stop":
            raise ClientError(
                f"{name}: the reply of client {reply.client} in round {round} has {fault}. Take a smaller learning "
                "rate, or let such replies be dropped (on_bad_reply=drop)."
            )
        return fault

    def guard(self, name: str, before: Slots, after: Slots, round: int) -> None:
        """Refuse to go on with NaN or inf that the server made of sound replies (they may be too large to add up)."""
        if self.bad == "accept" or after is before or all_finite(floats(after)):
            return
        if all_finite(floats(before)):
            raise ClientError(
                f"{name} made {first_odd({'server': after})} of the replies of round {round}, which were all finite. "
                "Take a smaller learning rate; on_bad_reply=accept goes on with it."
            )


def misfit(name: str, reply: Reply, heard: Reduction, mine: Slots | None, round: int) -> str | None:
    """Why a reply cannot be combined with those in `heard`, or its state not be kept where `mine` is expected: other
    names, shapes or dtypes. None if it can.

    In a simulation that is the method's mistake, and the run stops with it. A server whose clients are others' machines
    asks this first, and refuses the one reply."""
    try:
        if not isinstance(reply.up, Up):
            return f"{name} returned no Up (client {reply.client})."
        heard.check(reply.client, reply.up)
        if mine is not None:
            checked(name, "mine", reply.mine or {}, mine, f"client {reply.client}, round {round}")
    except ContractError as error:
        return str(error)
    return None


class Gathered(Reduction):
    """Means are held until the last reply is there: an attacker may look at the others, and a rule needs them all. Sums
    and rows are taken at once, as ever. Memory: a model a reply, and with a rule as much again while it works."""

    def __init__(self, name: str, server: Slots, how: Reception, round: int) -> None:
        super().__init__(name, server)
        self.how, self.round = how, round
        self.replies: list[tuple[int, Up]] = []

    def _take(self, client: int, up: Up, weight: float) -> None:
        super()._take(client, replace(up, mean={}), weight)
        mean = {slot: copied(value) for slot, value in up.mean.items()}
        self.replies.append((client, Up(mean, weight=self.weights[client])))

    def result(self) -> Up:
        found, how = super().result(), self.how
        if how.attack is not None:
            how.attack.corrupt(self.replies, how.attackers, self.server, how.seed, self.round)
        return replace(found, mean=self._averaged() if how.rule is None else self._by(how.rule))

    def _averaged(self) -> Slots:
        plain = Reduction(self.name, self.server)
        for client, up in self.replies:
            plain._take(client, up, 0.0)
        return plain.mean

    def _by(self, rule: Rule) -> dict[str, Any]:
        ups = [up for _, up in self.replies]
        if not any(up.mean for up in ups):
            return {}
        if len(ups) < rule.least:
            raise UsageError(
                f"{self.name}: reduce={rule} needs {rule.least} replies, round {self.round} has {len(ups)}; take "
                "another reduction, or more participants."
            )
        held = {slot: held_as(value, self.server.get(slot)) for slot, value in ups[0].mean.items()}
        places = [(slot, k) for slot, value in held.items() for k in entries(value)]
        updates = [
            torch.stack([entries(up.mean[slot])[k] - entries(held[slot])[k] for up in ups]) for slot, k in places
        ]
        weights = torch.tensor([self.weights[client] for client, _ in self.replies], dtype=torch.float64)
        shares = weights / weights.sum() if weights.sum() > 0 else torch.full_like(weights, 1 / len(weights))
        found: dict[str, dict[str, Tensor]] = {slot: {} for slot in held}
        for (slot, k), update in zip(places, rule(updates, shares), strict=True):
            found[slot][k] = entries(held[slot])[k] + update
        return {slot: Tree(v) if isinstance(held[slot], Tree) else v[""] for slot, v in found.items()}
