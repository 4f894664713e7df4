"""FedDyn: its reference, FedProx and plain steps as its limits, the optimum, g and h, the term's gradient, odd clients."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

import checks
from checks import EQUAL, PLAIN, history
from harness import SIZES, agree, experiment, moved, run, world
from idiolect.data.sources import quadratics
from idiolect.errors import UsageError
from idiolect.method import gradient
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.feddyn import FedDyn
from idiolect.methods.fedprox import FedProx
from idiolect.tree import Tree, stack
from reference import feddyn as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))

# the reference


@IMAGES
@pytest.mark.parametrize("hyper", [{}, {"alpha": 0.1}, {"alpha": 1.5}], ids=str)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedDyn(**hyper), images=images))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    assert moved(found.server["h"], Tree(expected.extra["h"])) < 1e-10
    for i, g in enumerate(expected.extra["g"]):
        assert moved(found.private(i)["g"], Tree(g)) < 1e-10


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(FedDyn(), sizes=sizes))
    agree(found, reference.run(world(found.run)))


# its limits


def held(**how):
    """FedDyn with g, or h, held at 0."""

    def local(self, me, down, mine):
        up, new = FedDyn.local(self, me, down, mine)
        return up, mine if "g" in how else new

    def server(self, server, rows, up, run):
        if "h" not in how:
            return FedDyn.server(self, server, rows, up, run)
        return {**server, **up.mean}, rows

    return type("FedDyn", (FedDyn,), {"local": local, "server": server, "__module__": FedDyn.__module__})


@IMAGES
def test_with_g_and_h_held_at_0_it_is_fedprox(images):
    fields = EQUAL | {"images": images}
    found, fedprox = run(experiment(held(g=0, h=0)(alpha=0.4), **fields)), run(experiment(FedProx(mu=0.4), **fields))
    assert moved(found.server["model"], fedprox.server["model"]) < 1e-12
    for some in (FedDyn, held(g=0), held(h=0)):
        dynamic = run(experiment(some(alpha=0.4), **fields))
        assert moved(dynamic.server["model"], fedprox.server["model"]) > 1e-3


def test_in_the_first_round_clients_are_fedprox_s_and_the_server_goes_further():
    """h is -alpha (K/N) times the mean move, which h / alpha doubles where everybody takes part."""
    for ratio, count in ((1.0, 8), (((0, 3),), 2)):
        fields = {"sizes": (8,) * 8, "ratio": ratio, "rounds": 1}
        found, fedprox = (run(experiment(m, **fields)) for m in (FedDyn(alpha=0.3), FedProx(mu=0.3)))
        start, mean = found.context.net.weights, fedprox.server["model"]
        assert moved(found.server["model"], mean + (mean - start) * (count / 8)) < 1e-12


def test_with_an_alpha_of_nearly_nothing_the_server_adds_up_all_moves():
    fields = EQUAL | {"rounds": 3}
    found = run(experiment(FedDyn(alpha=1e-9), **fields))
    _, context, states = history(FedDyn(alpha=1e-9), **fields)
    total = context.net.trainable.zeros()
    for before, after in pairwise(states):
        mean = after.server["model"] + after.server["h"] / 1e-9
        total = total + (mean - before.server["model"])
        assert moved(after.server["model"], mean + total) < 1e-6
    assert moved(found.server["model"], run(experiment(FedAvg(), **fields)).server["model"]) > 1e-2


def test_with_a_large_alpha_clients_hardly_move():
    fields = PLAIN | {"ratio": 1.0, "lr": 0.01, "rounds": 1, "epochs": 4}
    start = experiment(FedDyn(), **fields).context().net.weights
    far = [moved(run(experiment(FedDyn(alpha=a), **fields)).server["model"], start) for a in (0.01, 20.0, 100.0)]
    assert far[0] > 1.3 * far[1] > 1.6 * far[2] > 0


# the optimum


@pytest.mark.parametrize("problem", [{}, {"a": (4.0, 1.0, 2.0), "b": (1.0, -1.0, 3.0)}], ids=["two", "three"])
def test_it_finds_the_minimum_of_the_mean_and_fedprox_does_not(problem):
    a, b = problem.get("a", checks.A), problem.get("b", checks.B)
    best = quadratics.answers(a, b).global_optimum
    found = checks.on_quadratics(FedDyn(alpha=2.0), rounds=150, steps=60, **problem)
    assert float(found.server["model"]["head.weight"]) == pytest.approx(best, abs=1e-6)
    for i, (s, c) in enumerate(zip(a, b, strict=True)):  # g is the client's gradient there
        assert float(found.private(i)["g"]["head.weight"]) == pytest.approx(s * (best - c), abs=1e-5)
    fedprox = checks.on_quadratics(FedProx(mu=2.0), rounds=150, steps=60, **problem)
    assert abs(float(fedprox.server["model"]["head.weight"]) - best) > 0.02


# g and h


@pytest.mark.parametrize(
    "fields",
    [{"ratio": 1.0}, {}, {"ratio": "bernoulli:0.3"}, {"drop": 0.4}, {"images": True, "rounds": 2}],
    ids=["everybody", "5 of 8", "Bernoulli", "lost replies", "BatchNorm"],
)
def test_h_is_the_mean_of_all_g(fields):
    """Whoever took part: h moves by the sum over the participants divided by all N."""
    run_, _, states = history(FedDyn(alpha=0.3), **fields)
    for state in states:
        mean = stack([state.store.read(i)["g"] for i in range(run_.clients)]).map(lambda v: v.mean(0))
        assert moved(state.server["h"], mean) < 1e-12
    assert float(states[-1].server["h"].norm()) > 1e-3


def test_clients_that_were_away_keep_their_g():
    found, first = (run(experiment(FedDyn(), ratio=((0, 1), (1, 2), (1, 4)), rounds=r)) for r in (3, 1))
    assert found.private(0)["g"].equals(first.private(0)["g"])
    assert float(found.private(0)["g"].norm()) > 1e-3
    assert float(found.private(3)["g"].norm()) == 0.0


def test_replies_count_alike_not_by_samples():
    found = [run(experiment(FedDyn(), ratio=((i,),), rounds=1)) for i in (0, 6)]
    two = run(experiment(FedDyn(), ratio=((0, 6),), rounds=1))
    start = two.context.net.weights
    ends = [start + (f.server["model"] - start) / (1 + 1 / 8) for f in found]  # without h
    mean = (ends[0] + ends[1]) * 0.5
    assert moved(two.server["model"], mean + (mean - start) * (2 / 8)) < 1e-12


def test_statistics_are_averaged_and_have_no_g():
    fields = EQUAL | {"images": True, "rounds": 1}
    found, fedprox = (run(experiment(m, **fields)) for m in (FedDyn(alpha=0.3), FedProx(mu=0.3)))
    buffers = found.context.net.buffers
    assert buffers
    assert not buffers & set(found.server["h"])
    assert not buffers & set(found.private(0)["g"])
    assert moved(found.server["model"].pick(buffers), fedprox.server["model"].pick(buffers)) < 1e-12


# the term


def test_its_gradient_is_that_of_finite_differences():
    """What `dynamic` adds is the gradient of -<g, w> + alpha/2 |w - received|^2, which gradcheck holds to differences."""
    draw = torch.Generator().manual_seed(0)
    w, received, g = (torch.randn(7, generator=draw, dtype=torch.float64) for _ in range(3))
    method = FedDyn(alpha=0.7)

    def term(v: torch.Tensor) -> torch.Tensor:
        return -(g * v).sum() + method.alpha / 2 * (v - received).square().sum()

    assert torch.autograd.gradcheck(term, (w.requires_grad_(),))
    added = method.dynamic(*(Tree({"v": v.detach()}) for v in (0 * w, w, received, g)))
    wanted = gradient(lambda t: term(t["v"]), Tree({"v": w}))
    assert moved(added, wanted) < 1e-14


# public code


def test_alpha_knows_no_samples():
    """There it is divided by each client's share: the pull of a client does not depend on how much data others have."""
    one, two = (run(experiment(FedDyn(alpha=1.0), sizes=s, ratio=((0,),), rounds=1)) for s in ((9, 9), (9, 90)))
    assert moved(one.private(0)["g"], two.private(0)["g"]) < 1e-12


def test_clients_predict_with_what_is_sent_next_not_with_the_mean_of_the_replies():
    found = run(experiment(FedDyn(alpha=0.3)))
    assert all(found.personal(i).equals(found.server["model"]) for i in EVERYONE)
    w, h = found.server["model"], found.server["h"]
    assert moved(w.pick(h) + h / 0.3, w) > 1e-3  # the mean


# the rest


def test_bytes_and_passes_of_a_round():
    found, fedavg = (run(experiment(m)) for m in (FedDyn(), FedAvg()))
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert (a["bytes_down"], a["bytes_up"]) == (b["bytes_down"], b["bytes_up"])
        assert a["gradient_passes"] == b["gradient_passes"]


@pytest.mark.parametrize("alpha", [0.0, -0.1])
def test_impossible_values_are_refused(alpha):
    with pytest.raises(UsageError, match=r"FedDyn\.alpha must be above 0"):
        FedDyn(alpha=alpha)


def test_defaults():
    assert dataclasses.asdict(FedDyn()) == {"alpha": 0.01}
