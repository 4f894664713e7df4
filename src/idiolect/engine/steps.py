"""One client's phase of training as a plain loop of steps: the engine's innermost part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from idiolect.client import Phase
from idiolect.optim import clipped
from idiolect.task import Batch, Features, Task
from idiolect.tree import Tree


def train(task: Task, phase: Phase) -> Tree:
    """Carry out one phase; the result shares no memory with what came in."""
    trained = phase.trained
    live = task.lay(phase.weights, trained, single=len(phase.y) == 1)
    leaves = [live[k] for k in trained]
    given = phase.given
    aligned = [narrowed(g, trained) for g in given] if phase.correct else []
    mine = Tree({k: p.detach() for k, p in zip(trained, leaves, strict=True)})  # shares memory, carries no graph
    plain = [p.detach() for p in leaves]
    state: dict[str, Any] = {}
    torch.default_generator.manual_seed(phase.noise)  # dropout and the like
    for t, group in enumerate(phase.indices):
        batches = [
            Batch(inputs(task, phase, t, j), phase.y.index_select(0, indices), None, rows(phase.beside, indices))
            for j, indices in enumerate(group)
        ]
        if phase.step is not None:
            here = live | mine  # carries no graph: what needs one asks for it
            moved = phase.step(task, here, batches[0] if len(batches) == 1 else tuple(batches), phase.lr, *given)
            with torch.no_grad():
                for k in trained:
                    mine[k].copy_(moved[k])
            continue
        batch = batches[0]
        value: Any = phase.loss(task, live, batch, *given)
        then: Any = {}
        if phase.carried:
            value, then = value
        grads = list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))
        with torch.no_grad():
            if phase.correct is not None:
                steered = phase.correct(Tree(zip(trained, grads, strict=True)), mine, *aligned)
                grads = [steered[k] for k in trained]
            if phase.clip is not None:
                grads = clipped(grads, phase.clip)
            phase.optimizer.step_(plain, grads, state, phase.lr)
            for k in phase.carried:
                live[k].copy_(then[k])
            if phase.project is not None:
                for k, v in phase.project(mine).items():
                    mine[k].copy_(v)
    moving = task.net.buffers.union(phase.carried)
    return Tree({k: _kept(v, live[k], k in moving) for k, v in phase.weights.items()})


def inputs(task: Task, phase: Phase, t: int, j: int) -> Any:
    """What the network sees in batch j of step t."""
    x = rows(phase.x, phase.indices[t][j])
    if phase.augment is None:
        return x
    x = phase.augment(x, phase.indices[t][j], phase.keys[t][j])
    if phase.body is None:
        return x
    with torch.no_grad():
        return Features(task.features(phase.body, x))


def rows(x: Any, indices: Tensor) -> Any:
    """The chosen samples; images keep the memory layout that they have."""
    if x is None:
        return None
    if isinstance(x, Features):
        return Features(x.z.index_select(0, indices))
    if isinstance(x, tuple):
        return tuple(rows(v, indices) for v in x)
    if x.dim() == 4:  # index_select would undo channels_last
        return x.permute(0, 2, 3, 1).index_select(0, indices).permute(0, 3, 1, 2)
    return x.index_select(0, indices)


def narrowed(value: Any, names: tuple[str, ...]) -> Any:
    """A correction's constants have the names that are trained."""
    return value.pick(names) if isinstance(value, Tree) and all(k in value for k in names) else value


def _kept(before: Tensor, after: Tensor, moving: bool) -> Tensor:
    """A copy of a trained entry, or of a buffer or carried one that moved; a frozen entry is handed on as it came."""
    if after.requires_grad or (moving and not torch.equal(after, before)):
        return after.detach().clone(memory_format=torch.contiguous_format)
    return before
