"""FedEM: its reference, FedAvg as its limit, the shares of samples and of clients, mixtures of answers, odd clients."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from harness import SIZES, agree, experiment, federation, moved, opposed, run, world
from idiolect import Result
from idiolect.data import federate
from idiolect.data.sources import quadratics
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedem import FedEM
from idiolect.tree import Tree
from reference import fedem as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))


def component(w: Tree, m: int) -> Tree:
    """One component, named as the network is."""
    return (
        Tree({k: v for k, v in w.items() if k.startswith(("body.", "head."))}) if m == 0 else w.under(f"component{m}")
    )


def components(found: Result) -> list[Tree]:
    return [component(w, m) for m, w in enumerate(found.server.values())]


def answers(found: Result, i: int, split: str = "test") -> Tensor:
    """Client i's class probabilities for its own samples."""
    x = found.context.shards.part(split, i)[0]
    return found.run.method.logits(found.context.task, found.personal(i), x).exp()


def shares(found: Result, i: int, pi: Tensor) -> Tensor:
    """By Bayes' rule: which of the server's components each training sample of client i is from. [n, M]"""
    task, (x, y) = found.context.task, found.context.shards.part("train", i)
    likelihoods = [task.logits(w, x).softmax(1)[torch.arange(len(y)), y] for w in components(found)]
    joint = pi * torch.stack(likelihoods, 1)
    return joint / joint.sum(1, keepdim=True)


def compare(count: int, **fields) -> None:
    found = run(experiment(FedEM(count), **fields))
    expected = reference.run(world(found.run), count)
    agree(found, expected)
    for w, known in zip(components(found), expected.extra["models"], strict=True):
        assert moved(w, Tree(known)) < 1e-10
    for i in range(found.run.clients):
        torch.testing.assert_close(answers(found, i, "train"), expected.extra["probabilities"][i], rtol=0, atol=1e-10)


# the reference


@IMAGES
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_engine_equals_reference(count, images):
    compare(count, images=images)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (40, 2)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    compare(3, sizes=sizes)


# FedAvg as its limit


@IMAGES
def test_of_one_component_it_is_fedavg(images):
    found, fedavg, three = (run(experiment(m, images=images)) for m in (FedEM(1), FedAvg(), FedEM()))
    assert moved(components(found)[0], fedavg.server["model"]) < 1e-12
    for i in EVERYONE:
        assert found.private(i)["pi"].tolist() == [1.0]
        x = found.context.shards.part("test", i)[0]
        plain = fedavg.context.task.logits(fedavg.personal(i), x).softmax(1)
        torch.testing.assert_close(answers(found, i), plain, rtol=0, atol=1e-12)
    assert moved(components(three)[0], fedavg.server["model"]) > 1e-3


class Certain(FedEM):
    """All weight on the first component, from the start."""

    def init(self, net):
        return dataclasses.replace(super().init(net), client={"pi": torch.eye(self.components, dtype=net.dtype)[0]})


def test_clients_that_are_sure_of_one_component_train_it_as_fedavg_does():
    """The others have responsibility 0: only weight decay moves them."""
    found, fedavg = (run(experiment(m, weight_decay=0.0)) for m in (Certain(), FedAvg()))
    assert moved(components(found)[0], fedavg.server["model"]) < 1e-12
    assert (
        max(moved(found.server[f"component{m}"], found.context.state.server[f"component{m}"]) for m in (1, 2)) < 1e-12
    )
    for i in EVERYONE:
        assert found.private(i)["pi"].tolist() == [1.0, 0.0, 0.0]
        x = found.context.shards.part("test", i)[0]
        plain = fedavg.context.task.logits(fedavg.personal(i), x).softmax(1)
        torch.testing.assert_close(answers(found, i), plain, rtol=0, atol=1e-12)


# the components


def test_components_begin_apart_and_the_first_is_the_network():
    few, more = (run(experiment(FedEM(m), rounds=0)) for m in (3, 5))
    models = components(few)
    assert models[0].equals(few.context.net.weights)
    assert min(moved(a, b) for k, a in enumerate(models) for b in models[:k]) > 1e-2
    assert all(a.equals(b) for a, b in zip(models, components(more), strict=False))  # more of them change none


def test_a_network_that_always_begins_alike_is_refused():
    fed = federation()
    with pytest.raises(UsageError, match="begin apart"):
        run(experiment(FedEM(), network="point", network_options={}, federation=fed))


@pytest.mark.parametrize("m", [0, 1, 2])
def test_each_component_is_the_mean_by_samples(m):
    fields = {"rounds": 1, "sizes": (12, 3)}
    whole, *alone = (
        run(experiment(FedEM(), **fields, ratio=r)).server[f"component{m}"] for r in (1.0, ((0,),), ((1,),))
    )
    assert moved(whole, 0.8 * alone[0] + 0.2 * alone[1]) < 1e-12
    assert moved(alone[0], alone[1]) > 1e-3


# the E-step and the M-step


@IMAGES
def test_after_a_round_pi_is_the_mean_of_the_samples_shares_under_what_was_received(images):
    """Of the received components in eval mode, not of those just trained."""
    found, start = (run(experiment(FedEM(), images=images, rounds=r, ratio=((0, 4),))) for r in (1, 0))
    for i in EVERYONE:
        uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
        if i in (0, 4):
            torch.testing.assert_close(found.private(i)["pi"], shares(start, i, uniform).mean(0), rtol=0, atol=1e-12)
            assert float((found.private(i)["pi"] - shares(found, i, uniform).mean(0)).abs().max()) > 1e-3
        else:
            assert torch.equal(found.private(i)["pi"], uniform)


def test_the_next_round_goes_on_from_the_client_s_own_pi():
    found, before = (run(experiment(FedEM(), rounds=r, ratio=((0, 4), (0, 1)))) for r in (2, 1))
    pi = before.private(0)["pi"]
    torch.testing.assert_close(found.private(0)["pi"], shares(before, 0, pi).mean(0), rtol=0, atol=1e-12)
    assert float((shares(before, 0, pi) - shares(before, 0, torch.ones(3).double() / 3)).abs().max()) > 1e-3
    assert torch.equal(found.private(4)["pi"], before.private(4)["pi"])


def test_a_reply_that_is_lost_leaves_pi_as_it_was():
    found = run(experiment(FedEM(), ratio=((0,),) * 6, rounds=6, drop=0.6))
    heard = [r for r, row in enumerate(found.rounds[1:]) if not row["dropped"]]
    assert 0 < len(heard) < 6
    pi = torch.full((3,), 1 / 3, dtype=torch.float64)
    for r in range(6):
        now = run(experiment(FedEM(), ratio=((0,),) * 6, rounds=r + 1, drop=0.6)).private(0)["pi"]
        assert torch.equal(now, pi) == (r not in heard)
        pi = now


def test_without_training_the_likelihood_of_the_labels_never_falls():
    """The rounds are then EM for the mixtures' weights."""
    values = []
    for rounds in range(6):
        found = run(experiment(FedEM(), ratio=1.0, rounds=rounds, lr=1e-12, weight_decay=0.0))
        own = [
            float(answers(found, i, "train").gather(1, found.context.shards.part("train", i)[1][:, None]).log().sum())
            for i in EVERYONE
        ]
        values.append(own)
    for before, after in itertools.pairwise(values):
        assert all(b > a - 1e-9 for a, b in zip(before, after, strict=True))
    assert sum(values[-1]) > sum(values[0]) + 0.5


def test_shares_of_samples_that_every_component_finds_impossible():
    """exp(-loss) is 0 of all of them: they are compared before it is taken."""
    context = run(experiment(FedEM(), rounds=0)).context
    down = {k: w.map(lambda v: 1e3 * v) for k, w in context.state.server.items()}
    job = Job("local", 0, 0, 0, down, context.store(len(SIZES)).read(0))
    me = context.client(job)
    _, mine = FedEM().local(me, down, job.mine)
    assert mine["pi"].isfinite().all()
    assert float(mine["pi"].sum()) == pytest.approx(1, abs=1e-12)
    assert float(mine["pi"].max()) < 1 or float(mine["pi"].min()) == 0


@IMAGES
def test_every_pi_is_a_share(images):
    found = run(experiment(FedEM(), images=images))
    pis = torch.stack([found.private(i)["pi"] for i in EVERYONE])
    torch.testing.assert_close(pis.sum(1), torch.ones(8).double(), rtol=0, atol=1e-12)
    assert float(pis.min()) >= 0
    assert float((pis[0] - pis[1]).abs().max()) > 1e-2  # every client's is another


# the weighted loss


def setting(part: str) -> tuple:
    context = run(experiment(FedEM(), rounds=0)).context
    x, y = context.shards.part("train", 0)
    q = torch.rand(len(y), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return context.task, context.state.server[part or "component0"], x, y, q


@pytest.mark.parametrize("part", ["", "component1"])
def test_the_loss_is_the_mean_of_each_sample_s_times_its_share(part):
    """Divided by the samples, not by the sum of their shares."""
    task, w, x, y, q = setting(part)
    own = component(w, int(part[-1:] or 0))
    terms = [float(a * task.losses(task.logits(own, x[k : k + 1]), y[k : k + 1])) for k, a in enumerate(q)]
    assert float(FedEM().loss(task, w, Batch(x, y, None, q), part)) == pytest.approx(sum(terms) / len(y), rel=1e-12)


@pytest.mark.parametrize("part", ["", "component1"])
def test_the_loss_s_gradient_is_that_of_finite_differences(part):
    task, w, x, y, q = setting(part)

    def loss(*values: Tensor) -> Tensor:
        return FedEM().loss(task, Tree(zip(w, values, strict=True)), Batch(x, y, None, q), part)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def test_padding_is_left_out():
    task, w, x, y, q = setting("")
    padded = Batch(
        torch.cat([x, 9 * x[:2]]),
        torch.cat([y, y[:2]]),
        torch.tensor([1.0] * len(y) + [0.0] * 2),
        torch.cat([q, q[:2]]),
    )
    value = float(FedEM().loss(task, w, Batch(x, y, None, q), ""))
    assert float(FedEM().loss(task, w, padded, "")) == pytest.approx(value, rel=1e-12)


# predictions


@IMAGES
def test_a_client_predicts_with_the_mixture_of_probabilities(images):
    """Not of logits, nor with the model of mixed weights."""
    found = run(experiment(FedEM(), images=images))
    task = found.context.task
    for i in EVERYONE:
        x = found.context.shards.part("test", i)[0]
        scores, pi = [task.logits(w, x) for w in components(found)], found.private(i)["pi"]
        mixed = sum(p * s.softmax(1) for p, s in zip(pi, scores, strict=True))
        torch.testing.assert_close(answers(found, i), mixed, rtol=0, atol=1e-12)
        torch.testing.assert_close(answers(found, i).sum(1), torch.ones(4).double(), rtol=0, atol=1e-12)
    logits = sum(p * s for p, s in zip(pi, scores, strict=True))
    assert float((answers(found, EVERYONE[-1]) - logits.softmax(1)).abs().max()) > 1e-5


def test_scores_are_what_the_mixture_says():
    found = run(experiment(FedEM()))
    for row in (r for r in found.clients if r["moment"] == "received" and r["round"] == 4 and r["split"] == "test"):
        y = found.context.shards.part("test", row["client"])[1]
        own = answers(found, row["client"])
        assert row["correct"] == int((own.argmax(1) == y).sum())
        assert row["loss"] == pytest.approx(float(-own.gather(1, y[:, None]).log().sum()), rel=1e-10)


def test_after_training_a_client_has_its_own_components_and_its_new_pi():
    found = run(experiment(FedEM(), rounds=1, ratio=((0,),)))
    trained, received = (
        next(r for r in found.clients if (r["moment"], r["client"], r["round"], r["split"]) == (m, 0, 1, "test"))
        for m in ("trained", "received")
    )
    assert trained["loss"] == pytest.approx(received["loss"], rel=1e-12)  # it alone took part


# what it is for


def test_clients_that_contradict_each_other_are_served_better_than_by_one_model():
    fields = {
        "federation": opposed(), "ratio": 1.0, "rounds": 40, "epochs": 3, "lr": 0.1, "schedule": "constant",
        "network_options": {"hidden": (16,)},
    }  # fmt: skip
    found, fedavg = (run(experiment(m, **fields)) for m in (FedEM(2), FedAvg()))
    pis = torch.stack([found.private(i)["pi"] for i in EVERYONE])
    assert sorted(pis[:2].argmax(1).tolist()) == [0, 1]
    assert torch.equal(pis.argmax(1), pis[:2].argmax(1).repeat(4))
    assert found.rounds[-1]["received_loss"] < 0.7 * fedavg.rounds[-1]["received_loss"]


# the rest


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_and_passes_of_a_round(count):
    found, fedavg = (run(experiment(m)) for m in (FedEM(count), FedAvg()))
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == a["bytes_up"] == 5 * count * 8 * found.context.net.weights.size
        assert a["gradient_passes"] == count * b["gradient_passes"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_client_whose_pi_has_a_zero_has_finite_scores(dtype):
    found = run(experiment(Certain(), dtype=dtype))
    assert all(math.isfinite(row["received_loss"]) for row in found.rounds)
    for i in EVERYONE:
        x = found.context.shards.part("test", i)[0]
        assert found.run.method.logits(found.context.task, found.personal(i), x).isfinite().all()


def test_data_without_classes_are_refused():
    fed = federate(quadratics.load(), "given", 2, 0, test=0.0)
    with pytest.raises(UsageError, match="classes"):
        run(experiment(FedEM(1), federation=fed, network="point", network_options={}, rounds=1))


@pytest.mark.parametrize("count", [0, -1])
def test_impossible_values_are_refused(count):
    with pytest.raises(UsageError, match=r"FedEM\.components must be"):
        FedEM(count)


def test_the_default_is_the_paper_s():
    assert FedEM() == FedEM(components=3)
