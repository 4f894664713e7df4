"""One data set, checked once when it is built, so that nothing later has to doubt it; what stays in a file is checked
row by row as it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idiolect.data.stored import Stored
from idiolect.errors import UsageError

Loss = Literal["cross_entropy", "squared"]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples `x` with targets `y`, row by row, and what belongs to them.

    x: float32 images [n, channels, height, width] or vectors [n, d], or int64 token ids [n, length]. A tensor, or
        `Stored`, of which x[rows] gives any rows as a tensor: pixels of one byte, or what lies in a file.
    y: int64 labels [n] in 0..classes-1; for loss="squared" float32 targets [n, classes].
    classes: the number of outputs of the network.
    network: the name of the network used when a run names none.
    group: the natural client of each row (writer, device, ...), where the data has one.
    loss: "cross_entropy", or "squared": half the squared error, summed over outputs.
    official_test: True for the rows of the official test set, where the data has one.
    own_test: whether the official test rows are those of the clients in `group`, which split "given" leaves to them.
    class_names: what classes 0, 1, ... are called, where the data says.
    tokens: how many token ids there are, where x holds token ids; one more than the largest where not given.
    words: what each token id stands for, as far as it stands for one word.
    fit: what makes, of this data set and the rows trained on, the data set as it is with a vocabulary or statistics of
        those rows alone.
    origin: what it was fitted from, in a data set that was.
    """

    name: str
    x: Tensor | Stored
    y: Tensor
    classes: int
    network: str
    group: NDArray[Any] | None = None
    loss: Loss = "cross_entropy"
    official_test: NDArray[np.bool_] | None = None
    own_test: bool = False
    class_names: tuple[str, ...] | None = None
    tokens: int | None = None
    words: tuple[str, ...] = ()
    fit: Callable[[Dataset, NDArray[np.int64]], Dataset] | None = None
    origin: Dataset | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _check_x(self.name, self.x, self.tokens))
        if self.y.shape[:1] != self.x.shape[:1]:
            raise UsageError(
                f"{self.name}: expected one y per row of x, found x of shape {list(self.x.shape)} and y of "
                f"shape {list(self.y.shape)}; give arrays of the same length."
            )
        if self.loss == "cross_entropy":
            _check_labels(self.name, self.y, self.classes)
        elif self.loss == "squared":
            _check_targets(self.name, self.y, self.classes)
        else:
            raise UsageError(f"{self.name}: expected loss 'cross_entropy' or 'squared', found {self.loss!r}.")
        _check_rowwise(self.name, "group", self.group, len(self.x))
        _check_rowwise(self.name, "official_test", self.official_test, len(self.x))
        if self.official_test is not None and self.official_test.dtype != np.bool_:
            raise UsageError(
                f"{self.name}: expected official_test to be True or False per row, found dtype "
                f"{self.official_test.dtype}; convert it with .astype(bool)."
            )
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise UsageError(
                f"{self.name}: expected a name for each of the {self.classes} classes, found {len(self.class_names)}."
            )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        sizes = f"x={list(self.x.shape)}, classes={self.classes}"
        return f"Dataset({self.name!r}, {sizes}, network={self.network!r}, loss={self.loss!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def fitted(self, rows: NDArray[np.int64]) -> Dataset:
        """The data set as it is for those who train on these rows and no others; itself, once it was fitted."""
        return self if self.fit is None else replace(self.fit(self, rows), fit=None, origin=self)

    @cached_property
    def digest(self) -> str:
        """Other samples or targets have another one; the same, whichever rows they were fitted to. All samples are read
        for it, some at a time."""
        if self.origin is not None:
            return self.origin.digest
        if isinstance(self.x, Stored):
            return digest(chain(self.x.bytes(), [self.y]), str((self.x.form, self.x.scale)))
        return digest([self.x, self.y])

    @cached_property
    def classes_called(self) -> tuple[str, ...]:
        """What each class is called: by its number where the data says no more."""
        return tuple(map(str, range(self.classes))) if self.class_names is None else self.class_names

    @property
    def strata(self) -> NDArray[np.int64]:
        """The class of each row, by which rows are stratified; one class for all where y holds no labels."""
        return self.y.numpy() if self.loss == "cross_entropy" else np.zeros(len(self.x), np.int64)


def digest(tensors: Iterable[Tensor], about: str = "") -> str:
    """Twelve digits that stand for the numbers in these tensors, and for a text."""
    found = hashlib.sha256(about.encode())
    for t in tensors:
        found.update(f"{t.dtype}{list(t.shape)}".encode())
        found.update(t.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


def from_arrays(
    x: Any,
    y: Any,
    classes: int | None = None,
    name: str = "arrays",
    network: str | None = None,
    group: Any = None,
) -> Dataset:
    """A classification data set from NumPy arrays, torch tensors or nested lists; floats become float32.

    `classes` may be left out when the labels are exactly 0, 1, ..., C-1. Nothing is relabelled or rescaled
    here: what looks like a mistake is refused with the line that mends it.
    """
    features = _features(name, x)
    labels = to_labels(name, y)
    if classes is None:
        classes = count_classes(name, labels)
    groups = None if group is None else _array(name, "group", group)
    return Dataset(name, features, labels, classes, network or default_network(features), groups)


def default_network(x: Tensor | Stored) -> str:
    """The network used for samples like these when nobody names one."""
    if not x.dtype.is_floating_point:
        return "fasttext"
    if len(x.shape) == 4:
        return "cnn4" if min(x.shape[2:]) >= 28 else "convnet3"
    return "mlp"


def _array(name: str, what: str, values: Any) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16
    try:
        array: NDArray[Any] = np.asarray(values)
        return array
    except ValueError as error:
        raise UsageError(
            f"{name}: expected {what} as one rectangular array, found rows of differing shapes; "
            "bring them to one shape first."
        ) from error


def _features(name: str, x: Any) -> Tensor:
    array = _array(name, "x", x)
    if array.dtype == np.uint8:
        raise UsageError(
            f"{name}: expected x as floats or int64 token ids, found uint8, which looks like raw pixels; "
            "pass x.astype('float32') / 255."
        )
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf and is refused as such
            return torch.from_numpy(np.array(array, np.float32))
    if array.dtype.kind in "iu":
        return torch.from_numpy(np.array(array, np.int64))
    raise UsageError(f"{name}: expected x as floats or int64 token ids, found {array.dtype}; convert it to numbers.")


def to_labels(name: str, y: Any) -> Tensor:
    """Class numbers as the data set holds them."""
    array = _array(name, "y", y)
    if array.dtype.kind == "b":
        raise UsageError(f"{name}: expected integer labels, found True and False; pass y.astype('int64').")
    if array.dtype.kind not in "iuf":
        raise UsageError(
            f"{name}: expected integer labels, found {array.dtype}; number the classes from 0, for "
            "instance by y = np.unique(y, return_inverse=True)[1]."
        )
    if array.dtype.kind == "f":
        odd = array[~np.isfinite(array) | (array != np.round(array))]
        if len(odd):
            raise UsageError(f"{name}: expected integer labels, found {odd[0]} among them; pass class numbers.")
    return torch.from_numpy(array.astype(np.int64))


def count_classes(name: str, labels: Tensor) -> int:
    """The number of classes, if the labels are exactly 0, 1, ..., C-1."""
    seen = _distinct(labels.numpy())
    if seen != list(range(len(seen))):
        raise UsageError(
            f"{name}: expected labels 0, 1, ..., C-1, found {_some(seen)}; number them by "
            "y = np.unique(y, return_inverse=True)[1], or pass classes=C if some classes have no rows."
        )
    return len(seen)


def _distinct(labels: NDArray[np.int64]) -> list[int]:
    """Ascending. Counting takes a tenth of the time of sorting."""
    if labels.ndim == 1 and len(labels) and labels.min() >= 0 and labels.max() <= len(labels):
        return np.flatnonzero(np.bincount(labels)).tolist()  # type: ignore[no-any-return]
    return np.unique(labels).tolist()  # type: ignore[no-any-return]


def _some(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return "{" + shown + (", ..." if len(values) > 8 else "") + "}"


def _check_x(name: str, x: Tensor | Stored, tokens: int | None) -> int | None:
    """The number of token ids, where these are token ids."""
    if x.dtype not in (torch.float32, torch.int64):
        raise UsageError(f"{name}: expected x as float32 or int64 token ids, found {x.dtype}; convert it with .to().")
    if len(x.shape) < 2 or x.shape.numel() == 0:
        raise UsageError(
            f"{name}: expected x of shape [rows, ...] with at least one row and one feature, found "
            f"{list(x.shape)}; a single feature per row is x[:, None]."
        )
    if isinstance(x, Stored):  # which checks the rows that are asked for
        return _check_tokens(name, int(x.values.max()), tokens) if x.dtype == torch.int64 else None
    low, high = torch.aminmax(x)  # NaN and inf show in the extremes; no second array of x's size
    if x.dtype == torch.int64 and low < 0:
        raise UsageError(f"{name}: expected token ids from 0, found {int(low)}; number the tokens from 0.")
    if x.dtype == torch.int64:
        return _check_tokens(name, int(high), tokens)
    if not (low.isfinite() and high.isfinite()):
        _refuse_not_finite(name, "x", x)
    return None


def _check_tokens(name: str, largest: int, tokens: int | None) -> int:
    if tokens is not None and tokens <= largest:
        raise UsageError(f"{name}: expected token ids below tokens={tokens}, found {largest}; give their number.")
    return largest + 1 if tokens is None else tokens


def _check_labels(name: str, y: Tensor, classes: int) -> None:
    if y.dtype != torch.int64 or y.ndim != 1:
        raise UsageError(
            f"{name}: expected y as int64 labels of shape [rows], found {y.dtype} {list(y.shape)}; "
            "pass class numbers, or loss='squared' for float targets."
        )
    if classes < 1:
        raise UsageError(f"{name}: expected at least one class, found classes={classes}.")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise UsageError(
            f"{name}: expected labels in 0..{classes - 1}, found {low if low < 0 else high}; number them "
            f"from 0, or pass the right number of classes."
        )


def _check_targets(name: str, y: Tensor, outputs: int) -> None:
    if y.dtype != torch.float32 or y.ndim != 2 or y.shape[1] != outputs:
        raise UsageError(
            f"{name}: expected y as float32 targets of shape [rows, {outputs}] for loss='squared', found "
            f"{y.dtype} {list(y.shape)}; classes is the number of outputs."
        )
    if not y.isfinite().all():
        _refuse_not_finite(name, "y", y)


def _check_rowwise(name: str, what: str, values: NDArray[Any] | None, rows: int) -> None:
    if values is None:
        return
    if values.shape != (rows,):
        raise UsageError(f"{name}: expected one entry of {what} per row, shape ({rows},), found {values.shape}.")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UsageError(f"{name}: expected {what} to name a client for every row, found NaN or inf; drop those rows.")
    if values.dtype.kind == "O":
        raise UsageError(
            f"{name}: expected {what} as numbers or strings, found Python objects; pass np.array(..., str)."
        )


def _refuse_not_finite(name: str, what: str, values: Tensor) -> None:
    bad = (~values.isfinite()).flatten(1).any(1).nonzero().flatten()
    raise UsageError(
        f"{name}: expected finite numbers in {what}, found NaN or inf in {len(bad)} rows, the first is "
        f"row {int(bad[0])}; drop or repair those rows."
    )
