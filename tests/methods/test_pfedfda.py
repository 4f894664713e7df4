"""pFedFDA: its reference, the head of Gaussians, the statistics, cross-validation, both ends of the interpolation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn.functional import cross_entropy

from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Method, State, Tree, Up
from idiolect.methods.pfedfda import PFedFDA, descended, folds, searched
from reference import pfedfda as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
HEAD = ("head.weight", "head.bias")
EXACT = {"rtol": 0, "atol": 1e-10}

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"grid": 5},
        {"single_beta": True},
        {"local_beta": True},
        {"min_samples": 3, "shrinkage": 0.1, "single_beta": True, "grid": 11},
    ],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(PFedFDA(**hyper), images=images))
    same(found, reference.run(world(found.run), **hyper))


@IMAGES
@pytest.mark.parametrize("hyper", [{}, {"shrinkage": 0.05}, {"grid": 5}], ids=str)
def test_engine_equals_reference_with_the_other_jitter(hyper, images):
    """Its heads reach into the thousands where there are more dimensions than samples: to as many digits."""
    hyper = {"jitter": "identity"} | hyper
    found = run(experiment(PFedFDA(**hyper), images=images))
    expected = reference.run(world(found.run), **hyper)
    assert moved(found.server["model"], expected.server) < 1e-10
    for name in ("mean", "covariance"):
        torch.testing.assert_close(found.server[name], expected.extra[name], **EXACT)
    for i, w in enumerate(expected.clients):
        for name in HEAD:
            scale = max(1.0, float(w[name].abs().max()))
            assert float((found.personal(i)[name] - w[name]).abs().max()) < 1e-10 * scale


@pytest.mark.parametrize("hyper", [{}, {"grid": 4}], ids=str)
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, hyper):
    found = run(experiment(PFedFDA(**hyper), sizes=sizes))
    same(found, reference.run(world(found.run), **hyper))


def same(found: Result, expected: Any) -> None:
    agree(found, expected)
    for name in ("mean", "covariance"):
        torch.testing.assert_close(found.server[name], expected.extra[name], **EXACT)


# both ends


class Chosen(PFedFDA):
    """Goes a given way, whatever cross-validation says."""

    b: ClassVar[tuple] = (0.0, 0.0)

    def chosen(self, z, y, shared, prior):
        return z.new_tensor(self.b)


class Local(Chosen):
    b = (1.0, 1.0)


def statistics_of(found: Result, i: int, method: PFedFDA) -> tuple[Tensor, Tensor]:
    """Features and the class means and covariance of a client's own data under the body that it predicts with."""
    x, y = found.context.shards.part("train", i)
    with torch.no_grad():
        z = found.context.task.features(found.personal(i), x)
    return z, method.statistics(z, y, found.server["mean"])


@IMAGES
def test_at_0_the_shared_statistics_never_move_and_are_everybody_s(images):
    found = run(experiment(Chosen(), images=images))
    start = found.context.state.server
    torch.testing.assert_close(found.server["mean"], start["mean"], rtol=0, atol=1e-15)
    torch.testing.assert_close(found.server["covariance"], start["covariance"], rtol=0, atol=1e-15)
    weights = [found.personal(i)["head.weight"] for i in EVERYONE]
    assert all(torch.equal(w, weights[0]) for w in weights)
    torch.testing.assert_close(weights[0], start["mean"], rtol=0, atol=1e-12)  # of the identity: nearest mean


@IMAGES
def test_at_1_a_client_predicts_with_its_own_statistics_alone(images):
    found, option = run(experiment(Local(), images=images)), run(experiment(PFedFDA(local_beta=True), images=images))
    for i in EVERYONE:
        _, (mean, S) = statistics_of(found, i, PFedFDA())
        weight, bias = PFedFDA().head(mean, S, priors(found, i))
        w = found.personal(i)
        torch.testing.assert_close(w["head.weight"], weight, **EXACT)
        torch.testing.assert_close(w["head.bias"], bias, **EXACT)
        assert w.equals(option.personal(i))


def test_in_between_it_is_neither():
    found, ends = run(experiment(PFedFDA())), [run(experiment(m)) for m in (Chosen(), Local())]
    for end in ends:
        assert moved(found.server["model"], end.server["model"]) > 1e-3
        assert max(moved(found.personal(i), end.personal(i)) for i in EVERYONE) > 1e-2


@dataclass(frozen=True)
class UnderAHead(Method):
    """FedAvg of the body under a head that nobody trains."""

    def init(self, net):
        return State(server={"model": net.weights | self.given})

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"], only=me.task.net.body)}), mine


@IMAGES
def test_at_0_a_client_alone_is_fedavg_under_a_frozen_head(images):
    fields = {"sizes": (9,), "ratio": 1.0, "images": images}
    found = run(experiment(Chosen(), **fields))
    start = found.context.state.server
    weight, bias = PFedFDA().head(start["mean"], start["covariance"], priors(found, 0))
    kind = type("UnderAHead", (UnderAHead,), {"given": Tree({"head.weight": weight, "head.bias": bias})})
    frozen = run(experiment(kind(), **fields))
    assert moved(found.server["model"], frozen.server["model"].pick(found.context.net.body)) < 1e-12
    assert moved(found.server["model"], found.context.net.body) > 1e-2


def priors(found: Result, i: int) -> Tensor:
    y = found.context.shards.part("train", i)[1]
    shares = torch.bincount(y, minlength=3).double() / len(y) + 1e-4
    return shares / shares.sum()


# the head


def gaussians(C: int = 3, d: int = 4, n: int = 30, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    A, mean, z = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((d, d), (C, d), (n, d)))
    prior = torch.rand(C, generator=draw, dtype=torch.float64) + 0.1
    y = torch.randint(0, C, (n,), generator=draw)
    return mean, A @ A.T + torch.eye(d).double(), prior / prior.sum(), z + mean[y], y


def test_its_logits_are_log_densities_and_log_shares():
    mean, S, prior, z, _ = gaussians()
    weight, bias = PFedFDA(shrinkage=0.2).head(mean, S, prior)
    shrunk = 0.8 * S + 0.2 * S.trace() / 4 * torch.eye(4).double()
    densities = torch.stack([MultivariateNormal(m, shrunk).log_prob(z) for m in mean], 1) + prior.log()
    torch.testing.assert_close((z @ weight.T + bias).log_softmax(1), densities.log_softmax(1), **EXACT)


def test_of_equal_classes_with_the_identity_the_nearest_mean_wins():
    mean, _, _, z, _ = gaussians()
    weight, bias = PFedFDA().head(mean, torch.eye(4).double(), torch.ones(3).double() / 3)
    assert torch.equal((z @ weight.T + bias).argmax(1), torch.cdist(z, mean).argmin(1))


def test_predictions_do_not_see_the_basis():
    """With the identity for jitter; the official one sees it, for it adds to every entry."""
    mean, S, prior, z, y = gaussians()
    R = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))[0]
    for jitter, invariant in (("identity", True), ("official", False)):
        method, logits = PFedFDA(jitter=jitter), []
        for Z, shared in ((z, (mean, S)), (z @ R, (mean @ R, R.T @ S @ R))):
            b = method.chosen(Z, y, shared, prior)
            weight, bias = method.head(*method.interpolated(b, method.statistics(Z, y, shared[0]), shared), prior)
            logits.append(Z @ weight.T + bias)
        assert (float((logits[0] - logits[1]).abs().max()) < 1e-8) == invariant


def test_a_head_is_solved_in_float64():
    """A covariance that float32 could not be trusted with: the head of a float32 run is the exact one, rounded."""
    found = run(experiment(PFedFDA(jitter="identity"), dtype="float32"))
    x, y = found.context.shards.part("train", 0)
    w, method = found.personal(0), found.run.method
    with torch.no_grad():
        z = found.context.task.features(w, x).double()
    shared, prior = (found.server["mean"].double(), found.server["covariance"].double()), priors(found, 0)
    mean, S = method.interpolated(method.chosen(z, y, shared, prior), method.statistics(z, y, shared[0]), shared)
    S = (1 - 1e-4) * S + 1e-4 * S.trace() / len(S) * torch.eye(len(S)).double()
    exact = torch.linalg.solve(S, mean.T).T
    assert float((w["head.weight"].double() - exact).abs().max() / exact.abs().max()) < 1e-7
    assert w["head.weight"].dtype == torch.float32


# statistics


def test_statistics_by_hand_with_either_jitter():
    mean, _, _, z, y = gaussians()
    totals, S = [torch.zeros(4).double() for _ in range(3)], torch.zeros(4, 4).double()
    counts = [int((y == c).sum()) for c in range(3)]
    for n in range(30):
        totals[y[n]] += z[n]
    own = torch.stack([t / c for t, c in zip(totals, counts, strict=True)])
    for n in range(30):
        S += torch.outer(z[n] - own[y[n]], z[n] - own[y[n]]) / 29
    identity = torch.eye(4).double()
    for jitter, added in (("official", 1e-4 + identity), ("identity", 1e-4 * identity)):
        found, covariance = PFedFDA(jitter=jitter).statistics(z, y, mean)
        torch.testing.assert_close(found, own, rtol=0, atol=1e-12)
        torch.testing.assert_close(covariance, S + added, rtol=0, atol=1e-12)


def test_of_small_features_the_official_jitter_leaves_little_but_the_identity():
    mean, _, _, z, y = gaussians()
    official, identity = (PFedFDA(jitter=j).statistics(1e-2 * z, y, 1e-2 * mean)[1] for j in ("official", "identity"))
    assert float((official - torch.eye(4).double()).abs().max()) < 1e-2
    assert float(identity.abs().max()) < 1e-2


def test_a_class_of_one_sample_has_the_shared_mean_in_training_too():
    """Public code gives it its own there: the guard asks how long a mask is, not what is in it."""
    mean, _, _, z, y = gaussians()
    y = torch.where(y == 2, 1, y)
    y[7] = 2
    own, S = PFedFDA(jitter="identity").statistics(z, y, mean)
    assert torch.equal(own[2], mean[2])
    assert moved(Tree({"": own[:2]}), Tree({"": mean[:2]})) > 1e-2
    centred = z - own[y]  # its sample counts in the covariance all the same
    torch.testing.assert_close(S, centred.T @ centred / 29 + 1e-4 * torch.eye(4).double(), rtol=0, atol=1e-12)
    fewer = PFedFDA(min_samples=1).statistics(z, y, mean)[0]
    torch.testing.assert_close(fewer[2], z[7])


@pytest.mark.parametrize("jitter", ["official", "identity"])
def test_a_covariance_of_fewer_samples_than_dimensions_is_positive(jitter):
    mean, _, _, z, y = gaussians()
    for n in (1, 2):
        S = PFedFDA(jitter=jitter).statistics(z[:n], y[:n], mean)[1]
        assert float(torch.linalg.eigvalsh(S).min()) > 0.9e-4


@IMAGES
def test_statistics_are_of_one_pass_after_training(images):
    """Public code collects features while it trains, every sample once an epoch: its folds share samples."""
    seen = []

    class Watched(PFedFDA):
        def local(self, me, down, mine):
            seen.clear()
            return super().local(me, down, mine)

        def chosen(self, z, y, shared, prior):
            seen.append(z)
            return super().chosen(z, y, shared, prior)

    found = run(experiment(Watched(), images=images, rounds=1, ratio=((0,),), epochs=3))
    with torch.no_grad():
        expected = found.context.task.features(found.server["model"], found.context.shards.part("train", 0)[0])
    torch.testing.assert_close(seen[0], expected, **EXACT)


# cross-validation


def test_folds_are_even_in_each_class_and_share_nothing():
    y = torch.tensor([0, 1, 0, 2, 0, 1, 0, 0])
    assert [half.tolist() for half in folds(y, 4)] == [[0, 1, 4, 7], [2, 5, 6]]  # class 2 is left out
    _, _, _, _, y = gaussians(n=101)
    one, two = (half.tolist() for half in folds(y, 3))
    assert sorted(one + two) == list(range(101))
    for c in range(3):
        assert 0 <= sum(int(y[n] == c) for n in one) - sum(int(y[n] == c) for n in two) <= 1


def test_with_nothing_to_hold_out_it_is_the_shared_statistics():
    """Public code says of its 0 that these are the local ones."""
    mean, S, prior, z, _ = gaussians()
    for hyper in ({}, {"grid": 5}, {"single_beta": True}):
        assert PFedFDA(**hyper).chosen(z[:3], torch.tensor([0, 1, 2]), (mean, S), prior).tolist() == [0, 0]


@pytest.mark.parametrize("single", [False, True])
def test_on_a_grid_it_finds_the_least_held_out_loss(single):
    for seed in range(3):
        mean, S, prior, z, y = gaussians(seed=seed)
        method = PFedFDA(grid=5, single_beta=single)
        shared = (mean + 0.5, S)
        one, two = folds(y, 3)
        costs = {}
        for b_m in (0, 0.25, 0.5, 0.75, 1):
            for b_S in (0, 0.25, 0.5, 0.75, 1):
                total = 0.0
                for fitted, held in ((one, two), (two, one)):
                    m, C = method.statistics(z[fitted], y[fitted], shared[0])
                    m, C = b_m * m + (1 - b_m) * shared[0], b_S * C + (1 - b_S) * S
                    C = (1 - 1e-4) * C + 1e-4 * C.trace() / 4 * torch.eye(4).double()
                    scores = torch.stack([MultivariateNormal(row, C).log_prob(z[held]) for row in m], 1) + prior.log()
                    total += float(cross_entropy(scores, y[held]))
                if not single or b_m == b_S:
                    costs[b_m, b_S] = total
        assert tuple(method.chosen(z, y, shared, prior).tolist()) == min(costs, key=costs.get)


def test_equally_good_points_of_the_grid_leave_the_shared_statistics():
    flat = lambda b: 0 * b.sum()
    for count in (1, 2):
        assert searched(flat, torch.full((count,), 0.5).double(), 11).tolist() == [0] * count


def test_l_bfgs_finds_the_least_of_a_bowl():
    def bowl(b: Tensor) -> Tensor:
        return 0.3 * (b - b.new_tensor([0.3, 0.8])).square().sum() + 0.1 * b.prod()

    found = descended(bowl, torch.full((2,), 0.5).double())
    A = torch.tensor([[0.6, 0.1], [0.1, 0.6]]).double()
    torch.testing.assert_close(found, torch.linalg.solve(A, torch.tensor([0.18, 0.48]).double()), rtol=0, atol=3e-3)


def test_l_bfgs_stays_inside_and_where_its_first_step_left_it():
    """Beyond the border there is no derivative. The grid has no such end."""
    middle = torch.full((2,), 0.5).double()
    assert descended(lambda b: 3 * b[0] - 5 * b[1], middle).tolist() == [0, 1]
    steep = lambda b: 2 * (b - b.new_tensor([0.2, 0.5])).square().sum()
    assert descended(steep, middle).tolist() == [0.0, 0.5]
    assert searched(steep, middle, 11).tolist() == pytest.approx([0.2, 0.5])


@pytest.mark.parametrize("single", [False, True])
def test_l_bfgs_leaves_the_middle_for_the_better(single):
    for seed in range(6):
        mean, S, prior, z, y = gaussians(seed=seed)
        method, shared = PFedFDA(single_beta=single), (mean + 0.5, S)
        one, two = folds(y, 3)
        parts = [(method.statistics(z[u], y[u], shared[0]), z[v], y[v]) for u, v in ((one, two), (two, one))]
        b = method.chosen(z, y, shared, prior)
        assert 0 <= float(b.min()) <= float(b.max()) <= 1
        assert not single or b[0] == b[1]
        middle = method.held_out(torch.full((2,), 0.5).double(), parts, shared, prior)
        assert float(method.held_out(b, parts, shared, prior)) < float(middle)


def test_the_held_out_loss_s_gradient_is_that_of_finite_differences():
    mean, S, prior, z, y = gaussians()
    method, shared = PFedFDA(), (mean + 0.5, S)
    one, two = folds(y, 3)
    parts = [(method.statistics(z[u], y[u], shared[0]), z[v], y[v]) for u, v in ((one, two), (two, one))]
    b = torch.tensor([0.3, 0.7]).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda b: method.held_out(b, parts, shared, prior), (b,))


def test_b_is_learnt_where_no_gradients_are_kept():
    mean, S, prior, z, y = gaussians()
    free = PFedFDA().chosen(z, y, (mean + 0.5, S), prior)
    with torch.no_grad():
        assert torch.equal(PFedFDA().chosen(z, y, (mean + 0.5, S), prior), free)


# a round


def test_at_first_means_are_uniform_and_everybody_s():
    found = run(experiment(PFedFDA(), rounds=0, network_options={"hidden": (200,)}))
    mean, S = found.server["mean"], found.server["covariance"]
    assert float(mean.min()) >= 0
    assert float(mean.max()) < 1
    assert float(mean.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(mean.var()) == pytest.approx(1 / 12, abs=0.02)
    assert torch.equal(S, torch.eye(200).double())


def test_statistics_are_learnt_in_training():
    """There is public code in which they stay as they were drawn."""
    found = run(experiment(PFedFDA()))
    for name in ("mean", "covariance"):
        assert float((found.server[name] - found.context.state.server[name]).abs().max()) > 0.05


@IMAGES
def test_what_is_sent_is_interpolated(images):
    """A round of one client: the server holds what it sent."""
    found = run(experiment(PFedFDA(grid=6), images=images, rounds=1, ratio=((0,),)))
    start, (x, y) = found.context.state.server, found.context.shards.part("train", 0)
    with torch.no_grad():
        z = found.context.task.features(found.server["model"], x)
    method, shared = PFedFDA(grid=6), (start["mean"], start["covariance"])
    b = method.chosen(z, y, shared, priors(found, 0))
    own = method.statistics(z, y, shared[0])
    for k, name in enumerate(("mean", "covariance")):
        expected = b[k] * own[k] + (1 - b[k]) * shared[k]
        torch.testing.assert_close(found.server[name], expected, **EXACT)


@IMAGES
def test_the_body_trains_under_the_received_head_that_stands_still(images):
    found, heads = None, []

    class Watched(PFedFDA):
        def local(self, me, down, mine):
            train = me.train

            def watched(w, **options):
                after = train(w, **options)
                heads.append((down, me.id, w.pick(HEAD), after.pick(HEAD)))
                return after

            me.train = watched
            return super().local(me, down, mine)

    found = run(experiment(Watched(), images=images))
    for down, i, before, after in heads:
        weight, bias = PFedFDA().head(down["mean"], down["covariance"], priors(found, i))
        torch.testing.assert_close(before["head.weight"], weight, **EXACT)
        torch.testing.assert_close(before["head.bias"], bias, **EXACT)
        assert after.equals(before)


def test_who_was_away_predicts_with_the_new_body_and_statistics_of_its_own_data():
    found = run(experiment(PFedFDA(grid=5), ratio=((0, 1),) * 4))
    method, shared, prior = PFedFDA(grid=5), (found.server["mean"], found.server["covariance"]), priors(found, 7)
    z, own = statistics_of(found, 7, method)
    b = method.chosen(z, found.context.shards.part("train", 7)[1], shared, prior)
    weight, _ = method.head(*method.interpolated(b, own, shared), prior)
    assert found.personal(7).pick(found.context.net.body).equals(found.server["model"])
    torch.testing.assert_close(found.personal(7)["head.weight"], weight, **EXACT)
    assert not found.private(7)


def test_bytes_and_passes_of_a_round():
    found = run(experiment(PFedFDA()))
    net, d = found.context.net, found.context.net.features
    size = net.body.size + 3 * d + d * d
    for row in found.rounds[1:]:
        assert row["bytes_down"] == row["bytes_up"] == 5 * 8 * size
        assert row["gradient_passes"] == 2


# the rest


@pytest.mark.parametrize(
    "hyper",
    [{"jitter": "eps"}, {"shrinkage": 0.0}, {"shrinkage": 1.0}, {"min_samples": 0}, {"grid": 1}],
    ids=str,
)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"PFedFDA.{next(iter(hyper))} must be"):
        PFedFDA(**hyper)


def test_a_network_without_a_body_is_refused():
    with pytest.raises(UsageError, match="trains a body"):
        run(experiment(PFedFDA(), network="logistic", network_options={}))


def test_defaults_are_the_authors():
    assert PFedFDA() == PFedFDA("official", 1e-4, 2, None, False, False)
    assert math.isclose(PFedFDA().shrinkage, 1e-4)
