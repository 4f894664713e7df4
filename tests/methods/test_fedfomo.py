"""FedFomo: its reference, Local as its limit, whose models are tried, what is held out, how models are judged."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect.client import Client
from idiolect.data.federated import split_hash
from idiolect.errors import UsageError
from idiolect.method import Facts
from idiolect.methods.fedfomo import FedFomo
from idiolect.methods.local import Local
from idiolect.tree import Tree
from idiolect.wrap.fedlag import FedLAG
from reference import fedfomo as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
HYPER = [
    {},
    {"models": 2, "explore": 1.0, "explore_decay": 0.0},
    {"models": 8, "explore": 0.0, "share": 0.5},
    {"models": 3, "fallback": "old", "share": 0.6},
    {"models": 1, "fallback": "old"},
]

# the reference


@IMAGES
@pytest.mark.parametrize("hyper", HYPER, ids=str)
def test_engine_equals_reference(hyper, images):
    check(FedFomo(**hyper), hyper, images=images)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (2, 2, 3)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    check(FedFomo(), {}, sizes=sizes)


def test_after_a_round_of_nobody_there_are_no_models_to_try():
    found = check(FedFomo(models=8), {"models": 8}, ratio="bernoulli:0.3", rounds=9)
    asked = [row["participants"] for row in found.rounds[1:]]
    (empty, *_) = [r for r in range(1, 8) if not asked[r] and asked[r - 1] and asked[r + 1]]
    assert found.rounds[2 + empty]["bytes_down"] == 0
    assert any(row["bytes_down"] for row in found.rounds[2 + empty :])


def check(method, hyper, **fields):
    found = run(experiment(method, **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    for i in range(found.run.clients):
        assert moved(found.private(i)["old"], Tree(expected.extra["old"][i])) < 1e-10
        liked = found.progress.rows[i]["liked"]
        for n in range(found.run.clients):
            assert n == i or float(liked.get(str(n), 0.0)) == pytest.approx(float(expected.extra["P"][i, n]), abs=1e-10)
    return found


# Local


def in_order(me, share):
    """The first samples are trained on, the last held out."""
    first = round(share * me.n)
    return me._part(torch.arange(first)), me._part(torch.arange(first, me.n))


@IMAGES
@pytest.mark.parametrize("fallback", ["own", "old"])
def test_with_its_own_model_alone_a_client_is_local_on_what_it_trains_on(monkeypatch, fallback, images):
    """To the bit where nothing is undone."""
    monkeypatch.setattr(Client, "split", in_order)
    fed = federation((20, 10, 5, 15, 10, 10, 5, 10), images)
    train = [rows[: round(0.8 * len(rows))] for rows in fed.train]
    parts = list(zip(train, fed.validation, fed.test, strict=True))
    cut = dataclasses.replace(fed, train=train, split_hash=split_hash(*zip(*parts, strict=True)))
    fields = {"images": images, "rounds": 6}
    local = run(experiment(Local(), federation=cut, **fields))
    found, more = (run(experiment(FedFomo(models=m, fallback=fallback), federation=fed, **fields)) for m in (1, 5))
    alike = [found.personal(i).equals(local.personal(i)) for i in EVERYONE]
    assert all(alike) == (fallback == "own")
    assert max(moved(more.personal(i), local.personal(i)) for i in EVERYONE) > 1e-3


def test_without_others_what_others_have_is_not_known():
    fed, others = federation(), federation(seed=9)
    at = len(others.dataset)
    both = dataclasses.replace(
        others.dataset, x=torch.cat([others.dataset.x, fed.dataset.x]), y=torch.cat([others.dataset.y, fed.dataset.y])
    )
    train = [fed.train[i] + at if i == 1 else others.train[i] for i in EVERYONE]
    parts = list(zip(train, others.validation, others.test, strict=True))
    mixed = dataclasses.replace(others, dataset=both, train=train, split_hash=split_hash(*zip(*parts, strict=True)))
    for models, same in ((1, True), (8, False)):
        one, two = (run(experiment(FedFomo(models=models), federation=f, ratio=1.0)) for f in (fed, mixed))
        assert one.personal(1).equals(two.personal(1)) == same


# whose models are tried


def tried(method, rounds=400, clients=10, liked=None, me=3, at=0):
    """Which clients' models client `me` is sent, draw by draw, if all took part in the round before."""
    runs = [Facts(at, clients, (), (), 0.1, 10, seed) for seed in range(rounds)]
    return [method.chosen(me, list(range(clients)), liked or Tree(), r).tolist() for r in runs]


def test_it_explores():
    """Public code always takes those of the highest preference."""
    liked = Tree({str(n): torch.tensor(10.0 - n) for n in range(10)})
    best = {0, 1}
    share = np.mean([set(found) == best for found in tried(FedFomo(models=3), liked=liked)])
    assert 0.65 < share < 0.8  # 0.7 and a little by chance
    assert all(set(found) == best for found in tried(FedFomo(models=3, explore=0.0), liked=liked))
    always = tried(FedFomo(models=3, explore=1.0), liked=liked)
    times = np.bincount(np.ravel(always), minlength=10)
    assert times[3] == 0
    assert np.delete(times, 3).min() > 50


def test_exploration_ends():
    liked = Tree({str(n): torch.tensor(10.0 - n) for n in range(10)})
    share = [
        np.mean([set(found) == {0, 1} for found in tried(FedFomo(models=3), liked=liked, at=r)]) for r in (0, 3, 6, 50)
    ]
    assert share[0] < share[1] < share[2] == share[3] == 1.0


def test_equals_are_tried_at_random():
    """Public code's top-k takes the clients of the lowest numbers at first."""
    times = np.bincount(np.ravel(tried(FedFomo(models=3, explore=0.0))), minlength=10)
    assert times[3] == 0
    assert np.delete(times, 3).min() > 50


def test_what_did_harm_is_tried_after_what_is_not_known():
    liked = Tree({"1": torch.tensor(-1.0), "5": torch.tensor(2.0)})
    for found in tried(FedFomo(models=10, explore=0.0), rounds=20, liked=liked):
        assert len(found) == 9
        assert (found[0], found[-1]) == (5, 1)


@pytest.mark.parametrize("models", [6, 50])
def test_more_models_asked_for_than_there_are(models):
    """Public code's top-k fails."""
    (found,) = tried(FedFomo(models=models), rounds=1, clients=3, me=1)
    assert len(found) == models - 1
    assert sorted(found[:2]) == [0, 2]
    assert set(found[2:]) == {-1}


class Watched(FedFomo):
    """Keeps what every client was sent, what it started from and what it had."""

    def local(self, me, down, mine):
        had = {slot: w.clone() for slot, w in mine.items()}
        up, new = super().local(me, down, mine)
        self.seen[me.round, me.id] = down["models"], had, up.rows, new
        return up, new


def watch(method=None, **fields):
    Watched.seen = {}
    settings = (method or FedFomo()).fields()
    return run(experiment(Watched(**settings), **fields)), Watched.seen


@IMAGES
def test_clients_are_sent_others_models_of_the_round_before(images):
    found, seen = watch(FedFomo(models=8), images=images)
    for (r, i), (models, *_) in seen.items():
        before = [n for n in found.run.participants(r - 1) if n != i] if r else []
        rows = [models.map(lambda v, k=k: v[k]) for k in range(len(next(iter(models.values()), [])))]
        sent = [seen[r - 1, n][2]["model"] for n in before]
        assert len(rows) == len(before)
        assert all(any(w.equals(u) for w in rows) for u in sent)


# what is held out


def test_what_is_held_out_is_never_trained_on():
    """Other held-out samples, and with its own model alone the client's is the same to the bit; other training samples,
    and it is not."""
    method = FedFomo(models=1)
    plain = run(experiment(method, ratio=((0,),)))
    for held in (True, False):
        fed = federation()
        rows = world(experiment(method)).split(0, 0.8)[1 if held else 0]
        fed.dataset.x[torch.as_tensor(fed.train[0])[rows]] += 1.0
        other = run(experiment(method, federation=fed, ratio=((0,),)))
        assert other.personal(0).equals(plain.personal(0)) == held


def test_what_is_held_out_is_the_same_in_every_round():
    """Public code parts anew, and so judges by samples that were trained on."""
    parts = set()

    class Parted(FedFomo):
        def local(self, me, down, mine):
            own, held = me.split(self.share)
            parts.add((me.id, tuple(held._x.flatten().tolist())))
            assert own.n + held.n == me.n
            return super().local(me, down, mine)

    run(experiment(Parted(), ratio=1.0))
    assert sorted(i for i, _ in parts) == list(EVERYONE)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_small_clients_train_and_hold_out_what_they_can(n):
    """Public code leaves fewer than five samples nothing to train on."""
    found = run(experiment(FedFomo(), sizes=(n, 9, 9), ratio=1.0))
    assert moved(found.personal(0), found.context.net.weights) > 1e-3
    assert sum(len(rows) for rows in world(found.run).split(0, 0.8)) == n
    assert len(world(found.run).split(0, 0.8)[0]) == max(1, n - 1)
    agree(found, reference.run(world(found.run)))


# how models are judged


def judge(*losses, held=5):
    """Old model and candidates with these losses, drawn; `held` as the method sees it."""
    draw = torch.Generator().manual_seed(0)
    drawn = [
        Tree({"a": torch.randn(3, generator=draw).double(), "b": torch.randn(2, 2, generator=draw).double()})
        for _ in losses
    ]
    table = {id(w): torch.tensor(v, dtype=torch.float64) for w, v in zip(drawn, losses, strict=True)}
    task = SimpleNamespace(net=SimpleNamespace(buffers=frozenset()))
    return drawn[0], drawn[1:], SimpleNamespace(n=held, task=task, loss=lambda w: table[id(w)])


def shares(method, *losses):
    """By least squares: the start as a combination of the candidates."""
    old, candidates, held = judge(*losses)
    start = method.mixed(candidates, method.gains(held, candidates, old), old)
    return torch.linalg.lstsq(torch.stack([w.flat() for w in candidates]).T, start.flat()[:, None]).solution[:, 0]


def test_the_weights_by_hand():
    old, candidates, held = judge(2.0, 1.5, 1.0, 3.0)
    gains = FedFomo().gains(held, candidates, old)
    by_hand = [
        (2.0 - loss) / ((w.flat() - old.flat()).square().sum().sqrt() + 1e-5)
        for w, loss in zip(candidates, (1.5, 1.0, 3.0), strict=True)
    ]
    torch.testing.assert_close(gains, torch.stack(by_hand), rtol=0, atol=1e-14)
    assert gains[2] < 0
    expected = gains[:2] / gains[:2].sum()
    torch.testing.assert_close(shares(FedFomo(), 2.0, 1.5, 1.0, 3.0)[:2], expected, rtol=0, atol=1e-12)


def test_weights_are_not_negative_and_sum_to_1():
    for losses in ((2.0, 1.9, 1.0, 0.5), (2.0, 5.0, 1.0, 0.5), (2.0, 1.0, 3.0, 4.0)):
        found = shares(FedFomo(), *losses)
        assert float(found.min()) > -1e-12
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-12)


def test_a_factor_of_the_loss_changes_no_weight():
    losses = (2.0, 1.5, 1.0, 3.0)
    one, two = (shares(FedFomo(), *(f * v for v in losses)) for f in (1.0, 7.0))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fallback", ["own", "old"])
def test_where_nothing_helps_the_fallback_is_taken(fallback):
    method = FedFomo(fallback=fallback)
    for losses in ((1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (float("nan"), 1.0, 1.0)):
        old, candidates, held = judge(*losses)
        start = method.mixed(candidates, method.gains(held, candidates, old), old)
        assert start is (candidates[0] if fallback == "own" else old)
    old, candidates, held = judge(2.0, 1.0, 1.0, held=0)
    assert not method.gains(held, candidates, old).any()


def test_the_client_s_own_model_is_judged_like_the_others():
    """Public code judges by the own model as it is, which so has no weight and is dropped where any other helps."""
    assert float(shares(FedFomo(), 2.0, 1.0, 1.0)[0]) > 0.1
    alone = shares(FedFomo(), 2.0, 1.0, 2.5)
    assert float(alone[0]) == pytest.approx(1.0, abs=1e-12)


def test_a_model_that_diverged_helps_nobody():
    for broken in (float("nan"), float("inf")):
        old, candidates, held = judge(2.0, 1.0, broken)
        gains = FedFomo().gains(held, candidates, old)
        assert gains.isfinite().all()
        assert gains[1] == 0
        assert FedFomo().mixed(candidates, gains, old).equals(candidates[0])


def test_a_model_equal_to_the_old_one_is_no_division_by_zero():
    old, candidates, held = judge(2.0, 1.0)
    found = FedFomo().gains(held, [old, *candidates], old)
    assert found[0] == 0
    assert found.isfinite().all()
    assert FedFomo().mixed([old] * 3, FedFomo().gains(held, [old] * 3, old), old) is old


def test_models_are_judged_in_eval_mode_and_stay_as_they_were():
    """Public code's received models are in train mode, and their statistics move."""
    found, seen = watch(FedFomo(models=8, explore=0.0), images=True, rounds=2, ratio=1.0)
    context, checked = found.context, 0
    for i in EVERYONE:
        models, mine, rows, _ = seen[1, i]
        x, y = context.shards.part("train", i)
        held = world(found.run).split(i, 0.8)[1]

        def loss(w, x=x[held], y=y[held]):
            module = context.net.module.eval()
            with torch.no_grad():
                return torch.nn.functional.cross_entropy(torch.func.functional_call(module, dict(w), (x,)), y)

        for k in range(7):
            w = models.map(lambda v, k=k: v[k])
            far = (w - mine["old"]).drop(context.net.buffers).norm() + 1e-5
            expected = (loss(mine["old"]) - loss(w)) / far
            torch.testing.assert_close(rows["gains"][k], expected, rtol=0, atol=1e-10)
            checked += 1
        assert mine["old"].equals(context.net.weights)
    assert checked == 7 * 8


def test_the_old_model_is_what_the_last_training_began_with():
    found, seen = watch(ratio=((0, 1, 2), (1, 4), (0, 2)))
    assert seen[0, 0][3]["old"].equals(found.context.net.weights)
    assert moved(seen[0, 0][3]["model"], seen[0, 0][3]["old"]) > 1e-3
    assert seen[2, 0][1]["old"].equals(seen[0, 0][3]["old"])


# the rest


@IMAGES
def test_a_client_predicts_with_its_own_last_model(images):
    fields = {"images": images, "ratio": ((0, 2), (4, 5), (2, 4))}
    first, last = (run(experiment(FedFomo(), rounds=r, **fields)) for r in (1, 3))
    assert last.personal(0).equals(first.personal(0))
    assert all(last.personal(i).equals(last.private(i)["model"]) for i in EVERYONE)
    assert last.personal(7).equals(last.context.net.weights)
    assert moved(last.personal(2), first.personal(2)) > 1e-3


@pytest.mark.parametrize("models", [1, 3, 8])
def test_bytes_and_passes_of_a_round(models):
    found = run(experiment(FedFomo(models=models)))
    size = found.context.net.weights.nbytes
    for r, row in enumerate(found.rounds[1:]):
        ids = found.run.participants(r)
        before = found.run.participants(r - 1) if r else ()
        sent = sum(min(models - 1, len([n for n in before if n != i])) for i in ids)
        assert row["bytes_down"] == sent * size
        assert row["bytes_up"] == 5 * (size + 8 * (models - 1))
        trained = [len(world(found.run).split(i, 0.8)[0]) / SIZES[i] for i in ids]
        assert row["gradient_passes"] == pytest.approx(2 * sum(trained) / 5)


def test_there_is_no_shared_model_for_fedlag():
    with pytest.raises(UsageError, match="has no such model"):
        run(experiment(FedLAG(FedFomo())))


@pytest.mark.parametrize(
    "hyper",
    [
        {"models": 0}, {"explore": 1.1}, {"explore": -0.1}, {"explore_decay": -0.1}, {"share": 0.0}, {"share": 1.0},
        {"fallback": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedFomo.{next(iter(hyper))} must"):
        FedFomo(**hyper)


def test_defaults_are_not_local():
    assert FedFomo() == FedFomo(models=5, explore=0.3, explore_decay=0.05, share=0.8, fallback="own")
