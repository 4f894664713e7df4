"""APFL: its reference, FedAvg and Local as its limits, the mixture, both gradients, the share alpha, odd clients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import checks
from checks import apart, known
from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Batch, gradient
from idiolect.methods.apfl import APFL
from idiolect.methods.fedavg import FedAvg
from idiolect.nets import Network
from idiolect.tree import Tree
from reference import apfl as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
FIXED = {"adaptive": False}


def own(result: Result, i: int) -> Tree:
    return result.private(i)["own"].under("own")


def shares(result: Result) -> list[float]:
    return [float(result.private(i)["alpha"]) for i in range(result.run.clients)]


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper", [{}, {"alpha": 0.2, "adaptive": False}, {"alpha": 0.9, "alpha_lr": 3.0}, {"alpha_lr": 0.02}], ids=str
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(APFL(**hyper), images=images))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    assert shares(found) == pytest.approx(expected.extra["alpha"], abs=1e-10)
    for i in EVERYONE:
        assert moved(own(found, i), Tree(expected.extra["v"][i])) < 1e-10


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(APFL(), sizes=sizes))
    agree(found, reference.run(world(found.run)))


def test_a_network_given_as_an_object_has_its_twin():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
    found = run(experiment(APFL(), network=Network(body, nn.Linear(5, 3)), network_options={}, sizes=(5, 9, 4)))
    agree(found, reference.run(world(found.run)))
    initial = found.context.state.client["own"].under("own")
    assert initial.equals(found.context.net.weights)


# FedAvg and Local as its limits


@IMAGES
@pytest.mark.parametrize("hyper", [{}, {"alpha": 1.0, "adaptive": False}, {"alpha": 0.1, "alpha_lr": 5.0}], ids=str)
def test_the_shared_model_is_fedavg_s_to_the_bit_whatever_alpha(hyper, images):
    checks.same_shared(run(experiment(APFL(**hyper), images=images)), known("fedavg", images=images))


def test_alpha_0_predicts_with_the_shared_model_and_alpha_1_with_local_s():
    fedavg, local = known("fedavg"), known("local")
    zero, half, one = (run(experiment(APFL(alpha=a, **FIXED))) for a in (0.0, 0.5, 1.0))
    checks.same_personal(zero, fedavg)
    assert all(moved(one.personal(i), local.personal(i)) < 1e-12 for i in EVERYONE)
    for other in (fedavg, local):
        apart(half, other)
    everyone = zip(*(map(r.personal, EVERYONE) for r in (zero, half, one)), strict=True)
    assert max(moved(b, a.lerp(c, 0.5)) for a, b, c in everyone) > 1e-3  # v was trained in the mixture


def test_alpha_1_is_local_in_a_network_with_batchnorm():
    one = run(experiment(APFL(alpha=1.0, **FIXED), images=True))
    assert all(moved(one.personal(i), known("local", images=True).personal(i)) < 1e-10 for i in EVERYONE)


def test_alpha_that_does_not_learn_is_fixed_alpha_to_the_bit():
    still, fixed = (run(experiment(APFL(alpha=0.3, **h))) for h in ({"alpha_lr": 0.0}, FIXED))
    checks.same_personal(still, fixed)
    apart(run(experiment(APFL(alpha=0.3, alpha_lr=1.0))), fixed)


# the mixture


@IMAGES
def test_a_client_predicts_with_the_mixture_of_the_received_and_its_own(images):
    found = run(experiment(APFL(), images=images))
    buffers = found.context.net.weights.keys() & found.context.net.buffers
    for i, alpha in enumerate(shares(found)):
        v, w = own(found, i), found.server["model"]
        expected = v.drop(buffers) * alpha + w.drop(buffers) * (1 - alpha)
        personal = found.personal(i)
        assert moved(personal.drop(buffers), expected) < 1e-14
        assert all(torch.equal(personal[k], v[k]) for k in buffers)


def test_own_statistics_are_those_of_the_mixture_s_own_passes():
    """With alpha = 0 the mixture is w: v's statistics are those that w's training leaves."""
    fields = {"images": True, "ratio": ((0,),), "rounds": 1}
    found = run(experiment(APFL(alpha=0.0, **FIXED), **fields))
    trained = found.server["model"]
    buffers = trained.keys() & found.context.net.buffers
    assert buffers
    for k in buffers:
        torch.testing.assert_close(own(found, 0)[k], trained[k], rtol=0, atol=1e-12)
    half = run(experiment(APFL(alpha=0.7, **FIXED), **(fields | {"epochs": 4})))
    assert max(float((own(half, 0)[k] - half.server["model"][k]).abs().max()) for k in buffers) > 1e-4
    assert all(own(half, 3)[k].equal(half.context.net.weights[k]) for k in buffers)


def test_own_models_stay_with_their_clients_while_these_are_away():
    found, first = (run(experiment(APFL(), ratio=((0, 1), (1, 2), (1, 4)), rounds=r)) for r in (3, 1))
    assert own(found, 0).equals(own(first, 0))
    assert found.private(0)["alpha"].equal(first.private(0)["alpha"])
    assert own(found, 3).equals(found.context.net.weights)
    assert moved(found.personal(0), first.personal(0)) > 1e-3  # w goes on, and with it the mixture


# the gradients


def drawn(method: APFL, images: bool = False):
    """A task, and w and v far apart, under the network's names; a batch of client 0."""
    context = experiment(method, images=images).context()
    _ = context.state
    w = context.net.weights
    draw = torch.Generator().manual_seed(1)
    v = w.map(lambda t: t + 0.5 * torch.rand(t.shape, generator=draw, dtype=t.dtype))
    x, y = context.shards.part("train", 0)
    return context.task, w, v, Batch(x, y)


def plain(task, w: Tree, batch: Batch) -> Tree:
    """The gradient of the loss at w, in eval mode."""
    return gradient(lambda t: task.loss(w | t, batch), w.drop(task.net.buffers))


@IMAGES
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_both_gradients_of_a_step(share, images):
    """w's is that at w, v's is alpha times that at the mixture; public code for v: that at v, or of mixed outputs."""
    method = APFL()
    task, w, v, batch = drawn(method, images)
    both, alpha = w | v.prefixed("own"), torch.tensor(share, dtype=torch.float64)
    found = gradient(lambda t: method.loss(task, both | t, batch, alpha), both.drop(task.net.buffers))
    for_w, for_v = found.pick(w.drop(task.net.buffers)), found.under("own")
    assert moved(for_w, plain(task, w, batch)) < 1e-12
    at_mixture = plain(task, method.mixture(task, w, v, alpha), batch)
    assert moved(for_v, at_mixture * share) < 1e-12
    if share == 0.3:
        assert moved(for_v, plain(task, v, batch) * share) > 1e-3


def test_the_gradient_for_v_is_that_of_finite_differences():
    method = APFL()
    task, w, v, batch = drawn(method)
    names, alpha = list(v), torch.tensor(0.6, dtype=torch.float64)

    def loss(*values: Tensor) -> Tensor:
        own = Tree(zip(names, values, strict=True)).prefixed("own")
        return method.loss(task, w | own, batch, alpha)

    assert torch.autograd.gradcheck(loss, [t.clone().requires_grad_() for t in v.values()])


@IMAGES
def test_the_gradient_for_alpha_is_that_of_finite_differences_and_the_paper_s(images):
    """Eq. 10: <v - w, the gradient at the mixture>; public code mixes the gradients at v and w, and adds 0.02 alpha."""
    method = APFL()
    task, w, v, batch = drawn(method, images)
    share = torch.tensor(0.4, dtype=torch.float64)

    def loss(alpha: Tensor) -> Tensor:
        return method.of_alpha(task, Tree({"alpha": alpha}), batch, w, v)

    assert torch.autograd.gradcheck(loss, (share.clone().requires_grad_(),), eps=1e-7, atol=1e-5)
    found = gradient(lambda t: loss(t["alpha"]), Tree({"alpha": share}))["alpha"]
    g = plain(task, method.mixture(task, w, v, share), batch)
    assert float(found) == pytest.approx(float((v - w).pick(g).dot(g)), rel=1e-10)
    mixed = plain(task, v, batch) * 0.4 + plain(task, w, batch) * 0.6
    assert abs(float(found) - float((v - w).pick(g).dot(mixed))) > 1e-3


def test_both_models_step_from_where_they_were():
    """Two steps by hand, v's with w as it was before the step; public code takes the next one."""
    fields = checks.PLAIN | {"sizes": (5,), "ratio": 1.0, "rounds": 1, "batch_size": 8, "lr": 0.5}
    found = run(experiment(APFL(alpha=0.6, **FIXED), **fields))
    task, (x, y) = found.context.task, found.context.shards.part("train", 0)
    w = v = late = found.context.net.weights
    for _ in range(2):
        new = w - 0.5 * plain(task, w, Batch(x, y))
        v = v - 0.5 * 0.6 * plain(task, w.lerp(v, 0.6), Batch(x, y))
        late = late - 0.5 * 0.6 * plain(task, new.lerp(late, 0.6), Batch(x, y))
        w = new
    assert moved(found.server["model"], w) < 1e-12
    assert moved(own(found, 0), v) < 1e-12
    assert moved(own(found, 0), late) > 1e-3


# alpha


def test_alpha_stays_in_a_client_s_first_participation_where_both_models_are_one():
    found = run(experiment(APFL(), rounds=1))
    assert shares(found) == [0.5] * 8
    later = run(experiment(APFL(alpha_lr=1.0)))
    assert len(set(shares(later))) > 3


def test_alpha_learns_once_a_round_before_training_on_its_first_batch():
    fields = {"sizes": (9, 6), "ratio": ((0, 1), (0, 1)), "rounds": 2}
    found, before = (
        run(experiment(APFL(alpha_lr=2.0), **fields)),
        run(experiment(APFL(alpha_lr=2.0), **(fields | {"rounds": 1}))),
    )
    task, w = found.context.task, before.server["model"]
    for i in range(2):
        x, y = found.context.shards.part("train", i)
        first = world(found.run).batches(i, 1, 0, 0)[0]
        v = own(before, i)
        g = plain(task, w.lerp(v, 0.5), Batch(x[first], y[first]))
        expected = 0.5 - 2.0 * float((v - w).dot(g))
        assert shares(found)[i] == pytest.approx(min(max(expected, 0.0), 1.0), abs=1e-10)
        assert shares(found)[i] != 0.5


def test_alpha_stays_between_0_and_1():
    for rounds in (2, 3, 4):
        found = shares(run(experiment(APFL(alpha_lr=1000.0), rounds=rounds)))
        assert min(found) >= 0
        assert max(found) <= 1
    assert {0.0, 1.0} <= set(found)


def test_alpha_grows_where_a_client_s_own_model_suits_it():
    """Two clients that disagree, w between them: on their own samples each is better off with v."""
    early, found = (checks.on_quadratics(APFL(), rounds=r) for r in (5, 40))
    assert all(0.5 < a < b - 0.1 for a, b in zip(shares(early), shares(found), strict=True))
    assert checks.points(found) == pytest.approx(checks.B, abs=0.05)
    alike = checks.on_quadratics(APFL(), rounds=40, b=(0.5, 0.5))
    assert shares(alike) == pytest.approx([0.5, 0.5], abs=0.02)


# the rest


def test_bytes_and_passes_of_a_round():
    fedavg = run(experiment(FedAvg()))
    found, fixed = (run(experiment(APFL(adaptive=a))) for a in (True, False))
    firsts = [
        [len(world(found.run).batches(i, r, 0, 0)[0]) / SIZES[i] for i in found.run.participants(r)] for r in range(4)
    ]
    for a, b, c, first in zip(found.rounds[1:], fixed.rounds[1:], fedavg.rounds[1:], firsts, strict=True):
        assert (a["bytes_down"], a["bytes_up"]) == (b["bytes_down"], b["bytes_up"]) == (c["bytes_down"], c["bytes_up"])
        assert b["gradient_passes"] == pytest.approx(2 * 2)
        assert a["gradient_passes"] == pytest.approx(2 * 2 + sum(first) / 5)


@pytest.mark.parametrize("hyper", [{"alpha": -0.1}, {"alpha": 1.1}, {"alpha_lr": -1.0}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"APFL.{next(iter(hyper))} must be"):
        APFL(**hyper)


def test_defaults():
    assert dataclasses.asdict(APFL()) == {"alpha": 0.5, "adaptive": True, "alpha_lr": None}
