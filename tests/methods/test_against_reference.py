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


AWAY = {"absent": 0.2, "drop": 0.2, "late": 0.2, "leave": 0.2, "rounds": 6, "ratio": 0.8}


@pytest.mark.parametrize(("name", "hyper", "fields"), CASES)
def test_with_clients_away_and_replies_lost_too(name, hyper, fields):
    from idiolect import catalogue

    found = run(experiment(catalogue.build(name, hyper), **AWAY, **fields))
    assert found.summary["replies"]["absent"] >= 3
    assert found.summary["replies"]["dropped"] >= 3
    agree(found, importlib.import_module(f"reference.{name}").run(world(found.run), **hyper))


@pytest.mark.parametrize(
    ("name", "hyper", "fields"), [c for c in CASES if c[0] in ("local", "fedavg", "fedprox", "fedper", "scaffold")]
)
def test_with_slow_clients_too(name, hyper, fields):
    """Their batches are cut short. SCAFFOLD's reference divides by the batches that there were."""
    from idiolect import catalogue

    found = run(experiment(catalogue.build(name, hyper), slow=0.7, **fields))
    full = run(experiment(catalogue.build(name, hyper), **fields))
    expected = importlib.import_module(f"reference.{name}").run(world(found.run), **hyper)
    agree(found, expected)
    assert sum(r["gradient_passes"] for r in found.rounds) < sum(r["gradient_passes"] for r in full.rounds)
    if name == "scaffold":
        for k, v in expected.extra["c"].items():
            assert float((found.server["c"][k] - v).abs().max()) < 1e-10
        for i, ci in enumerate(expected.extra["ci"]):
            assert all(float((found.private(i)["c"][k] - v).abs().max()) < 1e-10 for k, v in ci.items())
