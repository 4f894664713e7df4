"""Data sets, how they are split over clients, and the federation that comes of it."""

from idiolect.data.dataset import Dataset, from_arrays
from idiolect.data.federated import Federation, federate
from idiolect.data.find import load, names
from idiolect.data.partition import (
    IID,
    Balanced,
    Blocks,
    Clusters,
    Dirichlet,
    Extended,
    FLBench,
    Flwr,
    Given,
    Pathological,
    Quantity,
    Resampled,
    Shards,
    Split,
    parse,
)
from idiolect.data.split_file import SplitFile
from idiolect.data.split_file import save as save_split

__all__ = [
    "IID",
    "Balanced",
    "Blocks",
    "Clusters",
    "Dataset",
    "Dirichlet",
    "Extended",
    "FLBench",
    "Federation",
    "Flwr",
    "Given",
    "Pathological",
    "Quantity",
    "Resampled",
    "Shards",
    "Split",
    "SplitFile",
    "federate",
    "from_arrays",
    "load",
    "names",
    "parse",
    "save_split",
]
