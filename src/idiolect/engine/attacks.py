"""Clients that mean harm, simulated: a fixed share of them, drawn from the run's seed, sends something else.

They change what is averaged (`Up.mean`), as an update of what the server holds; `labels` trains honestly on wrong
labels. What they send by other slots, and what they keep, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from idiolect.engine.orders import draw
from idiolect.errors import UsageError, unknown
from idiolect.method import Slots, Up
from idiolect.tree import Tree

DEFAULTS = {"sign": 1.0, "scale": 10.0, "random": 1.0, "little": 0.0, "labels": 0.0}


@dataclass(frozen=True)
class Attack:
    """`kind:share` or `kind:share,size`.

    sign: the update, turned round and made `size` times as long · scale: made `size` times as long · random: normal
    numbers, `size` times as long as the update · little: the attackers' mean less `size` standard deviations in each
    coordinate (Baruch et al., NeurIPS 2019); 0: as many as hide among the honest · labels: what training on labels
    counted from the other end gives.
    """

    kind: str
    share: float
    size: float

    @property
    def sends(self) -> bool:
        """Whether something else is sent than what training gave."""
        return self.kind != "labels"

    def attackers(self, clients: int, seed: int) -> frozenset[int]:
        """The same for every method."""
        count = int(self.share * clients + 0.5)
        if not 0 < count < clients:
            raise UsageError(
                f"attack={self.kind}:{self.share:g} makes {count} of {clients} clients attackers, which leaves no "
                f"{'honest one' if count else 'attacker'}; choose another share."
            )
        return frozenset(map(int, draw(seed, "attackers").choice(clients, count, replace=False)))

    def corrupt(self, replies: list[tuple[int, Up]], bad: Iterable[int], server: Slots, seed: int, round: int) -> None:
        """Replace, in the list of a round's replies, those of the clients `bad`."""
        places = [k for k, (client, _) in enumerate(replies) if client in bad]
        if not places or not self.sends:
            return
        if self.kind == "little":
            sent = self._little([replies[k][1] for k in places], len(replies))
            changed = [sent] * len(places)
        else:
            changed = [self._alone(replies[k][1], replies[k][0], server, seed, round) for k in places]
        for k, mean in zip(places, changed, strict=True):
            replies[k] = (replies[k][0], replace(replies[k][1], mean=mean))

    def _alone(self, up: Up, client: int, server: Slots, seed: int, round: int) -> Slots:
        random = torch.Generator().manual_seed(int(draw(seed, "attack", round, client).integers(2**62)))

        def moved(sent: Tensor, held: Tensor) -> Tensor:
            update = sent - held
            if self.kind == "random":
                noise = torch.randn(update.shape, generator=random, dtype=update.dtype)
                update = noise * (update.norm() / noise.norm().clamp(min=1e-12))
            return held + (-self.size if self.kind == "sign" else self.size) * update

        return {slot: _paired(moved, value, held_as(value, server.get(slot))) for slot, value in up.mean.items()}

    def _little(self, ups: list[Up], count: int) -> Slots:
        far = self.size or _hidden(count, len(ups))

        def least(*sent: Tensor) -> Tensor:
            values = torch.stack(sent)
            return values.mean(0) - far * values.std(0, correction=0)

        return {slot: _paired(least, *(up.mean[slot] for up in ups)) for slot in ups[0].mean}


def attack(text: str) -> Attack | None:
    """What a text like "sign:0.2" names."""
    if text == "none":
        return None
    kind, _, rest = text.strip().partition(":")
    if kind not in DEFAULTS:
        raise unknown("attack", kind, ["none", *DEFAULTS])
    share, _, size = rest.partition(",")
    try:
        found = Attack(kind, float(share), float(size) if size else DEFAULTS[kind])
    except ValueError:
        raise UsageError(f"An attack is written as '{kind}:SHARE' or '{kind}:SHARE,SIZE'; found '{text}'.") from None
    if not 0 < found.share < 1 or not 0 <= found.size < float("inf"):
        raise UsageError(f"An attack's share lies in (0, 1) and its size is at least 0; found '{text}'.")
    return found


def _hidden(count: int, bad: int) -> float:
    """The most standard deviations at which the attackers and the honest beyond them are a majority."""
    needed = count // 2 + 1 - bad
    return max(NormalDist().inv_cdf(min(max((count - bad - needed) / max(count - bad, 1), 1e-6), 1 - 1e-6)), 0.0)


def held_as(value: Any, held: Any) -> Any:
    """What an update is counted from: what the server holds by that name, or nothing."""
    if isinstance(value, Tree):
        return held if isinstance(held, Tree) and held.keys() == value.keys() else value.zeros()
    return held if isinstance(held, Tensor) else torch.zeros_like(value)


def _paired(fn: Callable[..., Tensor], *values: Any) -> Any:
    """The function, tensor by tensor."""
    if isinstance(values[0], Tree):
        return Tree({k: fn(*(v[k] for v in values)) for k in values[0]})
    return fn(*values)
