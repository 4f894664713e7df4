"""All harnesses by their names."""

from __future__ import annotations

import checkpoints
import pickles
import readers
import run_files
import split_files
from fuzzing import Harness


def found() -> dict[str, Harness]:
    modules = (run_files, checkpoints, split_files, pickles, readers)
    return {harness.name: harness for module in modules for harness in module.HARNESSES}
