"""Replies are combined one by one, strictly in the order in which they are given: the same bits however they came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from idiolect.engine.wire import pack, unpack
from idiolect.engine.work import match
from idiolect.errors import ContractError, individual
from idiolect.method import Slots, Up
from idiolect.tree import Tree


class Reduction:
    """A running mean, a running sum, and the rows. Memory: one model for the mean, however many reply; rows are held
    once, and one entry of theirs twice while `result`, which is asked for once, stacks them.

    The mean moves by weight/total towards each reply: equal replies give exactly themselves. `name`: whose replies."""

    def __init__(self, name: str, server: Any) -> None:
        self.name, self.server = name, server
        self.weights: dict[int, float] = {}
        self.total = 0.0
        self.mean: dict[str, Any] = {}
        self.sum: dict[str, Any] = {}
        self.rows: dict[int, Any] = {}
        self._first: Up | None = None
        self._outline: Any = None  # names, shapes and dtypes of the last reply

    def add(self, client: int, up: Up, weight: float) -> None:
        outline = pack([up.mean, up.sum, up.rows], lambda t: (t.shape, t.dtype) if isinstance(t, Tensor) else t)
        if outline != self._outline:  # else it is as the one before, which was checked
            self.check(client, up)
            self._outline = outline
        if self._first is None:
            self._first = Up(shaped(up.mean), shaped(up.sum), shaped(up.rows))
        self._take(client, up, weight)

    def _take(self, client: int, up: Up, weight: float) -> None:
        weight = weight if up.weight is None else up.weight
        first = not self.weights
        self.weights[client] = weight
        self.total += weight
        if first:
            self.mean = {k: copied(v) for k, v in up.mean.items()}
            self.sum = {k: copied(v) for k, v in up.sum.items()}
        else:
            share = weight / self.total if self.total else 0.0
            for k, v in up.mean.items():
                _pairs(self.mean[k], v, lambda a, b: torch._foreach_lerp_(a, b, share))
            for k, v in up.sum.items():
                _pairs(self.sum[k], v, lambda a, b: torch._foreach_add_(a, b))
        if up.rows:
            self.rows[client] = {k: copied(v) for k, v in up.rows.items()}

    def result(self) -> Up:
        replies = [self.rows.pop(i) for i in sorted(self.rows)]
        rows = {slot: _stacked([reply.pop(slot) for reply in replies]) for slot in (self._first or Up()).rows}
        return Up(mean=self.mean, sum=self.sum, rows=rows, weight=self.total)

    def check(self, client: int, up: Up) -> None:
        """Refuse (ContractError) a reply of other names, shapes or dtypes than those before it, or than what the server
        holds; and what has no mean."""
        where = f"client {client}"
        for kind in ("mean", "sum", "rows"):
            slots = getattr(up, kind)
            for slot, value in slots.items():
                entry = f'up.{kind}["{slot}"]'
                for t in value.values() if isinstance(value, Tree) else [value]:
                    if not isinstance(t, Tensor):
                        raise ContractError(
                            f"{self.name} returned {entry} with a {type(t).__name__}; expected a Tensor or a Tree of "
                            f"Tensors ({where})."
                        )
                    if kind == "mean" and not t.is_floating_point():
                        raise ContractError(f"{self.name} returned {entry} of {t.dtype}, which has no mean ({where}).")
                if kind == "mean" and slot in self.server:
                    match(self.name, entry, value, self.server[slot], where)
            if self._first is not None:
                first = getattr(self._first, kind)
                if first.keys() != slots.keys():
                    raise ContractError(
                        f"{self.name} returned up.{kind} with slots {', '.join(slots) or 'none'}, other clients "
                        f"{', '.join(first) or 'none'} ({where}). Every reply has the same slots."
                    )
                for slot, value in slots.items():
                    match(self.name, f'up.{kind}["{slot}"]', value, first[slot], where)


def summed(method: str, up: Up, secure: bool) -> None:
    """Refuse a reply that the server would see by itself, in a secure run."""
    if secure and up.rows:
        raise individual(method, up.rows)


def shaped(slots: Slots) -> Slots:
    """What is left of slots without their numbers."""
    return unpack(pack(slots, lambda t: torch.empty_like(t, device="meta")), lambda t: t)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tree) else value.detach().clone()


def _stacked(values: list[Any]) -> Any:
    """Rows name by name, each let go as it is stacked. [K, ...]"""
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    entries = [dict(values.pop(0)) for _ in range(len(values))]
    return Tree({k: torch.stack([entry.pop(k) for entry in entries]) for k in list(entries[0])})


def _pairs(ours: Any, theirs: Any, fn: Any) -> None:
    if isinstance(ours, Tensor):
        fn([ours], [theirs.detach()])
    elif len(ours):
        fn(list(ours.values()), [theirs[k].detach() for k in ours])
