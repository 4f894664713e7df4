"""MOON: its reference, FedAvg as its limit, the contrastive term and its gradient, the model of last time, odd clients."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.moon import Moon
from idiolect.tree import Tree
from reference import moon as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
HEAD = ("head.weight", "head.bias")

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"mu": 5.0, "tau": 0.1}, {"projection": 4}, {"projection": 2, "mu": 3.0, "tau": 1.0}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(Moon(**hyper), images=images))
    agree(found, reference.run(world(found.run), **hyper))


@pytest.mark.parametrize("projection", [None, 3])
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, projection):
    found = run(experiment(Moon(projection=projection), sizes=sizes))
    agree(found, reference.run(world(found.run), projection=projection))


# FedAvg as its limit


@IMAGES
def test_without_mu_it_is_fedavg_to_the_bit(images):
    found, fedavg = (run(experiment(m, images=images)) for m in (Moon(mu=0.0), FedAvg()))
    assert found.server["model"].equals(fedavg.server["model"])
    assert all(found.personal(i).equals(fedavg.personal(i)) for i in EVERYONE)
    contrasted = run(experiment(Moon(), images=images))
    assert moved(contrasted.server["model"], fedavg.server["model"]) > 1e-3


@IMAGES
def test_in_their_first_round_clients_are_fedavg_s_to_the_bit(images):
    fields = {"images": images, "ratio": ((0, 1), (2, 3), (4, 5), (6, 7))}
    found, fedavg = (run(experiment(m, **fields)) for m in (Moon(mu=9.0), FedAvg()))
    assert found.server["model"].equals(fedavg.server["model"])


def test_a_client_alone_is_fedavg():
    """Its old model is the received one: softplus is log 2 and pulls nowhere."""
    fields = {"sizes": (9,), "ratio": 1.0}
    found, fedavg = (run(experiment(m, **fields)) for m in (Moon(mu=9.0), FedAvg()))
    assert moved(found.server["model"], fedavg.server["model"]) < 1e-12


def test_the_larger_mu_the_nearer_are_features_to_the_received_model_s():
    fields = {"ratio": ((0, 4), (0,)), "rounds": 2, "epochs": 20, "momentum": 0.0, "weight_decay": 0.0}
    values = []
    for mu in (0.0, 1.0, 10.0):
        first, second = (run(experiment(Moon(mu=mu), **(fields | {"rounds": r}))) for r in (1, 2))
        task, (x, y) = second.context.task, second.context.shards.part("train", 0)
        received, previous = first.server["model"], first.private(0)["previous"]
        z, a, b = (task.features(w, x) for w in (second.server["model"], received, previous))
        values.append(float(Moon().contrast(z, Batch(x, y), a, b)))
    assert values[0] > values[1] + 0.01 > values[2] + 0.02


# the term


def drawn(rows: int = 6, width: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Batch]:
    draw = torch.Generator().manual_seed(seed)
    z, a, b = (torch.randn(rows, width, generator=draw, dtype=torch.float64) for _ in range(3))
    return z, a, b, Batch(z, torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_the_term_by_hand(tau):
    z, a, b, batch = drawn()

    def cosine(u: Tensor, v: Tensor) -> float:
        return float(u @ v) / math.sqrt(float(u @ u) * float(v @ v))

    terms = []
    for k in range(len(z)):
        near, far = (math.exp(cosine(z[k], o[k]) / tau) for o in (a, b))
        terms.append(-math.log(near / (near + far)))
    assert float(Moon(tau=tau).contrast(z, batch, a, b)) == pytest.approx(sum(terms) / len(z), rel=1e-12)


@pytest.mark.parametrize("tau", [0.5, 1e-3])
def test_its_gradient_is_that_of_finite_differences(tau):
    z, a, b, batch = drawn()
    z = z.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: Moon(tau=tau).contrast(v, batch, a, b), (z,), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("projection", [None, 3])
def test_the_whole_loss_s_gradient_is_that_of_finite_differences(projection):
    method = Moon(mu=2.0, projection=projection)
    context = experiment(method).context()
    task, w = context.task, context.state.server["model"]
    x, y = context.shards.part("train", 0)
    _, a, b, _ = drawn(len(y), projection or context.net.features)
    batch = Batch(x, y, None, (a, b))
    names = list(w)

    def loss(*values: Tensor) -> Tensor:
        return method.loss(task, Tree(zip(names, values, strict=True)), batch)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def test_equal_reference_models_give_log_2_and_no_gradient():
    z, a, _, batch = drawn()
    value = Moon().contrast(z.requires_grad_(), batch, a, a)
    assert float(value.detach()) == pytest.approx(math.log(2), rel=1e-15)
    assert float(torch.autograd.grad(value, z)[0].abs().max()) < 1e-16


def test_only_directions_count():
    z, a, b, batch = drawn()
    value = float(Moon().contrast(z, batch, a, b))
    assert float(Moon().contrast(3 * z, batch, 0.1 * a, 50 * b)) == pytest.approx(value, rel=1e-12)
    assert float(Moon().contrast(a, batch, a, b)) < math.log(2) < float(Moon().contrast(b, batch, a, b))


def test_a_tiny_temperature_does_not_overflow():
    z, a, b, batch = drawn()
    for one, other in ((a, b), (b, a)):
        value = Moon(tau=1e-5).contrast(z, batch, one, other)
        assert 0 < float(value) < 2e5


def test_zero_features_stay_finite():
    z, a, b, batch = drawn()
    z = (0 * z).requires_grad_()
    value = Moon().contrast(z, batch, a, 0 * b)
    assert float(value.detach()) == pytest.approx(math.log(2))
    assert torch.autograd.grad(value, z)[0].isfinite().all()


def test_padding_is_left_out():
    z, a, b, batch = drawn()
    padded = [torch.cat([v, 7 * v[:2]]) for v in (z, a, b)]
    mask = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    masked = Moon().contrast(padded[0], Batch(padded[0], torch.zeros(8, dtype=torch.int64), mask), *padded[1:])
    assert float(masked) == pytest.approx(float(Moon().contrast(z, batch, a, b)), rel=1e-14)


# the reference models


class Watched(Moon):
    """Keeps what the reference models say of the training set, as they enter a round."""

    seen: ClassVar[dict] = {}

    def local(self, me, down, mine):
        train = me.train

        def watched(w, beside=None, **options):
            self.seen[me.round, me.id] = down["model"].clone(), mine["previous"].clone(), beside
            return train(w, beside=beside, **options)

        me.train = watched
        return super().local(me, down, mine)


def watch(**fields: Any) -> tuple[Result, dict]:
    Watched.seen = {}
    return run(experiment(Watched(), **fields)), Watched.seen


@IMAGES
def test_the_reference_models_are_the_received_and_the_own_of_the_last_participation(images):
    """Also where that was long ago; in eval mode: their features are those of a plain pass."""
    fields = {"images": images, "ratio": ((0, 1), (1, 2), (1, 4), (0, 2))}
    found, seen = watch(**fields)
    net, task = found.context.net, found.context.task
    first = run(experiment(Moon(), **(fields | {"rounds": 1})))
    assert {k for k, (_, _, beside) in seen.items() if beside is None} == {(0, 0), (0, 1), (1, 2), (2, 4)}
    received, previous, (a, b) = seen[3, 0]
    assert previous.equals(first.private(0)["previous"])
    assert moved(previous, received.pick(net.body)) > 1e-3
    x = found.context.shards.part("train", 0)[0]
    with torch.no_grad():
        assert torch.equal(a, task.features(received, x))
        assert torch.equal(b, task.features(previous, x))
    assert not a.requires_grad


@IMAGES
def test_the_old_model_is_the_client_s_own_before_averaging(images):
    fields = {"images": images, "rounds": 1}
    found = run(experiment(Moon(), ratio=((0, 4),), **fields))
    for i in (0, 4):
        alone = run(experiment(Moon(), ratio=((i,),), **fields)).server["model"]
        assert found.private(i)["previous"].equals(alone.pick(found.context.net.body))
        assert moved(found.private(i)["previous"], found.server["model"].pick(found.context.net.body)) > 1e-3


def test_a_client_whose_reply_was_lost_still_has_no_old_model():
    found, seen = watch(ratio=((0,),) * 6, rounds=6, drop=0.6)
    lost = [row["dropped"] == [0] for row in found.rounds[1:]]
    assert lost[0]
    assert not all(lost[:-1])
    heard = lost.index(False)
    assert [seen[r, 0][2] is None for r in range(6)] == [r <= heard for r in range(6)]


# the projection head


def test_a_projection_takes_the_head_s_place():
    found = run(experiment(Moon(projection=3)))
    model, d = found.server["model"], found.context.net.features
    assert not set(HEAD) & set(model)
    shapes = {k: tuple(v.shape) for k, v in model.items() if not k.startswith("body.")}
    assert shapes == {
        "projection1.weight": (d, d), "projection1.bias": (d,), "projection2.weight": (3, d),
        "projection2.bias": (3,), "classifier.weight": (3, 3), "classifier.bias": (3,),
    }  # fmt: skip
    assert all(moved(model.pick([k]), found.context.state.server["model"].pick([k])) > 1e-4 for k in shapes)
    task = found.context.task
    x = found.context.shards.part("test", 0)[0]
    z = task.features(model, x)
    z = (z @ model["projection1.weight"].T + model["projection1.bias"]).relu()
    z = z @ model["projection2.weight"].T + model["projection2.bias"]
    expected = z @ model["classifier.weight"].T + model["classifier.bias"]
    torch.testing.assert_close(Moon(projection=3).logits(task, model, x), expected, rtol=0, atol=1e-12)


# the rest


@pytest.mark.parametrize("projection", [None, 3])
def test_bytes_and_passes_of_a_round(projection):
    found, fedavg = (run(experiment(m)) for m in (Moon(projection=projection), FedAvg()))
    d, net = found.context.net.features, found.context.net
    size = net.weights.size if projection is None else net.body.size + d * (d + 1) + 3 * (d + 1) + 3 * 4
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == a["bytes_up"] == 5 * 8 * size
        assert a["gradient_passes"] == b["gradient_passes"]


@pytest.mark.parametrize("hyper", [{"mu": -0.1}, {"tau": 0.0}, {"tau": -1.0}, {"projection": 0}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"Moon.{next(iter(hyper))} must be"):
        Moon(**hyper)


def test_defaults_are_not_fedavg():
    assert Moon() == Moon(mu=1.0, tau=0.5, projection=None)
