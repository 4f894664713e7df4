"""What a method is, told by itself: its docstring, its fields, and what it keeps and sends in a real round."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import idiolect
from idiolect import catalogue
from idiolect.client import Phase
from idiolect.data import Dataset
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.engine.steps import train
from idiolect.engine.wire import nbytes
from idiolect.engine.work import Context, Job, Reply
from idiolect.errors import UsageError
from idiolect.experiment import Run
from idiolect.method import Method, Rows
from idiolect.running import one_thread
from idiolect.task import Task
from idiolect.tree import Tree

HOMES = ("mean", "sum", "rows")
REFUSED: dict[str, dict[str, Any]] = {
    "momentum=0": {"momentum": 0.9},
    "optimizer=sgd": {"optimizer": "adam"},
    "no clip": {"clip": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """Bytes of each slot, as they went through the engine in the second of two rounds."""

    keeps: Mapping[str, int]
    down: Mapping[str, int]
    mean: Mapping[str, int]
    sum: Mapping[str, int]
    rows: Mapping[str, int]
    needs: tuple[str, ...]


def describe(name: str) -> dict[str, Any]:
    """An entry of `idiolect methods --json`. A wrapper is shown around FedAvg."""
    kind, found = catalogue.find(name), facts(name)
    title, paper = headline(kind)
    return {
        "name": name,
        "title": title,
        "paper": paper,
        "wraps": catalogue.wraps(name),
        "keeps": list(found.keeps),
        "sends": {
            "down": list(found.down),
            "up": {"mean": list(found.mean), "sum": list(found.sum), "rows": list(found.rows)},
        },
        "needs": list(found.needs),
        "hyper_parameters": {f.name: f.default for f in _fields(kind)},
    }


def headline(kind: type[Method]) -> tuple[str, str | None]:
    """What the method does in a sentence, and its paper, out of the first paragraph: `Name. Paper: what it does.`"""
    first = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    rest = re.sub(r"^\w+[.:]? +", "", first)
    cited = re.match(r"([^:]*?(?:\b(?:19|20)\d\d\b|Algorithm)[^:.]*)[:.] (.*)", rest)
    paper, text = (re.sub("[()]", "", cited[1]), cited[2]) if cited else (None, rest)
    return text.split(". ")[0].rstrip("."), paper


def page(name: str) -> str:
    """The page of one method, in plain text."""
    parts, found = catalogue.split(name), facts(name)
    lines: list[str] = [catalogue.build(name).name, ""]
    for part in parts:
        kind = catalogue.find(part)
        lines += [inspect.getdoc(kind) or "", "", f"source: {_source(kind)}", *_hyper_parameters(part, kind), ""]
    sent = {f"{slot} ({home})": size for home in HOMES for slot, size in getattr(found, home).items()}
    lines += [
        "Bytes of a client for the default network of digits (convnet3, 10 classes):",
        f"  keeps     {_slots(found.keeps)}",
        f"  receives  {_slots(found.down)}",
        f"  sends     {_slots(sent)}",
        f"  needs     {', '.join(found.needs) or 'nothing more'}",
    ]
    return "\n".join(lines)


def _slots(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{slot} {size:,}" for slot, size in sizes.items()) or "nothing"


def _hyper_parameters(part: str, kind: type[Method]) -> Iterator[str]:
    width = max((len(f.name) for f in _fields(kind)), default=0)
    for f in _fields(kind):
        yield f"  --set {part}.{f.name:<{width}} = {'none' if f.default is None else f.default}   ({f.type})"


def _fields(kind: type[Method]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(kind) if f.name != "inner"]


def _source(kind: type[Method]) -> str:
    root = Path(idiolect.__file__).parent
    return str(Path(inspect.getfile(kind)).relative_to(root.parent))


# what it keeps and sends, seen


class Watched(Serial):
    """The serial backend, which remembers the last training job and what was asked before it, and whether a client had
    to train to predict. A step of each phase is enough to see that."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.trainer = self._train
        self.trains_to_predict = False
        self.last: tuple[Job, Reply] | None = None
        self.asked: Reply | None = None

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in jobs:
            self._kind = job.kind
            reply = self.context.do(job)
            if job.kind == "local":
                self.last = job, reply
            elif job.kind == "ask":
                self.asked = reply
            yield reply

    def _train(self, task: Task, phase: Phase) -> Tree:
        self.trains_to_predict |= self._kind == "received"
        return train(task, dataclasses.replace(phase, indices=phase.indices[:1]))


@cache
def facts(name: str) -> Facts:
    """Two rounds of two tiny clients, with samples shaped like the digits."""
    experiment = Run(method=name, data=_tiny(), split="iid", clients=2, rounds=2, evaluate_every=2, backend="serial")
    context = experiment.context()
    state = context.state
    backend = Watched(context)
    with one_thread():
        loop(
            experiment,
            context,
            backend,
            Progress(state.server, Rows(state.rows), context.store(2)),
            lambda report: None,
        )
    assert backend.last is not None
    job, reply = backend.last
    assert reply.up is not None
    assert reply.mine is not None
    ups = [r.up for r in (backend.asked, reply) if r is not None]
    sent = {home: {k: n for up in ups for k, n in _bytes(getattr(up, home)).items()} for home in HOMES}
    needs = []
    if reply.mine:
        needs.append("state kept by clients")
    if sent["rows"]:
        needs.append("individual replies at the server")
    if context.method.says_hello:
        needs.append("a first message from every client")
    if context.method.asks:
        needs.append("two exchanges in a round")
    if backend.trains_to_predict:
        needs.append("training before prediction")
    needs += [need for need, fields in REFUSED.items() if _refuses(name, fields)]
    return Facts(_bytes(reply.mine), _bytes(job.down), **sent, needs=tuple(needs))


def _bytes(slots: Mapping[str, Any]) -> dict[str, int]:
    return {slot: nbytes(value) for slot, value in slots.items()}


def _refuses(name: str, fields: Mapping[str, Any]) -> bool:
    try:
        Run(method=name, **fields)
    except UsageError:
        return True
    return False


@cache
def _tiny() -> Dataset:
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return Dataset("tiny", x, torch.arange(16) % 10, classes=10, network="convnet3")
