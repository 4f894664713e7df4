"""What a run is between two rounds, and what a round says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from idiolect.engine.evaluating import Standing
from idiolect.engine.store import Store
from idiolect.engine.work import Score
from idiolect.method import Rows, Slots


@dataclass
class Progress:
    """All that a run is between two rounds."""

    server: Slots
    rows: Rows
    store: Store
    round: int = 0
    strangers: frozenset[int] = frozenset()  # clients whose introduction was refused
    standing: dict[int, Standing] = field(default_factory=dict)  # clients' last evaluations


@dataclass
class Report:
    """What one round says of itself. `received`: each client's scores with what it would download after this round;
    `trained`: the participants' after local training; `held_out`: as received, of clients that never train."""

    round: int  # rounds finished
    participants: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()  # drawn for the round, and not there
    refused: dict[int, str] = field(default_factory=dict)  # replies that were not taken in, and why
    failed: dict[int, str] = field(default_factory=dict)  # participants that were given up, and why
    unscored: dict[int, str] = field(default_factory=dict)  # likewise in the evaluation
    received: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    trained: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    held_out: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    passes: float = 0.0  # gradient passes over the participants' own data, on average
    seconds_train: float = 0.0
    seconds_evaluate: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)  # the method's own (Method.notes)
