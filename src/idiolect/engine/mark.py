"""Where a worker is: a few numbers in shared memory, which the parent can read when the worker hangs or has died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from idiolect.engine.wire import shared_bytes
from idiolect.engine.work import Job

TURN, PARCEL, CLIENT, PAUSED, MEMORY = range(5)
NONE, SEVERAL = -1, -1  # of parcels; of clients


class Mark:
    """`turn` is another number whenever something else is under way."""

    def __init__(self, memory: Tensor | None = None) -> None:
        self.memory = shared_bytes(5 * 8) if memory is None else memory
        self._numbers = self.memory.numpy().view(np.int64)
        self.parcel_under_way = NONE
        if memory is None:
            self.clear()

    def clear(self) -> None:
        """Nothing is under way."""
        self._numbers[1:] = (NONE, SEVERAL, 0, 0)
        self._numbers[TURN] += 1

    # the worker's side

    def begin(self, parcel: int) -> None:
        """What is told next is of this parcel."""
        self.parcel_under_way = parcel

    def tell(self, jobs: Sequence[Job]) -> None:
        """These are under way."""
        self._numbers[1:4] = (self.parcel_under_way, jobs[0].client if len(jobs) == 1 else SEVERAL, 0)
        self._numbers[TURN] += 1

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What takes its time in here is no client's."""
        self._numbers[PAUSED] = 1
        try:
            yield
        finally:
            self._numbers[PAUSED] = 0
            self._numbers[TURN] += 1

    def out_of_memory(self) -> None:
        self._numbers[MEMORY] = 1

    # the parent's side

    @property
    def turn(self) -> int:
        return int(self._numbers[TURN])

    @property
    def parcel(self) -> int:
        """The parcel's number, or NONE."""
        return int(self._numbers[PARCEL])

    @property
    def client(self) -> int | None:
        """The client; None where several are under way together."""
        found = int(self._numbers[CLIENT])
        return None if found == SEVERAL else found

    @property
    def paused(self) -> bool:
        return bool(self._numbers[PAUSED])

    @property
    def lacked_memory(self) -> bool:
        return bool(self._numbers[MEMORY])
