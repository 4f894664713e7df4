"""Data sets, how they are split over clients, and the federation that comes of it."""

from idiolect.data.dataset import Dataset, from_arrays
from idiolect.data.federated import Federation, federate
from idiolect.data.find import load, names
from idiolect.data.partition import IID, Dirichlet, Given, Pathological, Quantity, Split, parse
from idiolect.data.split_file import SplitFile
from idiolect.data.split_file import save as save_split

__all__ = [
    "IID",
    "Dataset",
    "Dirichlet",
    "Federation",
    "Given",
    "Pathological",
    "Quantity",
    "Split",
    "SplitFile",
    "federate",
    "from_arrays",
    "load",
    "names",
    "parse",
    "save_split",
]
