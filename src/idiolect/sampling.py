"""Who takes part in a round, as a short text: `0.1`, `bernoulli:0.1`, `0.5..1` (a ratio drawn each round), or lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np

from idiolect.errors import UsageError

Ratio = "float | str | Sequence[Sequence[int]]"
FORMS = "a ratio in (0, 1] such as 0.1, 'bernoulli:0.1', a range such as '0.5..1', or a list of client lists"


@dataclass(frozen=True)
class Sampler:
    """A participation rule: a function of (clients, generator, round)."""

    kind: str  # fixed | bernoulli | range | given
    low: float = 1.0
    high: float = 1.0
    lists: tuple[tuple[int, ...], ...] = ()

    def __call__(self, clients: int, draw: np.random.Generator, round: int) -> list[int]:
        if self.kind == "given":
            return list(self.lists[round % len(self.lists)])
        if self.kind == "bernoulli":  # an empty draw is an empty round
            return np.flatnonzero(draw.random(clients) < self.low).tolist()
        count = max(1, int(clients * self.low + 1e-9))
        if self.kind == "range":  # uniform over the counts between the two ratios, as the papers' drop-out runs
            count = int(draw.integers(count, max(1, int(clients * self.high + 1e-9)), endpoint=True))
        return sorted(draw.choice(clients, size=count, replace=False).tolist())

    def largest(self, clients: int) -> int:
        """Clients of the largest round that there can be."""
        if self.kind == "given":
            return max(map(len, self.lists))
        return clients if self.kind == "bernoulli" else max(1, int(clients * self.high + 1e-9))

    def most(self, clients: int, rounds: int) -> int:
        """Different clients that so many rounds come to at most; for bernoulli on average."""
        if self.kind == "given":
            return len({i for ids in self.lists[:rounds] for i in ids})
        return min(clients, rounds * max(1, int(clients * self.high + 1e-9)))


def sampler(ratio: float | str | Sequence[Sequence[int]], clients: int) -> Sampler:
    """The rule that a ratio, a text or lists stand for."""
    if not isinstance(ratio, str | int | float):
        try:
            lists = tuple(tuple(sorted(map(index, ids))) for ids in ratio)
        except (TypeError, ValueError):
            raise UsageError(f"ratio must be {FORMS}; found {ratio}.") from None
        wrong = [i for ids in lists for i in ids if not 0 <= i < clients]
        if not lists or wrong or any(len(set(ids)) < len(ids) or not ids for ids in lists):
            raise UsageError(
                f"Lists of participants name clients 0 to {clients - 1}, each once a round, none empty; found {ratio}."
            )
        return Sampler("given", lists=lists)
    text = str(ratio).strip()
    kind = "fixed"
    if text.startswith("bernoulli:"):
        kind, text = "bernoulli", text.removeprefix("bernoulli:")
    elif ".." in text:
        kind = "range"
    ends = text.split("..") if kind == "range" else [text]
    try:
        low, high = float(ends[0]), float(ends[-1])
    except ValueError:
        raise UsageError(f"ratio must be {FORMS}; found '{ratio}'.") from None
    if not 0 < low <= high <= 1 or len(ends) > 2:
        raise UsageError(f"ratio must be {FORMS}; found '{ratio}'.")
    return Sampler(kind, low, high)
