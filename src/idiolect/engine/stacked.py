"""Many clients of equal architecture in one step: gradients by vmap over padded, masked batches.

`local` stays written for one client: each runs in a thread of its own, one at a time, until it asks for training. When
all of them wait, those that asked for the same kind of phase are trained together. Only training is stacked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from idiolect.client import Phase
from idiolect.engine import steps
from idiolect.engine.failing import out_of_memory
from idiolect.engine.work import Context, Job, Reply
from idiolect.errors import UsageError
from idiolect.optim import clipped
from idiolect.task import NORMS, Batch, Features, Net, Task, unfit
from idiolect.tree import Tree

TOGETHER = 64


class Stacked:
    def __init__(self, context: Context, together: int = TOGETHER) -> None:
        _ = context.state  # `init` may add networks
        refuse(context.net)
        self.context, self.together = context, together

    def do(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for parcel in self.parcels(jobs):
            yield from self.carry_out(parcel)

    def parcels(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        for _, parcel in groupby(jobs, key=lambda job: job.parcel if self.context.steps == "stacked" else 0):
            while group := list(islice(parcel, self.together)):
                yield group

    def carry_out(self, jobs: Sequence[Job]) -> list[Reply]:
        return _Group(self.context, jobs).run()

    def close(self) -> None:
        pass


def refuse(net: Net) -> None:
    if (found := unfit(net)) is None:
        return
    name, m = found
    if isinstance(m, NORMS):
        raise UsageError(
            f"The stacked backend cannot run BatchNorm (layer {name}): a padded batch has other statistics than a "
            "client's own. Use the serial or workers backend, or a network with group normalisation."
        )
    raise UsageError(
        f"The stacked backend cannot run dropout (layer {name}): stacked clients would draw other numbers. Use "
        "the serial or workers backend."
    )


class _Group:
    """Clients that take turns: exactly one thread runs at any time."""

    def __init__(self, context: Context, jobs: Sequence[Job]) -> None:
        self.context, self.jobs = context, jobs
        self.events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in jobs]
        self.waiting: dict[int, Phase] = {}
        self.replies: dict[int, Reply] = {}

    def run(self) -> list[Reply]:
        try:
            for k in range(len(self.jobs)):
                threading.Thread(target=self._client, args=(k,), daemon=True).start()
                self._listen(k)
            while self.waiting:
                first = next(iter(self.waiting.values()))
                kind = _kind(first)
                same = [k for k, p in self.waiting.items() if _kind(p) == kind]
                self.context.watch([self.jobs[k] for k in same])
                for k, result in zip(same, self._train([self.waiting.pop(k) for k in same]), strict=True):
                    self.answers[k].put(result)
                    self._listen(k)
        finally:
            for answer in self.answers:  # after an error: let the others end
                answer.put(None)
        return [self.replies[k] for k in range(len(self.jobs))]

    def _train(self, phases: list[Phase]) -> list[Tree] | list[Exception]:
        """What fails together and not alone is refused; what fails alone as well is a mistake, told to the client."""
        task = self.context.task
        try:
            return train(task, phases)
        except Exception as error:
            if out_of_memory(error):
                raise
            try:
                steps.train(task, phases[0])
            except Exception as mistake:
                return [mistake] * len(phases)
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise UsageError(
                f"The stacked backend cannot run {self.context.method.name}: its clients train alone but not together "
                f"({reason}). Use the serial or workers backend."
            ) from error

    def _listen(self, k: int) -> None:
        what, value = self.events.get()
        if what == "phase":
            self.waiting[k] = value
        elif what == "error":
            raise value
        else:
            self.replies[k] = value

    def _client(self, k: int) -> None:
        def trainer(task: Task, phase: Phase) -> Tree:
            self.events.put(("phase", phase))
            result = self.answers[k].get()
            if result is None:
                raise SystemExit
            if isinstance(result, Exception):
                raise result
            return result

        try:
            context = replace(self.context, trainer=trainer)
            context.__dict__.update(net=self.context.net, task=self.context.task)
            self.events.put(("reply", context.do(self.jobs[k])))
        except SystemExit:
            return
        except BaseException as error:
            self.events.put(("error", error))


def _kind(p: Phase) -> tuple[Any, ...]:
    """Phases that can be one step: the same functions, names, shapes and rates."""
    shapes = tuple((k, v.shape, v.dtype) for k, v in p.weights.items())
    given, structure = pytree.tree_flatten(p.given)
    told = tuple((g.shape, g.dtype) if isinstance(g, Tensor) else g for g in given)
    beside, form = pytree.tree_flatten(p.beside)
    each = (*((v.shape[1:], v.dtype) if isinstance(v, Tensor) else v for v in beside), str(form))
    width = max(len(i) for group in p.indices for i in group)
    altered = p.augment, p.body is None
    plain = (p.loss, p.correct, p.step, p.project, p.trained, p.carried, p.lr, p.optimizer, p.clip, altered)
    return (*plain, shapes, told, str(structure), each, isinstance(p.x, Features), width if len(p.y) == 1 else 0)


def train(task: Task, phases: list[Phase]) -> list[Tree]:
    """Several clients' phases of one kind, together; entry by entry what `steps.train` gives for each."""
    p = phases[0]
    if len(phases) == 1:
        return [steps.train(task, p)]
    if p.body is not None:
        raise UsageError("Features of augmented samples are not computed together.")
    task.set_modes(p.weights, frozenset(p.trained))
    names = (*p.trained, *p.carried)
    values = [torch.stack([q.weights[k] for q in phases]).detach() for k in names]  # [K, ...] each
    frozen, frozen_dims = _join([{k: v for k, v in q.weights.items() if k not in names} for q in phases])
    given, given_dims = _join([q.given for q in phases])
    step, samples = _step(task, p), _Samples(phases, values[0].dtype)
    state: dict[str, Any] = {}
    for t in range(samples.steps):
        batches, masks, active = samples.at(t)
        own_dims = pytree.tree_map(lambda v: None if v is None else 0, (batches, masks))
        found = torch.vmap(step, (0, frozen_dims, given_dims, *own_dims))(values, frozen, given, batches, masks)
        moved = _moved(p, values, [v.detach() for v in found], state)
        if active is not None:  # a client whose batches are used up stands still
            moved = [_where(active, new, old) for new, old in zip(moved, values, strict=True)]
        values = moved
    own = [{k: v[c].clone() for k, v in zip(names, values, strict=True)} for c in range(len(phases))]
    return [Tree({**q.weights, **mine}) for q, mine in zip(phases, own, strict=True)]


def _step(task: Task, p: Phase) -> Callable[..., list[Tensor]]:
    """One client's step as a function of its values: the gradients to use, or the next values where the phase has a
    `step`; then the next values of carried entries."""
    names, T = (*p.trained, *p.carried), len(p.trained)

    def step(values: list[Tensor], frozen: Any, given: Any, batches: Any, masks: Any) -> list[Tensor]:
        known = [
            Batch(Features(x) if isinstance(p.x, Features) else x, y, mask, beside)
            for (x, y, beside), mask in zip(batches, masks, strict=True)
        ]

        def whole(values: list[Tensor]) -> Tree:
            w = {**frozen, **dict(zip(names, values, strict=True))}
            return Tree({k: w[k] for k in p.weights})

        if p.step is not None:
            new = p.step(task, whole(values), known[0] if len(known) == 1 else tuple(known), p.lr, *given)
            return [new[k] for k in p.trained]

        def loss(trained: list[Tensor]) -> Any:
            value = p.loss(task, whole([*trained, *values[T:]]), known[0], *given)
            return value if p.carried else (value, {})

        grads, then = torch.func.grad(loss, has_aux=True)(values[:T])
        if p.correct is not None:
            own = Tree(zip(p.trained, values[:T], strict=True))
            aligned = [steps.narrowed(g, p.trained) for g in given]
            steered = p.correct(Tree(zip(p.trained, grads, strict=True)), own, *aligned)
            grads = [steered[k] for k in p.trained]
        return [*(clipped(grads, p.clip) if p.clip is not None else grads), *(then[k] for k in p.carried)]

    return step


def _moved(p: Phase, values: list[Tensor], found: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    """All clients' next values, of what their steps found."""
    T = len(p.trained)
    if p.step is not None:
        trained = [v.clone() for v in found[:T]]
    else:
        trained = [v.clone() for v in values[:T]]
        p.optimizer.step_(trained, found[:T], state, p.lr)
    if p.project is not None:
        projected = torch.vmap(p.project)(Tree(zip(p.trained, trained, strict=True)))
        trained = [projected[k] for k in p.trained]
    return [*trained, *found[T:]]


class _Samples:
    """All clients' samples in one tensor, and step by step those of each. What is chosen in all steps is worked out
    beforehand and brought to the device at once: a step waits for nothing."""

    def __init__(self, phases: list[Phase], dtype: torch.dtype) -> None:
        self.phases, self.steps = phases, max(len(q.indices) for q in phases)
        xs = [q.x.z if isinstance(q.x, Features) else q.x for q in phases]
        starts = torch.from_numpy(np.cumsum([0, *map(len, xs)])[:-1])
        self.columns = torch.cat(xs), torch.cat([q.y for q in phases]), _column([q.beside for q in phases])
        sizes = self._sizes()  # [K, T, J]
        rows, real = self._rows(starts, sizes)
        self.widths = sizes.amax(0).tolist()
        self.full = (sizes == sizes.amax(0)).all(0).tolist()
        self.alive = (sizes[:, :, 0] > 0).all(0).tolist()
        device = self.columns[1].device
        self.starts, self.rows = steps.moved(starts[:, None], device), steps.moved(rows, device)
        self.masks = steps.moved(real.to(dtype), device)
        self.active = steps.moved(sizes[:, :, 0] > 0, device)

    def at(self, t: int) -> tuple[list[Any], list[Tensor | None], Tensor | None]:
        """The batches of step t, of K clients each; their masks, where there is padding; and who has any left, where
        somebody has not. [K]"""
        batches, masks = [], []
        for j, width in enumerate(self.widths[t]):
            rows = self.rows[:, t, j, :width]
            batches.append(self._augmented(pytree.tree_map(partial(_chosen, rows=rows), self.columns), rows, t, j))
            masks.append(None if self.full[t][j] else self.masks[:, t, j, :width])
        return batches, masks, None if self.alive[t] else self.active[:, t]

    def _augmented(self, batch: Any, rows: Tensor, t: int, j: int) -> Any:
        """The batch of each client with its images as this client would see them alone."""
        if (augment := self.phases[0].augment) is None:
            return batch
        keys = torch.tensor([q.keys[t][j] if t < len(q.keys) else 0 for q in self.phases])[:, None]
        keys = steps.moved(keys, rows.device).expand_as(rows)
        images = augment(batch[0].flatten(0, 1), (rows - self.starts).flatten(), keys.flatten())
        return images.reshape(batch[0].shape), *batch[1:]

    def _sizes(self) -> Tensor:
        """Samples in batch j of step t of client c. [K, T, J]"""
        per_step = len(self.phases[0].indices[0])
        nothing = [0] * per_step
        return torch.tensor(
            [
                [[len(i) for i in q.indices[t]] if t < len(q.indices) else nothing for t in range(self.steps)]
                for q in self.phases
            ]
        )

    def _rows(self, starts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of all batches, and which of them are no padding, which repeats a client's first sample. [K, T, J, B]"""
        shape = (*sizes.shape, int(sizes.max()))
        rows = starts[:, None, None, None].repeat(1, *shape[1:])
        for c, q in enumerate(self.phases):
            for t, group in enumerate(q.indices):
                for j, indices in enumerate(group):
                    rows[c, t, j, : len(indices)] += indices
        return rows, torch.arange(shape[3]) < sizes[..., None]


def _column(values: list[Any]) -> Any:
    """All clients' constants of samples in one tensor each."""
    if isinstance(values[0], tuple):
        return tuple(_column(list(column)) for column in zip(*values, strict=True))
    return None if values[0] is None else torch.cat(values)


def _where(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(active.reshape(-1, *[1] * (new.dim() - 1)), new, old)


def _chosen(v: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if v is None else v.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *v.shape[1:])


def _join(values: list[Any]) -> tuple[Any, Any]:
    """Nested constants of all clients stacked, with the dimensions for vmap; what is one object for all stays one."""
    flat = [pytree.tree_flatten(v) for v in values]
    structure = flat[0][1]
    leaves, dims = [], []
    for entries in zip(*(f[0] for f in flat), strict=True):
        same = all(e is entries[0] for e in entries) or not isinstance(entries[0], Tensor)
        leaves.append(entries[0] if same else torch.stack(entries))
        dims.append(None if same else 0)
    return pytree.tree_unflatten(leaves, structure), pytree.tree_unflatten(dims, structure)
