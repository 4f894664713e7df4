"""Clients whose rows a file lists, with what they train, validate and test on."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idiolect.data.partition.split import Labels, Rows, Split
from idiolect.errors import UsageError

if TYPE_CHECKING:
    from idiolect.data.dataset import Dataset

Index = NDArray[np.int64]


class Listed(NamedTuple):
    """One client's rows, each array ascending."""

    train: Index
    validation: Index
    test: Index


@dataclass(frozen=True)
class Divided(Split):
    """A division made elsewhere and kept in `file`: nothing is drawn, and no share of test rows is asked for."""

    verbatim: ClassVar[bool] = True  # a path, whatever is in it
    file: str = ""

    def __post_init__(self) -> None:
        if not self.file:
            raise UsageError(f"{self.name()}: expected a file, as in {self.name()}:PATH, found none; name it.")

    @abstractmethod
    def parts(self, dataset: Dataset, clients: int) -> list[Listed]:
        """What each client trains, validates and tests on, in rows of `dataset`; no row twice."""

    def __call__(self, labels: Labels, clients: int, seed: int) -> Rows:
        raise UsageError(f"{self.name()}: its file says who tests on what as well; use `federate` or `parts`.")
