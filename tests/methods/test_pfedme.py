"""pFedMe: its reference, plain SGD and the Moreau envelope as what it becomes, whose model is whose, FedLAG around it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from checks import on_quadratics, points
from harness import SIZES, agree, experiment, moved, run, world
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.pfedme import PFedMe
from idiolect.tree import Tree
from idiolect.wrap.fedlag import FedLAG
from reference import pfedme as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
PLAIN = {"momentum": 0.0, "lr": 0.05}


def of(method, **fields):
    return run(experiment(method, **(PLAIN | fields)))


def replied(method, i=0, down=None, mine=None, **fields):
    """A client's reply in the first round, by what it received and what it had."""
    context = experiment(method, **(PLAIN | fields)).context()
    state = context.state
    return context, context.do(Job("local", i, 0, 0, down or state.server, mine or state.client))


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"lam": 5.0, "inner_steps": 3, "personal_lr": 0.05, "beta": 0.7},
        {"weights": "samples", "beta": 2.0, "inner_steps": 1},
        {"lam": 0.0, "weights": "samples"},
    ],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = of(PFedMe(**hyper), images=images)
    agree(found, reference.run(world(found.run), **hyper))


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = of(PFedMe(), sizes=sizes)
    agree(found, reference.run(world(found.run)))


# what it becomes


@IMAGES
def test_of_one_inner_step_and_lr_times_lam_1_it_is_fedavg_with_the_personal_rate(images):
    """w lands on theta in every iteration, and theta's next step starts there."""
    fields = {"images": images, "schedule": "constant"}
    one = {"lam": 10.0, "inner_steps": 1, "personal_lr": 0.04, "weights": "samples"}
    fedavg = of(FedAvg(), lr=0.04, **fields)
    found, two, slow = (
        of(PFedMe(**(one | other)), lr=0.1, **fields) for other in ({}, {"inner_steps": 2}, {"lam": 5.0})
    )
    assert moved(found.server["model"], fedavg.server["model"]) < 1e-10
    assert moved(two.server["model"], fedavg.server["model"]) > 1e-3
    assert moved(slow.server["model"], fedavg.server["model"]) > 1e-3


@pytest.mark.parametrize("still", [{"beta": 0.0}, {"lam": 0.0}, {"personal_lr": 0.0}], ids=str)
def test_w_stays_to_the_bit_without_beta_without_lam_or_where_theta_stays(still):
    found = of(PFedMe(**still))
    assert found.server["model"].equals(found.context.net.weights)
    assert of(PFedMe(), lr=0.0).server["model"].equals(found.context.net.weights)
    if still != {"personal_lr": 0.0}:
        assert max(moved(found.personal(i), found.context.net.weights) for i in EVERYONE) > 1e-3


def test_without_lam_theta_is_the_received_model_trained_alone():
    fields = {"rounds": 1, "ratio": ((2,),)}
    found = of(PFedMe(lam=0.0, inner_steps=1, personal_lr=0.04), **fields)
    assert moved(found.personal(2), of(FedAvg(), lr=0.04, **fields).server["model"]) < 1e-12
    held = of(PFedMe(inner_steps=1, personal_lr=0.04), **fields)
    assert moved(held.personal(2), found.personal(2)) > 1e-3


def test_the_larger_lam_the_nearer_is_theta_to_w():
    fields = {"rounds": 1, "ratio": ((0,),), "epochs": 10, "lr": 0.01}
    runs = [of(PFedMe(lam=lam, personal_lr=0.02), **fields) for lam in (0.0, 5.0, 40.0)]
    far = [float((r.personal(0) - r.server["model"]).norm()) for r in runs]
    assert far[0] > 1.5 * far[1] > 3 * far[2] > 0


@pytest.mark.parametrize("lam", [0.5, 3.0])
def test_w_minimises_the_mean_of_the_moreau_envelopes_and_theta_is_its_proximal_point(lam):
    """Of a/2 (w - b)^2: the envelope is s/2 (w - b)^2 with s = lam a / (lam + a), the proximal point (a b + lam w) /
    (a + lam)."""
    a, b = (4.0, 1.0), (1.0, -1.0)
    found = on_quadratics(PFedMe(lam=lam, inner_steps=150, personal_lr=0.1), rounds=200, steps=1, lr=0.3, a=a, b=b)
    s = [lam * ai / (lam + ai) for ai in a]
    w = sum(si * bi for si, bi in zip(s, b, strict=True)) / sum(s)
    assert float(found.server["model"]["head.weight"]) == pytest.approx(w, abs=1e-8)
    assert points(found) == pytest.approx(
        [(ai * bi + lam * w) / (ai + lam) for ai, bi in zip(a, b, strict=True)], abs=1e-8
    )


# a step


def drawn(seed=0):
    """A task, theta and w apart from each other, and a batch."""
    context = experiment(PFedMe(), **PLAIN).context()
    draw = torch.Generator().manual_seed(seed)
    theta, w = (
        context.net.weights.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype)) for _ in range(2)
    )
    return context.task, theta, w, Batch(*context.shards.part("train", 0))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_an_inner_step_is_down_the_gradient_of_its_objective_by_finite_differences(decay):
    task, theta, w, batch = drawn()
    method = PFedMe(lam=3.0, inner_steps=1, personal_lr=0.01)

    def objective(v: Tree) -> float:
        return float(task.loss(v, batch) + 1.5 * (v - w).dot(v - w) + decay / 2 * v.dot(v))

    after = method.iterate(task, theta | w.prefixed("w"), batch, 0.05, decay)
    for name, value in theta.items():
        for k in range(min(value.numel(), 4)):
            bump = torch.zeros_like(value)
            bump.view(-1)[k] = 1e-5
            slope = (objective(theta | {name: value + bump}) - objective(theta | {name: value - bump})) / 2e-5
            step = float((value - after[name]).view(-1)[k]) / method.personal_lr
            assert step == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_w_goes_a_step_towards_theta_as_it_is_then():
    task, theta, w, batch = drawn(1)
    after = PFedMe(lam=4.0).iterate(task, theta | w.prefixed("w"), batch, 0.05, 0.0)
    assert moved(after.under("w"), w.lerp(after.pick(w), 0.2)) < 1e-14
    assert moved(after.pick(w), theta) > 1e-3


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_inner_steps_share_a_batch_and_w_waits_for_the_last(steps):
    task, theta, w, batch = drawn(2)
    found = PFedMe(inner_steps=steps).iterate(task, theta | w.prefixed("w"), batch, 0.02, 0.0)
    by_hand = theta
    for _ in range(steps):
        by_hand = PFedMe(inner_steps=1).iterate(task, by_hand | w.prefixed("w"), batch, 0.02, 0.0).pick(w)
    assert found.pick(w).equals(by_hand)
    assert moved(found.under("w"), w - 0.02 * 15 * (w - by_hand)) < 1e-14


def test_theta_has_no_weight_decay_of_its_own():
    """Public code: 1e-3, which is nobody's field. One batch, one step, by hand."""
    fields = {"weight_decay": 0.0, "epochs": 1, "batch_size": 64}
    context, reply = replied(PFedMe(inner_steps=1, personal_lr=0.1), **fields)
    w, (x, y) = context.net.weights, context.shards.part("train", 0)
    leaves = w.map(lambda v: v.clone().requires_grad_())
    loss = torch.nn.functional.cross_entropy(torch.func.functional_call(context.net.module, dict(leaves), (x,)), y)
    grads = Tree(zip(w, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert moved(reply.mine["model"], w - 0.1 * grads) < 1e-14


def test_the_run_s_rate_is_w_s_alone():
    """Public code: theta's is what decays."""
    fields = {"epochs": 1, "batch_size": 64}
    slow, fast = (replied(PFedMe(), lr=lr, **fields)[1] for lr in (0.01, 0.05))
    assert slow.mine["model"].equals(fast.mine["model"])
    start = experiment(PFedMe(), **PLAIN).context().net.weights
    assert moved((slow.up.mean["model"] - start) * 5, fast.up.mean["model"] - start) < 1e-12


# whose model is whose


def test_by_default_the_shared_model_moves():
    """Public code: beta is 0 by default, and w stays what it was for ever."""
    found = of(PFedMe())
    assert moved(found.server["model"], found.context.net.weights) > 1e-3
    half, whole, far = (of(PFedMe(beta=b), rounds=1) for b in (0.5, 1.0, 2.0))
    start = found.context.net.weights
    step = whole.server["model"] - start
    assert moved(half.server["model"] - start, 0.5 * step) < 1e-12
    assert moved(far.server["model"] - start, 2.0 * step) < 1e-12


@IMAGES
def test_the_personal_model_is_neither_the_shared_one_nor_w_nor_the_initial_one(images):
    """Public code: the list of theta's tensors is the live model's, so that w, or what is received next, is evaluated."""
    found = of(PFedMe(), images=images, ratio=((0, 2),), rounds=2)
    for i in (0, 2):
        theta = found.personal(i)
        w = replied(PFedMe(), i, found.server, found.private(i), images=images)[1].up.mean["model"]
        for other in (found.server["model"], w, found.context.net.weights):
            assert moved(theta.drop(found.context.net.buffers), other) > 1e-4
    assert found.personal(5).equals(found.context.net.weights)


@IMAGES
def test_a_client_that_is_away_keeps_its_theta(images):
    fields = {"images": images, "ratio": ((0, 2), (4, 5), (2, 4))}
    first, last = (of(PFedMe(), rounds=r, **fields) for r in (1, 3))
    assert last.personal(0).equals(first.personal(0))
    assert moved(last.personal(2), first.personal(2)) > 1e-4
    assert moved(last.server["model"], first.server["model"]) > 1e-4


def test_theta_starts_at_the_received_model_not_where_it_was():
    context, one = replied(PFedMe())
    other = {"model": context.net.weights.map(lambda v: v + 3.0)}
    two = replied(PFedMe(), mine=other)[1]
    assert two.mine["model"].equals(one.mine["model"])
    assert two.up.mean["model"].equals(one.up.mean["model"])
    assert not replied(PFedMe(), down=other)[1].mine["model"].equals(one.mine["model"])


def test_a_client_s_theta_does_not_follow_what_happens_to_its_reply():
    """Neither shares memory with the other."""
    _, reply = replied(PFedMe())
    kept = reply.mine["model"].clone()
    for v in reply.up.mean["model"].values():
        v.add_(1.0)
    assert reply.mine["model"].equals(kept)


def test_participants_alone_train():
    """The authors' code trains everybody and then draws whose w count."""
    found = of(PFedMe(), ratio=((0, 2),))
    assert all(found.private(i)["model"].equals(found.context.net.weights) for i in EVERYONE if i not in (0, 2))


def test_normalisation_statistics_are_theta_s_and_are_averaged_without_beta():
    found = of(PFedMe(beta=0.0), images=True, rounds=1, ratio=((2,),))
    buffers = found.context.net.buffers
    assert found.server["model"].pick(buffers).equals(found.personal(2).pick(buffers))
    assert moved(found.server["model"].pick(buffers), found.context.net.weights) > 1e-3
    assert found.server["model"].drop(buffers).equals(found.context.net.trainable)


def test_clients_count_alike_unless_samples_are_asked_for():
    fields = {"rounds": 1, "ratio": ((0, 3),)}
    alone = [of(PFedMe(), rounds=1, ratio=((i,),)).server["model"] for i in (0, 3)]
    share = SIZES[3] / (SIZES[0] + SIZES[3])
    assert moved(of(PFedMe(), **fields).server["model"], alone[0].lerp(alone[1], 0.5)) < 1e-12
    assert moved(of(PFedMe(weights="samples"), **fields).server["model"], alone[0].lerp(alone[1], share)) < 1e-12


# FedLAG around it

DEEP = {"network_options": {"hidden": (6, 5, 4)}}


@IMAGES
def test_without_layers_fedlag_around_it_is_it_to_the_bit(images):
    fields = {"images": images} | ({} if images else DEEP)
    found, plain = (of(m, **fields) for m in (FedLAG(PFedMe(), top_k=0, warmup=0), PFedMe()))
    assert found.server["model"].equals(plain.server["model"])
    for i in EVERYONE:
        assert found.personal(i).equals(plain.personal(i))
        assert found.private(i)["model"].equals(plain.private(i)["model"])
    for a, b in zip(found.rounds, plain.rounds, strict=True):
        assert {k: v for k, v in a.items() if "seconds" not in k} == {k: v for k, v in b.items() if "seconds" not in k}
    assert any(n["conflicts"].flat().any() for n in found.notes)


@IMAGES
def test_fedlag_around_it_keeps_layers_and_changes_both_models(images):
    fields = {"images": images} | ({} if images else DEEP)
    lag = FedLAG(PFedMe(), top_k=2, warmup=1, threshold=0.0)
    found, plain = (of(m, **fields) for m in (lag, PFedMe()))
    assert found.run.method.name == "pfedme+fedlag"
    assert any(n["personal"].flat().any() for n in found.notes)
    assert moved(found.server["model"], plain.server["model"]) > 1e-5
    assert max(moved(found.personal(i), plain.personal(i)) for i in EVERYONE) > 1e-5
    assert sum(r["bytes_down"] for r in found.rounds) < sum(r["bytes_down"] for r in plain.rounds)
    for i in EVERYONE:  # a client predicts with theta, whatever layers are its own
        assert found.personal(i).equals(found.private(i)["model"])


# the rest


@pytest.mark.parametrize("steps", [1, 5])
def test_bytes_and_passes_of_a_round(steps):
    found = of(PFedMe(inner_steps=steps))
    for row in found.rounds[1:]:
        assert row["bytes_down"] == row["bytes_up"] == 5 * found.context.net.weights.nbytes
        assert row["gradient_passes"] == pytest.approx(2 * steps)


@pytest.mark.parametrize(
    "hyper",
    [
        {"lam": -1.0},
        {"inner_steps": 0},
        {"personal_lr": -0.1},
        {"beta": -1.0},
        {"beta": float("nan")},
        {"weights": "n"},
    ],
    ids=str,
)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"PFedMe.{next(iter(hyper))} must be"):
        PFedMe(**hyper)


@pytest.mark.parametrize("field", [{"momentum": 0.5}, {"clip": 1.0}, {"optimizer": "adam"}], ids=str)
def test_other_steps_than_plain_ones_are_refused(field):
    with pytest.raises(UsageError, match=r"found (momentum|clipping|adam)\. Set"):
        experiment(PFedMe(), **(PLAIN | field))


def test_rates_that_drive_the_models_apart_are_refused():
    fits = partial(experiment, **PLAIN)
    for hyper, fields in (({"lam": 40.0}, {}), ({"personal_lr": 0.2}, {}), ({}, {"lr": 0.2})):
        with pytest.raises(UsageError, match=r"needs lr \* lam"):
            experiment(PFedMe(**hyper), **(PLAIN | fields))
    assert fits(PFedMe(lam=39.0)).method.lam == 39.0


def test_defaults_are_no_limit():
    assert PFedMe() == PFedMe(lam=15.0, inner_steps=5, personal_lr=0.01, beta=1.0, weights="uniform")
