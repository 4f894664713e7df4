"""FedPHP: its reference, FedAvg as its limit, how the HPM teaches and inherits, whose model is evaluated, odd clients."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from checks import history
from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedphp import FedPHP, mmd
from idiolect.tree import Tree
from reference import fedphp as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
TRANSFERS = pytest.mark.parametrize("transfer", ["mmd", "kd"])

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"transfer": "kd"},
        {"lam": 0.5, "mu": 0.5, "expected": 2.0},
        {"transfer": "kd", "lam": 0.6, "temperature": 0.5, "expected": 0.0},
    ],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedPHP(**hyper), images=images))
    agree(found, reference.run(world(found.run), **hyper))


@TRANSFERS
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, transfer):
    hyper = {"transfer": transfer, "lam": 0.4}
    found = run(experiment(FedPHP(**hyper), sizes=sizes))
    agree(found, reference.run(world(found.run), **hyper))


# what it becomes


@IMAGES
@TRANSFERS
def test_without_lam_the_shared_model_is_fedavg_s_to_the_bit_whatever_mu(transfer, images):
    fedavg = run(experiment(FedAvg(), images=images))
    for mu in (0.0, 0.9):
        found = run(experiment(FedPHP(lam=0.0, mu=mu, transfer=transfer), images=images))
        assert found.server["model"].equals(fedavg.server["model"])
        assert max(moved(found.personal(i), fedavg.personal(i)) for i in EVERYONE) > 1e-3
    taught = run(experiment(FedPHP(lam=0.5, transfer=transfer), images=images))
    assert moved(taught.server["model"], fedavg.server["model"]) > 1e-4


@IMAGES
def test_without_mu_the_hpm_is_the_client_s_last_trained_model(images):
    fields = {"images": images, "ratio": ((0,), (2,), (2,), (0,))}
    found, before = (run(experiment(FedPHP(lam=0.0, mu=0.0), rounds=r, **fields)) for r in (4, 3))
    assert found.personal(0).equals(found.server["model"])
    assert found.personal(2).equals(before.server["model"])
    kept = run(experiment(FedPHP(lam=0.0, expected=1.0), rounds=4, **fields))
    assert moved(kept.personal(0), found.personal(0)) > 1e-3


def test_with_mu_1_and_one_participation_expected_the_first_model_stays():
    fields = {"ratio": ((0, 1), (0, 2), (0, 1))}
    hyper = {"lam": 0.0, "mu": 1.0, "expected": 1.0}
    first, last = (run(experiment(FedPHP(**hyper), rounds=r, **fields)) for r in (1, 3))
    assert moved(last.personal(0), first.personal(0)) < 1e-15
    assert moved(last.server["model"], first.server["model"]) > 1e-3


def test_a_client_alone_with_all_of_lam_but_little_barely_moves():
    """Its first teacher is the model that it received."""
    fields = {"sizes": (9,), "ratio": 1.0, "rounds": 1, "weight_decay": 0.0}
    far = [
        float((r.server["model"] - r.context.net.weights).norm())
        for r in (run(experiment(FedPHP(lam=lam), **fields)) for lam in (0.0, 0.9, 0.999))
    ]
    assert far[0] > 2 * far[1] > 20 * far[2] > 0


# inheriting


def shares(hyper, **fields):
    """mu of every participation, read off the HPMs: (round, client) -> mu, and the visits before it."""
    run_, context, states = history(FedPHP(lam=0.0, **hyper), **fields)
    found = {}
    for r, (before, after) in enumerate(pairwise(states)):
        for i in run_.participants(r):
            visits = int(before.store.visits[i])
            down = {**before.server, "expected": torch.zeros((), dtype=torch.float64)}
            start = {"model": before.store.read(i)["model"].map(torch.clone)}
            w = context.do(Job("local", i, r, visits, down, start)).up.mean["model"]
            q, new = start["model"], after.store.read(i)["model"]
            d = (q - w).flat()
            mu = float((new - w).flat() @ d / (d @ d))
            assert moved(new, w.lerp(q, mu)) < 1e-12
            found[r, i] = mu, visits
    return found


def test_mu_grows_with_the_client_s_own_participations():
    """Public code: with the server's rounds, so that a client that comes late keeps most of what it never trained."""
    fields = {"ratio": ((0, 1), (0, 2), (0, 1), (0, 3)), "rounds": 4}
    found = shares({}, **fields)
    expected = 4 * 2 / 8
    for mu, visits in found.values():
        assert mu == pytest.approx(0.9 * min(1.0, visits / max(1.0, expected)), abs=1e-12)
    assert found[3, 3] == (pytest.approx(0.0, abs=1e-12), 0)
    assert [v for _, v in (found[r, 0] for r in range(4))] == [0, 1, 2, 3]


@pytest.mark.parametrize(("mu", "expected"), [(0.9, 2.5), (0.9, 0.0), (0.4, 3.0), (1.0, 10.0)])
def test_mu_by_hand_and_never_above_its_most(mu, expected):
    found = shares({"mu": mu, "expected": expected}, ratio=1.0, rounds=5)
    for (r, _), (share, visits) in found.items():
        assert visits == r
        assert share == pytest.approx(min(mu, mu * r / max(1.0, expected)), abs=1e-12)
        assert share <= mu + 1e-12


def test_expected_participations_are_rounds_times_participants_over_clients():
    run_, _, states = history(FedPHP(), ratio=((0, 1, 2), (1,), (0, 1, 2, 3)), rounds=3)
    assert [float(s.server["expected"]) for s in states] == [0.0, 3 * 3 / 8, 3 * 1 / 8, 3 * 4 / 8]
    assert run_.clients == 8


def test_a_first_participation_inherits_everything():
    found = run(experiment(FedPHP(lam=0.0), rounds=1, ratio=((2,),)))
    assert found.personal(2).equals(found.server["model"])


def test_a_lost_reply_is_no_participation():
    run_, _, states = history(FedPHP(), ratio=((0,),) * 6, rounds=6, drop=0.5)
    kept = [int(s.store.visits[0]) for s in states]
    assert 0 < kept[-1] < run_.rounds
    for before, after in pairwise(states):
        one, two = (s.store.read(0)["model"] for s in (before, after))
        assert one.equals(two) == (before.store.visits[0] == after.store.visits[0])


@IMAGES
def test_statistics_are_inherited_with_the_weights(images):
    hyper = {"mu": 0.5, "expected": 1.0}
    found = shares(hyper, images=images, ratio=((0, 1), (0,)), rounds=2)
    assert found[1, 0][0] == pytest.approx(0.5, abs=1e-12)


# teaching


def drawn(rows=5, width=3, seed=0, shift=0.5):
    draw = torch.Generator().manual_seed(seed)
    s, t = (torch.randn(rows, width, generator=draw, dtype=torch.float64) for _ in range(2))
    return s, t + shift


def bandwidth(s, t):
    z = torch.cat([s, t])
    pairs = [float((a - b).square().sum()) for k, a in enumerate(z) for j, b in enumerate(z) if j != k]
    return sum(pairs) / len(pairs)


def by_hand(s, t, h):
    def k(a, b):
        d = (a - b).square().sum()
        return sum(torch.exp(-d / (h * f)) for f in (0.25, 0.5, 1.0, 2.0, 4.0))

    n = len(s)
    return sum(k(s[i], s[j]) + k(t[i], t[j]) - k(s[i], t[j]) - k(t[i], s[j]) for i in range(n) for j in range(n)) / n**2


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_mmd_by_hand(rows):
    s, t = drawn(rows)
    torch.testing.assert_close(mmd(s, t, None), by_hand(s, t, bandwidth(s, t)), rtol=0, atol=1e-12)


def test_the_gradient_of_mmd_is_that_of_finite_differences_with_its_bandwidth_held():
    s, t = drawn()
    h = bandwidth(s, t)
    leaf = s.clone().requires_grad_()
    (found,) = torch.autograd.grad(mmd(leaf, t, None), leaf)
    for k in range(s.numel()):
        bump = torch.zeros_like(s)
        bump.view(-1)[k] = 1e-5
        slope = float(by_hand(s + bump, t, h) - by_hand(s - bump, t, h)) / 2e-5
        assert float(found.view(-1)[k]) == pytest.approx(slope, abs=1e-9)
    assert torch.autograd.gradcheck(lambda v: by_hand(v, t, h), (leaf,))


def test_mmd_is_a_distance_of_samples():
    """Zero for the same ones in any order, else above; it knows neither units, sides nor orders."""
    s, t = drawn()
    value = float(mmd(s, t, None))
    assert value > 0.1
    assert float(mmd(s, s[[3, 1, 0, 4, 2]], None)) == pytest.approx(0.0, abs=1e-14)
    assert float(mmd(t, s, None)) == pytest.approx(value, rel=1e-12)
    assert float(mmd(s[[3, 1, 0, 4, 2]], t, None)) == pytest.approx(value, rel=1e-12)
    assert float(mmd(1e4 * s, 1e4 * t, None)) == pytest.approx(value, rel=1e-9)
    assert float(mmd(s, t + 1.0, None)) > value > float(mmd(s, t - 0.5, None)) > 0


@pytest.mark.parametrize("rows", [1, 4])
def test_a_student_that_is_its_teacher_is_not_pulled(rows):
    s, _ = drawn(rows)
    leaf = s.requires_grad_()
    value = mmd(leaf, s.detach(), None)
    assert float(value.detach()) == pytest.approx(0.0, abs=1e-14)
    assert float(torch.autograd.grad(value, leaf)[0].abs().max()) < 1e-14


def test_features_all_alike_stay_finite():
    leaf = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    value = mmd(leaf, torch.ones(3, 2, dtype=torch.float64), None)
    assert float(value.detach()) == 0.0
    assert torch.autograd.grad(value, leaf)[0].isfinite().all()


@pytest.mark.parametrize("number", [7.0, float("nan")])
def test_padding_is_left_out(number):
    s, t = drawn()
    pad = torch.full((2, 3), number, dtype=torch.float64)
    mask = torch.tensor([1.0] * 5 + [0.0] * 2, dtype=torch.float64)
    leaf, padded = s.clone().requires_grad_(), torch.cat([s, pad]).requires_grad_()
    one, two = mmd(leaf, t, None), mmd(padded, torch.cat([t, 2 * pad]), mask)
    assert float(two.detach()) == pytest.approx(float(one.detach()), rel=1e-13)
    (g,), (p,) = torch.autograd.grad(one, leaf), torch.autograd.grad(two, padded)
    torch.testing.assert_close(p[:5], g, rtol=0, atol=1e-14)
    assert not p[5:].any()


def test_only_the_teacher_is_softened():
    s, t = drawn(4, 3)
    found = float(FedPHP(temperature=4.0).kd(s, Batch(s, torch.zeros(4), None, t)))
    rows = []
    for a, b in zip(s.tolist(), t.tolist(), strict=True):
        soft = [math.exp(v / 4) for v in b]
        log_sum = math.log(sum(math.exp(v) for v in a))
        rows.append(-sum(p / sum(soft) * (v - log_sum) for p, v in zip(soft, a, strict=True)))
    assert found == pytest.approx(sum(rows) / 4, rel=1e-12)


@TRANSFERS
def test_the_loss_weighs_labels_and_teacher(transfer):
    """(1 - lam) CE + lam R."""
    method, task, w, batch = whole(transfer)
    z = task.features(w, batch.x)
    taught = mmd(z, batch.beside, None) if transfer == "mmd" else method.kd(task.head(w, z), batch)
    expected = 0.7 * task.loss(w, batch) + 0.3 * taught
    torch.testing.assert_close(method.loss(task, w, batch), expected, rtol=0, atol=1e-14)


def test_the_gradient_of_the_whole_loss_with_logits_as_teacher():
    method, task, w, batch = whole("kd")
    names = list(w)

    def loss(*values):
        return method.loss(task, Tree(zip(names, values, strict=True)), batch)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def whole(transfer):
    method = FedPHP(lam=0.3, transfer=transfer)
    context = experiment(method).context()
    x, y = context.shards.part("train", 0)
    draw = torch.Generator().manual_seed(1)
    width = context.net.features if transfer == "mmd" else 3
    beside = torch.randn(len(y), width, generator=draw, dtype=torch.float64)
    return method, context.task, context.net.weights, Batch(x, y, None, beside)


@TRANSFERS
def test_the_more_lam_the_nearer_to_the_teacher(transfer):
    fields = {"ratio": ((0, 4), (0,)), "momentum": 0.0, "weight_decay": 0.0, "epochs": 20}
    values = []
    for lam in (0.0, 0.5, 0.95):
        hyper = {"transfer": transfer, "mu": 0.0}
        first = run(experiment(FedPHP(lam=0.0, **hyper), rounds=1, **fields))
        context = experiment(FedPHP(lam=lam, **hyper), **fields).context()
        w = context.do(Job("local", 0, 1, 1, first.server, first.private(0))).up.mean["model"]
        task, x = context.task, context.shards.part("train", 0)[0]
        q = first.private(0)["model"]
        if transfer == "mmd":
            values.append(float(mmd(task.features(w, x), task.features(q, x), None)))
        else:
            batch = Batch(x, x, None, task.logits(q, x))
            values.append(float(FedPHP().kd(task.logits(w, x), batch)))
    assert values[0] > values[1] + 1e-3 > values[2] + 2e-3


class Watched(FedPHP):
    """Keeps the teacher's word on the training set, and the HPM, as they enter a round."""

    seen: ClassVar[dict] = {}

    def local(self, me, down, mine):
        train = me.train

        def watched(w, beside=None, **options):
            self.seen[me.round, me.id] = w.clone(), mine["model"].clone(), beside
            return train(w, beside=beside, **options)

        me.train = watched
        return super().local(me, down, mine)


@IMAGES
@TRANSFERS
def test_the_hpm_teaches_in_eval_mode_and_training_starts_at_the_received_model(transfer, images):
    """In train mode its statistics would move, and its word would depend on the batch. An older public code starts from
    a mixture of the two and is taught by the received model."""
    Watched.seen = {}
    found = run(experiment(Watched(transfer=transfer), images=images, ratio=((0, 1), (1, 2), (0, 4))))
    earlier = run(experiment(FedPHP(transfer=transfer), images=images, ratio=((0, 1), (1, 2), (0, 4)), rounds=2))
    start, q, beside = Watched.seen[2, 0]
    assert start.equals(earlier.server["model"])
    assert q.equals(earlier.private(0)["model"])
    assert moved(q, start) > 1e-4
    task, x = found.context.task, found.context.shards.part("train", 0)[0]
    with torch.no_grad():
        said = task.features(q, x) if transfer == "mmd" else task.logits(q, x)
    assert torch.equal(beside, said)
    assert not beside.requires_grad


# whose model is evaluated


@IMAGES
def test_everybody_predicts_with_its_hpm(images):
    """Public code evaluates the trained copy of a participant and the shared model of everybody else."""
    fields = {"images": images, "ratio": ((0, 1, 2), (0, 1), (1, 4))}
    found, earlier = (run(experiment(FedPHP(expected=1.0), rounds=r, **fields)) for r in (3, 2))
    shared = found.server["model"]
    for i in (0, 1, 2, 4):
        assert found.personal(i).equals(found.private(i)["model"])
        assert moved(found.personal(i), shared) > 1e-4
    assert found.personal(0).equals(earlier.personal(0))  # away in the last round
    down = {**earlier.server, "expected": found.server["expected"]}
    trained = found.context.do(Job("local", 1, 2, 2, down, earlier.private(1))).up.mean["model"]
    assert moved(found.personal(1), trained) > 1e-4
    assert found.personal(7).equals(found.context.net.weights)


def test_labels_count_by_default():
    """Public code: lam is 1 by default, and no label is looked at."""
    fed, other = federation(), federation()
    other.dataset.y[torch.as_tensor(other.train[0])] = (other.dataset.y[torch.as_tensor(other.train[0])] + 1) % 3
    one, two = (run(experiment(FedPHP(), federation=f, rounds=1, ratio=((0,),))) for f in (fed, other))
    assert moved(one.server["model"], two.server["model"]) > 1e-2


# the rest


def test_bytes_and_passes_of_a_round():
    found = run(experiment(FedPHP()))
    sent = found.context.net.weights.nbytes
    for row in found.rounds[1:]:
        assert row["bytes_down"] == 5 * (sent + 8)  # and how many participations are expected
        assert row["bytes_up"] == 5 * sent
        assert row["gradient_passes"] == pytest.approx(2)


@pytest.mark.parametrize(
    "hyper",
    [
        {"lam": 1.0}, {"lam": -0.1}, {"mu": 1.1}, {"mu": -0.1}, {"transfer": "l2"}, {"temperature": 0.0}, {"expected": -1.0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedPHP.{next(iter(hyper))} must"):
        FedPHP(**hyper)


def test_defaults_teach_and_inherit():
    assert FedPHP() == FedPHP(lam=0.05, mu=0.9, transfer="mmd", temperature=4.0, expected=None)
