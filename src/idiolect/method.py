"""The contract. A method is one frozen dataclass: its fields are hyper-parameters, its behaviour a few pure functions.

It holds no tensor, network, loader, device or client list. What is shared, what is private and what the server keeps
is said once, in `init`; how replies may be combined is said by the reply itself, in `Up`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from idiolect.engine import orders
from idiolect.errors import UsageError
from idiolect.optim import SGD
from idiolect.tree import Tree, stack

if TYPE_CHECKING:
    from idiolect.client import Client
    from idiolect.experiment import Run
    from idiolect.task import Batch, Net, Task, linear

Slots = Mapping[str, Any]  # slot name -> Tree or Tensor
SHELF = 64  # clients whose rows are copied together


@dataclass(frozen=True)
class State:
    """What `init` returns: one template per home. `server`: one copy. `client`: one per client, private, never leaves
    it. `rows`: one per client, kept at the server. A client's whole network is `down["model"] | mine["model"]`.

    A list of client templates declares kinds of clients (other architectures, say), of which each client draws one. An
    empty Tree of the server's, or of a row, is an open slot, whose entries may change from round to round."""

    server: Slots = field(default_factory=dict)
    client: Slots | Sequence[Slots] = field(default_factory=dict)
    rows: Slots = field(default_factory=dict)


@dataclass(frozen=True)
class Up:
    """A client's reply, by how it may be combined. `mean` and `sum` can be streamed, aggregated securely, noised;
    `rows` are the openly declared cases in which the server must see individuals. `weight` is the client's weight in
    `mean`: its number of training samples unless given."""

    mean: Slots = field(default_factory=dict)
    sum: Slots = field(default_factory=dict)
    rows: Slots = field(default_factory=dict)
    weight: float | None = None


@dataclass(frozen=True)
class Facts:
    """What the server may use besides states and replies: `run`. `ids` and `weights` are of the clients whose replies
    were accepted, in the order of `up.rows`; in `plan`, of those who take part."""

    round: int
    num_clients: int
    ids: tuple[int, ...]
    weights: tuple[float, ...]
    lr: float
    rounds: int
    seed: int
    view: Callable[[Tensor, Tensor], Client] | None = field(default=None, repr=False, compare=False)

    def over(self, x: Tensor, y: Tensor) -> Client:
        """A view like `Client.over` of samples that the server has, to train on with the run's settings."""
        assert self.view is not None
        return self.view(x, y)

    def draw(self, purpose: str, client: int) -> np.random.Generator:
        """Randomness about a client in this round for a named purpose."""
        return orders.draw(self.seed, purpose, self.round, client)


class Written(Mapping[int, Slots]):
    """Entries by client. Another one with more of them shares what is not written: it costs what it writes, however
    many there are."""

    def __init__(self, entries: Mapping[int, Slots] | None = None) -> None:
        self._shelves: dict[int, dict[int, Slots]] = {}
        for i, entry in (entries or {}).items():
            self._shelves.setdefault(i // SHELF, {})[i] = entry

    def with_(self, entries: Mapping[int, Slots]) -> Written:
        new = Written()
        new._shelves = dict(self._shelves)
        for shelf in {i // SHELF for i in entries}:
            new._shelves[shelf] = dict(self._shelves.get(shelf, {}))
        for i, entry in entries.items():
            new._shelves[i // SHELF][i] = entry
        return new

    def __getitem__(self, client: int) -> Slots:
        return self._shelves[client // SHELF][client]

    def __iter__(self) -> Iterator[int]:
        return (i for shelf in sorted(self._shelves) for i in sorted(self._shelves[shelf]))

    def __len__(self) -> int:
        return sum(map(len, self._shelves.values()))


@dataclass(frozen=True)
class Rows:
    """The server's entry for every client; those never written are the template. `with_` gives new Rows."""

    template: Slots
    written: Written = field(default_factory=Written)

    def __getitem__(self, client: int) -> Slots:
        return self.written.get(client, self.template)

    def __iter__(self) -> Iterator[int]:
        return iter(self.written)

    def with_(self, ids: Iterable[int], **slots: Any) -> Rows:
        """New Rows in which entry k of each given slot (a stacked Tree or Tensor, or a list) is client ids[k]'s."""
        written: dict[int, Slots] = {}
        for k, i in enumerate(ids):
            entry = {
                s: v.map(lambda t, k=k: t[k]) if isinstance(v, Tree) else v[k]  # type: ignore[misc]
                for s, v in slots.items()
            }
            written[i] = {**written.get(i, self[i]), **entry}
        return Rows(self.template, self.written.with_(written))

    def stack(self, slot: str, ids: Iterable[int]) -> Any:
        """One slot of several clients: [K, ...]."""
        values = [self[i][slot] for i in ids]
        return stack(values) if isinstance(values[0], Tree) else torch.stack(values)


@dataclass(frozen=True)
class Method:
    """One method: its hyper-parameters, and these functions."""

    def init(self, net: Net) -> State:
        """Declare, shape and initialise every home."""
        raise NotImplementedError

    def hello(self, me: Client, down: Slots, mine: Slots) -> Slots:
        """What every client sends once, before the first round: entries of its row. Default: nothing."""
        return {}

    def plan(self, server: Slots, rows: Rows, run: Facts) -> tuple[Slots, Rows]:
        """Before a round: what the server decides once it knows who takes part. Default: nothing."""
        return server, rows

    def down(self, server: Slots, row: Slots) -> Slots:
        """What one client receives. Default: all of `server`."""
        return server

    def downs(self, server: Slots, rows: Sequence[Slots]) -> Iterable[Slots]:
        """`down` of several clients, in their order; what mixes for each of them may do so for all at once."""
        return (self.down(server, row) for row in rows)

    def published(self, server: Slots) -> Slots:
        """What the server's slots hold for clients that predict, where that is not what training starts from."""
        return server

    def ask(self, me: Client, down: Slots, mine: Slots) -> Up:
        """A first exchange of a round: what a participant says before `local`. Default: there is none."""
        return Up()

    def answered(self, server: Slots, rows: Rows, up: Up, run: Facts) -> tuple[Slots, Rows]:
        """What the server makes of the answers to `ask`; `down` of it is what `local` receives."""
        return server, rows

    def local(self, me: Client, down: Slots, mine: Slots) -> tuple[Up, Slots]:
        """One client's round: its reply, and its new private state."""
        raise NotImplementedError

    def server(self, server: Slots, rows: Rows, up: Up, run: Facts) -> tuple[Slots, Rows]:
        """The server's round. Default: the mean replaces."""
        return {**server, **up.mean}, rows

    def personal(self, me: Client, down: Slots, mine: Slots) -> Tree:
        """The weights that this client would predict with now. Asked with what was downloaded (received), and after
        local training with the client's own reply in place of the download (trained)."""
        return down.get("model", Tree()) | mine.get("model", Tree())

    def logits(self, task: Task, w: Tree, x: Any) -> Tensor:
        """Prediction with the personal weights; only where it differs from the network's own."""
        return task.logits(w, x)

    def notes(self, server: Slots) -> Mapping[str, Any]:
        """Tensors of the server that are worth keeping round by round, beside the metrics; or Trees of numbers."""
        return {}

    def check(self, run: Run) -> None:
        """Refuse (UsageError) a run that breaks the method's derivation."""

    @property
    def says_hello(self) -> bool:
        return type(self).hello is not Method.hello

    @property
    def asks(self) -> bool:
        return type(self).ask is not Method.ask

    @property
    def name(self) -> str:
        """The name on the command line: the file's name; a wrapper's follows what it wraps."""
        own = type(self).__module__.rsplit(".", 1)[-1]
        if own == "__main__" or not type(self).__module__.startswith("idiolect."):
            own = type(self).__name__.lower()
        inner = getattr(self, "inner", None)
        return f"{inner.name}+{own}" if isinstance(inner, Method) else own

    def fields(self) -> dict[str, Any]:
        """The hyper-parameters of this method alone (without what it wraps)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "inner"}


@dataclass(frozen=True)
class Wrapper(Method):
    """A method that holds a method: all is the inner's but what the wrapper redefines."""

    inner: Method

    def init(self, net: Net) -> State:
        return self.inner.init(net)

    def hello(self, me: Client, down: Slots, mine: Slots) -> Slots:
        return self.inner.hello(me, down, mine)

    def plan(self, server: Slots, rows: Rows, run: Facts) -> tuple[Slots, Rows]:
        return self.inner.plan(server, rows, run)

    def down(self, server: Slots, row: Slots) -> Slots:
        return self.inner.down(server, row)

    def downs(self, server: Slots, rows: Sequence[Slots]) -> Iterable[Slots]:
        changed = type(self).down is not Wrapper.down
        return super().downs(server, rows) if changed else self.inner.downs(server, rows)

    def published(self, server: Slots) -> Slots:
        return self.inner.published(server)

    def ask(self, me: Client, down: Slots, mine: Slots) -> Up:
        return self.inner.ask(me, down, mine)

    def answered(self, server: Slots, rows: Rows, up: Up, run: Facts) -> tuple[Slots, Rows]:
        return self.inner.answered(server, rows, up, run)

    def local(self, me: Client, down: Slots, mine: Slots) -> tuple[Up, Slots]:
        return self.inner.local(me, down, mine)

    def server(self, server: Slots, rows: Rows, up: Up, run: Facts) -> tuple[Slots, Rows]:
        return self.inner.server(server, rows, up, run)

    def personal(self, me: Client, down: Slots, mine: Slots) -> Tree:
        return self.inner.personal(me, down, mine)

    def logits(self, task: Task, w: Tree, x: Any) -> Tensor:
        return self.inner.logits(task, w, x)

    def notes(self, server: Slots) -> Mapping[str, Any]:
        return self.inner.notes(server)

    def check(self, run: Run) -> None:
        self.inner.check(run)

    @property
    def says_hello(self) -> bool:
        return self.inner.says_hello

    @property
    def asks(self) -> bool:
        return self.inner.asks


def gradient(fn: Callable[[Tree], Tensor], w: Tree) -> Tree:
    """The gradient of the scalar `fn(w)`, entry by entry; for a phase's `step`."""
    if torch._C._functorch.maybe_current_level() is not None:  # stacked clients
        return torch.func.grad(fn)(w)
    leaves = {k: v.detach().requires_grad_() for k, v in w.items()}
    with torch.enable_grad():
        value = fn(Tree(leaves))
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return Tree(zip(leaves, found, strict=True))


def unit_interval(w: Tree) -> Tree:
    """The projection of mixing weights: every entry in [0, 1]."""
    return w.clamp(0.0, 1.0)


__all__ = [
    "SGD", "Batch", "Client", "Facts", "Method", "Net", "Rows", "State", "Task", "Tree", "Up", "UsageError", "Wrapper",
    "gradient", "linear", "stack", "unit_interval",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A method file imports everything from here: the names of the client's and the network's side as well."""
    home = {"Batch": "task", "Net": "task", "Task": "task", "linear": "task", "Client": "client"}.get(name)
    if home is None:
        raise AttributeError(f"module 'idiolect.method' has no attribute '{name}'")
    return getattr(importlib.import_module(f"idiolect.{home}"), name)
