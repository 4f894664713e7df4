"""`me`: one client's view of the engine. A method's `local` trains, sweeps and predicts through it and sees no more."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idiolect.augment import Augment
from idiolect.engine import orders
from idiolect.errors import UsageError
from idiolect.optim import SGD, Adam
from idiolect.task import Batch, Features, Task, chunk
from idiolect.tree import Tree


@dataclass(frozen=True)
class Settings:
    """What the run fixes for every client's training."""

    seed: int
    epochs: int
    batch_size: int
    optimizer: SGD | Adam
    clip: float | None = None
    augment: Augment | None = None


@dataclass
class Phase:
    """One call of `train`, complete: what a backend needs to carry it out."""

    weights: Tree
    trained: tuple[str, ...]
    loss: Callable[..., Tensor]
    correct: Callable[..., Tree] | None
    step: Callable[..., Tree] | None
    given: tuple[Any, ...]
    x: Any
    y: Tensor
    indices: list[tuple[Tensor, ...]]  # step by step; more than one batch in a step for `step` alone
    lr: float
    optimizer: SGD | Adam
    clip: float | None
    project: Callable[[Tree], Tree] | None
    beside: Any
    noise: int  # the key of whatever the network draws (dropout)
    carried: tuple[str, ...] = ()
    augment: Augment | None = None
    keys: list[tuple[int, ...]] = field(default_factory=list)  # of augmentation, for each batch of `indices`
    body: Tree | None = None  # of which `batch.x` holds the features, where augmentation gives others every time


@dataclass
class Course:
    """What a client's phases have come to, on whatever samples: shared by its views."""

    n: int  # its own training samples
    seen: float = 0.0  # samples trained on
    buffers: Tree | None = None  # of the received network, followed through training (policy `local`)
    dated: bool = False  # something was asked of it whose answer depends on the round


Trainer = Callable[[Task, Phase], Tree]


class Client:
    """One client in one round.

    n: training samples · id: its number · round: the global round · visits: its earlier participations · lr: this
    round's learning rate · task: the network's functions.
    """

    def __init__(
        self,
        task: Task,
        x: Tensor | Callable[[], Tensor],
        y: Tensor,
        settings: Settings,
        trainer: Trainer,
        *,
        id: int,
        round: int,
        visits: int,
        lr: float,
    ) -> None:
        self.task, self._samples, self._y = task, x, y
        self._settings, self._trainer = settings, trainer
        self.id, self.visits, self._round, self._lr = id, visits, round, lr
        self.n = len(y)
        self.pace = 1.0
        self.course = Course(self.n)
        self._calls = 0
        self._known: tuple[Tree, Tensor] | None = None  # a body and the training set's features under it

    @cached_property
    def _x(self) -> Tensor:
        """The samples: fetched when they are first needed, which for a prediction they are not."""
        return self._samples if isinstance(self._samples, Tensor) else self._samples()

    @property
    def round(self) -> int:
        self.course.dated = True
        return self._round

    @property
    def lr(self) -> float:
        self.course.dated = True
        return self._lr

    # training

    def train(
        self,
        w: Tree,
        *,
        only: Iterable[str] | None = None,
        loss: Callable[..., Tensor] | None = None,
        correct: Callable[..., Tree] | None = None,
        step: Callable[..., Tree] | None = None,
        given: Sequence[Any] = (),
        epochs: int | None = None,
        steps: int | None = None,
        lr: float | None = None,
        optimizer: SGD | Adam | None = None,
        project: Callable[[Tree], Tree] | None = None,
        features: Tree | None = None,
        beside: Any = None,
        per_step: int = 1,
        gradients: float = 1,
        order: int | None = None,
        share: float = 1.0,
        carried: Iterable[str] = (),
    ) -> Tree:
        """Mini-batch training of `w`; gives back all of it, trained.

        only: the names that are trained (a Tree serves); the rest is constant and in eval mode. Default: all but
            normalisation buffers and integers.
        loss: `loss(task, w, batch, *given)`; default the run's loss of the network's logits.
        correct: `correct(g, w, *given)` gives the gradient to use. It sees the trained entries alone, of `given` too.
        step: `step(task, w, batch, lr, *given)` gives the entries' next values, in place of a gradient step; `gradient`
            of the contract serves it. With `per_step` = k > 1, `batch` is a tuple of k batches in a row;
            `gradients` says how many the step takes of each batch, for the count of passes.
        given: constant tensors of the equation.
        epochs, lr, optimizer: the run's unless given; `steps` cuts the phase after so many batches.
        project: applied to the trained entries after every step.
        features: a body; `batch.x` then holds the Features under it, computed once, or batch by batch of augmented
            samples. Implied where `only` lies in the head, and loss is the default.
        beside: constants of each sample, [n, ...] or a tuple of such (a frozen model's logits, say): `batch.beside`.
        order: which shuffling; calls with the same number see the same batches. Default: 0, 1, ... call by call.
        share: the part of the training samples that this phase uses.
        carried: entries that follow the steps without being trained (a running mean, say); `loss` then gives a pair,
            its value and their next values.
        """
        epochs = self._settings.epochs if epochs is None else epochs
        if epochs == 0 or steps == 0 or self.n == 0:
            return w
        if order is None:
            order, self._calls = self._calls, self._calls + 1
        carried = tuple(carried)
        fixed = self.task.net.buffers.union(carried)
        trained = tuple(k for k in (w if only is None else only) if k not in fixed and w[k].is_floating_point())
        if not trained:
            return w  # a network without a body, say
        augment = self._settings.augment
        if augment is not None and beside is not None:
            raise UsageError(
                "The method compares each sample in training with what was computed of it before, which is not of the "
                "augmented sample. Use augment=none, or another method."
            )
        in_head = loss is None and only is not None and all(k in self.task.net.head for k in trained)
        if features is None and in_head and augment is None:
            features = w
        indices = self._indices(epochs, steps, order, share)
        groups = [tuple(indices[k : k + per_step]) for k in range(0, len(indices) - per_step + 1, per_step)]
        groups = groups[: self._paced(len(groups))]
        self.course.seen += gradients * sum(batch.shape[0] for group in groups for batch in group)
        phase = Phase(
            weights=w,
            trained=trained,
            loss=loss or _plain,
            correct=correct,
            step=step,
            given=tuple(given),
            x=Features(self.features(features)) if features is not None and augment is None else self._x,
            y=self._y,
            indices=groups,
            lr=self.lr if lr is None else lr,
            optimizer=optimizer or self._settings.optimizer,
            clip=self._settings.clip,
            project=project,
            beside=beside,
            noise=orders.key(self._settings.seed, "noise", self.round, self.id, order),
            carried=carried,
            augment=augment,
            keys=self._keys(groups, order, share) if augment is not None else [],
            body=features if augment is not None else None,
        )
        result = self._trainer(self.task, phase)
        if self.buffers is not None and all(w.get(k) is v for k, v in self.buffers.items()):
            self.course.buffers = result.pick(self.buffers)
        return result

    def _indices(self, epochs: int, steps: int | None, order: int, share: float) -> list[Tensor]:
        s = self._settings
        found: list[Tensor] = []
        for epoch in range(epochs):
            indices = orders.epoch_order(self.n, s.seed, self.round, self.id, order, epoch, share)
            found += [indices[a:b] for a, b in orders.cuts(len(indices), s.batch_size)]
            if steps is not None and len(found) >= steps:
                return found[:steps]
        return found

    def _keys(self, groups: list[tuple[Tensor, ...]], order: int, share: float) -> list[tuple[int, ...]]:
        """Of augmentation, batch by batch: a sample's depends on the epoch, and not on its batch."""
        s, batches = self._settings, len(orders.cuts(math.ceil(share * self.n), self._settings.batch_size))
        counter = itertools.count()
        epochs = [[next(counter) // batches for _ in group] for group in groups]
        keys = [
            orders.key(s.seed, "augment", self.round, self.id, order, e)
            for e in range(1 + max(epochs, default=[0])[-1])
        ]
        return [tuple(keys[e] for e in group) for group in epochs]

    def steps(self, epochs: int | None = None) -> int:
        """The optimiser steps that so many epochs take."""
        epochs = self._settings.epochs if epochs is None else epochs
        return self._paced(epochs * len(orders.cuts(self.n, self._settings.batch_size)))

    def _paced(self, steps: int) -> int:
        """So many of a phase's steps as this client does in this round: all of them, unless it is slow."""
        return math.ceil(self.pace * steps)

    @property
    def passes(self) -> float:
        """Gradient passes over the whole training set so far."""
        return self.course.seen / self.course.n if self.course.n else 0.0

    @property
    def buffers(self) -> Tree | None:
        """The running statistics that this client keeps of what it receives, where the run lets it keep its own."""
        self.course.dated = True
        return self.course.buffers

    @property
    def epochs(self) -> int:
        """The run's local epochs."""
        return self._settings.epochs

    @property
    def weight_decay(self) -> float:
        """The run's weight decay, for a phase's `step`, which goes without the optimiser."""
        return self._settings.optimizer.weight_decay

    # passes without gradients, over the training set in its own order

    @property
    def _chunks(self) -> list[slice]:
        size = chunk(self._x)
        return [slice(start, start + size) for start in range(0, self.n, size)]

    def sweep(self, w: Tree, fn: Callable[..., Any], given: Sequence[Any] = ()) -> Any:
        """The sum over the training set of `fn(task, w, batch, *given)`: a Tensor, a Tree, or a dict of them."""
        total: Any = None
        with torch.no_grad():
            for part in self._chunks:
                value = fn(self.task, w, Batch(self._x[part], self._y[part]), *given)
                total = value if total is None else _plus(total, value)
        return total

    def features(self, w: Tree) -> Tensor:
        """Features of the training set under the body in `w` (eval mode); remembered for the same body. [n, d]"""
        body = w.pick(self.task.net.body)
        if self._known is None or any(v is not self._known[0][k] for k, v in body.items()):
            with torch.no_grad():
                z = torch.cat([self.task.features(body, self._x[part]) for part in self._chunks])
            self._known = body, z
        return self._known[1]

    def logits(self, w: Tree, part: str = "") -> Tensor:
        """Logits of the training set (eval mode), of the network or one beside it. [n, classes]"""
        with torch.no_grad():
            return torch.cat([self.task.logits(w, self._x[few], part) for few in self._chunks])

    def loss(self, w: Tree) -> Tensor:
        """The run's loss over the training set (eval mode)."""
        with torch.no_grad():
            return self.task.losses(self.logits(w), self._y).mean()

    # the training set

    @property
    def inputs(self) -> Tensor:
        """The training set itself, in the order of `labels`. [n, ...]"""
        return self._x

    @property
    def labels(self) -> Tensor:
        """Classes of the training set, in the order of `features` and `logits`. [n]"""
        if self.task.kind == "squared":
            raise UsageError("The method asks for samples' classes; found data of the loss 'squared'. Use other data.")
        return self._y

    @cached_property
    def counts(self) -> Tensor:
        """Training samples per class, over the whole training set. [classes]"""
        return torch.bincount(self.labels, minlength=self.task.classes).to(self.task.net.dtype)

    # with other samples

    def split(self, share: float) -> tuple[Client, Client]:
        """Two disjoint parts of this client's training set, the same in every round: ceil(share * n) samples, and the
        rest (at least one each where there are two)."""
        shuffled = orders.draw(self._settings.seed, "split", self.id).permutation(self.n)
        order = torch.from_numpy(shuffled).to(self._y.device)
        first = min(max(math.ceil(share * self.n - 1e-9), 1), max(self.n - 1, 1))
        return self._part(order[:first].sort().values), self._part(order[first:].sort().values)

    def over(self, x: Tensor, y: Tensor, batch_size: int | None = None) -> Client:
        """This client with other samples than its own (condensed ones, say), which are not augmented. So many trained
        on count as the same number of its own would, in `passes`."""
        part = copy.copy(self)
        part._x, part._y, part.n, part._known = x, y, len(y), None
        part.__dict__.pop("counts", None)
        part._settings = replace(self._settings, augment=None, batch_size=batch_size or self._settings.batch_size)
        return part

    def _part(self, rows: Tensor) -> Client:
        part = self.over(self._x[rows], self._y[rows])
        part._settings = self._settings
        return part

    # randomness

    def draw(self, purpose: str) -> np.random.Generator:
        """Randomness of this client in this round for a named purpose."""
        return orders.draw(self._settings.seed, purpose, self.round, self.id)

    def fresh(self, purpose: str) -> Tree:
        """Another initialisation of the network, this client's in this round for a named purpose."""
        return self.task.net.fresh(repr((purpose, self.round, self.id))).to(self._y.device)


def is_plain(loss: Callable[..., Tensor]) -> bool:
    """Whether a phase's loss is the run's own, of the network's logits."""
    return loss is _plain


def _plain(task: Task, w: Tree, batch: Batch, *given: Any) -> Tensor:
    return task.loss(w, batch)


def _plus(a: Any, b: Any) -> Any:
    return {k: _plus(v, b[k]) for k, v in a.items()} if isinstance(a, dict) else a + b
