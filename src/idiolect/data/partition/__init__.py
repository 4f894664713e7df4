"""How rows are split over clients: one file per split, and the short text that names it."""

from __future__ import annotations

from importlib import import_module
from inspect import getdoc, isabstract
from pkgutil import iter_modules

from idiolect.data.partition.balanced import Balanced
from idiolect.data.partition.blocks import Blocks
from idiolect.data.partition.clusters import Clusters
from idiolect.data.partition.dirichlet import Dirichlet
from idiolect.data.partition.divided import Divided
from idiolect.data.partition.extended import Extended
from idiolect.data.partition.flbench import FLBench
from idiolect.data.partition.flwr import Flwr
from idiolect.data.partition.given import Given
from idiolect.data.partition.iid import IID
from idiolect.data.partition.pathological import Pathological
from idiolect.data.partition.quantity import Quantity
from idiolect.data.partition.resampled import Resampled
from idiolect.data.partition.shards import Shards
from idiolect.data.partition.split import Split
from idiolect.data.texts import options, read

__all__ = [
    "IID", "Balanced", "Blocks", "Clusters", "Dirichlet", "Divided", "Extended", "FLBench", "Flwr", "Given",
    "Pathological", "Quantity", "Resampled", "Shards", "Split", "describe", "parse",
]  # fmt: skip


def _found() -> dict[str, type[Split]]:
    """Every split, by the name of its file."""
    found: dict[str, type[Split]] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        found |= {c.name(): c for c in own if issubclass(c, Split) and not isabstract(c)}
    return dict(sorted(found.items()))


SPLITS = _found()


def describe() -> list[tuple[str, str, str]]:
    """Of each split its name, its options with their defaults, and what it does in a line."""
    return [(name, options(split), (getdoc(split) or "").partition("\n")[0]) for name, split in SPLITS.items()]


def parse(text: str) -> Split:
    """The split that a text like "iid", "dirichlet:0.1" or "dirichlet:0.1,minimum=5" names; `str(split)` gives it back.

    After the colon come the split's fields, in their order or by keyword, or the file of a division made elsewhere.
    """
    split: Split = read("split", text, SPLITS)
    return split
