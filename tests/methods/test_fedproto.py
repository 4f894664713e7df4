"""FedProto: its reference, Local as its limit, prototypes by hand, who answers which class, odd clients."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from harness import CLASSES, SIZES, agree, experiment, federation, moved, run, world
from idiolect.engine.reduce import Reduction
from idiolect.errors import UsageError
from idiolect.method import Facts, Rows, Up
from idiolect.methods.fedproto import FedProto
from idiolect.methods.local import Local
from idiolect.nets import build
from idiolect.task import Batch, Net, Task
from idiolect.tree import Tree
from reference import fedproto as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
WIDTH = 5  # of the mlp's features

# the reference


def compared(method_fields, **fields):
    found = run(experiment(FedProto(**method_fields), **fields))
    expected = reference.run(world(found.run), **method_fields)
    agree(found, expected)
    torch.testing.assert_close(found.server["prototype"], expected.extra["prototype"], rtol=0, atol=1e-10)
    assert torch.equal(found.server["known"], expected.extra["known"])
    return found, expected


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"lam": 0.3, "aggregate": "plain"}, {"predict": "head"}, {"lam": 0.0}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found, expected = compared(hyper, images=images)
    if "logits" not in expected.extra:
        return
    task = found.context.task
    for i in EVERYONE:
        w, (x, _) = found.personal(i), found.context.shards.part("train", i)
        answered = (w["held"] > 0) if w["held"].any() else torch.ones(CLASSES, dtype=torch.bool)
        scores = FedProto().logits(task, w, x)
        torch.testing.assert_close(scores[:, answered], expected.extra["logits"][i][:, answered], rtol=0, atol=1e-10)
        assert torch.equal(scores.argmax(1), expected.extra["logits"][i].argmax(1))


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    for aggregate in ("count", "plain"):
        compared({"aggregate": aggregate}, sizes=sizes)


# Local, and beyond it


@IMAGES
@pytest.mark.parametrize("predict", ["prototype", "head"])
def test_without_lam_every_model_is_local_s_to_the_bit(images, predict):
    found, local = (run(experiment(m, images=images)) for m in (FedProto(lam=0.0, predict=predict), Local()))
    assert all(found.private(i)["model"].equals(local.personal(i)) for i in EVERYONE)
    drawn = run(experiment(FedProto(predict=predict), images=images))
    assert max(moved(drawn.private(i)["model"], local.personal(i)) for i in EVERYONE) > 1e-3


def test_nothing_draws_in_the_first_round():
    found, local = (run(experiment(m, rounds=1)) for m in (FedProto(lam=50.0), Local()))
    assert all(found.private(i)["model"].equals(local.personal(i)) for i in EVERYONE)


def test_the_larger_lam_the_nearer_features_come_to_their_prototypes():
    fields = {"ratio": 1.0, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.05, "schedule": "constant"}
    apart = []
    for lam in (0.0, 2.0, 10.0):
        before, after = (run(experiment(FedProto(lam=lam), rounds=r, **fields)) for r in (3, 4))
        gaps = []
        for i in EVERYONE:
            x, y = after.context.shards.part("train", i)
            z = after.context.task.features(after.private(i)["model"], x)
            gaps.append((z - before.server["prototype"][y]).square().sum(1))
        apart.append(float(torch.cat(gaps).mean()))
    assert apart[0] > 1.5 * apart[1] > 1.5 * apart[2] > 0


# the loss


def small(seed: int = 1):
    """A task, weights, a batch, and prototypes; class 2 has none yet."""
    net = Net(build("mlp", (3,), 4, hidden=(4, 3)), (3,), 4, 0, torch.float64)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 3, generator=draw, dtype=torch.float64)
    prototype = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    return (
        Task(net),
        net.weights,
        Batch(x, torch.tensor([0, 2, 1, 3, 0, 2, 1])),
        prototype,
        torch.tensor([1, 1, 0, 1]) > 0,
    )


def test_gradients_against_finite_differences():
    task, w, batch, prototype, known = small()

    def loss(*values):
        return FedProto(lam=0.7).loss(task, Tree(zip(w, values, strict=True)), batch, prototype, known)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def test_the_loss_by_hand():
    """The mean over the whole batch; samples of a class without a prototype count in it, and are not drawn."""
    task, w, batch, prototype, known = small()
    z = task.features(w, batch.x)
    total = 0.0
    for row, k in zip(z, batch.y.tolist(), strict=True):
        total += float(torch.nn.functional.cross_entropy(task.head(w, row), torch.tensor(k)))
        if known[k]:
            total += 0.7 * float((row - prototype[k]).square().mean())
    value = FedProto(lam=0.7).loss(task, w, batch, prototype, known)
    assert float(value) == pytest.approx(total / 7, rel=1e-12)
    assert float(FedProto(lam=0.7).loss(task, w, batch, prototype, known & False)) == pytest.approx(
        float(task.loss(w, batch)), rel=1e-12
    )


def test_padding_changes_neither_the_loss_nor_its_gradient():
    task, w, batch, prototype, known = small()
    w = w.map(lambda v: v.clone().requires_grad_())
    rows = torch.tensor([*range(7), 0, 0])
    padded = Batch(batch.x[rows], batch.y[rows], torch.tensor([1.0] * 7 + [0.0] * 2, dtype=torch.float64))
    values = [FedProto().loss(task, w, b, prototype, known) for b in (batch, padded)]
    grads = [torch.autograd.grad(v, list(w.values())) for v in values]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*grads, strict=True))


# the prototypes


def tables(found, ids):
    """Sums and counts by class of what each client's trained model makes of its own samples, in eval mode."""
    task, sums, counts = found.context.task, [], []
    for i in ids:
        x, y = found.context.shards.part("train", i)
        z = task.features(found.private(i)["model"], x)
        sums.append(torch.stack([z[y == k].sum(0) for k in range(CLASSES)]))
        counts.append(torch.bincount(y, minlength=CLASSES).double())
    return torch.stack(sums), torch.stack(counts)  # [K, C, d], [K, C]


@IMAGES
def test_prototypes_are_of_the_trained_model_in_eval_mode_over_all_samples(images):
    """Public code collects them while the model moves, and loses the last batch."""
    found = run(experiment(FedProto(), images=images, rounds=1, ratio=1.0))
    sums, counts = tables(found, EVERYONE)
    expected = sums.sum(0) / counts.sum(0)[:, None]
    torch.testing.assert_close(found.server["prototype"], expected, rtol=0, atol=1e-12)
    plain = run(experiment(FedProto(aggregate="plain"), images=images, rounds=1, ratio=1.0))
    holders = (counts > 0).double()
    means = (sums / counts.clamp(min=1)[..., None]).sum(0) / holders.sum(0)[:, None]
    torch.testing.assert_close(plain.server["prototype"], means, rtol=0, atol=1e-12)
    assert moved(Tree({"": means}), Tree({"": expected})) > 1e-3


def combined(method, tables, before=None):
    """The server's round with these (sums, counts) as the clients would send them."""
    classes, width = tables[0][0].shape
    server = before or {"prototype": torch.zeros(classes, width).double(), "known": torch.zeros(classes) > 0}
    reduction = Reduction("fedproto.local", server)
    for i, (sums, counts) in enumerate(tables):
        me = SimpleNamespace(counts=counts, train=lambda w, **_: w, sweep=lambda *_, sums=sums: sums)
        up, _ = method.local(me, server, {"model": Tree()})
        reduction.add(i, up, float(counts.sum()))
    facts = Facts(0, len(tables), tuple(range(len(tables))), (1.0,) * len(tables), 0.1, 1, 0)
    return method.server(server, Rows({}), reduction.result(), facts)[0]


def drawn(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    counts = torch.tensor([[3.0, 0, 1], [2, 0, 5], [0, 4, 2]]).double()[:count]
    return [(torch.randn(3, 2, generator=draw, dtype=torch.float64) * (c > 0)[:, None], c) for c in counts]


def test_two_clients_are_as_one_that_has_the_samples_of_both():
    a, b, c = drawn(3)
    apart, joined = combined(FedProto(), [a, b, c]), combined(FedProto(), [(a[0] + b[0], a[1] + b[1]), c])
    torch.testing.assert_close(apart["prototype"], joined["prototype"], rtol=0, atol=1e-15)


@pytest.mark.parametrize("aggregate", ["count", "plain"])
def test_a_class_of_one_client_has_that_client_s_mean(aggregate):
    a, b, c = drawn(3)
    new = combined(FedProto(aggregate=aggregate), [a, b, c])
    torch.testing.assert_close(new["prototype"][1], c[0][1] / 4, rtol=0, atol=1e-15)


@pytest.mark.parametrize("aggregate", ["count", "plain"])
def test_clients_that_agree_shrink_nothing(aggregate):
    """The paper's eq. 6, read literally, would divide by the number of holders once more."""
    mean = torch.tensor([[1.0, -2.0], [3.0, 0.5]]).double()
    counts = torch.tensor([[1.0, 7.0], [4.0, 2.0], [9.0, 1.0]]).double()
    new = combined(FedProto(aggregate=aggregate), [(mean * c[:, None], c) for c in counts])
    torch.testing.assert_close(new["prototype"], mean, rtol=0, atol=1e-14)


def test_a_class_that_none_of_the_participants_holds_keeps_its_prototype():
    """Client 3 has class 1 alone."""
    before, after = (run(experiment(FedProto(), ratio=[[0, 1, 2, 5], [3]], rounds=r)).server for r in (1, 2))
    assert before["known"].all()
    assert after["known"].all()
    for k in range(CLASSES):
        assert torch.equal(before["prototype"][k], after["prototype"][k]) == (k != 1)


def test_a_class_that_nobody_has_never_gets_a_prototype():
    fed = federation()
    fed = dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, y=fed.dataset.y.clamp(max=1)))
    for aggregate in ("count", "plain"):
        found, _ = compared({"aggregate": aggregate}, federation=fed)
        assert found.server["known"].tolist() == [True, True, False]
        assert not found.server["prototype"][2].any()


# prediction


def scored(prototype, held, x, known=True):
    """A client's scores where features are the inputs."""
    net = Net(build("logistic", (2,), len(prototype)), (2,), len(prototype), 0, x.dtype)
    me = SimpleNamespace(counts=torch.tensor(held, dtype=x.dtype))
    down = {"prototype": prototype, "known": torch.full((len(prototype),), known)}
    w = FedProto().personal(me, down, {"model": net.weights})
    return FedProto().logits(Task(net), w, x), Task(net).head(net.weights, x)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_nearest_prototype_of_the_own_classes_is_answered(scale, dtype):
    """Public code answers classes that the client has never seen, or puts them at a distance of 100, which a real one
    may exceed."""
    prototype = scale * torch.tensor([[0, 0], [4, 0], [0, 4], [9, 9]], dtype=dtype)
    x = scale * torch.tensor([[0.1, 0.1], [3, 0.1], [0.1, 3], [-50, -50], [90, 90]], dtype=dtype)
    scores, _ = scored(prototype, [0, 3, 2, 0], x)
    assert scores.argmax(1).tolist()[1:] == [1, 2, 1, 1]
    torch.testing.assert_close(scores[:, 1], -(x - prototype[1]).square().sum(1))
    alone, _ = scored(prototype, [0, 0, 1, 0], x)
    assert alone.argmax(1).tolist() == [2] * 5
    every, _ = scored(prototype, [1, 1, 1, 1], x)
    assert every.argmax(1).tolist() == [0, 1, 2, 0, 3]
    assert bool(scores.isfinite().all())


def test_the_head_answers_while_there_is_no_prototype():
    """Public code scores 0 before the first round."""
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores, head = scored(torch.zeros(3, 2).double(), [2, 1, 0], x, known=False)
    assert torch.equal(scores, head)
    found, local = (run(experiment(m, rounds=0)) for m in (FedProto(), Local()))
    assert found.rounds[0]["received_plain"] == local.rounds[0]["received_plain"]


def test_clients_that_are_away_predict_with_the_new_prototypes_and_their_own_model():
    found = run(experiment(FedProto(), ratio=[[0, 1], [2, 5]], rounds=2))
    for i in (0, 3):
        w = found.personal(i)
        assert torch.equal(w["prototype"], found.server["prototype"])
        assert w.pick(found.context.net.weights).equals(found.private(i)["model"])
    assert found.private(3)["model"].equals(found.context.net.weights)
    assert found.personal(3)["held"].tolist() == [0, 1, 0]


# the rest


def test_bytes_and_passes_of_a_round():
    for hyper in ({}, {"aggregate": "plain"}, {"predict": "head"}):
        found = run(experiment(FedProto(**hyper)))
        for row in found.rounds[1:]:
            assert row["bytes_down"] == 5 * (8 * CLASSES * WIDTH + CLASSES)  # prototypes, and which are known
            assert row["bytes_up"] == 5 * 8 * CLASSES * (WIDTH + 1)  # sums and counts
            assert row["gradient_passes"] == pytest.approx(2)
    assert "model" not in found.server


def test_plain_means_do_not_tell_how_many_samples_a_client_has():
    (sums, counts), server = drawn(1)[0], {"prototype": torch.zeros(3, 2).double(), "known": torch.zeros(3) > 0}
    me = SimpleNamespace(counts=counts, train=lambda w, **_: w, sweep=lambda *_: sums)
    up: Up = FedProto(aggregate="plain").local(me, server, {"model": Tree()})[0]
    assert up.sum["counts"].tolist() == [1, 0, 1]


@pytest.mark.parametrize("hyper", [{"aggregate": "mean"}, {"predict": "nearest"}, {"lam": -1.0}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedProto.{next(iter(hyper))} must be"):
        FedProto(**hyper)
