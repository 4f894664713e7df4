"""The store: every client's private state, one fixed record each, in memory or in one memory-mapped file.

Records are created when they are first written; until then a client has the template. Untouched records cost nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from idiolect.engine.wire import Layout, shared_bytes
from idiolect.method import Slots


class Store:
    def __init__(self, template: Slots, clients: int, file: Path | None = None) -> None:
        self.template = template
        self.layout = Layout(template)
        self.visits = np.zeros(clients, dtype=np.int64)  # committed participations of each client
        size = self.layout.size * clients
        if file is None:
            self.buffer = shared_bytes(size)
        else:
            self.buffer = torch.from_file(str(file), shared=True, size=max(size, 1), dtype=torch.uint8)

    def read(self, client: int) -> Any:
        """The client's state: the template, or views of its record, good until it is next written."""
        return self.layout.read(self.buffer, client * self.layout.size) if self.visits[client] else self.template

    def write(self, client: int, mine: Slots) -> None:
        """Commit: the client's reply was accepted."""
        ordered = {slot: mine[slot] for slot in self.template}
        self.layout.write(self.buffer, client * self.layout.size, ordered)
        self.visits[client] += 1
