"""FedAdam: its reference; FedAvg, FedAvgM and signs as its limits; the step of the server. What FedAdam and
FedYogi have in common is in test_adaptive_servers.py."""

from __future__ import annotations

import math

import pytest
import torch

from checks import apart, found, known, stepped
from harness import agree, experiment, moved, run, world
from idiolect.methods.fedadam import FedAdam
from idiolect.tree import Tree
from reference import fedadam as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
BLUNT = {"tau": 1e7, "beta2": 0.0}  # v is nothing beside tau

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"server_lr": 0.1, "tau": 0.05}, {"beta1": 0.5, "beta2": 0.7}, {"beta1": 0.0, "tau": 1e-9}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    result = run(experiment(FedAdam(**hyper), images=images))
    expected = reference.run(world(result.run), **hyper)
    agree(result, expected)
    assert moved(result.server["m"], Tree(expected.extra["m"])) < 1e-10
    assert moved(result.server["v"], Tree(expected.extra["v"])) < 1e-10


# its limits


@IMAGES
def test_with_a_tau_that_hides_v_it_is_fedavg_and_with_beta1_fedavgm(images):
    blunt = found(FedAdam(server_lr=1e7, beta1=0.0, **BLUNT), images=images)
    assert moved(blunt.server["model"], known("fedavg", images=images).server["model"]) < 1e-6
    heavy = found(FedAdam(server_lr=1e7, beta1=0.8, **BLUNT), images=images)
    momentum = known("fedavgm", {"server_momentum": 0.8, "server_lr": 0.2}, images=images)
    assert moved(heavy.server["model"], momentum.server["model"]) < 1e-6
    for other in ("fedavg", "fedavgm"):
        apart(found(FedAdam(), images=images), known(other, images=images))


def test_without_memory_and_with_little_tau_every_weight_moves_by_the_rate():
    result = found(FedAdam(server_lr=0.02, beta1=0.0, beta2=0.0, tau=1e-12), rounds=1)
    start, mean = result.context.net.weights, known("fedavg", rounds=1).server["model"]
    assert moved(result.server["model"] - start, (mean - start).map(torch.sign) * 0.02) < 1e-6
    lasting = (found(FedAdam(server_lr=0.02), rounds=1).server["model"] - start).map(torch.abs).flat()
    assert 0 < float(lasting.min()) < 0.018 < float(lasting.max()) < 0.02


# the step of the server


def test_the_step_by_hand():
    method = FedAdam(server_lr=0.3, beta1=0.8, beta2=0.6, tau=0.1)
    states = stepped(method, [[0.5, -2.0], [0.0, 1.0], [-3.0, 1e-3]])
    for k in range(2):
        w, m, v = 0.0, 0.0, 0.1**2
        for state, d in zip(states[1:], ([0.5, -2.0][k], [0.0, 1.0][k], [-3.0, 1e-3][k]), strict=True):
            m = 0.8 * m + 0.2 * d
            v = 0.6 * v + 0.4 * d * d
            w += 0.3 * m / (math.sqrt(v) + 0.1)
            for slot, value in (("model", w), ("m", m), ("v", v)):
                assert float(state[slot]["w"][k]) == pytest.approx(value, rel=1e-12)


def test_tau_is_added_to_the_root_not_under_it():
    states = stepped(FedAdam(server_lr=1.0, tau=0.5, beta1=0.0, beta2=0.0), [[0.5, -1.5]])
    torch.testing.assert_close(states[1]["model"]["w"], torch.tensor([0.5, -0.75]).double(), rtol=0, atol=1e-12)
