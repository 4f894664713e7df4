"""What goes wrong with participation, simulated: functions of (seed, round, client), the same for every method."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from idiolect.engine.orders import draw

FAULTS = ("absent", "drop", "slow", "late", "leave")  # fields of `Run`, each a probability


@dataclass(frozen=True)
class Faults:
    """absent: a participant never begins · drop: its reply is lost · slow: it does a part of its steps · late: a client
    joins after a while, in the first half of the rounds · leave: it leaves for good, in the second half."""

    seed: int
    rounds: int
    absent: float = 0.0
    drop: float = 0.0
    slow: float = 0.0
    late: float = 0.0
    leave: float = 0.0

    def there(self, round: int, ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """Of those drawn for a round: who takes part, and who does not."""
        here: list[int] = []
        away: list[int] = []
        for i in ids:
            (here if self.belongs(round, i) and not self._happens("absent", i, round) else away).append(i)
        return here, away

    def belongs(self, round: int, client: int) -> bool:
        """Whether the client has joined and not left."""
        half = self.rounds // 2
        if self._happens("late", client) and round < self._between("joins", client, 1, half):
            return False
        return not self._happens("leave", client) or round < self._between("leaves", client, half, self.rounds - 1)

    def lost(self, round: int, client: int) -> bool:
        """Whether its reply is lost."""
        return self._happens("drop", client, round)

    def pace(self, round: int, client: int) -> float:
        """The part of its steps that it does, more than 0 and at most 1."""
        if not self._happens("slow", client, round):
            return 1.0
        return 1.0 - draw(self.seed, "pace", round, client).random()

    def _happens(self, fault: str, client: int, round: int | None = None) -> bool:
        chance = getattr(self, fault)
        if not chance:
            return False
        key = (fault, client) if round is None else (fault, round, client)
        return bool(draw(self.seed, *key).random() < chance)

    def _between(self, purpose: str, client: int, low: int, high: int) -> int:
        return int(draw(self.seed, purpose, client).integers(low, max(high, low), endpoint=True))


NONE = Faults(0, 1)
