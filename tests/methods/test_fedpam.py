"""FedPAM: its reference, FedAvg as its limit, the contrastive loss and its gradient, masks, odd clients."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect.errors import UsageError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedpam import FedPAM, unit
from idiolect.nets import Network
from idiolect.task import Batch
from idiolect.tree import Tree
from reference import fedpam as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"lam": 2.0, "tau": 0.2}, {"pam": False, "lam": 3.0}, {"contrast": False}, {"pam": False, "contrast": False}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedPAM(**hyper), images=images))
    agree(found, reference.run(world(found.run), **hyper))


@IMAGES
@pytest.mark.parametrize("capacity", [3, 8])
def test_a_capacity_is_a_network_with_one_more_layer(capacity, images):
    """The reference on a network whose body ends in the added layer."""
    found = run(experiment(FedPAM(lam=2.0, capacity=capacity), images=images))
    initial, net = found.context.state.server["model"], found.context.net

    def layer(name: str) -> nn.Linear:
        made = nn.Linear(*reversed(initial[f"{name}.weight"].shape)).double()
        made.load_state_dict(dict(initial.under(name)))
        return made

    def module() -> Network:
        plain = found.run.module()
        body = OrderedDict(plain.body.named_children(), capacity=layer("capacity"))
        return Network(nn.Sequential(body), layer("classifier"))

    def named(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.replace("body.capacity", "capacity").replace("head", "classifier"): v for k, v in state.items()}

    expected = reference.run(dataclasses.replace(world(found.run), module=module), lam=2.0)
    agree(found, dataclasses.replace(expected, server=named(expected.server), clients=[*map(named, expected.clients)]))
    size, d = net.weights.drop(net.head).size, net.features
    sent = 8 * (size + capacity * (d + 1) + 3 * (capacity + 1))
    assert all(row["bytes_down"] == row["bytes_up"] == 5 * sent for row in found.rounds[1:])


def test_the_features_own_width_is_no_capacity():
    found, plain = (run(experiment(FedPAM(capacity=m))) for m in (5, None))
    assert found.server["model"].equals(plain.server["model"])


# FedAvg as its limit


@IMAGES
@pytest.mark.parametrize("pam", [False, True])
def test_without_its_weight_the_shared_model_is_fedavg_s_to_the_bit(pam, images):
    found = run(experiment(FedPAM(lam=0.0, pam=pam), images=images))
    fedavg = run(experiment(FedAvg(), images=images))
    assert found.server["model"].equals(fedavg.server["model"])
    contrasted = run(experiment(FedPAM(lam=1.0, pam=pam), images=images))
    assert moved(contrasted.server["model"], fedavg.server["model"]) > 1e-3


@IMAGES
def test_with_the_identity_a_client_predicts_with_the_shared_head_without_bias(images):
    found = run(experiment(FedPAM(lam=0.0, pam=False), images=images))
    task, x = found.context.task, found.context.shards.part("test", 0)[0]
    for i in EVERYONE:
        w = found.personal(i)
        expected = task.logits(w, x) - w["head.bias"]
        torch.testing.assert_close(found.run.method.logits(task, w, x), expected, rtol=0, atol=1e-12)


def test_the_matrix_moves_and_stays_with_its_client():
    found = run(experiment(FedPAM(), ratio=[[0, 1, 2, 4, 5]] * 4, weight_decay=0.0))
    identity = torch.eye(5, dtype=torch.float64)
    assert set(found.server) == {"model"}
    assert set(found.server["model"]) == set(found.context.net.weights)
    for i in (3, 6, 7):
        assert torch.equal(found.private(i)["adjust"]["adjust"], identity)
    matrices = [found.private(i)["adjust"]["adjust"] for i in (0, 1, 2, 4, 5)]
    assert all(float((p - identity).abs().max()) > 1e-3 for p in matrices)
    assert all(float((p - matrices[0]).abs().max()) > 1e-3 for p in matrices[1:])


def test_without_pam_the_matrix_is_not_even_decayed():
    found = run(experiment(FedPAM(pam=False)))
    assert all(torch.equal(found.private(i)["adjust"]["adjust"], torch.eye(5, dtype=torch.float64)) for i in EVERYONE)


def test_bytes_and_passes_are_fedavg_s():
    found, fedavg = (run(experiment(m)) for m in (FedPAM(), FedAvg()))
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert all(a[k] == b[k] for k in ("bytes_down", "bytes_up", "gradient_passes"))


# the contrastive loss


def drawn(labels: list[int], classes: int = 4, width: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(len(labels), width, generator=draw, dtype=torch.float64)
    anchors = torch.randn(classes, width, generator=draw, dtype=torch.float64)
    return z, anchors, torch.tensor(labels)


LABELS = pytest.mark.parametrize(
    "labels", [[0, 1, 2, 0, 1], [0, 0, 0], [2], [0, 3]], ids=["mixed", "one class", "one sample", "absent classes"]
)


@LABELS
@pytest.mark.parametrize("tau", [0.5, 0.07])
def test_contrast_sample_by_sample(labels, tau):
    z, anchors, y = drawn(labels)
    zn, wn = z / z.norm(dim=1, keepdim=True), anchors / anchors.norm(dim=1, keepdim=True)
    values = []
    for i in range(len(y)):
        classes = sum(torch.exp(zn[i] @ w / tau) for w in wn)
        samples = sum(torch.exp(zn[i] @ zn[j] / tau) for j in range(len(y)) if y[j] != y[i])
        values.append(-torch.log(torch.exp(zn[i] @ wn[y[i]] / tau) / (classes + samples)))
    found = FedPAM(tau=tau).contrastive(z, anchors, Batch(None, y))
    torch.testing.assert_close(found, torch.stack(values).mean(), rtol=1e-12, atol=0)


@LABELS
def test_gradient_of_the_contrast_against_finite_differences(labels):
    z, anchors, y = drawn(labels, seed=1)
    assert torch.autograd.gradcheck(
        lambda z, w: FedPAM().contrastive(z, w, Batch(None, y)), [z.requires_grad_(), anchors.requires_grad_()]
    )


@LABELS
def test_gradient_of_the_contrast_by_hand(labels):
    z, anchors, y = drawn(labels, seed=2)
    tau, b = 0.5, len(labels)
    zn, wn = unit(z), unit(anchors)
    to_class = torch.exp(zn @ wn.T / tau)
    to_batch = torch.exp(zn @ zn.T / tau) * (y[:, None] != y)
    total = to_class.sum(1, keepdim=True) + to_batch.sum(1, keepdim=True)
    p = to_class / total - functional.one_hot(y, 4)  # how much each class attracts or repels each sample. [B, C]
    q = to_batch / total  # and each sample each other. [B, B]
    by_anchor, by_feature = p.T @ zn / (b * tau), (p @ wn + (q + q.T) @ zn) / (b * tau)

    def through_norm(g: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return (g - n * (g * n).sum(1, keepdim=True)) / v.norm(dim=1, keepdim=True)

    leaves = [z.requires_grad_(), anchors.requires_grad_()]
    found = torch.autograd.grad(FedPAM(tau=tau).contrastive(*leaves, Batch(None, y)), leaves)
    torch.testing.assert_close(found[0], through_norm(by_feature, z, zn), rtol=0, atol=1e-14)
    torch.testing.assert_close(found[1], through_norm(by_anchor, anchors, wn), rtol=0, atol=1e-14)


def test_padding_is_neither_anchor_nor_negative():
    z, anchors, y = drawn([0, 1, 2, 0, 3, 1])
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    leaves = [z.requires_grad_(), anchors.requires_grad_()]
    masked = FedPAM().contrastive(*leaves, Batch(None, y, mask))
    real = FedPAM().contrastive(z[:4], anchors, Batch(None, y[:4]))
    torch.testing.assert_close(masked, real, rtol=1e-14, atol=0)
    found, expected = torch.autograd.grad(masked, leaves), torch.autograd.grad(real, leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)
    assert bool((found[0][4:] == 0).all())


def test_the_contrast_does_not_know_lengths():
    z, anchors, y = drawn([0, 1, 2, 0])
    value = FedPAM().contrastive(z, anchors, Batch(None, y))
    longer = FedPAM().contrastive(7 * z, anchors * torch.tensor([[2.0], [0.1], [5], [1]]), Batch(None, y))
    torch.testing.assert_close(value, longer, rtol=1e-13, atol=0)


def test_the_contrast_s_gradient_falls_as_features_grow():
    """Alone it cannot diverge; what blows up where the rate is too high is the cross-entropy of long features."""
    z, anchors, y = drawn([0, 1, 2, 0])
    grads = []
    for length in (1.0, 100.0, 1e12):
        leaf = (length * z).requires_grad_()
        grads.append(torch.autograd.grad(FedPAM().contrastive(leaf, anchors, Batch(None, y)), leaf)[0] * length)
    for g in grads[1:]:
        torch.testing.assert_close(g, grads[0], rtol=1e-9, atol=1e-12)


def test_the_loss_s_gradient_is_the_cross_entropy_s_and_lam_times_the_contrast_s():
    task = experiment(FedPAM()).context().task
    draw = torch.Generator().manual_seed(3)
    w = (task.net.weights | Tree({"adjust": torch.empty(5, 5, dtype=torch.float64)})).map(
        lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype).requires_grad_()
    )
    batch = Batch(torch.randn(6, 6, generator=draw, dtype=torch.float64), torch.tensor([0, 2, 1, 0, 1, 1]))
    whole, alone = (
        torch.autograd.grad(
            FedPAM(lam=lam).loss(task, w, batch), list(w.values()), allow_unused=True, materialize_grads=True
        )
        for lam in (30.0, 0.0)
    )
    z, _, anchors = FedPAM().parts(task, w, batch.x)
    contrast = FedPAM().contrastive(z, anchors, batch)
    extra = torch.autograd.grad(contrast, list(w.values()), allow_unused=True, materialize_grads=True)
    for a, b, c in zip(whole, alone, extra, strict=True):
        torch.testing.assert_close(a, b + 30 * c, rtol=0, atol=1e-12)
    module = nn.Linear(5, 3).double()
    module.load_state_dict({k: w[f"head.{k}"].detach() for k in ("weight", "bias")})
    by_torch = functional.cross_entropy(module(task.features(w, batch.x)), batch.y)  # a mean over the batch
    torch.testing.assert_close(FedPAM(lam=0.0).loss(task, w, batch), by_torch, rtol=0, atol=1e-12)


@pytest.mark.parametrize("hyper", [{}, {"contrast": False}, {"capacity": 3}, {"lam": 2.0, "tau": 0.2}], ids=str)
def test_gradient_of_the_loss_against_finite_differences(hyper):
    method = FedPAM(**hyper)
    context = experiment(method).context()
    draw = torch.Generator().manual_seed(4)
    w = context.state.server["model"] | context.state.client["adjust"]
    w = w.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype))
    batch = Batch(torch.randn(5, 6, generator=draw, dtype=torch.float64), torch.tensor([0, 2, 1, 0, 1]))

    def loss(*values: Tensor) -> Tensor:
        return method.loss(context.task, Tree(zip(w, values, strict=True)), batch)

    assert torch.autograd.gradcheck(loss, [v.requires_grad_() for v in w.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_features_and_small_temperatures_stay_finite(dtype):
    z, anchors, y = drawn([0, 1, 2, 0])
    z[1], z[3], anchors[2] = 0, 0, 0
    leaves = [z.to(dtype).requires_grad_(), anchors.to(dtype).requires_grad_()]
    value = FedPAM(tau=1e-3).contrastive(*leaves, Batch(None, y))
    assert bool(value.isfinite())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(value, leaves))


def test_gradient_of_the_matrix_is_the_head_s_transposed_times_the_anchors():
    task = experiment(FedPAM()).context().task
    draw = torch.Generator().manual_seed(0)
    w = (task.net.weights | Tree({"adjust": torch.empty(5, 5, dtype=torch.float64)})).map(
        lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype)
    )
    batch = Batch(torch.randn(4, 6, generator=draw, dtype=torch.float64), torch.tensor([0, 2, 1, 0]))
    p = w["adjust"].requires_grad_()
    (found,) = torch.autograd.grad(FedPAM(lam=3.0).loss(task, w, batch), p)
    z, anchors = task.features(w, batch.x), (w["head.weight"] @ p).detach().requires_grad_()
    (by_anchor,) = torch.autograd.grad(3.0 * FedPAM().contrastive(z, anchors, batch), anchors)
    torch.testing.assert_close(found, w["head.weight"].T @ by_anchor, rtol=0, atol=1e-13)


# prediction


@pytest.mark.parametrize("capacity", [None, 3])
def test_inference(capacity):
    adjusted, cosine = FedPAM(capacity=capacity), FedPAM(capacity=capacity, inference="cosine", tau=0.25)
    found = run(experiment(adjusted, rounds=2))
    task, x, w = found.context.task, found.context.shards.part("test", 0)[0], found.personal(0)
    z, head = task.features(w, x), "head"
    if capacity:
        z, head = z @ w["capacity.weight"].T + w["capacity.bias"], "classifier"
    expected = torch.stack([(w[f"{head}.weight"] @ w["adjust"]) @ row for row in z])
    torch.testing.assert_close(adjusted.logits(task, w, x), expected)
    lengths = z.norm(dim=1)[:, None] * (w[f"{head}.weight"] @ w["adjust"]).norm(dim=1)
    by_length = expected / lengths.clamp(min=1e-8)  # some features are all zero
    torch.testing.assert_close(cosine.logits(task, w, x), by_length / 0.25)


def test_cosine_needs_no_temperature_to_choose_and_is_not_the_adjusted_head():
    found = run(experiment(FedPAM(), rounds=2))
    task, w = found.context.task, found.personal(0)
    x = torch.cat([found.context.shards.part("test", i)[0] for i in EVERYONE])
    one, two, adjusted = (
        m.logits(task, w, x).argmax(1)
        for m in (FedPAM(inference="cosine"), FedPAM(inference="cosine", tau=7.0), FedPAM())
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, adjusted)


def test_inference_changes_prediction_alone():
    a, b = (run(experiment(FedPAM(inference=how))) for how in ("adjusted", "cosine"))
    assert a.server["model"].equals(b.server["model"])
    assert all(a.personal(i).equals(b.personal(i)) for i in EVERYONE)
    assert [r["received_loss"] for r in a.rounds] != [r["received_loss"] for r in b.rounds]


@pytest.mark.parametrize("hyper", [{"inference": "cosinus"}, {"tau": 0.0}, {"capacity": 0}, {"lam": -1.0}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedPAM.{next(iter(hyper))} must be"):
        FedPAM(**hyper)


# odd clients


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(FedPAM(), sizes=sizes))
    agree(found, reference.run(world(found.run)))
    images = run(experiment(FedPAM(), sizes=sizes, images=True, lr=0.005))
    assert all(bool(v.isfinite().all()) for i in range(len(sizes)) for v in images.personal(i).values())


def test_a_class_that_nobody_has():
    fed = federation()
    data = dataclasses.replace(fed.dataset, y=fed.dataset.y.clamp(max=1))
    found = run(experiment(FedPAM(), federation=dataclasses.replace(fed, dataset=data)))
    agree(found, reference.run(world(found.run)))


# where it runs


def test_workers_give_the_bits_of_the_serial_backend():
    serial, workers = (
        run(experiment(FedPAM(), images=True, backend=b, workers=w)) for b, w in (("serial", None), ("workers", 2))
    )
    assert serial.server["model"].equals(workers.server["model"])
    assert all(serial.personal(i).equals(workers.personal(i)) for i in EVERYONE)


@pytest.mark.parametrize("hyper", [{}, {"contrast": False}, {"capacity": 3}], ids=str)
def test_stacked_clients_agree_with_the_serial_backend(hyper):
    fields = {"dtype": "float32", "lr": 0.02}
    serial, stacked = (run(experiment(FedPAM(**hyper), backend=b, **fields)) for b in ("serial", "stacked"))
    assert moved(serial.server["model"], stacked.server["model"]) < 1e-5
    assert max(moved(serial.personal(i), stacked.personal(i)) for i in EVERYONE) < 1e-5


def test_defaults_are_the_paper_s():
    assert FedPAM() == FedPAM(lam=30.0, tau=0.5, pam=True, contrast=True, inference="adjusted", capacity=None)
