"""Clients whose samples look different: a change of every sample that depends on its client, with any split."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from inspect import getdoc

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from idiolect.data.dataset import Dataset
from idiolect.data.streams import stream
from idiolect.data.texts import read, written
from idiolect.errors import UsageError

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Shift(ABC):
    """A change of samples by client. A client has a place of 0 to clients - 1, on which the change depends."""

    @abstractmethod
    def __call__(self, x: Tensor, rows: Index, place: int, clients: int, seed: int) -> Tensor:
        """The float samples `x` of one client, changed; `rows` are their numbers in the data set."""

    def places(self, clients: int, seed: int) -> Index:
        """The place of each client."""
        return np.arange(clients)

    def check(self, data: Dataset) -> None:
        """Refuse samples that cannot be changed so."""
        if not data.x.dtype.is_floating_point:
            raise UsageError(
                f"Expected numbers as samples for shift '{self}', found token ids in '{data.name}'; use shift=none."
            )

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    def __str__(self) -> str:
        return written(self.name(), self)


@dataclass(frozen=True)
class Rotation(Shift):
    """Images turned, anticlockwise, by one of so many angles for each client; each angle has as many clients.

    step: degrees between two angles; 0 divides the full turn, so that 4 angles are 0, 90, 180 and 270. Multiples of 90
    degrees are exact; others interpolate, with the border's pixels beyond it.
    """

    angles: int = 4
    step: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.angles, bool) or not isinstance(self.angles, int) or self.angles < 1:
            raise UsageError(f"rotation: expected a whole number of at least 1 for angles, found {self.angles!r}.")
        if isinstance(self.step, bool) or not isinstance(self.step, int | float) or not 0 <= self.step < 360:
            raise UsageError(f"rotation: expected a number of degrees in [0, 360) for step, found {self.step!r}.")

    def places(self, clients: int, seed: int) -> Index:
        return stream(seed, "rotation").permutation(clients)

    def check(self, data: Dataset) -> None:
        _check_images(self, data)
        turns = {self._angle(place) for place in range(self.angles)}
        if data.shape[1] != data.shape[2] and turns - {0.0, 180.0}:
            raise UsageError(
                f"Expected square images for shift '{self}', found {data.shape[1]} x {data.shape[2]} in '{data.name}'; "
                "use rotation:2, which turns by 180 degrees."
            )

    def __call__(self, x: Tensor, rows: Index, place: int, clients: int, seed: int) -> Tensor:
        angle = self._angle(place)
        if angle % 90 == 0:
            return torch.rot90(x, int(angle // 90), (2, 3))
        cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        turn = torch.tensor([[[cos, -sin, 0.0], [sin, cos, 0.0]]], dtype=x.dtype).expand(len(x), 2, 3)
        grid = affine_grid(turn, list(x.shape), align_corners=False)
        return grid_sample(x, grid, padding_mode="border", align_corners=False)

    def _angle(self, place: int) -> float:
        return place % self.angles * (self.step or 360 / self.angles) % 360


@dataclass(frozen=True)
class Noise(Shift):
    """Gaussian noise whose standard deviation grows from client to client: none for the first, `level` for the last.

    NIID-Bench (Li et al., ICDE 2022) as its code has it; its text calls the level a variance.
    """

    level: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self, "level", self.level)

    def __call__(self, x: Tensor, rows: Index, place: int, clients: int, seed: int) -> Tensor:
        key = int(stream(seed, "noise").integers(2**63))
        drawn = np.empty((len(x), x[0].numel() if len(x) else 0), np.float32)
        for number, row in enumerate(rows.tolist()):  # a stream for each sample, whatever it is asked for with
            counter = np.array([0, 0, place, row], np.uint64)
            np.random.Generator(np.random.Philox(key=key, counter=counter)).standard_normal(
                dtype=np.float32, out=drawn[number]
            )
        deviation = self.level * (place / (clients - 1) if clients > 1 else 1.0)
        return x + deviation * torch.from_numpy(drawn).view(x.shape).to(x.dtype)


@dataclass(frozen=True)
class Colour(Shift):
    """A gain in [1 - strength, 1 + strength] and an offset in [-strength, strength] for each channel of each client."""

    strength: float = 0.5

    def __post_init__(self) -> None:
        _check_positive(self, "strength", self.strength)

    def check(self, data: Dataset) -> None:
        _check_images(self, data)

    def __call__(self, x: Tensor, rows: Index, place: int, clients: int, seed: int) -> Tensor:
        drawn = stream(seed, f"colour of client {place}").uniform(-self.strength, self.strength, (2, x.shape[1], 1, 1))
        gain, offset = torch.from_numpy(drawn).to(x.dtype)
        return x * (1 + gain) + offset


@dataclass(frozen=True)
class Shifted:
    """A shift as a federation has it: which place each of its clients has, and the seed."""

    shift: Shift
    places: Index
    seed: int

    def __call__(self, x: Tensor, clients: Index, rows: Index) -> Tensor:
        """Samples with the number of each one's client, and its own in the data set, changed."""
        changed = torch.empty_like(x)
        for client in np.unique(clients).tolist():
            own = np.flatnonzero(clients == client)
            at = torch.from_numpy(own)
            changed[at] = self.shift(x[at], rows[own], int(self.places[client]), len(self.places), self.seed)
        return changed


SHIFTS: dict[str, type[Shift]] = {shift.name(): shift for shift in (Colour, Noise, Rotation)}


def parse(text: str) -> Shift | None:
    """The shift that a text like "rotation:4", "noise:0.5" or "colour:0.3" names; None for "none"."""
    if text.strip() == "none":
        return None
    shift: Shift = read("shift", text, {**SHIFTS, "none": Shift})
    return shift


def describe() -> list[tuple[str, str]]:
    """Of each shift its text with the defaults, and what it does in a line."""
    return [(str(kind()), (getdoc(kind) or "").partition("\n")[0]) for kind in SHIFTS.values()]


def _check_images(shift: Shift, data: Dataset) -> None:
    Shift.check(shift, data)
    if len(data.shape) != 3:
        raise UsageError(
            f"Expected images for shift '{shift}', found samples of shape {list(data.shape)} in '{data.name}'; use "
            "noise, which takes vectors too."
        )


def _check_positive(shift: Shift, field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{shift.name()}: expected a finite number > 0 for {field}, found {value!r}.")
