"""The store: every client's private state, one fixed record each, in memory or in one memory-mapped file.

Records are created when they are first written; until then a client has its kind's template. Untouched records cost
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idiolect.engine.wire import Layout, shared_bytes
from idiolect.errors import UsageError
from idiolect.method import Slots


class Store:
    def __init__(self, kinds: Sequence[Slots], drawn: np.ndarray, file: Path | None = None) -> None:
        """`kinds`: the templates; `drawn`: which of them each client has."""
        self._open(kinds, drawn)
        self.visits = np.zeros(len(drawn), dtype=np.int64)  # committed participations of each client
        self.changed: set[int] = set()  # clients written since the last checkpoint
        self.file = file
        self.buffer = shared_bytes(self.record * len(drawn)) if file is None else self._mapped(file)
        self._out = None if file is None else file.open("r+b", buffering=0)
        self._scratch = torch.empty(self.record, dtype=torch.uint8)

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
        layout, ordered = self.layouts[self.drawn[client]], {slot: mine[slot] for slot in self.template(client)}
        if not layout.size:
            pass
        elif self._out is None:
            layout.write(self.buffer, client * self.record, ordered)
        else:
            layout.write(self._scratch, 0, ordered)
            self._put(client * self.record)
        self.visits[client] += 1
        self.changed.add(client)

    def _put(self, place: int) -> None:
        """By a plain write, which the map shows at once: it fetches no page, and on a full disk it fails, where writing
        to the map would end the process."""
        assert self._out is not None
        try:
            written = os.pwrite(self._out.fileno(), self._scratch.numpy().data, place)
            reason = None if written == self.record else "No space left on device"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            raise UsageError(
                f"Private states cannot be written to '{self.file}' ({reason}); free some space, or choose another "
                "place (out, or the variable TMPDIR)."
            )
