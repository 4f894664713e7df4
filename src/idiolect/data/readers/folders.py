"""Folders of images, by class or by client and class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np

from idiolect.data import images
from idiolect.data.dataset import Dataset
from idiolect.data.labels import in_order
from idiolect.errors import UsageError

FORM = "a folder of .png or .jpg images, as class/image.png or client/class/image.png, maybe below train/ and test/"
BEFORE = ("csv",)  # a list of the images may lie beside their folders
IMAGES = (".png", ".jpg", ".jpeg")
OTHER_IMAGES = (".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
LOOK = 1000  # how many entries tell whether a folder holds images
Place = tuple[tuple[str, ...], Path]  # the folders between the root and a file, and the file


class Image(NamedTuple):
    tests: bool
    client: str  # "" where images lie by class alone
    kind: str
    file: Path


def reads(path: Path) -> bool:
    return path.is_dir() and any(file.suffix.lower() in IMAGES for _, file in islice(_files(path), LOOK))


def load(
    folder: Path,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    network: str | None = None,
) -> Dataset:
    """The images of `class/`, or of `client/class/`, whose clients become the groups; below `train/` and `test/`
    those of `test` are the official test set. Classes and clients come in the order of their names (by value where
    all are whole numbers), images in that of theirs. Normalised as `images.samples` says. Hidden files and files that
    are no images are passed over; images of another kind are refused."""
    found = _found(folder)
    kinds, clients = (in_order({getattr(image, what) for image in found}) for what in ("kind", "client"))
    if len(kinds) < 2:
        raise UsageError(
            f"Expected two classes or more in '{folder}', found '{kinds[0]}' alone; images lie as class/image.png or "
            "client/class/image.png."
        )
    number = {name: k for k, name in enumerate(kinds)}
    place = {name: k for k, name in enumerate(clients)}
    found.sort(key=lambda image: (image.tests, place[image.client], number[image.kind], image.file))
    in_train = sum(not image.tests for image in found)
    return images.samples(
        folder,
        _decoded(folder, _Blobs([image.file for image in found])),
        np.array([number[image.kind] for image in found]),
        name=folder.resolve().name,
        in_train=in_train if in_train < len(found) else None,
        classes=len(kinds),
        mean=mean,
        std=std,
        network=network,
        group=np.array([image.client for image in found]) if clients != [""] else None,
        class_names=tuple(kinds),
    )


class _Blobs(Sequence[bytes]):
    """The files' bytes, each read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.last = files[0]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> bytes:  # type: ignore[override]
        self.last = self.files[row]
        return self.last.read_bytes()


def _decoded(folder: Path, blobs: _Blobs) -> images.Pixels:
    try:
        return images.decode(folder, blobs)
    except UsageError as error:
        raise UsageError(f"{str(error).rstrip('.')}: '{blobs.last}'.") from None
    except OSError as error:
        raise UsageError(f"Expected an image in '{blobs.last}', found: {error.strerror or error}.") from None


def _files(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Place]:
    """Every file up to four folders down, hidden ones left out, in the order of their names."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if _hidden(entry.name):
            continue
        if not entry.is_dir():
            yield above, Path(entry.path)
        elif len(above) < 4:
            yield from _files(Path(entry.path), (*above, normalize("NFC", entry.name)))


def _found(folder: Path) -> list[Image]:
    parts = {part: _images(folder, part) for part in _parts(folder)}
    depth = _depth(folder, [one for part in parts.values() for one in part])
    return [
        Image(part == "test", above[0] if depth == 2 else "", above[-1], file)
        for part, found in parts.items()
        for above, file in found
    ]


def _parts(folder: Path) -> list[str]:
    """train, and test where there is one; a folder `train` without folders in it is a class of that name."""
    there = _folders(folder)
    if "train" not in there or not _folders(folder / "train"):
        return [""]
    if strange := sorted(there - {"train", "test"}):
        raise UsageError(
            f"Expected train and test alone in '{folder}', found '{strange[0]}' beside them; move it elsewhere."
        )
    return sorted(there, reverse=True)


def _folders(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder) if entry.is_dir() and not _hidden(entry.name)}


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _images(folder: Path, part: str) -> list[Place]:
    """The images of a part, in which no folder of the first level may be empty."""
    found = list(_files(folder / part))
    if other := next((file for _, file in found if file.suffix.lower() in OTHER_IMAGES), None):
        raise UsageError(f"Expected .png or .jpg images in '{folder}', found '{other}'; convert it first.")
    found = [(above, file) for above, file in found if file.suffix.lower() in IMAGES]
    full = {above[0] for above, _ in found if above}
    if empty := sorted(name for name in _folders(folder / part) if normalize("NFC", name) not in full):
        raise UsageError(f"Expected images in '{folder / part / empty[0]}', found none; remove the folder.")
    return found


def _depth(folder: Path, found: list[Place]) -> int:
    """1 for images by class, 2 for images by client and class."""
    depths = {len(above): file for above, file in reversed(found)}
    if not depths:
        raise UsageError(f"Expected .png or .jpg images below '{folder}', found none.")
    if len(depths) > 1:
        shown = " and ".join(f"'{file.relative_to(folder)}'" for _, file in sorted(depths.items()))
        raise UsageError(f"Expected images at one depth in '{folder}', found {shown}; lay all out as class/image.png.")
    depth = min(depths)
    if depth not in (1, 2):
        raise UsageError(
            f"Expected images as class/image.png or client/class/image.png in '{folder}', found "
            f"'{depths[depth].relative_to(folder)}'; move each into a folder named after its class."
        )
    return depth
