"""FedCP: its reference, FedPer as its limit, the policy, the discrepancy of features, both heads, noise, odd clients."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from checks import history
from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedcp import FedCP, gumbel, mmd
from idiolect.methods.fedper import FedPer
from idiolect.tree import Tree
from reference import fedcp as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))

# the reference


@IMAGES
@pytest.mark.parametrize("hyper", [{}, {"lam": 0.0}, {"lam": 0.7, "noise": False}, {"lam": 30.0}], ids=str)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedCP(**hyper), images=images))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    for i, logits in enumerate(expected.extra["logits"]):
        x = found.context.shards.part("train", i)[0]
        torch.testing.assert_close(predicted(found, i, x), logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, noise):
    found = run(experiment(FedCP(noise=noise), sizes=sizes))
    agree(found, reference.run(world(found.run), noise=noise))


def predicted(found: Result, i: int, x: Tensor) -> Tensor:
    with torch.no_grad():
        return found.run.method.logits(found.context.task, found.personal(i), x)


# FedPer as its limit


class AllPersonal(FedCP):
    """The policy sends everything to the private head; the shared one, of which the bias would remain, is masked."""

    def policy(self, w, f, k, noise=0.0):
        return torch.ones_like(f), torch.zeros_like(f)

    def combined(self, task, w, f, r, s):
        return task.head(w, r * f)


@IMAGES
def test_with_everything_personal_and_no_lam_it_is_fedper_to_the_bit(images):
    found, fedper = (run(experiment(m, images=images)) for m in (AllPersonal(lam=0.0, noise=False), FedPer()))
    body = fedper.server["model"]
    assert found.server["model"].pick(body).equals(body)
    whole = fedper.context.net.weights
    assert all(found.personal(i).pick(whole).equals(fedper.personal(i)) for i in EVERYONE)


@pytest.mark.parametrize("other", [FedCP(lam=0.0, noise=False), AllPersonal(noise=False), FedCP()], ids=repr)
def test_either_of_its_two_parts_alone_is_not_fedper(other):
    found, fedper = (run(experiment(m)) for m in (other, FedPer()))
    body = fedper.server["model"]
    assert moved(found.server["model"].pick(body), body) > 1e-3


def test_equal_heads_leave_the_policy_nothing_to_decide():
    """h(r f) + h(s f) = W f + 2 b, as r + s = 1: so it is before the first round."""
    found = run(experiment(FedCP(), rounds=0))
    w, x = found.personal(0), found.context.shards.part("train", 0)[0]
    z = found.context.task.features(w, x)
    expected = z @ w["head.weight"].T + 2 * w["head.bias"]
    torch.testing.assert_close(predicted(found, 0, x), expected, rtol=0, atol=1e-12)


def test_the_larger_lam_the_nearer_are_features_to_the_received_body_s():
    fields = {"ratio": ((0,),), "rounds": 1, "epochs": 10, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.02}
    far = []
    for lam in (0.0, 1.0, 20.0):
        found = run(experiment(FedCP(lam=lam), **fields))
        net, task = found.context.net, found.context.task
        x = found.context.shards.part("train", 0)[0]
        far.append(float((task.features(found.server["model"], x) - task.features(net.weights, x)).norm()))
    assert far[0] > 1.2 * far[1] > 1.2 * far[2]


# the policy


def drawn(rows: int = 6, width: int = 5, count: int = 2, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=draw, dtype=torch.float64) for _ in range(count)]


def prepared(**hyper: Any) -> tuple[FedCP, Any, Tree]:
    """A method, its task, and one client's weights with nothing at its initial value."""
    method = FedCP(**hyper)
    context = experiment(method).context()
    draw = torch.Generator().manual_seed(1)
    w = context.state.server["model"] | context.net.head
    return method, context, w.map(lambda v: v + 0.3 * torch.randn(v.shape, generator=draw, dtype=v.dtype))


def test_the_policy_by_hand():
    method, _, w = prepared()
    (f,), k = drawn(count=1), method.context(w)
    assert float(k.norm()) == pytest.approx(1)
    r, s = method.policy(w, f, k)
    for n in range(len(f)):
        a = [float(w["policy.weight"][j] @ (f[n] * k) + w["policy.bias"][j]) for j in range(10)]
        mean = sum(a) / 10
        deviation = math.sqrt(sum((v - mean) ** 2 for v in a) / 10 + 1e-5)
        o = [
            (v - mean) / deviation * float(w["policy.scale"][j]) + float(w["policy.shift"][j]) for j, v in enumerate(a)
        ]
        o = [max(v, 0.0) for v in o]
        for j in range(5):
            share = math.exp(o[j]) / (math.exp(o[j]) + math.exp(o[5 + j]))
            assert float(r[n, j]) == pytest.approx(share, rel=1e-10)
            assert float(s[n, j]) == pytest.approx(1 - share, rel=1e-10)


@pytest.mark.parametrize("scale", [1.0, 1e8])
def test_r_and_s_add_up_to_1(scale):
    method, _, w = prepared()
    (f,) = drawn(count=1)
    noise = gumbel(np.random.default_rng(0))(f)
    for added in (0.0, noise):
        r, s = method.policy(w, scale * f, method.context(w), added)
        assert float((r + s - 1).abs().max()) < 1e-15
        assert float(r.min()) > 0
        assert float(s.min()) > 0
        assert float((r - s).abs().max()) > 1e-2


def test_the_context_is_the_direction_of_the_private_head_s_rows():
    method, _, w = prepared()
    rows = w["head.weight"]
    total = sum(rows[c] for c in range(len(rows)))
    torch.testing.assert_close(method.context(w), total / math.sqrt(float(total @ total)), rtol=0, atol=1e-14)
    torch.testing.assert_close(method.context(w | {"head.weight": 7 * rows}), method.context(w))
    assert float(method.context(w | {"head.weight": 0 * rows}).abs().max()) == 0


# the discrepancy


def test_the_discrepancy_by_hand():
    """Every pair of the batch, each with itself too."""
    f, g = drawn()
    f = 4 * f

    def kernel(u: Tensor, v: Tensor) -> float:
        return sum(math.exp(-float((u - v) @ (u - v)) / (2 * a)) for a in (10, 15, 20, 50))

    total = sum(
        kernel(a, b) + kernel(c, d) - 2 * kernel(a, d)
        for a, c in zip(f, g, strict=True)
        for b, d in zip(f, g, strict=True)
    )
    assert float(mmd(f, g)) == pytest.approx(total / 36, rel=1e-12)
    assert float(mmd(g, f)) == pytest.approx(total / 36, rel=1e-12)


def test_a_body_that_has_not_moved_is_at_no_distance():
    f, _ = drawn()
    f.requires_grad_()
    value = mmd(f, f.detach().clone())
    assert abs(float(value.detach())) < 1e-15
    assert float(torch.autograd.grad(value, f)[0].abs().max()) < 1e-15


def test_a_batch_of_one_is_the_distance_of_two_points():
    f, g = drawn(rows=1)
    D = float((f - g).square().sum())
    assert float(mmd(f, g)) == pytest.approx(sum(2 - 2 * math.exp(-D / (2 * a)) for a in (10, 15, 20, 50)), rel=1e-12)


def test_features_far_apart_saturate_it_without_harm():
    f, g = drawn()
    far = (1e6 * f).requires_grad_()
    value = mmd(far, g)
    assert value.isfinite()
    assert float(torch.autograd.grad(value, far)[0].abs().max()) == 0


def test_its_gradient_is_that_of_finite_differences():
    f, g = drawn()
    mask = torch.tensor([1.0] * 4 + [0.0] * 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: mmd(v, g), (f.requires_grad_(),))
    assert torch.autograd.gradcheck(lambda v: mmd(v, g, mask), (f,))


def test_padding_is_left_out():
    f, g = drawn()
    mask = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    padded = [torch.cat([v, torch.full((2, 5), math.inf)]).requires_grad_() for v in (f, g)]
    value = mmd(*padded, mask)
    assert float(value.detach()) == pytest.approx(float(mmd(f, g)), rel=1e-13)
    assert torch.autograd.grad(value, padded[0])[0].isfinite().all()


@pytest.mark.parametrize("noise", [True, False])
def test_the_whole_loss_s_gradient_is_that_of_finite_differences(noise):
    method, context, w = prepared(lam=2.0, noise=noise)
    x, y = context.shards.part("train", 0)
    before = context.task.features(context.net.weights, x)
    fixed = gumbel(np.random.default_rng(0))(before)
    k, batch, names = method.context(context.net.head), Batch(x, y, None, before), list(w)

    def loss(*values: Tensor) -> Tensor:
        return method.loss(context.task, Tree(zip(names, values, strict=True)), batch, k, lambda f: fixed)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


# noise


def test_noise_is_gumbel_s_and_new_at_each_step():
    (f,) = drawn(rows=3000, count=1)
    fresh = gumbel(np.random.default_rng(0))
    one, two = fresh(f), fresh(f)
    assert one.shape == (3000, 2, 5)
    assert one.dtype == f.dtype
    assert not torch.equal(one, two)
    assert float(one.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(one.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_uniform_draw_stay_finite(u, dtype):
    class Stuck:
        def random(self, shape):
            return np.full(shape, u)

    assert gumbel(Stuck())(torch.zeros(2, 3, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("noise", [True, False])
def test_clients_can_be_stacked(noise):
    one, two = (run(experiment(FedCP(noise=noise), backend=b)) for b in ("serial", "stacked"))
    assert all(moved(one.personal(i), two.personal(i)) < 1e-10 for i in EVERYONE)


def test_nothing_is_drawn_in_prediction():
    """Public code draws there as well, so that its accuracies are random."""
    found = run(experiment(FedCP()))
    x = found.context.shards.part("test", 0)[0]
    w, task = found.personal(0), found.context.task
    state = torch.random.get_rng_state()
    assert torch.equal(predicted(found, 0, x), predicted(found, 0, x))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(FedCP(noise=False).logits(task, w, x), FedCP().logits(task, w, x))
    quiet = run(experiment(FedCP(noise=False)))
    assert moved(quiet.server["model"], found.server["model"]) > 1e-3


def test_a_client_s_prediction_of_a_sample_is_its_own_matter():
    """Not that of the batch around it."""
    found = run(experiment(FedCP()))
    x = found.context.shards.part("train", 0)[0]
    torch.testing.assert_close(predicted(found, 0, x)[3:4], predicted(found, 0, x[3:4]), rtol=0, atol=1e-14)


# heads, and what is received


@IMAGES
def test_the_shared_head_is_frozen_and_what_is_sent_is_the_mean_of_both(images):
    found = run(experiment(FedCP(), images=images, rounds=1, ratio=((0,),)))
    net = found.context.net
    for name, value in net.head.items():
        own = found.private(0)["model"][name]
        assert float((own - value).abs().max()) > 1e-3
        shared = found.server["model"][f"global.{name.removeprefix('head.')}"]
        torch.testing.assert_close(shared, (own + value) / 2, rtol=0, atol=1e-15)


def test_the_private_head_never_leaves_its_client():
    found = run(experiment(FedCP(), ratio=1.0))
    assert not set(found.context.net.head) & set(found.server["model"])
    heads = [found.private(i)["model"]["head.weight"] for i in EVERYONE]
    assert min(float((a - b).abs().max()) for k, a in enumerate(heads) for b in heads[:k]) > 1e-4


def test_all_parts_of_the_policy_learn():
    found = run(experiment(FedCP()))
    start = found.context.state.server["model"]
    for name in ("weight", "bias", "scale", "shift"):
        assert moved(found.server["model"].pick([f"policy.{name}"]), start.pick([f"policy.{name}"])) > 1e-4


def test_who_was_away_predicts_with_body_shared_head_and_policy_of_the_same_round():
    """Public code gives those who were away the new body alone."""
    found = run(experiment(FedCP(), ratio=((0, 1),) * 4))
    w, net = found.personal(7), found.context.net
    assert w.pick(found.server["model"]).equals(found.server["model"])
    assert w.pick(net.head).equals(net.head)


class Watched(FedCP):
    """Keeps what a round begins with: the received, the own head, the context and the reference features."""

    seen: ClassVar[dict] = {}

    def local(self, me, down, mine):
        train = me.train

        def watched(w, given=(), beside=None, **options):
            self.seen[me.round, me.id] = down["model"].clone(), mine["model"].clone(), given[0], beside
            return train(w, given=given, beside=beside, **options)

        me.train = watched
        return super().local(me, down, mine)


@IMAGES
def test_the_received_body_stands_still_in_eval_mode(images):
    """Public code has it in train mode, which moves its statistics."""
    Watched.seen = {}
    found = run(experiment(Watched(), images=images))
    task, method = found.context.task, FedCP()
    for (_, i), (received, head, k, before) in Watched.seen.items():
        x = found.context.shards.part("train", i)[0]
        with torch.no_grad():
            torch.testing.assert_close(before, task.features(received, x), rtol=0, atol=1e-14)
        assert not before.requires_grad
        assert torch.equal(k, method.context(head))


def test_the_context_is_that_of_the_own_head_at_the_start_of_the_round():
    _, context, states = history(Watched(), ratio=1.0)
    for r, state in enumerate(states[:-1]):
        for i in EVERYONE:
            own = state.store.read(i)["model"] if r else context.net.head
            assert torch.equal(Watched.seen[r, i][2], FedCP().context(own))


def test_under_sgd_the_context_never_turns():
    """The gradient of a cross-entropy adds up to 0 over the classes, so that the sum of the head's rows stays (weight
    decay shortens it): every client has the direction of the common initial head. Adam turns it."""
    for optimizer, turns in (("sgd", False), ("adam", True)):
        fields = {"optimizer": "adam", "momentum": 0.0, "lr": 0.01} if turns else {}
        found = run(experiment(FedCP(), **fields))
        first = FedCP().context(found.context.net.head)
        far = max(float((FedCP().context(found.private(i)["model"]) - first).norm()) for i in EVERYONE)
        assert (far > 1e-3) if turns else (far < 1e-12), optimizer


# the rest


def test_bytes_and_passes_of_a_round():
    found, fedper = (run(experiment(m)) for m in (FedCP(), FedPer()))
    net, d = found.context.net, found.context.net.features
    size = net.weights.size + 2 * d * d + 6 * d
    for a, b in zip(found.rounds[1:], fedper.rounds[1:], strict=True):
        assert a["bytes_down"] == a["bytes_up"] == 5 * 8 * size
        assert a["gradient_passes"] == b["gradient_passes"]


def test_impossible_values_are_refused():
    with pytest.raises(UsageError, match=r"FedCP.lam must be 0 or more; found -0.1"):
        FedCP(lam=-0.1)


def test_defaults_are_the_authors():
    assert FedCP() == FedCP(lam=5.0, noise=True)
