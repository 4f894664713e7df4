"""Idiolect: personalized federated learning, from the laptop to the federation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from idiolect.comparing import Comparison, compare
    from idiolect.experiment import Run
    from idiolect.running import Result, run

__all__ = ["Comparison", "Result", "Run", "compare", "run"]
__version__ = "0.1.0"

HOMES = {"Comparison": "comparing", "compare": "comparing", "Result": "running", "Run": "experiment", "run": "running"}


def __getattr__(name: str) -> Any:
    """Imported when first asked for, as torch takes seconds: `idiolect --help` does without."""
    if name not in HOMES:
        raise AttributeError(f"module 'idiolect' has no attribute '{name}'")
    return getattr(import_module(f"idiolect.{HOMES[name]}"), name)
