"""FedAvgM: its reference, FedAvg as its limit, the step of the server, odd clients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import checks
from checks import apart, found, known
from harness import agree, experiment, moved, run, world
from idiolect.errors import UsageError
from idiolect.method import Rows, Up
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedavgm import FedAvgM
from idiolect.tree import Tree
from reference import fedavgm as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper", [{}, {"server_momentum": 0.5}, {"server_lr": 0.3}, {"server_momentum": 0.97, "server_lr": 1.4}], ids=str
)
def test_engine_equals_reference(hyper, images):
    result = run(experiment(FedAvgM(**hyper), images=images))
    expected = reference.run(world(result.run), **hyper)
    agree(result, expected)
    assert moved(result.server["v"], Tree(expected.extra["m"])) < 1e-10


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    result = run(experiment(FedAvgM(), sizes=sizes))
    agree(result, reference.run(world(result.run)))


# FedAvg as its limit, and beyond it


@IMAGES
def test_without_momentum_it_is_fedavg(images):
    plain = found(FedAvgM(server_momentum=0.0), images=images)
    assert moved(plain.server["model"], known("fedavg", images=images).server["model"]) < 1e-12
    apart(found(FedAvgM(), images=images), known("fedavg", images=images))


def test_its_first_round_is_fedavg_s_and_the_second_is_not():
    for rounds, alike in ((1, True), (2, False)):
        one = found(FedAvgM(), rounds=rounds)
        assert (moved(one.server["model"], known("fedavg", rounds=rounds).server["model"]) < 1e-12) == alike


def test_the_rate_scales_the_step():
    start = experiment(FedAvgM()).context().net.weights
    half, whole = (found(FedAvgM(server_lr=s), rounds=1).server["model"] for s in (0.5, 1.0))
    assert moved(half - start, (whole - start) * 0.5) < 1e-12


def test_on_quadratics_it_ends_where_fedavg_does():
    """Momentum changes the way, not where the mean update is 0."""
    result = checks.on_quadratics(FedAvgM(server_momentum=0.5), rounds=120)
    assert checks.points(result) == pytest.approx(checks.points(checks.on_quadratics(FedAvg(), rounds=120)), abs=1e-9)


# the step of the server


def stepped(method: FedAvgM, updates: list[list[float]], start: list[float] | None = None):
    """What the server holds after each of these mean updates, of parameters w and statistics b."""
    zero = torch.tensor(start or [0.0, 0.0], dtype=torch.float64)
    server = {"model": Tree({"w": zero, "b": zero}), "v": Tree({"w": 0 * zero})}
    states = [server]
    for d in updates:
        mean = server["model"] + torch.tensor(d, dtype=torch.float64)
        server, _ = method.server(server, Rows({}), Up(mean={"model": mean}), None)
        states.append(server)
    return states


def test_v_by_hand():
    states = stepped(FedAvgM(0.5, 2.0), [[1.0, -2.0], [1.0, 0.0], [0.0, 0.0]])
    assert [s["v"]["w"].tolist() for s in states] == [[0.0, 0.0], [1.0, -2.0], [1.5, -1.0], [0.75, -0.5]]
    assert [s["model"]["w"].tolist() for s in states] == [[0.0, 0.0], [2.0, -4.0], [5.0, -6.0], [6.5, -7.0]]


def test_v_is_a_sum_not_a_mean():
    """Public code that shares Adam's first moment goes only 1 - beta as far."""
    (*_, last) = stepped(FedAvgM(0.9), [[1.0, 1.0]] * 200)
    torch.testing.assert_close(last["v"]["w"], torch.full((2,), 10.0, dtype=torch.float64), rtol=0, atol=1e-6)


def test_without_further_updates_it_goes_on():
    states = stepped(FedAvgM(0.9), [[1.0, -1.0]] + [[0.0, 0.0]] * 300)
    torch.testing.assert_close(states[-1]["model"]["w"], torch.tensor([10.0, -10.0]).double(), rtol=0, atol=1e-6)


@IMAGES
def test_statistics_have_no_momentum(images):
    (*_, last) = stepped(FedAvgM(0.9, 0.5), [[1.0, 2.0], [3.0, 4.0]], [7.0, 7.0])
    assert last["model"]["b"].tolist() == [11.0, 13.0]
    net = experiment(FedAvgM(), images=images).context().net
    assert set(FedAvgM().init(net).server["v"]) == set(net.trainable) == set(net.weights) - net.buffers


# the rest


def test_bytes_and_passes_of_a_round():
    for a, b in zip(found(FedAvgM()).rounds[1:], known("fedavg").rounds[1:], strict=True):
        assert (a["bytes_down"], a["bytes_up"]) == (b["bytes_down"], b["bytes_up"])
        assert a["gradient_passes"] == b["gradient_passes"]


@pytest.mark.parametrize(
    "hyper", [{"server_momentum": 1.0}, {"server_momentum": -0.1}, {"server_lr": 0.0}, {"server_lr": -1.0}], ids=str
)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedAvgM.{next(iter(hyper))} must be"):
        FedAvgM(**hyper)


def test_defaults_are_not_fedavg():
    assert dataclasses.asdict(FedAvgM()) == {"server_momentum": 0.9, "server_lr": 1.0}
