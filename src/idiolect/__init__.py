"""Idiolect: personalized federated learning, from the laptop to the federation."""

from idiolect.experiment import Run
from idiolect.running import Result, run

__all__ = ["Result", "Run", "run"]
__version__ = "0.1.0"
