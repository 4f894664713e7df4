"""FedYogi: its reference; FedAvg, FedAvgM and FedAdam as its limits; the step of the server. What FedAdam and
FedYogi have in common is in test_adaptive_servers.py."""

from __future__ import annotations

import math

import pytest
import torch

from checks import apart, found, known, stepped
from harness import agree, experiment, moved, run, world
from idiolect.methods.fedadam import FedAdam
from idiolect.methods.fedyogi import FedYogi
from idiolect.tree import Tree
from reference import fedyogi as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
BLUNT = {"tau": 1e7, "beta2": 0.5}  # v stays tau^2, so that the step is divided by 2 tau

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"server_lr": 0.1, "tau": 0.05}, {"beta1": 0.5, "beta2": 0.7}, {"beta1": 0.0, "tau": 1e-9}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    result = run(experiment(FedYogi(**hyper), images=images))
    expected = reference.run(world(result.run), **hyper)
    agree(result, expected)
    assert moved(result.server["m"], Tree(expected.extra["m"])) < 1e-10
    assert moved(result.server["v"], Tree(expected.extra["v"])) < 1e-10


# its limits


@IMAGES
def test_with_a_tau_that_hides_v_it_is_fedavg_and_with_beta1_fedavgm(images):
    blunt = found(FedYogi(server_lr=2e7, beta1=0.0, **BLUNT), images=images)
    assert moved(blunt.server["model"], known("fedavg", images=images).server["model"]) < 1e-6
    heavy = found(FedYogi(server_lr=2e7, beta1=0.8, **BLUNT), images=images)
    momentum = known("fedavgm", {"server_momentum": 0.8, "server_lr": 0.2}, images=images)
    assert moved(heavy.server["model"], momentum.server["model"]) < 1e-6
    for other in ("fedavg", "fedavgm"):
        apart(found(FedYogi(), images=images), known(other, images=images))


def test_where_v_is_far_below_the_update_it_is_adam_without_forgetting_and_far_above_it_hardly_moves():
    yogi, adam = FedYogi(tau=1e-3), FedAdam(tau=1e-3)
    (*_, one), (*_, other) = stepped(yogi, [[1.0, 1e-6]]), stepped(adam, [[1.0, 1e-6]])
    assert one["v"]["w"][0] == pytest.approx(1e-6 + 0.01, rel=1e-12)
    assert other["v"]["w"][0] == pytest.approx(0.99e-6 + 0.01, rel=1e-12)
    assert one["v"]["w"][1] == pytest.approx(1e-6 - 0.01e-12, rel=1e-12)  # Adam's has lost a hundredth
    assert other["v"]["w"][1] == pytest.approx(0.99e-6 + 0.01e-12, rel=1e-12)


def test_it_is_not_fedadam():
    apart(found(FedYogi(beta2=0.7, server_lr=0.1)), known("fedadam", {"beta2": 0.7, "server_lr": 0.1}))


def test_after_a_burst_v_falls_by_squared_updates_not_by_a_share():
    quiet = [[0.0, 0.1]] * 50
    (*_, yogi), (*_, adam) = (stepped(m, [[10.0, 10.0], *quiet]) for m in (FedYogi(beta2=0.9), FedAdam(beta2=0.9)))
    v = 1e-6 + 0.1 * 100
    torch.testing.assert_close(
        yogi["v"]["w"], torch.tensor([v, v - 50 * 0.1 * 0.01], dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert float(adam["v"]["w"].max()) < 0.1 * v


def test_v_stays_above_0():
    draw = torch.Generator().manual_seed(0)
    updates = (10 ** (6 * torch.rand(400, 2, generator=draw) - 5)).tolist()
    states = stepped(FedYogi(beta2=0.0), updates)
    assert all(float(s["v"]["w"].min()) >= 0 and s["model"]["w"].isfinite().all() for s in states)


# the step of the server


def test_the_step_by_hand():
    method = FedYogi(server_lr=0.3, beta1=0.8, beta2=0.6, tau=0.1)
    states = stepped(method, [[0.5, -2.0], [0.0, 1.0], [-3.0, 1e-3]])
    for k in range(2):
        w, m, v = 0.0, 0.0, 0.1**2
        for state, d in zip(states[1:], ([0.5, -2.0][k], [0.0, 1.0][k], [-3.0, 1e-3][k]), strict=True):
            m = 0.8 * m + 0.2 * d
            v -= 0.4 * d * d * (1 if v > d * d else -1)
            w += 0.3 * m / (math.sqrt(v) + 0.1)
            for slot, value in (("model", w), ("m", m), ("v", v)):
                assert float(state[slot]["w"][k]) == pytest.approx(value, rel=1e-12)


def test_tau_is_added_to_the_root_not_under_it():
    states = stepped(FedYogi(server_lr=1.0, tau=0.5, beta1=0.0, beta2=0.0), [[0.5, -1.5]])
    expected = [0.5, -1.5 / (math.sqrt(0.25 + 2.25) + 0.5)]  # v is as large as the first update squared, and stays
    torch.testing.assert_close(states[1]["model"]["w"], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
