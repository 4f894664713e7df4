"""FedPAC: its reference, FedRep as its limit, alignment, statistics, the weights of the heads, whose head goes where."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import pytest
import torch
from scipy.optimize import LinearConstraint, minimize
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from harness import CLASSES, SIZES, agree, experiment, federation, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods import fedpac
from idiolect.methods.fedpac import LEAST, RIDGE, FedPAC, quadratics, simplex_minimum
from idiolect.methods.fedrep import FedRep
from idiolect.tree import Tree
from reference import fedpac as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
WIDTH = 5  # of the mlp's features


class Alone(FedPAC):
    """Every client's mixture is its own head."""

    def weights(self, H, v):
        return torch.eye(len(v), dtype=v.dtype)


class Watched(FedPAC):
    """Keeps what each client says, and what its body phase was given."""

    seen: ClassVar[dict] = {}
    phases: ClassVar[dict] = {}

    def local(self, me, down, mine):
        train = me.train

        def watched(w, **options):
            self.phases.setdefault((me.round, me.id), []).append(options)
            return train(w, **options)

        me.train = watched
        up, mine = super().local(me, down, mine)
        self.seen[me.round, me.id] = down, up
        return up, mine


def watch(**fields: Any) -> tuple[Result, dict, dict]:
    Watched.seen, Watched.phases = {}, {}
    return run(experiment(Watched(), **fields)), Watched.seen, Watched.phases


def drawn(clients: int, seed: int = 0, classes: int = 4, width: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    H = torch.randn(clients, classes, width, generator=draw, dtype=torch.float64)
    return H, 3 * torch.rand(clients, generator=draw, dtype=torch.float64)


# the reference


def compared(hyper: dict, **fields: Any) -> None:
    found = run(experiment(FedPAC(**hyper), **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    torch.testing.assert_close(found.server["centroid"], expected.extra["prototype"], rtol=0, atol=1e-10)
    assert torch.equal(found.server["known"], expected.extra["known"])


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"lam": 5.0, "head_lr": None}, {"lam": 0.3, "head_epochs": 3, "body_epochs": 1}, {"lam": 0.0}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    compared(hyper, images=images)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (4,)], ids=str)
@pytest.mark.parametrize("ratio", [0.65, 1.0])
def test_clients_of_one_sample_or_one_class(sizes, ratio):
    compared({}, sizes=sizes, ratio=ratio)


# what it becomes


@IMAGES
def test_with_own_heads_and_without_alignment_it_is_fedrep_to_the_bit(images):
    methods = Alone(lam=0.0, head_lr=None), FedRep(head_epochs=1)
    found, fedrep = (run(experiment(m, images=images)) for m in methods)
    assert found.server["model"].equals(fedrep.server["model"])
    assert all(found.personal(i).equals(fedrep.personal(i)) for i in EVERYONE)
    for other in (Alone(head_lr=None), FedPAC(lam=0.0, head_lr=None), Alone(lam=0.0)):  # alignment, mixture, rate
        assert moved(run(experiment(other, images=images)).server["model"], fedrep.server["model"]) > 1e-3


def test_equal_clients_have_equal_heads_and_unequal_ones_have_not():
    fed = federation((6, 6))
    same = dataclasses.replace(fed, **{k: (getattr(fed, k)[0],) * 3 for k in ("train", "validation", "test")})
    found = run(experiment(FedPAC(), federation=same, ratio=1.0, batch_size=8))
    assert max(moved(found.personal(0), found.personal(i)) for i in (1, 2)) < 1e-12
    heads = [Tree({"": run(experiment(FedPAC(), ratio=1.0)).personal(i)["head.weight"]}) for i in EVERYONE]
    assert min(moved(a, b) for a, b in itertools.combinations(heads, 2)) > 1e-4


def test_heads_are_neither_the_clients_own_nor_one_for_all():
    found = run(experiment(FedPAC(lam=0.0), ratio=1.0, rounds=1))
    own = run(experiment(Alone(lam=0.0), ratio=1.0, rounds=1))
    assert max(moved(found.personal(i), own.personal(i)) for i in EVERYONE) > 1e-2
    assert moved(found.personal(0), found.personal(3)) > 1e-2


def test_nothing_draws_in_the_first_round():
    found, plain = (run(experiment(FedPAC(lam=lam), rounds=1)) for lam in (50.0, 0.0))
    assert found.server["model"].equals(plain.server["model"])
    later = [run(experiment(FedPAC(lam=lam), rounds=2)) for lam in (50.0, 0.0)]
    assert moved(later[0].server["model"], later[1].server["model"]) > 1e-3


def test_the_larger_lam_the_nearer_features_come_to_their_centroids():
    fields = {"ratio": 1.0, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.05, "schedule": "constant"}
    apart = []
    for lam in (0.0, 2.0, 10.0):
        before, after = (run(experiment(FedPAC(lam=lam), rounds=r, **fields)) for r in (3, 4))
        gaps = []
        for i in EVERYONE:
            x, y = after.context.shards.part("train", i)
            gaps.append(after.context.task.features(after.server["model"], x) - before.server["centroid"][y])
        apart.append(float(torch.cat(gaps).square().mean()))
    assert apart[0] > 1.2 * apart[1] > 1.3 * apart[2] > 0


# alignment


def aligning(seed: int = 0):
    """A task, weights, a batch and targets, all of them drawn."""
    task = experiment(FedPAC()).context().task
    draw = torch.Generator().manual_seed(seed)
    w = task.net.weights.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype))
    x = torch.randn(7, 6, generator=draw, dtype=torch.float64)
    target = torch.randn(CLASSES, WIDTH, generator=draw, dtype=torch.float64)
    return task, w, Batch(x, torch.tensor([0, 2, 1, 0, 2, 2, 1])), target


def test_the_loss_by_hand():
    """The mean over samples and dimensions: PyTorch's MSELoss, as in the authors' code."""
    task, w, batch, target = aligning()
    z = task.features(w, batch.x)
    expected = float(task.loss(w, batch)) + 0.4 * float(torch.nn.functional.mse_loss(z, target[batch.y]))
    assert float(FedPAC(lam=0.4).aligned(task, w, batch, target)) == pytest.approx(expected, rel=1e-12)


def test_gradient_of_the_aligned_loss_against_finite_differences():
    task, w, batch, target = aligning(1)

    def loss(*values: Tensor) -> Tensor:
        return FedPAC(lam=0.7).aligned(task, Tree(zip(w, values, strict=True)), batch, target)

    assert torch.autograd.gradcheck(loss, [v.requires_grad_() for v in w.values()])


def test_padding_changes_neither_the_loss_nor_its_gradient():
    task, w, batch, target = aligning(2)
    w = w.map(lambda v: v.requires_grad_())
    rows = torch.tensor([*range(7), 0, 0])
    padded = Batch(batch.x[rows], batch.y[rows], torch.tensor([1.0] * 7 + [0.0] * 2, dtype=torch.float64))
    values = [FedPAC().aligned(task, w, b, target) for b in (batch, padded)]
    grads = [torch.autograd.grad(v, list(w.values())) for v in values]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*grads, strict=True))


def test_a_class_without_a_centroid_is_drawn_to_the_client_s_own_mean():
    """After a round of client 3 alone, class 1 has a centroid and no other has."""
    found, seen, phases = watch(ratio=((3,), (0, 1, 2)))
    assert seen[1, 0][0]["known"].tolist() == [False, True, False]
    for i in (0, 1, 2):
        down, _ = seen[1, i]
        assert "loss" not in phases[1, i][0]
        (target,) = phases[1, i][1]["given"]
        x, y = found.context.shards.part("train", i)
        z = found.context.task.features(down["model"], x)
        assert torch.equal(target[1], down["centroid"][1])
        for c in set(y.tolist()) & {0, 2}:
            torch.testing.assert_close(target[c], z[y == c].mean(0), rtol=0, atol=1e-12)
    assert "loss" not in phases[0, 3][1]


def test_a_class_that_nobody_has_is_no_error():
    """The authors' code looks every class up among the centroids."""
    fed = federation()
    fed = dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, y=fed.dataset.y.clamp(max=1)))
    compared({}, federation=fed)
    found = run(experiment(FedPAC(), federation=fed))
    assert found.server["known"].tolist() == [True, True, False]
    assert not found.server["centroid"][2].any()


@IMAGES
def test_centroids_are_the_means_of_all_samples_under_the_trained_bodies(images):
    """Other public code gives clients equal weight in them."""
    found, seen, _ = watch(images=images, rounds=1, ratio=1.0)
    task, sums, counts = found.context.task, 0, 0
    for i in EVERYONE:
        x, y = found.context.shards.part("train", i)
        z = task.features(seen[0, i][1].mean["model"], x)
        sums = sums + torch.stack([z[y == c].sum(0) for c in range(CLASSES)])
        counts = counts + torch.bincount(y, minlength=CLASSES)
    torch.testing.assert_close(found.server["centroid"], sums / counts[:, None], rtol=0, atol=1e-12)


def test_a_class_that_no_participant_holds_keeps_its_centroid():
    before, after = (run(experiment(FedPAC(), ratio=((0, 1, 2, 5), (3,)), rounds=r)).server for r in (1, 2))
    assert before["known"].all()
    assert [torch.equal(before["centroid"][c], after["centroid"][c]) for c in range(CLASSES)] == [True, False, True]


# statistics


@IMAGES
def test_h_is_a_mean_over_samples_and_v_the_variance_of_that_mean(images):
    """Of the received body, in eval mode and before anything moves."""
    found, seen, _ = watch(images=images, ratio=1.0, rounds=2)
    for i in EVERYONE:
        down, up = seen[1, i]
        x, y = found.context.shards.part("train", i)
        z = found.context.task.features(down["model"], x)
        each = torch.nn.functional.one_hot(y, CLASSES).double()[:, :, None] * z[:, None]  # [n, C, d]
        torch.testing.assert_close(up.rows["H"], each.mean(0), rtol=0, atol=1e-12)
        variance = (each - each.mean(0)).square().sum() / len(y) ** 2
        torch.testing.assert_close(up.rows["v"], variance, rtol=1e-9, atol=1e-12)
        assert set(up.rows["H"].any(1).nonzero().flatten().tolist()) <= set(y.tolist())


def test_v_of_one_sample_is_0_and_never_below():
    """Rounding would make it negative: equal samples far from the origin, in float32."""
    fed = federation((5, 1, 7))
    shift = dataclasses.replace(fed.dataset, x=fed.dataset.x * 0 + 1e3 / 3, y=fed.dataset.y * 0)
    _, seen, _ = watch(federation=dataclasses.replace(fed, dataset=shift), dtype="float32", ratio=1.0, rounds=2)
    values = [float(up.rows["v"]) for _, up in seen.values()]
    assert all(0 <= v < 1e-6 for v in values)
    _, seen, _ = watch(federation=fed, ratio=1.0, rounds=1)
    assert [bool(seen[0, i][1].rows["v"] > 1e-15) for i in range(3)] == [True, False, True]


# the quadratic form


def by_trace(H: Tensor, i: int) -> Tensor:
    """D of client i as the authors' code has it: a d x d matrix for each pair and class."""
    D = torch.zeros(len(H), len(H), dtype=H.dtype)
    for j, k in itertools.product(range(len(H)), repeat=2):
        D[j, k] = sum((a[:, None] @ b[None]).trace() for a, b in zip(H[i] - H[j], H[i] - H[k], strict=True))
    return D


def test_the_gram_form_is_the_trace_of_the_d_x_d_matrices():
    H, v = drawn(5)
    for i, Q in enumerate(quadratics(H, v)):
        torch.testing.assert_close(Q, torch.diag(v + RIDGE) + by_trace(H, i), rtol=0, atol=1e-13)


def test_what_is_minimised_is_variance_and_the_distance_to_the_mixture():
    H, v = drawn(6, seed=1)
    a = torch.softmax(torch.arange(6, dtype=torch.float64) * 0.7, 0)
    mixed = torch.einsum("k,kcd->cd", a, H)
    for i, Q in enumerate(quadratics(H, v)):
        expected = (v * a * a).sum() + (H[i] - mixed).square().sum()
        assert float(a @ Q @ a) == pytest.approx(float(expected), rel=1e-7)


def test_it_is_convex_without_any_repair_and_far_from_the_origin():
    """Public code drops eigenvalues below 0.01."""
    for seed in range(20):
        H, v = drawn(12, seed, classes=2, width=2)  # more clients than dimensions
        near, far = (list(quadratics(h, 0 * v)) for h in (H, H + 1e4))
        assert min(float(torch.linalg.eigvalsh(Q)[0]) for Q in near) > 0.9 * RIDGE
        assert max(float((a - b).abs().max()) for a, b in zip(near, far, strict=True)) < 1e-9


def test_its_cost_is_that_of_one_gram_matrix():
    clients, classes, width = 6, 10, 64
    H, v = drawn(clients, 0, classes, width)
    with FlopCounterMode(display=False) as gram:
        list(quadratics(H, v))
    with FlopCounterMode(display=False) as trace:
        by_trace(H, 0)
    assert gram.get_total_flops() == 2 * clients**2 * classes * width
    assert clients * trace.get_total_flops() == clients * width * gram.get_total_flops()


# the weights


def optimal(Q: Tensor, a: Tensor) -> None:
    """On the simplex, and by the conditions of Karush, Kuhn and Tucker its minimum, to rounding of Q @ a."""
    value, slope = a @ Q @ a, Q @ a
    rounding = 1e-9 * float(value) + 1e-15 * float(Q.abs().max())
    assert float(a.min()) >= 0
    assert float(a.sum()) == pytest.approx(1, abs=1e-12)
    assert float((slope - value)[a > 0].abs().max()) <= rounding
    assert float((slope - value).min()) >= -rounding


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 20])
def test_weights_are_those_that_scipy_finds(clients):
    for seed in range(5):
        H, v = drawn(clients, seed)
        for Q in quadratics(H, v):
            a, matrix = simplex_minimum(Q), Q.numpy()
            optimal(Q, a)
            found = minimize(
                lambda x, q=matrix: x @ q @ x, [1 / clients] * clients, jac=lambda x, q=matrix: 2 * q @ x, method="SLSQP",
                bounds=[(0, 1)] * clients, constraints=LinearConstraint([[1] * clients], 1, 1), options={"ftol": 1e-15, "maxiter": 1000},
            )  # fmt: skip
            torch.testing.assert_close(a, torch.from_numpy(found.x), rtol=0, atol=1e-5)
            assert float(a @ Q @ a) <= found.fun + 1e-9


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("clients", [2, 9, 60])
def test_weights_are_optimal_at_any_scale(clients, scale):
    for seed, noise in itertools.product(range(3), (0.0, 1e-6, 1.0, 50.0)):
        H, v = drawn(clients, seed, *((1, 2) if seed == 2 else (4, 3)))  # more clients than dimensions
        for Q in itertools.islice(quadratics(scale * H, noise * v), 6):
            optimal(Q, simplex_minimum(Q))


def test_without_differences_weights_are_inverse_variances():
    H, v = drawn(6, seed=2)
    alike = H[:1].expand_as(H)
    a = FedPAC().weights(alike, v)
    torch.testing.assert_close(a, ((1 / v) / (1 / v).sum()).expand_as(a), rtol=1e-6, atol=0)
    torch.testing.assert_close(FedPAC().weights(alike, 0 * v), torch.full_like(a, 1 / 6), rtol=0, atol=1e-12)


def test_two_clients_in_closed_form():
    for seed in range(10):
        H, v = drawn(2, seed)
        delta = (H[0] - H[1]).square().sum()
        for i, row in enumerate(FedPAC().weights(H, v)):
            expected = (v[1 - i] + delta) / (v.sum() + delta)
            torch.testing.assert_close(row[i], expected, rtol=1e-7, atol=0)


def test_a_client_alone_and_one_far_from_all_others_keep_their_own():
    H, v = drawn(4)
    assert FedPAC().weights(H[:1], v[:1]).tolist() == [[1.0]]
    H[2] += 1e4
    assert FedPAC().weights(H, v)[2].tolist() == [0, 0, 1, 0]


def test_without_variance_every_client_keeps_its_own():
    """No bias is the least, and nothing is gained by averaging."""
    H, v = drawn(5)
    torch.testing.assert_close(FedPAC().weights(H, 0 * v), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-6)


def test_duplicates_share_their_weight():
    """Degenerate problems: without the ridge, no unique minimum."""
    H, v = drawn(3)
    twice, none = torch.cat([H, H]), torch.zeros(6, dtype=torch.float64)
    for a in (FedPAC().weights(twice, none), FedPAC().weights(twice, torch.cat([v, v]))):
        torch.testing.assert_close(a[:, :3], a[:, 3:], rtol=0, atol=1e-7)
        torch.testing.assert_close(a[:3], a[3:], rtol=0, atol=1e-7)


def test_small_weights_are_dropped_and_the_rest_adds_up():
    H, v = drawn(3)
    v = torch.tensor([1.0, 1.0, 5e3], dtype=torch.float64)
    raw = simplex_minimum(next(iter(quadratics(0 * H, v))))
    assert 0 < float(raw[2]) < LEAST
    torch.testing.assert_close(FedPAC().weights(0 * H, v)[0], torch.tensor([0.5, 0.5, 0.0]).double())


def test_the_largest_weight_is_never_dropped(monkeypatch):
    """Among more than a thousand clients all of them may be small."""
    small = torch.full((1200,), 1 / 1200, dtype=torch.float64)
    monkeypatch.setattr(fedpac, "simplex_minimum", lambda Q: small)
    H, v = drawn(2)
    torch.testing.assert_close(FedPAC().weights(H, v), small.expand(2, -1))


# whose head goes where


def by_hand(found: Result, seen: dict, r: int) -> dict[int, Tree]:
    """The mixed heads of a round: for client i, weights from the statistics and the heads of the same clients."""
    ids = sorted(i for k, i in seen if k == r)
    H, v = (torch.stack([seen[r, i][1].rows[k] for i in ids]) for k in ("H", "v"))
    alpha = FedPAC().weights(H, v)
    heads = [seen[r, i][1].rows["head"] for i in ids]
    return {i: sum(a * h for a, h in zip(alpha[k].tolist(), heads, strict=True)) for k, i in enumerate(ids)}


def test_heads_keep_their_order():
    """Public code lists statistics in the order of selection, and heads in another one."""
    found, seen, _ = watch(ratio=((7, 2, 5),), rounds=1)
    mixed = by_hand(found, seen, 0)
    head = found.context.net.head
    for i in EVERYONE:
        if i in mixed:
            assert moved(found.personal(i).pick(head), mixed[i]) < 1e-12
        else:
            assert found.personal(i).pick(head).equals(head)
    assert all(moved(mixed[i], mixed[j]) > 1e-3 for i, j in itertools.combinations(mixed, 2))


def test_heads_keep_their_order_when_replies_are_lost():
    found, seen, _ = watch(ratio=1.0, rounds=1, drop=0.4)
    lost = found.rounds[1]["dropped"]
    assert 0 < len(lost) < len(SIZES) - 1
    mixed = by_hand(found, {k: v for k, v in seen.items() if k[1] not in lost}, 0)
    head = found.context.net.head
    for i in EVERYONE:
        assert moved(found.personal(i).pick(head), head if i in lost else mixed[i]) < 1e-12


def test_a_client_that_is_away_has_the_new_body_and_the_mixed_head_of_last_time():
    fields = {"ratio": ((0, 1), (2, 5))}
    before, after = (run(experiment(FedPAC(), rounds=r, **fields)) for r in (1, 2))
    head = before.context.net.head
    for i in (0, 1):
        assert after.personal(i).pick(head).equals(before.personal(i).pick(head))
        assert after.personal(i).pick(after.server["model"]).equals(after.server["model"])
    assert moved(after.server["model"], before.server["model"]) > 1e-3
    assert moved(before.personal(0).pick(head), head) > 1e-3


def test_training_starts_from_the_mixed_head():
    found, seen, _ = watch(ratio=1.0, rounds=2)
    mixed = by_hand(found, seen, 0)
    assert all(moved(seen[1, i][0]["head"], mixed[i]) < 1e-12 for i in EVERYONE)


def test_without_a_learning_rate_heads_alone_are_trained_at_their_own():
    found = run(experiment(FedPAC(), lr=0.0))
    body, head = found.context.net.body, found.context.net.head
    assert moved(found.server["model"], body) < 1e-15
    assert moved(found.personal(0).pick(head), head) > 1e-2
    still = run(experiment(FedPAC(head_lr=None), lr=0.0))
    assert all(moved(still.personal(i), still.context.net.weights) < 1e-15 for i in EVERYONE)


def test_after_training_a_client_is_scored_with_its_own_head():
    found, seen, _ = watch(rounds=1)
    for i in found.progress.rows:
        down, up = seen[0, i]
        assert FedPAC().personal(None, {**down, **up.rows, **up.mean}, {}).equals(up.mean["model"] | up.rows["head"])


# the rest


@pytest.mark.parametrize(("hyper", "passes"), [({}, 3), ({"head_epochs": 2, "body_epochs": 4}, 6)], ids=str)
def test_bytes_and_passes_of_a_round(hyper, passes):
    found = run(experiment(FedPAC(**hyper)))
    whole, table = found.context.net.weights.size, CLASSES * WIDTH
    for row in found.rounds[1:]:
        assert row["bytes_down"] == 5 * (8 * (whole + table) + CLASSES)  # and which centroids are known
        assert row["bytes_up"] == 5 * 8 * (whole + 2 * table + CLASSES + 1)  # sums, H, counts, v
        assert row["gradient_passes"] == pytest.approx(passes)


@pytest.mark.parametrize(
    "hyper", [{"lam": -1.0}, {"head_lr": 0.0}, {"head_lr": -0.1}, {"head_epochs": -1}, {"body_epochs": -2}], ids=str
)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedPAC.{next(iter(hyper))} must be"):
        FedPAC(**hyper)


def test_defaults_are_the_paper_s():
    assert FedPAC() == FedPAC(lam=1.0, head_lr=0.1, head_epochs=1, body_epochs=None)
