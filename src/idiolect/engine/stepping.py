"""How clients take their steps: one after another as a loop, by compiled functions, or several clients as a stack; and
which of these is the fastest here, by a measurement of a second or two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace

from idiolect.engine import work
from idiolect.engine.compiled import Compiled
from idiolect.engine.serial import Serial
from idiolect.engine.stacked import Stacked, refuse
from idiolect.engine.work import Context, Job
from idiolect.errors import UsageError
from idiolect.method import Method, State, Up
from idiolect.task import unfit

STEPS = 10  # at most, of a client in a measurement
BUSY = 0.005  # seconds; in a step that takes longer, Python's part is small
BUDGET = 1.5  # seconds of measuring, without compilation
GAIN = 1.15  # what is not exact has to be so much faster
_measured: dict[Hashable, dict[str, float]] = {}


@dataclass(frozen=True)
class Probe(Method):
    """A few plain steps."""

    steps: int = STEPS

    def init(self, net):  # type: ignore[no-untyped-def]
        return State(server={"model": net.weights})

    def local(self, me, down, mine):  # type: ignore[no-untyped-def]
        return Up(mean={"model": me.train(down["model"], steps=self.steps)}), mine


def take(context: Context, steps: str) -> None:
    """Have this run's clients take their steps so; refuse what cannot."""
    if steps != "loop" and (found := unfit(context.net)) is not None:
        if steps == "stacked":
            refuse(context.net)
        raise UsageError(
            f"steps={steps} cannot have {type(found[1]).__name__} (layer {found[0]}), which changes or draws "
            "numbers in a step. Use steps=loop, or a network with group normalisation and without dropout."
        )
    context.steps = steps
    if steps == "compiled":
        context.trainer = Compiled(context.settings.batch_size)


def here(context: Context) -> Serial | Stacked:
    """The run's clients in this process."""
    return Stacked(context, work.STACK) if context.steps == "stacked" else Serial(context)


def fastest(context: Context) -> tuple[str, dict[str, float]]:
    """The way of taking steps that is the fastest for this network and batch size, and seconds a client of each that
    was measured. Other ways than the loop must be clearly faster, as theirs are other roundings."""
    key = _kind(context)
    if key not in _measured:
        _measured[key] = _measure(context)
    found = _measured[key]
    best = min(found, key=lambda way: found[way])
    return best if found["loop"] > GAIN * found[best] else "loop", found


def _kind(context: Context) -> Hashable:
    made = context.network, repr(context.options)
    same = made if context.network is not None else id(context.module)
    return same, context.shape, context.classes, context.dtype, context.settings, context.device


def _measure(context: Context) -> dict[str, float]:
    loop = _Way(context, "loop")
    loop.run(1)  # the first of all is slower
    step = loop.run(1) / STEPS
    ways = {"loop": loop}
    if step < BUSY and unfit(context.net) is None:
        for steps in ("compiled", "stacked"):
            with suppress(UsageError):  # no C++ compiler, say
                way = _Way(context, steps)
                way.run(work.STACK)
                ways[steps] = way
    return _alternating(ways) if len(ways) > 1 else {"loop": step * STEPS}


def _alternating(ways: dict[str, _Way]) -> dict[str, float]:
    """The median of each, measured in turns: what else the machine does falls on all."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    started = time.perf_counter()
    while not times["loop"] or time.perf_counter() - started < BUDGET:
        for name, way in ways.items():
            times[name].append(way.run(work.STACK))
    return {way: statistics.median(t) for way, t in times.items()}


class _Way:
    """A round of plain training, on the run's own data."""

    def __init__(self, context: Context, steps: str) -> None:
        self.context = replace(context, method=Probe(), own_buffers=False, steps="loop")
        take(self.context, steps)
        self.backend = here(self.context)
        sizes = [context.shards.size("train", i) for i in range(context.shards.clients)]
        self.clients = [i for i, n in enumerate(sizes) if n] or [0]

    def run(self, count: int) -> float:
        """Seconds a client."""
        state = self.context.state
        ids = [self.clients[k % len(self.clients)] for k in range(count)]
        jobs = [Job("local", i, 0, 0, state.server, {}) for i in ids]
        started = time.perf_counter()
        for _ in self.backend.do(jobs):
            pass
        return (time.perf_counter() - started) / count
