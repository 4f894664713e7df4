"""Numbers that are none: NaN and inf in what clients send and keep."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from idiolect.method import Slots, Up
from idiolect.tree import entries


def bad_numbers(up: Up | None, mine: Slots | None) -> str | None:
    """What is no number in a reply, or in the state that its client would keep: where it is; None if all are."""
    up = up or Up()
    if up.weight is not None and not (isfinite(up.weight) and up.weight >= 0):
        return f"a weight of {up.weight:g}"
    parts = {"up.mean": up.mean, "up.sum": up.sum, "up.rows": up.rows, "mine": mine or {}}
    return None if all_finite([t for slots in parts.values() for t in floats(slots)]) else first_odd(parts)


def all_finite(tensors: list[Tensor]) -> bool:
    """No NaN and no inf. Their sums of magnitudes tell in one pass; where one overflows, the numbers themselves."""
    if not tensors:
        return True
    norms = list(torch._foreach_norm(tensors, 1))
    if len({n.dtype for n in norms}) > 1:
        norms = [n.double() for n in norms]
    return isfinite(float(torch.stack(norms).sum())) or all(bool(t.isfinite().all()) for t in tensors)


def first_odd(parts: Mapping[str, Slots]) -> str:
    """The first entry that is no number."""
    for part, slots in parts.items():
        for slot, value in slots.items():
            for k, t in entries(value).items():
                if t.is_floating_point() and not t.isfinite().all():
                    return f"NaN or inf in {part}['{slot}'] {k}".rstrip()
    raise AssertionError("all numbers are finite")


def floats(slots: Slots) -> list[Tensor]:
    """All numbers that may be none."""
    found = [t.detach() for value in slots.values() for t in entries(value).values()]
    return [t for t in found if t.is_floating_point() and t.numel()]
