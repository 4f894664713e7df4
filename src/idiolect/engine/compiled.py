"""Compiled steps: a phase's gradients by a function that PyTorch's compiler made of its loss, in place of autograd; of
plain SGD on linear layers, by the formulas (`linear_steps.py`), which no compiler makes faster.

The same mathematics, rounded otherwise: results agree to about 1e-6, not to the bit, and so this is an option. What the
compiler makes is kept on disk by PyTorch and found there by every process and the next run. A phase whose loss cannot
be traced, or would be traced wrongly, is stepped through as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from idiolect.client import Phase
from idiolect.engine import linear_steps, steps
from idiolect.errors import UsageError
from idiolect.task import Batch, Features, Task, unfit
from idiolect.tree import Tree

KINDS = 16  # of phases that one process compiles; a method with more has them made anew each round
Function = Callable[..., Any]
NONE: Mapping[str, Tensor] = {}


@dataclass
class Compiled:
    """A trainer. Batches of another size than the run's, such as an epoch's last, are not worth a compilation."""

    batch_size: int
    known: dict[Hashable, Function | None] = field(default_factory=dict, repr=False)
    fit: bool | None = field(default=None, repr=False)
    layers: list[linear_steps.Linear] | None = field(default=None, repr=False)  # of a network of linear layers alone
    uncounted: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, repr=False)  # no client's time

    def __call__(self, task: Task, phase: Phase) -> Tree:
        if self.layers is None:
            self.layers = linear_steps.chain(task.net) or []
        if self.layers and linear_steps.fits(task, phase, self.layers):
            return linear_steps.train(task, phase, self.layers)
        if not self._fits(task, phase):
            return steps.train(task, phase)
        return steps.train(task, phase, lambda live: self._gradients(task, phase, live))

    def __getstate__(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "known": {},
            "fit": None,
            "layers": None,
        }  # for one process

    def _fits(self, task: Task, phase: Phase) -> bool:
        if self.fit is None:
            self.fit = unfit(task.net) is None
        if not self.fit or phase.step is not None or phase.carried or not isinstance(phase.loss, Hashable):
            return False
        # what a function of its own closes over may be other things the next time
        return getattr(phase.loss, "__closure__", None) is None and all(map(_plain, _leaves(phase)))

    def _gradients(self, task: Task, phase: Phase, live: Tree) -> steps.Gradients:
        fixed = [v.detach() for v in live.values()] + [v for v in _leaves(phase) if isinstance(v, Tensor)]
        by_autograd = steps.backward(task, phase, live, [live[k] for k in phase.trained])
        found: list[Function | None] = []  # for this phase; looking it up costs as much as a small layer

        def gradients(batch: Batch) -> tuple[list[Tensor], Mapping[str, Tensor]]:
            if batch.y.shape[0] != self.batch_size:
                return by_autograd(batch)
            inputs = [*fixed, *_tensors(batch)]
            if not found:
                found.append(self._function(task, phase, live, batch, inputs))
            function = found[0]
            return (list(function(*inputs)), NONE) if function else by_autograd(batch)

        return gradients

    def _function(self, task: Task, phase: Phase, live: Tree, batch: Batch, inputs: list[Tensor]) -> Function | None:
        key = _key(phase, live, inputs)
        if key not in self.known:
            if len(self.known) >= KINDS:
                return None
            with self.uncounted():
                self.known[key] = made(traced(task, phase, live, batch, inputs), inputs)
        return self.known[key]


def _key(phase: Phase, live: Tree, inputs: list[Tensor]) -> Hashable:
    told, form = (
        pytree.tree_flatten((phase.given, phase.beside)) if phase.given or phase.beside is not None else ((), "")
    )
    numbers = tuple(v for v in told if not isinstance(v, Tensor))
    shapes = tuple((v.shape, v.stride(), v.dtype) for v in inputs)
    return phase.loss, phase.trained, tuple(live), shapes, numbers, str(form), isinstance(phase.x, Features)


def _leaves(phase: Phase) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves(phase.given) if phase.given else []
    return leaves


def _plain(value: Any) -> bool:
    """A constant that a trace takes for what it is; a function, say, might answer otherwise the next time."""
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _tensors(batch: Batch) -> list[Tensor]:
    x = batch.x.z if isinstance(batch.x, Features) else batch.x
    if batch.beside is None and isinstance(x, Tensor):
        return [x, batch.y]
    return [v for v in pytree.tree_leaves((x, batch.y, batch.beside)) if v is not None]


def traced(task: Task, phase: Phase, live: Tree, batch: Batch, inputs: list[Tensor]) -> torch.fx.GraphModule | None:
    """The loss's gradients as a graph of tensor operations alone, or None where that is not all there is to it."""
    given, form = pytree.tree_flatten(phase.given)
    columns, shape = pytree.tree_flatten((batch.x, batch.y, batch.beside))

    def gradients(*values: Tensor) -> list[Tensor]:
        rest = iter(values)
        w = {k: next(rest).detach().requires_grad_(k in phase.trained) for k in live}
        constants = [next(rest) if isinstance(g, Tensor) else g for g in given]
        x, y, beside = pytree.tree_unflatten([v if v is None else next(rest) for v in columns], shape)
        value = phase.loss(task, Tree(w), Batch(x, y, None, beside), *pytree.tree_unflatten(constants, form))
        leaves = [w[k] for k in phase.trained]
        return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))

    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):  # the steps' own random numbers come after this
            graph = make_fx(gradients)(*inputs)
    except (RuntimeError, TypeError, ValueError):  # a loss that looks at numbers, say: it runs as it is
        return None
    return None if any(map(_outside, graph.graph.nodes)) else graph


def _outside(node: torch.fx.Node) -> bool:
    """Something that the next step would want anew: a tensor that the loss made by itself, or a random number."""
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "get_attr" or drawn


def made(graph: torch.fx.GraphModule | None, inputs: list[Any]) -> Function | None:
    if graph is None:
        return None
    from torch._inductor import compile, config  # seconds to import

    config.compile_threads = 1  # no pool of processes for a few functions
    with suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a worker that is ended leaves behind
    try:
        with torch.no_grad():
            function: Function = compile(graph, inputs, options={"size_asserts": False})  # the key has them
            function(*inputs)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"steps=compiled needs PyTorch's compiler and a C++ compiler that it can use; it failed with "
            f"{type(error).__name__}: {reason}. Use steps=loop."
        ) from error
    return function
