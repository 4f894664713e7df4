"""The store: every client's private state, one fixed record each, in memory or in one memory-mapped file.

Records are created when they are first written; until then a client has its kind's template. Untouched records cost
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idiolect.engine.wire import Layout, shared_bytes
from idiolect.method import Slots


class Store:
    def __init__(self, kinds: Sequence[Slots], drawn: np.ndarray, file: Path | None = None) -> None:
        """`kinds`: the templates; `drawn`: which of them each client has."""
        self._open(kinds, drawn)
        self.visits = np.zeros(len(drawn), dtype=np.int64)  # committed participations of each client
        self.changed: set[int] = set()  # clients written since the last checkpoint
        self.file = file
        self.buffer = shared_bytes(self.record * len(drawn)) if file is None else self._mapped(file)

    def _mapped(self, file: Path) -> Tensor:
        size = max(self.record * len(self.drawn), 1)
        return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)

    def _open(self, kinds: Sequence[Slots], drawn: np.ndarray) -> None:
        self.kinds, self.drawn = list(kinds), drawn
        self.layouts = [Layout(template) for template in self.kinds]
        self.record = max(layout.size for layout in self.layouts)

    @property
    def records(self) -> Tensor | Path:
        """Where another process finds the records: a file is mapped there anew, by its name."""
        return self.buffer if self.file is None else self.file.absolute()

    @classmethod
    def attached(cls, kinds: Sequence[Slots], drawn: np.ndarray, records: Tensor | Path) -> Store:
        """The same store in another process, to read from."""
        store = cls.__new__(cls)
        store._open(kinds, drawn)
        store.buffer = records if isinstance(records, Tensor) else store._mapped(records)
        return store

    def template(self, client: int) -> Slots:
        return self.kinds[self.drawn[client]]

    def read(self, client: int) -> Any:
        """The client's state: its template, or views of its record, good until it is next written."""
        return self.record_of(client) if self.visits[client] else self.template(client)

    def record_of(self, client: int) -> Any:
        return self.layouts[self.drawn[client]].read(self.buffer, client * self.record)

    def write(self, client: int, mine: Slots) -> None:
        """Commit: the client's reply was accepted."""
        ordered = {slot: mine[slot] for slot in self.template(client)}
        self.layouts[self.drawn[client]].write(self.buffer, client * self.record, ordered)
        self.visits[client] += 1
        self.changed.add(client)
