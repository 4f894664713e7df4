"""`me.train`: a plain PyTorch loop and nothing else, whatever is frozen, corrected, projected or reused."""

import copy

import pytest
import torch
from torch import nn

from harness import experiment, federation, moved
from idiolect import catalogue
from idiolect.client import Client
from idiolect.data import federate, from_arrays
from idiolect.data.sources import quadratics
from idiolect.engine import orders
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.nets import Network
from idiolect.optim import SGD, Adam
from idiolect.task import Features
from idiolect.tree import Tree

NETWORKS = {"mlp": {}, "convnet with BatchNorm": {"images": True}}
networks = pytest.mark.parametrize("fields", NETWORKS.values(), ids=NETWORKS)


def client(id=0, round=0, **fields):
    """`me` of one client, and the network's initial weights."""
    context = experiment("fedavg", **fields).context()
    return context.client(Job("local", id, round, 0, {}, {})), context.net.weights


def loaded(me, w):
    """A module of its own with these weights."""
    module = copy.deepcopy(me.task.net.module)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            value.copy_(w[name])
    return module


def looped(me, w, optimizer, *, modes=lambda m: m.train(), only="", epochs=2, order=0, lr=0.1):
    """What torch does."""
    module = loaded(me, w)
    modes(module)
    steps = optimizer([p for name, p in module.named_parameters() if name.startswith(only)])
    for epoch in range(epochs):
        for batch in orders.batches(me.n, 4, 3, me.round, me.id, order, epoch):
            steps.zero_grad()
            nn.functional.cross_entropy(module(me._x[batch]), me._y[batch]).backward()
            steps.step()
    return Tree({k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]})


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.5, weight_decay=0.01)


@networks
def test_training_is_a_plain_loop(fields):
    me, w = client(**fields)
    assert moved(me.train(w), looped(me, w, sgd)) < 1e-12


@networks
@pytest.mark.parametrize("part", ["head", "body"])
def test_a_frozen_part_is_constant_and_in_eval_mode(fields, part):
    me, w = client(**fields)
    found = me.train(w, only=getattr(me.task.net, part))

    def modes(module):
        module.eval()
        getattr(module, part).train()

    assert moved(found, looped(me, w, sgd, modes=modes, only=part)) < 1e-12
    frozen = w.drop(getattr(me.task.net, part))
    assert found.pick(frozen).equals(frozen)
    assert moved(found.drop(frozen), w.drop(frozen)) > 1e-3


def test_a_head_phase_moves_no_buffer_and_a_body_phase_does():
    me, w = client(images=True)
    buffers = me.task.net.buffers
    assert buffers
    plain = me.train(w, only=me.task.net.head)
    by_hand = me.train(w, only=me.task.net.head, loss=lambda task, w, batch: task.loss(w, batch))
    assert plain.pick(buffers).equals(w.pick(buffers))
    assert by_hand.pick(buffers).equals(w.pick(buffers))
    body = me.train(w, only=me.task.net.body)
    assert all(not torch.equal(body[k], w[k]) for k in buffers)


@networks
def test_features_of_a_frozen_body_are_computed_once_and_give_the_same_numbers(fields):
    me, w = client(**fields)
    calls = []
    for module in (me.task.live, me.task.still, me.task.moving):
        module.body.register_forward_hook(lambda *_: calls.append(1))
    once = me.train(w, only=me.task.net.head, epochs=3, order=0)
    assert len(calls) == 1
    again = me.train(w, only=me.task.net.head, epochs=3, order=0)
    assert len(calls) == 1  # remembered for the same body
    assert again.equals(once)
    plain = me.train(w, only=me.task.net.head, epochs=3, order=0, loss=lambda task, w, batch: task.loss(w, batch))
    assert len(calls) == 1 + 3 * 4  # 17 samples are four batches
    assert moved(once, plain) < 1e-12
    trained = me.train(once, order=1)
    calls.clear()
    me.train(trained, only=me.task.net.head)
    assert len(calls) == 1  # another body


def mixing(me, w):
    method = catalogue.build("fedala", {"first_epochs": 3})
    mix = method.init(me.task.net).client["mix"]
    return method.learn(me, w * 1.1, {"model": w, "mix": mix, "mixed": torch.zeros(1, dtype=torch.bool)})


def tuning(me, w):
    method = catalogue.build("fedavg+finetune", {"finetune.part": "head", "finetune.epochs": 3})
    return method.personal(me, {"model": w}, {})


def counted(phases):
    """What the phases make of the weights, and how often the body was run."""
    me, w = client(images=True, round=1)
    calls = []
    for module in (me.task.live, me.task.still, me.task.moving):
        module.body.register_forward_hook(lambda *_: calls.append(1))
    return phases(me, w), len(calls)


@pytest.mark.parametrize("phases", [mixing, tuning])
def test_methods_that_train_a_head_run_the_frozen_body_once(phases, monkeypatch):
    found, calls = counted(phases)
    assert calls == 1
    train = Client.train

    def plainly(me, w, loss=None, features=None, **how):
        return train(me, w, loss=loss or (lambda task, w, batch: task.loss(w, batch)), **how)

    monkeypatch.setattr(Client, "train", plainly)
    plain, calls = counted(phases)
    assert calls > 3
    assert moved(found, plain) < 1e-12


def test_a_loss_may_ask_for_features_of_a_body():
    me, w = client()
    seen = []

    def loss(task, w, batch):
        seen.append(isinstance(batch.x, Features))
        return task.loss(w, batch)

    found = me.train(w, only=me.task.net.head, loss=loss, features=w, order=0)
    assert all(seen)
    assert found.equals(me.train(w, only=me.task.net.head, order=0))


def test_a_correction_sees_what_is_trained_and_nothing_else():
    me, w = client()
    head, seen = me.task.net.head, []

    def steer(g, now, anchor, number):
        seen.append((list(g), list(now), list(anchor), number, now.clone()))
        return g + number * (now - anchor)

    found = me.train(w, only=head, correct=steer, given=(w, 0.3), order=0)
    assert all(s[:4] == (list(head),) * 3 + (0.3,) for s in seen)
    assert len(seen) == me.steps()
    assert seen[0][4].equals(w.pick(head))
    assert not seen[1][4].equals(seen[0][4])  # as it is now
    plain = me.train(w, only=head, correct=lambda g, now, anchor: g, given=(w,), order=0)
    assert plain.equals(me.train(w, only=head, order=0))
    assert moved(found, plain) > 1e-4


def test_a_projection_follows_every_step():
    me, w = client()
    found = me.train(w, project=lambda v: v.clamp(-0.05, 0.05))
    assert max(float(v.abs().max()) for v in found.values()) <= 0.05
    seen = []

    def project(v):
        seen.append(v)
        return v * 0.5

    me.train(w, project=project, steps=3)
    assert len(seen) == 3
    assert [list(v) for v in seen] == [list(w)] * 3
    halved = me.train(w, project=lambda v: v * 0.5, steps=1, order=0)
    assert halved.equals(me.train(w, steps=1, order=0) * 0.5)


def test_other_trees_than_the_network_are_trained_too():
    """Mixing weights: a leaf of their own, through which the network runs in eval mode."""
    me, w = client(images=True)
    old = w * 1.1
    mix = me.task.net.head.ones()

    def mixed(task, mix, batch, new, old):
        return task.loss(new | old.pick(mix).lerp(new, mix), batch)

    found = me.train(mix, loss=mixed, given=(w, old), lr=1.0, optimizer=SGD(), order=9)
    assert set(found) == set(mix)
    x, y = me._x, me._y
    expected = mix
    for epoch in range(2):
        for batch in orders.batches(me.n, 4, 3, 0, 0, 9, epoch):
            leaves = expected.map(lambda v: v.clone().requires_grad_())
            blended = w | {k: old[k] + (w[k] - old[k]) * leaves[k] for k in leaves}
            module = loaded(me, w).eval()
            logits = torch.func.functional_call(module, dict(blended), (x[batch],))
            grads = torch.autograd.grad(nn.functional.cross_entropy(logits, y[batch]), list(leaves.values()))
            expected = Tree({k: v - g for (k, v), g in zip(expected.items(), grads, strict=True)})
    assert moved(found, expected) < 1e-12


def test_integers_beside_the_network_are_constants():
    me, w = client()
    both = w | {"labels": me.labels, "more": torch.ones(3, dtype=torch.float64)}

    def loss(task, w, batch):
        return task.loss(w, batch) + (w["more"] * w["labels"][:3]).sum()

    after = me.train(both, loss=loss)
    assert torch.equal(after["labels"], me.labels)
    assert moved(after.pick(["more"]), both.pick(["more"])) > 1e-3
    assert moved(after.pick(w), me.train(w, order=0)) == 0


def test_images_and_weights_lie_channels_last():
    x = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    me, w = client(federation=federate(from_arrays(x, torch.arange(24) % 3), "iid", 2, 0), network="convnet3")
    seen = []

    def loss(task, w, batch):
        seen.extend(v.is_contiguous(memory_format=torch.channels_last) for v in (batch.x, w["body.block2.conv.weight"]))
        return task.loss(w, batch)

    trained = me.train(w, loss=loss)
    assert len(seen) == 2 * me.steps()
    assert all(seen)
    assert all(v.is_contiguous() for v in trained.values())


def test_labels_stand_in_the_order_of_features():
    me, w = client()
    seen = me.sweep(w, lambda task, w, batch: {"sum": batch.by_class(task.features(w, batch.x), 3)})["sum"]
    z = me.features(w)
    found = torch.stack([z[me.labels == c].sum(0) for c in range(3)])
    torch.testing.assert_close(found, seen, rtol=0, atol=1e-12)
    assert me.counts.tolist() == [int((me.labels == c).sum()) for c in range(3)]
    part, _ = me.split(0.5)
    assert len(part.labels) == part.n == len(part.features(w))


def test_data_without_classes_have_no_labels():
    fed = federate(quadratics.load(), "given", 2, 0, test=0.0)
    me, _ = client(federation=fed, network="point", network_options={})
    for ask in ("labels", "counts"):
        with pytest.raises(UsageError, match="asks for samples' classes"):
            getattr(me, ask)


def test_calls_with_the_same_order_see_the_same_batches():
    me, w = client()
    seen = []

    def loss(task, w, batch):
        seen.append(batch.y.tolist())
        return task.loss(w, batch)

    def batches(**options):
        seen.clear()
        me.train(w, loss=loss, **options)
        return [tuple(y) for y in seen]

    first, second = batches(), batches()
    assert first != second  # 0, 1, ... call by call
    assert batches(order=0) == first
    assert batches(order=1) == second
    me.train(w, epochs=0)  # takes no number
    third = batches()
    assert third == batches(order=2)


def test_what_is_not_given_is_the_run_s_and_what_is_given_wins():
    me, w = client(schedule="constant")
    assert moved(me.train(w, order=0, epochs=3), looped(me, w, sgd, epochs=3)) < 1e-12
    plain = looped(me, w, lambda p: torch.optim.SGD(p, lr=0.02))
    assert moved(me.train(w, order=0, lr=0.02, optimizer=SGD()), plain) < 1e-12
    adam = looped(me, w, lambda p: torch.optim.Adam(p, lr=0.1))
    assert moved(me.train(w, order=0, optimizer=Adam()), adam) < 1e-12


def test_clipping_acts_on_the_corrected_gradient():
    me, w = client(clip=1e-3, momentum=0.0, weight_decay=0.0)
    found = me.train(w, correct=lambda g, now: g * 1e6, steps=1)
    assert float((found - w).norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_nothing_given_is_changed_and_no_memory_is_shared():
    me, w = client(images=True)
    before = w.clone()
    found = me.train(w)
    assert w.equals(before)
    assert not {v.data_ptr() for v in w.values()} & {v.data_ptr() for v in found.values()}
    resident = {p.data_ptr() for p in me.task.live.parameters()}
    assert not resident & {v.data_ptr() for v in found.values()}
    copy_ = found.clone()
    me.train(w, order=7)
    assert found.equals(copy_)  # the next phase runs in the same module
    assert not any(v.requires_grad for v in found.values())


def test_no_epochs_no_steps_and_nothing_to_train_change_nothing():
    me, w = client()
    assert me.train(w, epochs=0) is w
    assert me.train(w, steps=0) is w
    assert me.train(w, only=Tree()).equals(w)
    assert me.passes == 0


def test_a_client_of_one_sample_trains_with_norm_layers_in_eval_mode():
    me, w = client(federation=federation((1, 5), images=True), images=True)
    found = me.train(w)
    module = looped(me, w, sgd, modes=lambda m: m.eval())
    assert moved(found, module) < 1e-12
    assert all(v.isfinite().all() for v in found.values())
    assert found.pick(me.task.net.buffers).equals(w.pick(me.task.net.buffers))


def test_passes_and_steps_are_counted():
    me, w = client()
    assert me.n == 17
    assert me.steps() == 2 * 4 == me.steps(2)  # 4, 4, 4 and 5
    me.train(w)
    assert me.passes == 2
    me.train(w, steps=1)
    assert me.passes == pytest.approx(2 + 4 / 17)
    me.train(w, epochs=1, share=0.5)
    assert me.passes == pytest.approx(2 + (4 + 9) / 17)
    before = me.passes
    me.train(w, step=lambda task, w, batch, lr: w, epochs=1, gradients=5)
    assert me.passes == pytest.approx(before + 5)


@networks
def test_what_is_carried_follows_the_steps_and_is_not_trained(fields):
    """A running mean of the labels, in a phase that is otherwise the plain one."""
    me, w = client(**fields)

    def loss(task, w, batch):
        return task.loss(w, batch), {"mean": 0.75 * w["mean"] + 0.25 * batch.y.double().mean()}

    start = torch.ones((), dtype=torch.float64)
    found = me.train(w | {"mean": start}, loss=loss, carried=("mean",))
    mean = start.clone()
    for epoch in range(2):
        for batch in orders.batches(me.n, 4, 3, me.round, me.id, 0, epoch):
            mean = 0.75 * mean + 0.25 * me._y[batch].double().mean()
    assert float(found["mean"]) == pytest.approx(float(mean), rel=1e-14)
    assert float(start) == 1
    assert found.pick(w).equals(me.train(w, order=0))


def test_sweeps_add_up_over_the_whole_training_set():
    me, w = client(sizes=(700, 5))
    x, y = me._x, me._y

    def statistic(task, w, batch, scale):
        return {"n": torch.tensor(float(len(batch.y))), "sums": batch.by_class(batch.x, 3) * scale}

    found = me.sweep(w, statistic, given=(2.0,))
    assert float(found["n"]) == 700
    expected = torch.stack([x[y == c].sum(0) for c in range(3)]) * 2
    torch.testing.assert_close(found["sums"], expected, rtol=0, atol=1e-10)
    assert me.counts.tolist() == torch.bincount(y, minlength=3).tolist()
    module = loaded(me, w).eval()
    torch.testing.assert_close(me.logits(w), module(x).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(me.features(w), module.body(x).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(me.loss(w), nn.functional.cross_entropy(module(x), y).detach(), rtol=0, atol=1e-12)


def test_dropout_draws_from_the_key_of_its_phase_alone():
    network = Network(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(5, 3))
    me, w = client(network=network)
    torch.manual_seed(1)
    one = me.train(w, order=0)
    torch.manual_seed(2)
    torch.rand(5)
    assert me.train(w, order=0).equals(one)
    assert not me.train(w, order=1).equals(one)
    other, _ = client(network=network, round=1, schedule="constant")
    assert not other.train(w, order=0).equals(one)


def test_a_reference_model_in_a_loss_is_in_eval_mode_and_keeps_its_buffers():
    me, w = client(images=True)
    teacher = w * 0.9
    before = teacher.clone()
    expected = loaded(me, teacher).eval()(me._x).detach()
    seen = []

    def loss(task, w, batch, teacher):
        with torch.no_grad():
            seen.append(task.logits(teacher, me._x))
        return task.loss(w, batch)

    me.train(w, loss=loss, given=(teacher,))
    assert all(torch.allclose(s, expected, atol=1e-10) for s in seen)
    assert teacher.equals(before)
