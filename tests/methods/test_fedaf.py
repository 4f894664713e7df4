"""FedAF: its reference, training on the condensed images alone as its limit, both guiding terms and their gradients, what
each exchange is made of, odd clients."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness import CLASSES, SIZES, agree, experiment, federation, moved, run, world
from idiolect import Result
from idiolect.data import Dataset, Federation, federate
from idiolect.data.sources import quadratics
from idiolect.engine import orders
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedaf import FedAF, class_means, diverging, held, sliced
from idiolect.optim import SGD
from idiolect.tree import Tree
from reference import fedaf as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
QUICK = {"ipc": 2, "iterations": 4, "server_epochs": 2}


def compared(hyper: dict[str, Any], **fields: Any) -> tuple[Result, Any]:
    hyper = QUICK | hyper
    found = run(experiment(FedAF(**hyper), **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    for i in range(found.run.clients):
        own = found.private(i)["images"].unflatten(0, (CLASSES, hyper["ipc"]))
        for c in range(CLASSES):
            known = expected.extra["condensed"][i].get(c, torch.zeros_like(own[c]))
            torch.testing.assert_close(own[c], known, rtol=0, atol=1e-10)
    return found, expected


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"ipc": 3, "gamma": 0.3, "lam_loc": 2.0, "restart": True, "averaged": 1},
        {"lam_glob": 3.0, "temperature": 0.5, "image_momentum": 0.0, "image_lr": 0.2},
        {"lam_loc": 0.0, "lam_glob": 0.0, "gamma": 1.0, "iterations": 7, "image_lr": 0.1},
        {"gamma": 0.0, "averaged": 3, "server_epochs": 3},
    ],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    compared(hyper, images=images)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (2, 30)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    compared({}, sizes=sizes)
    compared({"ipc": 1, "restart": True}, sizes=sizes)


# its limit: the server trains on what the images began as


@IMAGES
def test_without_condensation_and_soft_labels_it_is_training_on_some_real_samples(images):
    hyper = {"ipc": 2, "averaged": 1, "iterations": 0, "lam_glob": 0.0, "server_epochs": 3}
    fields = {"images": images, "rounds": 1, "ratio": ((0, 2, 4),)}
    found = run(experiment(FedAF(**hyper), **fields))
    x, y = [], []
    for i in (0, 2, 4):
        own, labels = found.context.shards.part("train", i)
        begun = found.private(i)["images"].unflatten(0, (CLASSES, 2))
        for c in labels.unique().tolist():
            real = own[labels == c]
            assert all(any(torch.equal(image, sample) for sample in real) for image in begun[c])
            x.append(begun[c])
            y += [c, c]
    x, y = torch.cat(x), torch.tensor(y)
    module = found.context.net.module.train()
    steps = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    for epoch in range(3):
        for batch in orders.batches(len(y), 4, 3, 0, -1, 0, epoch):
            steps.zero_grad()
            nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
            steps.step()
    trained = Tree(dict(module.named_parameters())).detach()
    assert moved(found.server["model"].pick(trained), trained) < 1e-10
    whole = run(experiment(FedAF(**(hyper | {"iterations": 4, "lam_glob": 0.8})), **fields))
    assert moved(whole.server["model"], found.server["model"]) > 1e-3


def test_the_server_knows_of_clients_what_they_send_alone():
    """With images and soft labels as they are, the networks they were condensed under are nothing to it."""
    fields = QUICK | {"iterations": 0, "restart": True}
    models = [run(experiment(FedAF(**fields, gamma=g, lam_loc=c))).server["model"] for g, c in ((0.1, 5.0), (1.0, 0.0))]
    assert models[0].equals(models[1])
    moved_ = [run(experiment(FedAF(**QUICK, gamma=g))).server["model"] for g in (0.1, 1.0)]
    assert moved(*moved_) > 1e-3


def test_without_soft_labels_only_the_images_count():
    found = run(experiment(FedAF(**QUICK, lam_glob=0.0, temperature=1.0)))
    other = run(experiment(FedAF(**QUICK, lam_glob=0.0, temperature=9.0)))
    assert found.server["model"].equals(other.server["model"])
    held = run(experiment(FedAF(**QUICK, lam_glob=0.8, temperature=9.0)))
    assert moved(held.server["model"], found.server["model"]) > 1e-4


def apart() -> Federation:
    """Clients with two classes each of three, which are well apart."""
    fed = federation((12,) * 6)
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(len(fed.dataset.y)) % 2
    for i in range(6):
        for rows in (fed.train[i], fed.test[i]):
            y[rows] = (y[rows] + i) % CLASSES
    x = 2 * torch.eye(6)[y] + 0.3 * torch.randn(len(y), 6, generator=draw)
    return dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, x=x, y=y))


def test_it_learns_what_its_clients_never_say():
    """From random weights to all classes, without a model or a gradient of any client."""
    fields = {"federation": apart(), "ratio": 1.0, "rounds": 4, "network_options": {"hidden": (16,)}}
    found = run(experiment(FedAF(ipc=3, iterations=20, image_lr=0.2, server_epochs=20), **fields))
    assert found.rounds[0]["received_weighted"] < 0.6
    assert found.rounds[-1]["received_weighted"] > 0.95


# the terms


def parts(i: int = 0, ipc: int = 2, **hyper: Any) -> tuple[Any, ...]:
    """The method, the task, the weights, client i and its three constants of a condensation."""
    method = FedAF(ipc=ipc, **hyper)
    context = experiment(method).context()
    me = context.client(Job("local", i, 0, 0, {}, {}))
    w = method.resampled(me, context.net.weights)
    peers = torch.randn(CLASSES, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return method, context.task, w, me, (class_means(me, me.features(w)), peers, held(me))


def condensing(method, task, w, images, given) -> Tensor:
    return method.condensing(task, w | {"images": images}, None, *given)


def test_the_whole_of_a_class_matches_itself():
    method, task, w, me, given = parts(lam_loc=0.0)
    x, y = me.inputs, me.labels
    n = math.lcm(*(int(k) for k in me.counts if k))
    images = torch.ones(CLASSES, n, 6, dtype=torch.float64)
    for c in y.unique().tolist():
        images[c] = x[y == c].repeat(n // int(me.counts[c]), 1)
    images = images.flatten(0, 1)
    whole = FedAF(ipc=n, lam_loc=0.0)
    assert float(condensing(whole, task, w, images, given)) < 1e-20
    assert float(condensing(whole, task, w, images + 0.1, given)) > 1e-4
    assert float(condensing(method, task, w, x[:6], given)) > 1e-4


def test_condensation_brings_features_nearer():
    for i in (0, 4):
        method, task, w, me, given = parts(i, iterations=60, image_lr=0.2, lam_loc=0.0)
        before = method.begun(me)
        up, _ = method.local(
            me, {"model": me.task.net.weights, "peers": Tree({"logits": given[1]})}, {"images": before}
        )
        values = [float(condensing(method, task, w, v, given)) for v in (before, up.rows["images"])]
        assert values[1] < 0.5 * values[0]


def test_the_guidance_brings_logits_nearer_to_those_of_the_peers():
    far = []
    for lam in (0.0, 50.0):
        method, task, w, me, (_, _, own) = parts(0, iterations=100, image_lr=0.05, lam_loc=lam)
        peers = class_means(me, me.logits(w)).flip(0)  # of images that there are, but of another class
        down = {"model": me.task.net.weights, "peers": Tree({"logits": peers})}
        images = method.local(me, down, {"images": method.begun(me)})[0].rows["images"]
        logits = task.logits(w, images).unflatten(0, (CLASSES, 2)).mean(1)
        far.append(float((own * sliced(logits - peers)).sum()))
    assert far[1] < 0.5 * far[0]


def test_classes_that_are_not_held_count_for_nothing():
    method, task, w, _, given = parts(3)  # one class
    assert given[2].tolist() == [0, 1, 0]
    images = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    value = condensing(method, task, w, images, given)
    (g,) = torch.autograd.grad(value, images)
    assert not g[[0, 1, 4, 5]].any()
    assert g[2:4].all(1).any()
    other = images.detach().clone()
    other[[0, 1, 4, 5]] += 9
    assert float(condensing(method, task, w, other, given)) == float(value.detach())


@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_the_gradient_of_a_condensation_is_that_of_finite_differences(lam):
    method, task, w, _, given = parts(lam_loc=lam)
    images = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: condensing(method, task, w, v, given), (images,))


def test_the_guidance_of_the_peers_has_a_gradient():
    """In public code it is a number out of NumPy."""
    images = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for lam in (0.0, 1.0):
        method, task, w, _, given = parts(lam_loc=lam)
        found.append(torch.autograd.grad(condensing(method, task, w, images, given), images)[0])
    assert float((found[0] - found[1]).abs().max()) > 1e-3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_sliced_distance_is_the_mean_over_directions(n):
    u, v = drawn(1, n), drawn(1, n, seed=1)
    directions = nn.functional.normalize(drawn(400_000, n, seed=2), dim=1)
    found = ((directions @ u[0]) - (directions @ v[0])).square().mean()  # of point masses in one dimension
    assert float(sliced(u - v)) == pytest.approx(float(found), rel=0.01)
    assert float(reference.sliced(u[0], v[0])) == pytest.approx(float(sliced(u - v)), rel=1e-12)


def test_the_sliced_distance_by_hand():
    assert sliced(torch.tensor([[3.0, 1.0], [0.0, 0.0]])).tolist() == [5.0, 0.0]
    turned = torch.linalg.qr(drawn(4, 4))[0]
    assert float(sliced(drawn(1, 4) @ turned)) == pytest.approx(float(sliced(drawn(1, 4))), rel=1e-12)


def test_divergence_by_hand():
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).double(), torch.tensor([[0.25, 0.25, 0.5]]).double()
    forth = 2 * 0.5 * math.log(2)
    back = 2 * 0.25 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-8)
    assert float(diverging(p, q)) == pytest.approx((forth + back) / 2, rel=1e-12)
    assert float(diverging(q, p)) == pytest.approx((forth + back) / 2, rel=1e-12)
    assert float(diverging(p, p)) == 0
    assert diverging(torch.eye(3), torch.zeros(3, 3)).isfinite().all()


def teaching(method: FedAF, w: Tree, x: Tensor, y: Tensor, soft: Tensor) -> Tensor:
    return method.teaching(experiment(method).context().task, w, Batch(x, y), soft)


def test_soft_labels_that_are_met_pull_nowhere():
    method, plain = FedAF(lam_glob=5.0, temperature=1.5), FedAF(lam_glob=0.0)
    context = experiment(method).context()
    x, y = context.shards.part("train", 0)
    w = context.net.weights
    said = (context.task.logits(w, x) / 1.5).softmax(1)
    met = torch.stack([said[y == c].mean(0) if (y == c).any() else torch.full((3,), 7.0) for c in range(3)]).double()
    assert float(teaching(method, w, x, y, met)) == pytest.approx(float(teaching(plain, w, x, y, met)), rel=1e-12)
    assert float(teaching(method, w, x, y, met.flip(1))) > float(teaching(plain, w, x, y, met)) + 1e-3


def test_the_teaching_by_hand_of_a_batch_that_lacks_a_class():
    method = FedAF(lam_glob=0.6, temperature=2.0)
    task = experiment(method).context().task
    w = task.net.weights
    x, y = drawn(4, 6), torch.tensor([2, 0, 2, 2])
    soft = drawn(3, 3, seed=4).softmax(1)
    said = (task.logits(w, x) / 2).softmax(1)
    total = 0.0
    for c, own in ((0, said[1:2]), (2, said[[0, 2, 3]])):
        p, q = soft[c], own.mean(0)
        total += float(((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2)
    expected = float(nn.functional.cross_entropy(task.logits(w, x), y)) + 0.6 / 3 * total
    assert float(method.teaching(task, w, Batch(x, y), soft)) == pytest.approx(expected, rel=1e-10)


def test_the_gradient_of_the_teaching_is_that_of_finite_differences():
    """In public code the soft labels have none."""
    method = FedAF(lam_glob=2.0)
    context = experiment(method).context()
    task, names = context.task, list(context.net.weights)
    x, y, soft = drawn(5, 6), torch.tensor([0, 1, 1, 0, 1]), drawn(3, 3, seed=5).softmax(1)

    def loss(*values: Tensor) -> Tensor:
        return method.teaching(task, Tree(zip(names, values, strict=True)), Batch(x, y), soft)

    leaves = [v.clone().requires_grad_() for v in context.net.weights.values()]
    assert torch.autograd.gradcheck(loss, leaves)
    with_, without = (
        torch.autograd.grad(m.teaching(task, Tree(zip(names, leaves, strict=True)), Batch(x, y), soft), leaves)
        for m in (method, FedAF(lam_glob=0.0))
    )
    assert max(float((a - b).abs().max()) for a, b in zip(with_, without, strict=True)) > 1e-3


def test_padding_teaches_nothing():
    method = FedAF(lam_glob=2.0)
    task = experiment(method).context().task
    x, y, soft = drawn(6, 6), torch.tensor([0, 1, 1, 0, 2, 2]), drawn(3, 3, seed=5).softmax(1)
    mask = torch.tensor([1.0] * 4 + [0.0] * 2, dtype=torch.float64)
    values = [method.teaching(task, task.net.weights, b, soft) for b in (Batch(x, y, mask), Batch(x[:4], y[:4]))]
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-12)


# the exchanges


class Watched(FedAF):
    """Keeps what goes through it."""

    seen: ClassVar[dict[tuple[str, int, int], Any]] = {}

    def resampled(self, me, w):
        self.seen.setdefault(("network", me.round, me.id), []).append(super().resampled(me, w))
        return self.seen["network", me.round, me.id][-1]

    def ask(self, me, down, mine):
        assert not down["peers"]
        self.seen["ask", me.round, me.id] = super().ask(me, down, mine)
        return self.seen["ask", me.round, me.id]

    def local(self, me, down, mine):
        self.seen["down", me.round, me.id] = down
        self.seen["local", me.round, me.id] = super().local(me, down, mine)
        return self.seen["local", me.round, me.id]


def watch(**fields: Any) -> tuple[Result, dict]:
    Watched.seen = {}
    hyper = {k: fields.pop(k) for k in ("gamma", "temperature", "restart", "lam_glob") if k in fields}
    return run(experiment(Watched(**QUICK, **hyper), **fields)), Watched.seen


def test_both_exchanges_see_one_network_and_every_round_another():
    _, seen = watch(rounds=3, ratio=((0, 1), (0, 4), (0, 1)))
    networks = {k[1:]: v for k, v in seen.items() if k[0] == "network"}
    assert all(len(v) == 2 and v[0].equals(v[1]) for v in networks.values())
    drawn_ = [v[0] for v in networks.values()]
    assert min(moved(a, b) for k, a in enumerate(drawn_) for b in drawn_[:k]) > 1e-3


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
def test_the_network_lies_between_the_received_and_another_initialisation(gamma):
    method, fed = FedAF(gamma=gamma), federation(images=True)
    context = experiment(method, images=True, federation=fed).context()
    me = context.client(Job("ask", 1, 2, 0, {}, {}))
    received = context.net.weights.map(lambda v: v + 1)
    w, random = method.resampled(me, received), me.fresh("resampled")
    trained = context.net.trainable
    assert moved(w.pick(trained), gamma * received.pick(trained) + (1 - gamma) * random.pick(trained)) < 1e-12
    assert w.drop(trained).equals(received.drop(trained))  # a random network has no statistics
    assert context.net.buffers


def test_clients_hear_the_mean_of_those_who_hold_a_class():
    """Whole vectors of logits, each holder alike whatever it has."""
    found, seen = watch(rounds=1, ratio=((0, 3, 4),))
    peers = seen["down", 0, 0]["peers"]["logits"]
    for c in range(CLASSES):
        told = []
        for i in (0, 3, 4):
            x, y = found.context.shards.part("train", i)
            if (y == c).any():
                told.append(found.context.task.logits(seen["network", 0, i][0], x[y == c]).mean(0))
        expected = sum(told) / len(told) if told else torch.zeros(CLASSES, dtype=torch.float64)
        torch.testing.assert_close(peers[c], expected, rtol=0, atol=1e-12)
    assert all(torch.equal(seen["down", 0, i]["peers"]["logits"], peers) for i in (3, 4))
    assert not found.server["peers"]


def test_soft_labels_are_of_real_samples_under_the_received_model():
    """In public code they are of condensed ones, under another network."""
    found, seen = watch(rounds=1, ratio=((0, 4),), temperature=3.0)
    for i in (0, 4):
        (up, _), (x, y) = seen["local", 0, i], found.context.shards.part("train", i)
        said = (found.context.task.logits(found.context.net.weights, x) / 3).softmax(1)
        for c in range(CLASSES):
            expected = said[y == c].mean(0) if (y == c).any() else torch.zeros(CLASSES).double()
            torch.testing.assert_close(up.sum["soft"][c], expected, rtol=0, atol=1e-12)


def test_classes_of_fewer_samples_than_images_are_condensed_too():
    """In public code they are skipped."""
    found, seen = watch(rounds=1, ratio=1.0)
    for i in EVERYONE:
        has = torch.bincount(found.context.shards.part("train", i)[1], minlength=CLASSES) > 0
        up, mine = seen["local", 0, i]
        assert torch.equal(up.rows["held"] > 0, has)
        images = mine["images"].unflatten(0, (CLASSES, 2)).flatten(2)
        assert images.any(2).any(1).tolist() == has.tolist()
        assert torch.equal(mine["images"], up.rows["images"])


@pytest.mark.parametrize("restart", [False, True])
def test_images_go_on_unless_they_restart(restart):
    found, seen = watch(rounds=3, ratio=((0,), (1,), (0,)), restart=restart)
    method = found.run.method
    me = found.context.client(Job("local", 0, 2, 1, {}, {}))
    first, last = (seen["local", r, 0][1]["images"] for r in (0, 2))
    start = method.begun(me) if restart else first
    w = seen["network", 2, 0][0]
    whole = w | {"images": start}
    given = (class_means(me, me.features(w)), seen["down", 2, 0]["peers"]["logits"], held(me))
    view = me.over(start, torch.zeros(len(start), dtype=torch.int64), len(start))
    again = view.train(
        whole, only=["images"], loss=method.condensing, given=given, epochs=4, lr=1.0, optimizer=SGD(0.5)
    )
    torch.testing.assert_close(again["images"], last, rtol=0, atol=1e-12)


def test_images_begin_as_means_of_samples_of_their_class():
    for averaged in (1, 4):
        method = FedAF(ipc=6, averaged=averaged)
        me = experiment(method).context().client(Job("local", 0, 0, 0, {}, {}))
        begun = method.begun(me).unflatten(0, (CLASSES, 6))
        for c in range(CLASSES):
            real = me.inputs[me.labels == c]
            if len(real):
                assert ((begun[c] >= real.amin(0) - 1e-12) & (begun[c] <= real.amax(0) + 1e-12)).all()
                kinds = len(begun[c].unique(dim=0))
                assert kinds > 1 or len(real) == 1
        other = experiment(method).context().client(Job("local", 0, 1, 0, {}, {}))
        assert not torch.equal(method.begun(other), method.begun(me))


# the rest


@pytest.mark.parametrize("ipc", [1, 3])
def test_bytes_and_passes_of_a_round(ipc):
    found = run(experiment(FedAF(ipc=ipc, iterations=5, server_epochs=1)))
    size, images = found.context.net.weights.size, CLASSES * ipc * 6
    for row in found.rounds[1:]:
        ids = row["participants"]
        assert row["bytes_down"] == 5 * 8 * (size + CLASSES**2)  # the model once, though there are two exchanges
        assert row["bytes_up"] == 5 * 8 * (2 * CLASSES**2 + 2 * CLASSES + images)
        assert row["gradient_passes"] == pytest.approx(np.mean([5 * CLASSES * ipc / SIZES[i] for i in ids]))


def test_a_client_predicts_with_the_shared_model():
    found = run(experiment(FedAF(**QUICK)))
    assert all(found.personal(i).equals(found.server["model"]) for i in EVERYONE)
    received = {(r["round"], r["client"]): r["loss"] for r in found.clients if r["moment"] == "received"}
    for r in found.clients:  # who took part has what it had received
        if r["moment"] == "trained":
            assert r["loss"] == pytest.approx(received[r["round"] - 1, r["client"]], rel=1e-12)
    losses = [row["received_loss"] for row in found.rounds]
    assert all(a != b for a, b in pairwise(losses))


IMPOSSIBLE = [
    ("ipc", 0), ("iterations", -1), ("image_lr", -1.0), ("image_momentum", -0.1), ("gamma", -0.1), ("gamma", 1.1),
    ("lam_loc", -1.0), ("lam_glob", -1.0), ("temperature", 0.0), ("server_epochs", -1), ("averaged", 0),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(UsageError, match=rf"FedAF\.{field} must be"):
        FedAF(**{field: value})


def test_data_without_classes_are_refused():
    fed = federate(quadratics.load(), "given", 2, 0, test=0.0)
    with pytest.raises(UsageError, match="classes"):
        run(experiment(FedAF(**QUICK), federation=fed, network="point", network_options={}, rounds=1))


def test_token_ids_are_refused():
    fed = federation((4, 4))
    tokens = torch.randint(0, 9, (len(fed.dataset.y), 7), generator=torch.Generator().manual_seed(0))
    data = Dataset("tokens", tokens, fed.dataset.y, CLASSES, "fasttext")
    other = Federation(data, fed.train, fed.validation, fed.test, fed.split_hash, "tokens")
    fields = {"federation": other, "network": "fasttext", "network_options": {"vocabulary": 9}}
    with pytest.raises(UsageError, match="real numbers"):
        run(experiment(FedAF(**QUICK), **fields, rounds=1))


def test_defaults_void_nothing():
    made = FedAF()
    assert min(made.ipc, made.iterations, made.image_lr, made.lam_loc, made.lam_glob, made.server_epochs) > 0
    assert 0 < made.gamma < 1
    assert (made.ipc, made.iterations, made.temperature, made.gamma) == (50, 1000, 2.0, 0.9)
