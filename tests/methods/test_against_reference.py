"""Every method against its independent reference: 4 rounds, 5 of 8 unequal clients, float64, to 1e-10."""

from __future__ import annotations

import importlib

import pytest

from harness import agree, experiment, run, world

PLAIN = {"momentum": 0.0}
CASES = [
    ("local", {}, {}),
    ("fedavg", {}, {}),
    ("fedprox", {"mu": 0.3}, {}),
    ("fedper", {}, {}),
    ("fedrep", {"head_epochs": 3}, {}),
    ("ditto", {"lam": 0.7}, {}),
    ("ditto", {"lam": 0.7, "personal_epochs": 1}, {}),
    ("scaffold", {}, PLAIN),
    ("scaffold", {"server_lr": 0.6}, PLAIN),
    ("fedala", {"first_epochs": 3}, {}),
    ("fedala", {"layers": 2, "share": 0.5, "mix_lr": 0.4}, {}),
    ("fedamp", {}, {}),
    ("fedamp", {"attention": "cosine", "lam": 0.4}, {}),
    ("finetune", {"epochs": 2}, {}),
    ("finetune", {"epochs": 2, "part": "head"}, {}),
]


@pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
@pytest.mark.parametrize(("name", "hyper", "fields"), CASES)
def test_engine_equals_reference(name, hyper, fields, images):
    from idiolect import catalogue

    found = run(experiment(catalogue.build(name, hyper), images=images, **fields))
    reference = importlib.import_module(f"reference.{name}").run(world(found.run), **hyper)
    agree(found, reference)
