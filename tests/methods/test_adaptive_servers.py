"""FedAdam and FedYogi: what their servers have in common."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest
import torch

from checks import found, known, stepped
from harness import agree, experiment, run, world
from idiolect.errors import UsageError
from idiolect.methods.fedadam import FedAdam
from idiolect.methods.fedyogi import FedYogi

KINDS = pytest.mark.parametrize("kind", [FedAdam, FedYogi])
IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])


@KINDS
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(kind, sizes):
    result = run(experiment(kind(), sizes=sizes))
    agree(result, importlib.import_module(f"reference.{kind.__name__.lower()}").run(world(result.run)))


@KINDS
def test_v_starts_at_tau_squared(kind):
    """Public code: at 0, which makes the first steps longer."""
    (first,) = stepped(kind(tau=0.25), [])
    assert first["v"]["w"].tolist() == [0.0625] * 2
    assert first["m"]["w"].tolist() == [0.0] * 2


@KINDS
def test_the_first_round_s_moments_are_taken_as_they_are(kind):
    """Public code divides them by 1 - beta, as Adam does: a first step of nearly the rate."""
    first = stepped(kind(server_lr=1.0, tau=1e-9), [[5.0, -0.1]])[1]["model"]["w"]
    expected = 0.1 / math.sqrt(0.01)  # (1 - beta1) / sqrt(1 - beta2), here 1 by chance
    torch.testing.assert_close(first, torch.tensor([expected, -expected]).double(), rtol=0, atol=1e-6)
    first = stepped(kind(server_lr=1.0, tau=1e-9, beta2=0.9), [[5.0, -0.1]])[1]["model"]["w"]
    expected = 0.1 / math.sqrt(0.1)
    torch.testing.assert_close(first, torch.tensor([expected, -expected]).double(), rtol=0, atol=1e-6)


@KINDS
def test_a_server_without_updates_rests(kind):
    states = stepped(kind(beta1=0.0), [[0.0, 0.0]] * 500)
    assert states[-1]["model"]["w"].tolist() == [0.0, 0.0]
    assert all(s["v"]["w"].isfinite().all() for s in states)


@KINDS
@IMAGES
def test_statistics_have_no_moments(kind, images):
    (*_, last) = stepped(kind(), [[1.0, 2.0], [3.0, 4.0]])
    assert last["model"]["b"].tolist() == [4.0, 6.0]
    net = experiment(kind(), images=images).context().net
    server = kind().init(net).server
    assert set(server["m"]) == set(server["v"]) == set(net.weights) - net.buffers


@KINDS
def test_bytes_and_passes_of_a_round(kind):
    for a, b in zip(found(kind()).rounds[1:], known("fedavg").rounds[1:], strict=True):
        assert (a["bytes_down"], a["bytes_up"]) == (b["bytes_down"], b["bytes_up"])
        assert a["gradient_passes"] == b["gradient_passes"]


@KINDS
@pytest.mark.parametrize(
    "hyper",
    [{"server_lr": 0.0}, {"tau": 0.0}, {"tau": -1.0}, {"beta1": 1.0}, {"beta1": -0.1}, {"beta2": 1.0}, {"beta2": -0.1}],
    ids=str,
)
def test_impossible_values_are_refused(kind, hyper):
    with pytest.raises(UsageError, match=f"{kind.__name__}.{next(iter(hyper))} must be"):
        kind(**hyper)


@KINDS
def test_defaults(kind):
    assert dataclasses.asdict(kind()) == {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
