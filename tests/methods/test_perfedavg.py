"""Per-FedAvg: its reference, its three variants against each other and by hand, what public code gets wrong, odd clients."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checks
from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.engine import orders
from idiolect.errors import UsageError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.perfedavg import PerFedAvg
from idiolect.nets import Network
from idiolect.task import Batch
from idiolect.tree import Tree
from reference import fedavg as reference_fedavg
from reference import perfedavg as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERY = pytest.mark.parametrize("variant", ["fo", "hf", "exact"])
EVERYONE = range(len(SIZES))
A, B = torch.tensor([4.0, 1.0], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)


def done(method: Any, **fields: Any) -> Result:
    """A run without momentum, which the method refuses."""
    return run(experiment(method, **{"momentum": 0.0} | fields))


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {}, {"variant": "hf"}, {"variant": "exact"}, {"alpha": 0.05, "beta": 0.3, "weights": "samples"},
        {"variant": "hf", "delta": 0.2, "beta": 0.3}, {"variant": "exact", "alpha": 0.3, "beta": 0.2},
    ],
    ids=str,
)  # fmt: skip
def test_engine_equals_reference(hyper, images):
    found = done(PerFedAvg(**hyper), images=images)
    agree(found, reference.run(world(found.run), **hyper))


@EVERY
@pytest.mark.parametrize(
    "fields",
    [{"sizes": (6, 1, 1, 3, 9)}, {"sizes": (1, 1, 1, 1)}, {"batch_size": 1}, {"batch_size": 64, "epochs": 1}],
    ids=["clients of one sample", "nobody has two", "batches of one", "clients of one batch"],
)
def test_odd_clients(fields, variant):
    found = done(PerFedAvg(variant, beta=0.3), **fields)
    agree(found, reference.run(world(found.run), variant, beta=0.3))


@pytest.mark.parametrize("variant", ["hf", "exact"])
def test_the_variants_are_the_same_wherever_clients_run(variant):
    """The contract's suite has the first-order one."""
    serial, workers, stacked = (
        done(PerFedAvg(variant, beta=0.3), backend=b, workers=2) for b in ("serial", "workers", "stacked")
    )
    assert serial.server["model"].equals(workers.server["model"])
    assert moved(serial.server["model"], stacked.server["model"]) < 1e-10
    assert [r["gradient_passes"] for r in serial.rounds] == [r["gradient_passes"] for r in stacked.rounds]


# what it becomes


@EVERY
def test_without_an_inner_step_it_is_fedavg_on_every_second_batch(variant):
    fields = {"sizes": (8,) * 8, "weight_decay": 0.05}
    found = done(PerFedAvg("fo", alpha=0.0, beta=0.2), **fields)
    true = world(found.run)
    seconds = dataclasses.replace(true, batches=lambda *a: true.batches(*a)[1::2], lr=lambda r: 0.2)
    expected = reference_fedavg.run(seconds)
    assert moved(found.server["model"], Tree(expected.server)) < 1e-12
    # with three batches in a step the second of three
    other = done(PerFedAvg(variant, alpha=0.0, beta=0.2), **fields)
    taken = {"fo": slice(1, None, 2), "hf": slice(1, None, 3), "exact": slice(1, None, 3)}[variant]

    def batches(i: int, r: int, order: int, epoch: int) -> list[Tensor]:
        stream = [b for e in range(true.epochs) for b in true.batches(i, r, order, e)]
        count = 2 if variant == "fo" else 3
        return [] if epoch else stream[: len(stream) // count * count][taken]

    again = reference_fedavg.run(dataclasses.replace(true, batches=batches, lr=lambda r: 0.2))
    assert moved(other.server["model"], Tree(again.server)) < 1e-12
    assert moved(done(PerFedAvg(variant, beta=0.2), **fields).server["model"], other.server["model"]) > 1e-4


def test_without_an_inner_step_the_variants_of_three_batches_are_the_same_bits():
    one, two = (done(PerFedAvg(v, alpha=0.0, beta=0.3)) for v in ("hf", "exact"))
    assert one.server["model"].equals(two.server["model"])
    one, two = (done(PerFedAvg(v, beta=0.3)) for v in ("hf", "exact"))
    assert moved(one.server["model"], two.server["model"]) > 1e-12


def test_without_an_outer_step_the_shared_model_stands_still_and_clients_still_adapt():
    found = done(PerFedAvg(beta=0.0))
    assert moved(found.server["model"], found.context.net.weights) == 0.0
    assert min(moved(found.personal(i), found.server["model"]) for i in EVERYONE) > 1e-3


# the curvature


def laid(**fields: Any) -> tuple[Any, Tree, list[Batch]]:
    """A task, weights, and three batches of one client."""
    context = experiment(PerFedAvg(), momentum=0.0, **fields).context()
    draw = torch.Generator().manual_seed(1)
    w = context.net.weights.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype))
    x, y = context.shards.part("train", 0)
    return context.task, w, [Batch(x[k : k + 5], y[k : k + 5]) for k in (0, 5, 10)]


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_an_exact_step_is_the_gradient_of_the_loss_after_a_step_by_finite_differences(decay):
    """F'(w - alpha grad F(w)) of F on D, which is D'' as well, and F' on D'."""
    task, w, (first, second, _) = laid()
    alpha = 0.3

    def value(v: Tree, batch: Batch) -> Tensor:
        return task.loss(v, batch) + 0.5 * decay * v.dot(v)

    def objective(v: Tree) -> float:
        leaves = v.map(lambda t: t.clone().requires_grad_())
        grads = torch.autograd.grad(value(leaves, first), list(leaves.values()))
        return float(value(v - alpha * Tree(zip(v, grads, strict=True)), second))

    found = w - PerFedAvg("exact").meta(task, w, (first, second, first), 1.0, alpha, decay)
    for name, tensor in w.items():
        for at in range(tensor.numel()):
            step = torch.zeros_like(tensor)
            step.view(-1)[at] = 1e-6
            slope = (objective(w | {name: tensor + step}) - objective(w | {name: tensor - step})) / 2e-6
            assert float(found[name].view(-1)[at]) == pytest.approx(slope, abs=1e-7)
    plain = w - PerFedAvg("fo").meta(task, w, (first, second), 1.0, alpha, decay)
    assert moved(found, plain) > 1e-2


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_the_exact_product_is_that_with_the_hessian(decay):
    task, w, (batch, *_) = laid(network="logistic", network_options={})
    v = w.map(torch.cos)
    names, values = list(w), tuple(w.values())

    def loss(*tensors: Tensor) -> Tensor:
        u = Tree(zip(names, tensors, strict=True))
        return task.loss(u, batch) + 0.5 * decay * u.dot(u)

    rows = torch.autograd.functional.hessian(loss, values)
    found = PerFedAvg("exact").curved(task, w, batch, w, v, decay)
    for name, row in zip(names, rows, strict=True):
        expected = sum(h.reshape(found[name].numel(), -1) @ v[k].reshape(-1) for k, h in zip(names, row, strict=True))
        torch.testing.assert_close(found[name].reshape(-1), expected, rtol=0, atol=1e-13)


def test_the_hessian_free_product_errs_by_the_square_of_delta():
    task, w, (batch, *_) = laid(network="logistic", network_options={})
    v = w.map(torch.cos)
    exact = PerFedAvg("exact").curved(task, w, batch, w, v, 0.1)
    errors = [
        float((PerFedAvg("hf", delta=d).curved(task, w, batch, w, v, 0.1) - exact).norm()) for d in (0.1, 0.01, 0.001)
    ]
    assert errors[0] > 1e-5
    assert 95 < errors[0] / errors[1] < 105
    assert 90 < errors[1] / errors[2] < 110


class Slope:
    """A task whose loss is linear in the weights."""

    net = SimpleNamespace(buffers=frozenset())

    def loss(self, w: Tree, batch: Tensor) -> Tensor:
        return (w["a"] * batch).sum() + 2.0 * w["b"].sum()


def test_a_linear_loss_has_no_curvature():
    w = Tree({"a": torch.tensor([0.5, -1.0]), "b": torch.tensor([2.0])}).to(torch.float64)
    batches = [torch.tensor([k, 1.0 - k], dtype=torch.float64) for k in (1.0, 2.0, 3.0)]
    found = [PerFedAvg(v).meta(Slope(), w, batches, 0.3, 0.7, 0.0) for v in ("fo", "hf", "exact")]
    expected = Tree({"a": w["a"] - 0.3 * batches[1], "b": w["b"] - 0.6})
    assert all(moved(f, expected) < 1e-12 for f in found)


# quadratics, by hand


def by_hand(variant: str, alpha: float, beta: float, rounds: int, steps: int) -> float:
    w = torch.zeros((), dtype=torch.float64)
    shrink = (1 - alpha * A) if variant == "fo" else (1 - alpha * A) ** 2
    for _ in range(rounds):
        own = w.repeat(2)
        for _ in range(steps):
            own = own - beta * A * shrink * (own - B)
        w = own.mean()
    return float(w)


@pytest.mark.parametrize("hyper", [("fo", 1e-3), ("hf", 1e-4), ("hf", 1.0), ("hf", 1e3), ("exact", 1e-3)], ids=str)
def test_quadratics_by_hand_and_for_every_delta(hyper):
    variant, delta = hyper
    method = PerFedAvg(variant, alpha=0.1, beta=0.07, delta=delta)
    found = checks.on_quadratics(
        method, rounds=5, steps=7
    )  # 3 steps of two batches, 2 of three; one batch is left over
    expected = by_hand(variant, 0.1, 0.07, 5, 3 if variant == "fo" else 2)
    assert float(found.server["model"]["head.weight"]) == pytest.approx(expected, abs=1e-10)
    for i, point in enumerate(checks.points(found)):
        assert point == pytest.approx(expected - 0.1 * float(A[i] * (expected - B[i])), abs=1e-10)


def test_it_comes_to_rest_where_the_mean_loss_after_a_step_is_least():
    weight = A * (1 - 0.1 * A) ** 2
    best = float((weight * B).sum() / weight.sum())
    for variant in ("hf", "exact"):
        found = checks.on_quadratics(PerFedAvg(variant, alpha=0.1, beta=0.1), rounds=300, steps=3)
        assert float(found.server["model"]["head.weight"]) == pytest.approx(best, abs=1e-9)
    fedavg = checks.on_quadratics(FedAvg(), rounds=300, steps=1)
    assert abs(float(fedavg.server["model"]["head.weight"]) - best) > 0.1


# what public code gets wrong


@pytest.mark.parametrize(("variant", "passes"), [("fo", 3.0), ("hf", 4.0), ("exact", 4.0)])
def test_a_client_trains_once_in_a_round(variant, passes):
    """PFLlib calls `train` twice. Six batches: three steps of two gradients, or two of four."""
    found = done(PerFedAvg(variant), sizes=(8,) * 8, epochs=3)
    assert [r["gradient_passes"] for r in found.rounds] == [0.0, *[pytest.approx(passes)] * 4]


@EVERY
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_clients_smaller_than_two_batches_train(size, variant):
    """PFLlib leaves them out, or fails; FL-bench takes no step where an epoch has one batch."""
    found = done(PerFedAvg(variant), sizes=(size,) * 3, ratio=((2,),), rounds=1, epochs=1)
    assert moved(found.server["model"], found.context.net.weights) > 1e-5


@IMAGES
def test_prediction_is_after_one_step_on_one_batch_of_a_copy(images):
    """Neither without adaptation, nor after an epoch of it, nor with a shared model that adaptation has moved."""
    found = done(PerFedAvg(), images=images)
    unseen = done(PerFedAvg(), images=images, evaluate_every=4)
    assert found.server["model"].equals(unseen.server["model"])
    module, net = found.run.module().double(), found.context.net
    for i in EVERYONE:
        module.load_state_dict(dict(found.server["model"]), strict=False)
        module.train()
        x, y = found.context.shards.part("train", i)
        batch = orders.batches(len(y), 4, 3, 4, i, 8, 0)[0]
        sgd = torch.optim.SGD(module.parameters(), found.context.rate(4), weight_decay=0.01)
        sgd.zero_grad()
        nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
        sgd.step()
        after = {k: v for k, v in module.state_dict().items() if k in net.weights}
        assert moved(found.personal(i), Tree(after)) < 1e-12
        assert moved(found.personal(i), found.server["model"]) > 1e-3


@EVERY
def test_statistics_of_normalisation_follow_the_adapted_model_alone(variant):
    """PFLlib restores the parameters after the inner step, not the statistics."""
    fields = {"sizes": (12,), "ratio": 1.0, "rounds": 1, "epochs": 1, "images": True, "weight_decay": 0.0}
    found = done(PerFedAvg(variant, alpha=0.4, beta=0.3), **fields)
    module = found.run.module().double()
    x, y = found.context.shards.part("train", 0)
    first, second, *_ = orders.batches(12, 4, 3, 0, 0, 0, 0)
    module.train()
    statistics = {k: v.clone() for k, v in module.named_buffers()}
    nn.functional.cross_entropy(module(x[first]), y[first]).backward()
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.4 * p.grad
        for k, v in module.named_buffers():
            v.copy_(statistics[k])
        module(x[second])
    kept = [k for k in found.server["model"] if k in found.context.net.buffers]
    assert kept
    for k in kept:
        torch.testing.assert_close(found.server["model"][k], module.get_buffer(k), rtol=0, atol=1e-12)
        assert float((module.get_buffer(k) - statistics[k]).abs().max()) > 1e-4


def test_both_sides_of_the_difference_see_the_same_dropout():
    """With other masks on either side it would grow as 1/delta."""
    tanh = Network(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.5)), nn.Linear(9, 3))
    fields = {"network": tanh, "network_options": {}}
    one, two, plain = (
        done(PerFedAvg("hf", alpha=0.5, beta=0.3, delta=d), **f)
        for d, f in ((1e-6, fields), (1e-3, fields), (1e-6, fields | {"seed": 4}))
    )
    assert moved(one.server["model"], two.server["model"]) < 1e-5
    assert moved(one.server["model"], plain.server["model"]) > 1e-3


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_clients_count_alike_or_by_samples(weights):
    method = PerFedAvg(beta=0.3, weights=weights)
    whole = done(method, ratio=1.0, rounds=1).server["model"]
    alone = [done(method, ratio=((i,),), rounds=1).server["model"] for i in EVERYONE]
    share = [1 / len(SIZES) if weights == "uniform" else n / sum(SIZES) for n in SIZES]
    mean = sum(p * w for p, w in zip(share, alone, strict=True))
    assert moved(whole, mean) < 1e-12


def test_the_rates_are_the_round_s_and_a_tenth_of_it_unless_given():
    free, given = (done(m, schedule="constant") for m in (PerFedAvg(), PerFedAvg(alpha=0.1, beta=0.1 * 0.1)))
    assert free.server["model"].equals(given.server["model"])
    assert all(free.personal(i).equals(given.personal(i)) for i in EVERYONE)
    falling, held = (done(m) for m in (PerFedAvg(), PerFedAvg(alpha=0.1, beta=0.1 * 0.1)))
    assert moved(falling.server["model"], held.server["model"]) > 1e-5
    swapped = done(PerFedAvg(alpha=0.01, beta=0.1), schedule="constant")
    assert moved(free.server["model"], swapped.server["model"]) > 1e-2


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"momentum": 0.5}, "found momentum"),
        ({"optimizer": "adam"}, "found adam"),
        ({"clip": 1.0}, "found clipping"),
        ({"momentum": 0.5, "clip": 1.0}, "found momentum and clipping"),
    ],
    ids=str,
)
def test_a_step_that_is_not_plain_sgd_is_refused(fields, found):
    with pytest.raises(UsageError, match=f"a step of plain SGD; {found}. Set momentum=0, no clip, optimizer sgd."):
        done(PerFedAvg(), **fields)


# the rest


@EVERY
def test_bytes_of_a_round_are_fedavg_s(variant):
    found, fedavg = done(PerFedAvg(variant)), done(FedAvg())
    for one, two in zip(found.rounds, fedavg.rounds, strict=True):
        assert (one["bytes_down"], one["bytes_up"]) == (two["bytes_down"], two["bytes_up"])


@pytest.mark.parametrize(
    ("hyper", "sentence"),
    [
        ({"variant": "so"}, "PerFedAvg.variant must be one of fo, hf, exact; found 'so'."),
        ({"weights": "all"}, "PerFedAvg.weights must be one of uniform, samples; found 'all'."),
        ({"alpha": -0.1}, "PerFedAvg.alpha must be at least 0, or none; found -0.1."),
        ({"beta": -1.0}, "PerFedAvg.beta must be at least 0, or none; found -1.0."),
        ({"delta": 0.0}, "PerFedAvg.delta must be above 0; found 0.0."),
        ({"delta": -1.0}, "PerFedAvg.delta must be above 0; found -1.0."),
    ],
    ids=str,
)
def test_impossible_values_are_refused(hyper, sentence):
    with pytest.raises(UsageError) as error:
        PerFedAvg(**hyper)
    assert str(error.value) == sentence


def test_defaults():
    assert PerFedAvg() == PerFedAvg(variant="fo", alpha=None, beta=None, delta=1e-3, weights="uniform")
