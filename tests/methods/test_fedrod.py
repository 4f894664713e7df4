"""FedRoD: its reference, FedAvg as its limit, the balanced softmax, two heads that do not disturb each other, the
hypernetwork, odd clients."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import checks
from harness import CLASSES, SIZES, agree, experiment, federation, moved, run, world
from idiolect import Result
from idiolect.data import Dataset, Federation
from idiolect.data.federated import split_hash
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedrod import FedRoD
from idiolect.nets import Network
from idiolect.tree import Tree
from reference import fedrod as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
FORMS = pytest.mark.parametrize("hyper", [None, 3], ids=["linear", "hypernetwork"])


def found(method, **fields) -> Result:
    return run(experiment(method, **fields))


def network(result: Result) -> Tree:
    """The shared body and generic head, without a hypernetwork."""
    return result.server["model"].pick(result.context.net.weights)


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"gamma": 0.5, "personal_init": "zero"}, {"gamma": 0.0}, {"hyper": 4}, {"hyper": 2, "gamma": 2.0}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    one = found(FedRoD(**hyper), images=images)
    expected = reference.run(world(one.run), **hyper)
    agree(one, expected)
    module = one.run.module().double()
    task = one.context.task
    for i in EVERYONE:
        module.load_state_dict({k: v for k, v in expected.clients[i].items() if "personal" not in k}, strict=False)
        x = one.context.shards.part("train", i)[0]
        logits = reference.logits(module.eval(), expected.clients[i], x)
        torch.testing.assert_close(FedRoD().logits(task, one.personal(i), x), logits, rtol=0, atol=1e-10)


@FORMS
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, hyper):
    one = found(FedRoD(hyper=hyper), sizes=sizes)
    agree(one, reference.run(world(one.run), hyper=hyper))


# FedAvg as its limit


@IMAGES
@FORMS
def test_without_gamma_the_generic_model_is_fedavg_s_to_the_bit(images, hyper):
    one, fedavg = (found(m, images=images) for m in (FedRoD(gamma=0.0, hyper=hyper), FedAvg()))
    assert network(one).equals(fedavg.server["model"])
    balanced = found(FedRoD(hyper=hyper), images=images)
    assert moved(network(balanced), fedavg.server["model"]) > 1e-3


def even(clients: int = 4, each: int = 3) -> Federation:
    """Clients that have equally many samples of every class."""
    draw = np.random.default_rng(1)
    labels = np.tile(np.repeat(np.arange(CLASSES), each), clients)
    x = draw.normal(size=(len(labels), 6)) + labels[:, None]
    data = Dataset("even", torch.tensor(x, dtype=torch.float32), torch.tensor(labels), CLASSES, "mlp")
    size, none = CLASSES * each, np.array([], dtype=np.int64)
    parts = [(np.arange(i * size, (i + 1) * size), none, np.arange(i * size, i * size + 2)) for i in range(clients)]
    return Federation(data, *zip(*parts, strict=True), split_hash(*zip(*parts, strict=True)), "even")


@pytest.mark.parametrize("gamma", [0.5, 1.0, 3.0])
def test_of_equal_class_counts_the_generic_model_is_fedavg_s(gamma):
    one, fedavg = (found(m, federation=even()) for m in (FedRoD(gamma=gamma), FedAvg()))
    assert moved(network(one), fedavg.server["model"]) < 1e-12
    assert moved(network(one), one.context.net.weights) > 1e-2


# the balanced softmax


def drawn(rows: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, CLASSES, generator=draw, dtype=torch.float64), torch.arange(rows) % CLASSES


def tensor(*counts: float) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_the_balanced_softmax_by_hand(gamma):
    g, y = drawn()
    n = (7, 1, 3)
    task = experiment(FedRoD()).context().task
    value = task.criterion(FedRoD(gamma).balanced(g, tensor(*n)), Batch(g, y))
    terms = []
    for row, label in zip(g.tolist(), y.tolist(), strict=True):
        weighed = [n[c] ** gamma * math.exp(row[c]) for c in range(CLASSES)]
        terms.append(-math.log(weighed[label] / sum(weighed)))
    assert float(value) == pytest.approx(sum(terms) / len(terms), rel=1e-13)


def test_a_class_without_samples_has_no_probability_and_no_gradient():
    g, y = drawn()
    g.requires_grad_()
    y = y % 2
    counts = tensor(4, 2, 0)
    loss = nn.functional.cross_entropy(FedRoD().balanced(g, counts), y)
    left_out = nn.functional.cross_entropy(g[:, :2] + counts[:2].log(), y)
    assert float(loss.detach()) == pytest.approx(float(left_out.detach()), rel=1e-14)
    (grad,) = torch.autograd.grad(loss, g)
    assert torch.equal(grad[:, 2], torch.zeros(len(g), dtype=torch.float64))
    assert grad.isfinite().all()


@pytest.mark.parametrize("counts", [(7, 1, 3), (4, 2, 0)], ids=str)
def test_its_gradient_is_that_of_finite_differences(counts):
    g, y = drawn()
    y = y % 2

    def loss(v: Tensor) -> Tensor:
        return nn.functional.cross_entropy(FedRoD(0.7).balanced(v, tensor(*counts)), y)

    assert torch.autograd.gradcheck(loss, (g.requires_grad_(),))


class Counted(FedRoD):
    """Keeps the counts that the loss was given."""

    seen: ClassVar[list] = []

    def balanced(self, g, counts):
        self.seen.append(counts.clone())
        return super().balanced(g, counts)


@pytest.mark.parametrize("batch_size", [4, 64])
def test_classes_are_counted_over_all_training_samples(batch_size):
    """Public code counts one pass of full batches: of a class in the rest it finds no sample, and the loss is inf."""
    for i in EVERYONE:
        Counted.seen = []
        one = found(Counted(), ratio=((i,),), rounds=1, batch_size=batch_size)
        y = one.context.shards.part("train", i)[1]
        expected = torch.bincount(y, minlength=CLASSES).double()
        assert Counted.seen
        assert all(torch.equal(counts, expected) for counts in Counted.seen)


def test_a_client_leaves_the_generic_head_s_rows_of_classes_that_it_lacks_alone():
    absent = [set(range(CLASSES)) - set(federation().dataset.y[rows].tolist()) for rows in federation().train]
    client = next(i for i in EVERYONE if len(absent[i]) == 1)
    (c,) = absent[client]
    fields = PLAIN | {"ratio": ((client,),) * 2, "rounds": 2}
    for gamma, still in ((1.0, True), (0.0, False)):
        one = found(FedRoD(gamma), **fields)
        assert torch.equal(one.server["model"]["head.weight"][c], one.context.net.weights["head.weight"][c]) == still
        assert not torch.equal(one.server["model"]["head.weight"], one.context.net.weights["head.weight"])


def test_a_client_of_one_class_teaches_its_personal_head_alone():
    one = found(FedRoD(), **PLAIN, ratio=((3,),), rounds=1)
    assert one.server["model"].equals(one.context.net.weights)
    assert moved(one.private(3)["model"], one.context.state.client["model"]) > 1e-3


# two losses that do not disturb each other


class Loud(FedRoD):
    """Another personal head."""

    def both(self, w, counts):
        w = super().both(w, counts)
        return w | {"personal.weight": 7 * w["personal.weight"], "personal.bias": w["personal.bias"] - 3}


@IMAGES
def test_the_generic_model_knows_nothing_of_personal_heads(images):
    one = network(found(FedRoD(), images=images))
    for other in (FedRoD(personal_init="zero"), FedRoD(hyper=3), FedRoD(hyper=5), Loud()):
        assert network(found(other, images=images)).equals(one)


def prepared(method: FedRoD) -> tuple:
    """A loss of the whole training set of client 0, weights that are nobody's initial ones, and their names."""
    one = found(method, rounds=1, ratio=1.0)
    x, y = one.context.shards.part("train", 0)
    w = one.server["model"] | one.private(0)["model"]
    counts = torch.bincount(y, minlength=CLASSES).double()

    def loss(v: Tree) -> Tensor:
        return method.loss(one.context.task, v, Batch(x, y), counts)

    return loss, w, one, x, y, counts


@FORMS
def test_body_and_generic_head_learn_from_the_balanced_loss_alone(hyper):
    """In other public code the personal loss reaches the body."""
    loss, w, one, x, y, counts = prepared(FedRoD(hyper=hyper))
    net = one.context.net
    v = w.map(lambda t: t.clone().requires_grad_())
    whole = torch.autograd.grad(loss(v), list(v.pick(net.weights).values()))
    g = one.context.task.logits(v, x)
    alone = nn.functional.cross_entropy(g + counts.log(), y)
    generic = torch.autograd.grad(alone, list(v.pick(net.weights).values()))
    assert all(torch.equal(a, b) for a, b in zip(whole, generic, strict=True))


@FORMS
def test_what_makes_the_personal_head_learns_from_the_loss_of_the_sum(hyper):
    """Other public code has the personal head answer alone."""
    method = FedRoD(hyper=hyper)
    loss, w, one, x, y, counts = prepared(method)
    names = list(w.drop(one.context.net.weights))
    leaves = [w[k].clone().requires_grad_() for k in names]

    def whole(*values: Tensor) -> Tensor:
        return loss(w | dict(zip(names, values, strict=True)))

    def sum_of_heads(*values: Tensor) -> Tensor:
        v = method.both(w | dict(zip(names, values, strict=True)), counts)
        z = one.context.task.features(w, x)
        own = z @ v["personal.weight"].T + v["personal.bias"]
        return nn.functional.cross_entropy(one.context.task.head(w, z) + own, y)

    assert torch.autograd.gradcheck(whole, leaves)
    pairs = zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (whole, sum_of_heads)), strict=True)
    assert all(float((a - b).abs().max()) < 1e-15 for a, b in pairs)


@FORMS
def test_a_step_by_hand(hyper):
    """Both losses are of the weights before the step."""
    method = FedRoD(hyper=hyper)
    one = found(method, **PLAIN, rounds=1, ratio=((0,),), epochs=1, batch_size=64)
    start = one.context.state.server["model"] | one.context.state.client["model"]
    x, y = one.context.shards.part("train", 0)
    counts = torch.bincount(y, minlength=CLASSES).double()
    v = start.map(lambda t: t.clone().requires_grad_())
    value = method.loss(one.context.task, v, Batch(x, y), counts)
    grads = Tree(zip(v, torch.autograd.grad(value, list(v.values())), strict=True))
    stepped = start - 0.1 * grads
    assert moved(one.server["model"] | one.private(0)["model"], stepped) < 1e-14


def test_padding_is_left_out_whatever_its_class():
    """A padded row may bear a class that the client lacks, whose loss is infinite."""
    method = FedRoD()
    _, w, one, _, _, _ = prepared(method)
    x = one.context.shards.part("train", 0)[0][:5]
    counts = tensor(3, 2, 0)
    y = torch.tensor([0, 1, 0, 1, 0])
    mask = torch.tensor([1.0] * 5 + [0.0] * 2, dtype=torch.float64)
    padded = Batch(torch.cat([x, 9 * x[:2]]), torch.cat([y, torch.tensor([2, 2])]), mask)
    v = w.map(lambda t: t.clone().requires_grad_())
    losses = [method.loss(one.context.task, v, batch, counts) for batch in (Batch(x, y), padded)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-14)
    pairs = zip(*(torch.autograd.grad(loss, list(v.values())) for loss in losses), strict=True)
    assert all(float((a - b).abs().max()) < 1e-14 for a, b in pairs)


# the personal head


@IMAGES
def test_the_personal_head_stays_private(images):
    one = found(FedRoD(), images=images, ratio=1.0)
    assert set(one.server["model"]) == set(one.context.net.weights)
    heads = [one.private(i)["model"]["personal.weight"] for i in EVERYONE]
    assert min(float((a - b).abs().max()) for k, a in enumerate(heads) for b in heads[:k]) > 1e-4


def test_it_begins_as_a_copy_or_as_zero():
    for start in ("copy", "zero"):
        one = found(FedRoD(personal_init=start), rounds=0)
        head = one.context.net.head.under("head").prefixed("personal")
        own = one.private(0)["model"]
        assert own.equals(head if start == "copy" else head.zeros())


def test_a_client_whose_personal_head_is_zero_answers_as_the_generic_model():
    one = found(FedRoD(personal_init="zero"), ratio=((0, 1),) * 4)
    task = one.context.task
    for i in (5, 6):  # they never take part
        x = one.context.shards.part("test", i)[0]
        assert torch.equal(FedRoD().logits(task, one.personal(i), x), task.logits(one.server["model"], x))


@IMAGES
def test_clients_predict_with_the_sum_of_both_heads(images):
    """In other public code, with the personal head alone."""
    one = found(FedRoD(), images=images)
    task = one.context.task
    for i in EVERYONE:
        w, x = one.personal(i), one.context.shards.part("test", i)[0]
        z = task.features(one.server["model"], x)
        own = z @ one.private(i)["model"]["personal.weight"].T + one.private(i)["model"]["personal.bias"]
        logits = task.logits(one.server["model"], x) + own
        torch.testing.assert_close(FedRoD().logits(task, w, x), logits, rtol=0, atol=1e-13)


@FORMS
def test_the_personal_head_fits_its_client(hyper):
    one = found(FedRoD(hyper=hyper, personal_init="zero"), ratio=1.0, rounds=12, epochs=6, schedule="constant")
    task = one.context.task
    totals = [0.0, 0.0]
    for i in EVERYONE:
        x, y = one.context.shards.part("train", i)
        w = one.personal(i)
        for k, logits in enumerate((FedRoD().logits(task, w, x), task.logits(w, x))):
            totals[k] += float(task.losses(logits, y).sum())
    assert totals[0] < 0.9 * totals[1]


def test_a_head_without_a_bias():
    module = Network(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, CLASSES, bias=False))
    one = found(FedRoD(), network=module, network_options={})
    assert set(one.private(0)["model"]) == {"personal.weight"}
    x = one.context.shards.part("test", 0)[0]
    z = one.context.task.features(one.server["model"], x)
    w = one.personal(0)
    expected = z @ (w["head.weight"] + w["personal.weight"]).T
    torch.testing.assert_close(FedRoD().logits(one.context.task, w, x), expected, rtol=0, atol=1e-14)


# the hypernetwork


@IMAGES
def test_the_hypernetwork_makes_the_head_out_of_class_frequencies(images):
    one = found(FedRoD(hyper=4), images=images)
    w, d = one.server["model"], one.context.net.features
    for i in EVERYONE:
        y = one.context.shards.part("train", i)[1]
        a = torch.bincount(y, minlength=CLASSES).double() / len(y)
        hidden = (w["hyper1.weight"] @ a + w["hyper1.bias"]).clamp(min=0)
        made = w["hyper2.weight"] @ hidden + w["hyper2.bias"]
        own = one.personal(i)
        torch.testing.assert_close(own["personal.weight"].flatten(), made[: CLASSES * d], rtol=0, atol=1e-13)
        torch.testing.assert_close(own["personal.bias"], made[CLASSES * d :], rtol=0, atol=1e-13)
        assert not any(k.startswith("hyper") for k in own)


def test_clients_keep_nothing_beside_a_hypernetwork_and_new_ones_have_a_head_at_once():
    one = found(FedRoD(hyper=4), ratio=((0, 1),) * 4)
    assert not any(one.private(i)["model"] for i in EVERYONE)
    first = one.context.state.server["model"]
    assert all(moved(one.server["model"].pick([k]), first.pick([k])) > 1e-5 for k in first if k.startswith("hyper"))
    made = [found(FedRoD(hyper=4), rounds=0).personal(6), one.personal(6)]
    assert moved(*(w.pick(["personal.weight"]) for w in made)) > 1e-4


# the rest


@FORMS
def test_everything_shared_is_weighted_by_samples(hyper):
    checks.the_server_holds_the_mean_by_samples(FedRoD, hyper=hyper)


@FORMS
def test_bytes_and_passes_of_a_round(hyper):
    one = found(FedRoD(hyper=hyper))
    net = one.context.net
    made = net.classes * (net.features + 1)
    extra = 0 if hyper is None else hyper * (net.classes + 1) + made * (hyper + 1)
    for row in one.rounds[1:]:
        assert row["bytes_down"] == row["bytes_up"] == 5 * 8 * (net.weights.size + extra)
        assert row["gradient_passes"] == pytest.approx(2)


@pytest.mark.parametrize("hyper", [{"gamma": -0.1}, {"personal_init": "random"}, {"hyper": 0}, {"hyper": -2}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedRoD.{next(iter(hyper))} must be"):
        FedRoD(**hyper)


def test_data_without_classes_are_refused():
    with pytest.raises(UsageError, match="asks for samples' classes"):
        checks.on_quadratics(FedRoD(), rounds=1)


def test_defaults():
    assert FedRoD() == FedRoD(gamma=1.0, personal_init="copy", hyper=None)
