"""One client's phase of training as a plain loop of steps: the engine's innermost part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor

from idiolect.client import Phase
from idiolect.optim import clipped
from idiolect.task import Batch, Features, Task
from idiolect.tree import Tree

BLOCK = 1 << 18  # bytes of samples that are gathered at once: a small client's whole phase, few batches of a large one
Gradients = Callable[[Batch], tuple[list[Tensor], Mapping[str, Tensor]]]


def train(task: Task, phase: Phase, compiled: Callable[[Tree], Gradients] | None = None) -> Tree:
    """Carry out one phase; the result shares no memory with what came in. `compiled` makes another way to the
    gradients out of the live weights."""
    trained = phase.trained
    live = task.lay(phase.weights, trained, single=len(phase.y) == 1)
    leaves = [live[k] for k in trained]
    given = phase.given
    aligned = [narrowed(g, trained) for g in given] if phase.correct else []
    plain = [p.detach() for p in leaves]  # shares memory, carries no graph
    mine = Tree(zip(trained, plain, strict=True))
    gradients = compiled(live) if compiled else backward(task, phase, live, leaves)
    state: dict[str, Any] = {}
    torch.default_generator.manual_seed(phase.noise)  # dropout and the like
    for group in batches(task, phase):
        if phase.step is not None:
            here = live | mine  # carries no graph: what needs one asks for it
            moved = phase.step(task, here, group[0] if len(group) == 1 else group, phase.lr, *given)
            with torch.no_grad():
                for k in trained:
                    mine[k].copy_(moved[k])
            continue
        grads, then = gradients(group[0])
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


def backward(task: Task, phase: Phase, live: Tree, leaves: list[Tensor]) -> Gradients:
    """The gradients of the phase's loss, and the next values of carried entries, by autograd as it stands."""
    loss, given, carried = phase.loss, phase.given, phase.carried

    def gradients(batch: Batch) -> tuple[list[Tensor], Mapping[str, Tensor]]:
        value: Any = loss(task, live, batch, *given)
        value, then = value if carried else (value, {})
        return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)), then

    return gradients


def batches(task: Task, phase: Phase) -> Iterator[tuple[Batch, ...]]:
    """The phase's batches, step by step. Those of several steps are gathered at once and cut out of that."""
    keys = iter([key for group in phase.keys for key in group])
    sample = max(_bytes(phase.x) // max(phase.y.shape[0], 1), 1)
    for block in _blocks(phase.indices, BLOCK // sample):
        flat = [indices for group in block for indices in group]
        lengths = [indices.shape[0] for indices in flat]  # len() of a tensor takes ten times as long
        chosen = moved(torch.cat(flat) if len(flat) > 1 else flat[0], phase.y.device)
        x, y, beside = (_cut(rows(column, chosen), lengths) for column in (phase.x, phase.y, phase.beside))
        if phase.augment is not None:
            x = [altered(task, phase, *one) for one in zip(x, flat, keys, strict=False)]
        found = map(Batch, x, y, repeat(None), beside)
        for group in block:
            yield tuple(islice(found, len(group)))


def moved(t: Tensor, device: torch.device) -> Tensor:
    """On another device, without waiting until it is there."""
    return t if t.device == device else t.pin_memory().to(device, non_blocking=True)


def altered(task: Task, phase: Phase, x: Any, indices: Tensor, key: Any) -> Any:
    """What the network sees of a batch's samples where they are augmented."""
    assert phase.augment is not None
    x = phase.augment(x, indices.to(phase.y.device), key)
    if phase.body is None:
        return x
    with torch.no_grad():
        return Features(task.features(phase.body, x))


def _blocks(steps: list[tuple[Tensor, ...]], samples: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Steps in a row that have about so many samples together, one step at least."""
    block: list[tuple[Tensor, ...]] = []
    have = 0
    for group in steps:
        size = sum([indices.shape[0] for indices in group])
        if block and have + size > samples:
            yield block
            block, have = [], 0
        block.append(group)
        have += size
    if block:
        yield block


def _bytes(x: Any) -> int:
    return sum(map(_bytes, x)) if isinstance(x, tuple) else int(x.nbytes)


def _cut(x: Any, lengths: list[int]) -> Iterable[Any]:
    """Gathered samples, batch by batch."""
    if x is None:
        return repeat(None, len(lengths))
    if isinstance(x, Features):
        return map(Features, _cut(x.z, lengths))
    if isinstance(x, tuple):
        return zip(*(_cut(v, lengths) for v in x), strict=True)
    cut: tuple[Tensor, ...] = x.split(lengths)
    return cut


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
