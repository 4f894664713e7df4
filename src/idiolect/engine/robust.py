"""Means that a few wrong replies cannot move far: what may stand in the place of the weighted mean of `Up.mean`.

Each rule sees the entries of all replies, stacked [K, ...], as updates: what was sent minus what the server holds. All
of a reply counts as one vector where lengths or distances are asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from idiolect.errors import UsageError, unknown


@dataclass(frozen=True)
class Rule(ABC):
    """How K replies become one."""

    @abstractmethod
    def __call__(self, updates: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Entries [K, ...] and the replies' shares [K], float64, to the entries of one update."""

    @property
    def least(self) -> int:
        """Replies that it needs, to be what it is."""
        return 1

    def __str__(self) -> str:
        values = [f"{getattr(self, f.name):g}" for f in fields(self)]
        return type(self).__name__.lower() + (":" + ",".join(values) if values else "")


@dataclass(frozen=True)
class Median(Rule):
    """Coordinate by coordinate. Yin et al., ICML 2018. The replies count alike."""

    def __call__(self, updates: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        middle = (len(weights) - 1) // 2, len(weights) // 2
        return [_mean_of(u.sort(0).values, range(middle[0], middle[1] + 1)) for u in updates]


@dataclass(frozen=True)
class Trimmed(Rule):
    """The mean of each coordinate without the share `share` of its values at either end. Yin et al., ICML 2018."""

    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise UsageError(f"trimmed leaves out a share in [0, 0.5) at either end; found {self.share:g}.")

    @property
    def least(self) -> int:
        return math.ceil((1 - 1e-9) / self.share) if self.share else 1  # with fewer none is left out

    def __call__(self, updates: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        cut = int(self.share * len(weights) + 1e-9)
        return [_mean_of(u.sort(0).values, range(cut, len(weights) - cut)) for u in updates]


@dataclass(frozen=True)
class Krum(Rule):
    """The reply that is nearest to its K - bad - 2 nearest others. Blanchard et al., NeurIPS 2017: K >= 2 bad + 3."""

    bad: int = 1

    def __post_init__(self) -> None:
        _count(self, "bad", self.bad)

    @property
    def least(self) -> int:
        return 2 * self.bad + 3

    def ranks(self, updates: Sequence[Tensor]) -> list[int]:
        """Replies by the sum of squared distances to their nearest others; ties by their order."""
        apart = _distances(updates).sort(1).values  # the first is the reply's own, 0
        scores = apart[:, 1 : max(len(apart) - self.bad - 1, 2)].sum(1)
        return sorted(range(len(scores)), key=lambda k: float(scores[k]))

    def __call__(self, updates: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        best = self.ranks(updates)[0]
        return [u[best].clone() for u in updates]


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The plain mean of the K - bad replies that Krum ranks first. Blanchard et al., NeurIPS 2017, section 4, with the
    m = K - f of its experiments; replies are ranked once."""

    def __call__(self, updates: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        kept = sorted(self.ranks(updates)[: len(weights) - self.bad])
        return [_mean_of(u, kept) for u in updates]


@dataclass(frozen=True)
class Clip(Rule):
    """The weighted mean of updates that are shortened to length `norm` where they are longer. Sun et al., 2019."""

    norm: float = 1.0

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise UsageError(f"clip takes a length > 0; found {self.norm:g}.")

    def __call__(self, updates: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        lengths = _squares(updates).sqrt()
        return _weighted(updates, weights * (self.norm / lengths.clamp(min=self.norm)))


@dataclass(frozen=True)
class Geometric(Rule):
    """The weighted geometric median by smoothed Weiszfeld steps from the mean, `steps` at most. Pillutla, Kakade and
    Harchaoui, IEEE TSP 2022 (RFA), Algorithm 2."""

    steps: int = 100
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        _count(self, "steps", self.steps)

    def __call__(self, updates: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        shares = weights
        for _ in range(self.steps):
            point = _weighted(updates, shares)
            apart = _squares([u - v for u, v in zip(updates, point, strict=True)]).sqrt()
            moved = weights / apart.clamp(min=self.smoothing)
            moved = moved / moved.sum()
            if torch.allclose(moved, shares, rtol=1e-9, atol=0):
                break
            shares = moved
        return _weighted(updates, shares)


RULES: dict[str, type[Rule]] = {
    rule.__name__.lower(): rule for rule in (Median, Trimmed, Krum, MultiKrum, Clip, Geometric)
}


def rule(text: str) -> Rule | None:
    """What a text like "median" or "trimmed:0.1" names; None is the weighted mean itself."""
    name, colon, rest = text.strip().partition(":")
    if name == "mean" and not colon:
        return None
    if name not in RULES:
        raise unknown("reduction", name, ["mean", *RULES])
    known = fields(RULES[name])
    values = rest.split(",") if colon else []
    if len(values) > len(known):
        raise UsageError(f"{name} takes {len(known)} numbers at most; found '{text}'.")
    try:
        given = {f.name: (int if f.type == "int" else float)(v) for f, v in zip(known, values, strict=False)}
    except ValueError:
        raise UsageError(f"{name} takes numbers, as in '{RULES[name]()}'; found '{text}'.") from None
    return RULES[name](**given)


def _count(rule: Rule, field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(
            f"{type(rule).__name__.lower()} takes a whole number of at least 1 for {field}; found {value}."
        )


def _mean_of(u: Tensor, ks: Sequence[int]) -> Tensor:
    """The plain mean of some rows, added in their order."""
    total = u[ks[0]].clone()
    for k in ks[1:]:
        total += u[k]
    return total / len(ks)


def _weighted(updates: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    return [torch.tensordot(shares.to(u.dtype), u, 1) for u in updates]


def _squares(updates: Sequence[Tensor]) -> Tensor:
    """The squared length of each reply, over all entries. [K], float64"""
    return torch.stack([u.reshape(len(u), -1).double().square().sum(1) for u in updates]).sum(0)


def _distances(updates: Sequence[Tensor]) -> Tensor:
    """Squared distances between replies. [K, K], float64"""
    count = len(updates[0])
    found = torch.zeros(count, count, dtype=torch.float64)
    for k in range(count - 1):  # not by inner products, which lose digits where replies are near each other
        found[k, k + 1 :] = found[k + 1 :, k] = _squares([u[k + 1 :] - u[k] for u in updates])
    return found
