"""Plain SGD on linear layers by its formulas: the numbers of autograd, where it serves, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness import experiment, moved, run
from idiolect.engine import linear_steps, steps
from idiolect.engine.linear_steps import chain, fits
from idiolect.engine.progress import Progress
from idiolect.engine.turns import turns
from idiolect.method import Rows
from idiolect.optim import SGD

PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
NETWORKS = {"mlp": {"hidden": (7, 5)}, "logistic": {}}


@pytest.fixture
def counted(monkeypatch):
    """How many phases went by the formulas."""
    seen = []
    original = linear_steps.train
    monkeypatch.setattr(linear_steps, "train", lambda *args: seen.append(args[1]) or original(*args))
    return seen


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 1e-13)])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedrep", "fedbabu", "fedavg+finetune", "local", "lgfedavg"])
def test_they_give_the_numbers_of_autograd(counted, method, network, dtype, tolerance):
    if (method, network) == ("fedbabu", "logistic"):
        network = "mlp"  # it trains the body alone, of which the other has none
    fields = {**PLAIN, "network": network, "network_options": NETWORKS[network], "dtype": dtype}
    loop, formulas = (run(experiment(method, **fields, steps=way)) for way in ("loop", "compiled"))
    assert max(moved(loop.personal(i), formulas.personal(i)) for i in range(8)) < tolerance
    assert max(moved(loop.personal(i), loop.context.net.weights) for i in range(8)) > 1e-2  # it has learnt
    assert counted
    assert [r["gradient_passes"] for r in loop.rounds] == [r["gradient_passes"] for r in formulas.rounds]


def phases():
    """One phase of every kind of a plain run, and the task."""
    found = []
    for method in ("fedavg", "fedrep"):
        context = experiment(method, **PLAIN, network="mlp", network_options={"hidden": (5,)}).context()
        original = context.trainer
        context.trainer = lambda task, phase, original=original: found.append((task, phase)) or original(task, phase)
        progress = Progress(context.state.server, Rows(context.state.rows), context.store(8))
        for job in turns(context, progress, "local", [0, 3]):
            context.do(job)
    return found


def test_frozen_layers_stay_and_are_handed_on():
    for task, phase in phases():
        result = linear_steps.train(task, phase, chain(task.net))
        by_autograd = steps.train(task, phase)
        assert moved(result, by_autograd) < 1e-13
        assert all((result[k] is v) == (k not in phase.trained) for k, v in phase.weights.items())
        assert all(
            torch.equal(v, w) for v, w in zip(phase.weights.values(), phase.weights.clone().values(), strict=True)
        )


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": SGD(momentum=0.5)}, {"optimizer": SGD(weight_decay=0.1)}, {"clip": 1.0}, {"correct": lambda g, w: g},
        {"project": lambda w: w}, {"step": lambda *a: {}}, {"loss": lambda task, w, batch: task.loss(w, batch)},
        {"trained": ("head.weight",)}, {"carried": ("head.bias",)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_anything_else_goes_by_autograd(change):
    task, phase = phases()[0]
    layers = chain(task.net)
    assert fits(task, phase, layers)
    assert not fits(task, replace(phase, **change), layers)


@pytest.mark.parametrize(("network", "options"), [("mlp", {"hidden": (4, 3)}), ("logistic", {}), ("convnet3", {})])
def test_only_linear_layers_make_a_chain(network, options):
    images = network == "convnet3"
    net = experiment("fedavg", images=images, network=network, network_options=options).context().net
    found = chain(net)
    if images:
        assert found is None
    else:
        assert [layer.relu for layer in found] == [True] * len(options.get("hidden", ())) + [False]
        assert found[-1].weight == "head.weight"


def test_networks_beside_it_go_by_autograd(counted):
    run(experiment("fedsimsup", **PLAIN, rounds=1, steps="compiled"))
    assert not counted
