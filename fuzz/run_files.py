"""Run files: any text is a run, which is then written and read as the same run, or is refused."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from fuzzing import Harness
from idiolect import Run, catalogue

MORE = {
    "data": "toy2d", "data_options": {"a": [1, "b"]}, "split": "dirichlet:0.5,minimum=3", "clients": 9, "rounds": 3,
    "ratio": [[0, 1], [2]], "lr": 0.5, "momentum": 0.9, "nesterov": True, "clip": 1.0, "schedule": "step",
    "augment": "crop:4,flip", "network_options": {"hidden": [3]}, "held_out": 0.2, "shift": "rotation:4", "drop": 0.1,
    "attack": "sign:0.2", "reduce": "trimmed:0.2", "dtype": "float64", "backend": "serial", "device": "cpu",
    "evaluate_clients": 2, "workers": 3, "optimizer": "sgd", "on_bad_reply": "stop", "buffers": "drop",
    "method": {"name": "fedavg"},
}  # fmt: skip


def seeds(folder: Path) -> list[bytes]:
    """A run of each method, and one with most fields."""
    held = [Run(method=name).to_toml() for name in catalogue.names()]
    split = {**MORE, "split": "clusters:3", "ratio": "0.5..1", "optimizer": "adam", "momentum": 0.0, "nesterov": False}
    return [text.encode() for text in (*held, tomli_w.dumps(MORE), tomli_w.dumps(split))]


def attempt(folder: Path, data: bytes) -> None:
    run = Run.from_toml(data.decode(errors="surrogateescape"))
    written = run.to_toml()
    again = Run.from_toml(written)
    assert again.to_toml() == written, "another run is read than was written"


HARNESSES = [Harness("run files", seeds, attempt)]
