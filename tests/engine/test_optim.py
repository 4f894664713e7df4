"""Optimisers, clipping and schedules are PyTorch's own."""

import math

import pytest
import torch

from idiolect import optim
from idiolect.errors import UsageError

STEPS = 20
CASES = {
    "sgd": (optim.SGD(), torch.optim.SGD, {}),
    "momentum": (optim.SGD(0.9), torch.optim.SGD, {"momentum": 0.9}),
    "weight decay": (optim.SGD(0.0, 0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum and decay": (optim.SGD(0.5, 0.01), torch.optim.SGD, {"momentum": 0.5, "weight_decay": 0.01}),
    "nesterov": (
        optim.SGD(0.7, 0.02, True),
        torch.optim.SGD,
        {"momentum": 0.7, "weight_decay": 0.02, "nesterov": True},
    ),
    "adam": (optim.Adam(), torch.optim.Adam, {}),
    "adam, decay": (
        optim.Adam(0.8, 0.95, 1e-6, 0.1),
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    ),
    "adamw": (optim.Adam(weight_decay=0.1, decoupled=True), torch.optim.AdamW, {"weight_decay": 0.1}),
}


def start():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw, dtype=torch.float64) for s in ((3, 4), (4,), ())]


def gradients(params, t):
    """Of a function that is no quadratic, another one in every step."""
    return [torch.sin(3 * p + t) + 0.1 * p**3 for p in params]


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_those_of_torch(name):
    ours, theirs, options = CASES[name]
    params, state = start(), {}
    leaves = [p.clone().requires_grad_() for p in start()]
    torchs = theirs(leaves, lr=0.05, **options)
    for t in range(STEPS):
        ours.step_(params, gradients(params, t), state, 0.05)
        for leaf, g in zip(leaves, gradients([p.detach() for p in leaves], t), strict=True):
            leaf.grad = g
        torchs.step()
        for p, leaf in zip(params, leaves, strict=True):
            torch.testing.assert_close(p, leaf.detach(), rtol=0, atol=1e-12)
    assert max(float((p - q).abs().max()) for p, q in zip(params, start(), strict=True)) > 0.1


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_left_alone(name):
    ours, _, _ = CASES[name]
    params, state = start(), {}
    for t in range(3):
        grads = gradients(params, t)
        before = [g.clone() for g in grads]
        ours.step_(params, grads, state, 0.05)
        assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


def test_the_learning_rate_may_change_from_step_to_step():
    params, state = start(), {}
    leaves = [p.clone().requires_grad_() for p in start()]
    torchs = torch.optim.SGD(leaves, lr=1.0, momentum=0.9)
    for t, lr in enumerate((0.1, 0.01, 0.05)):
        torchs.param_groups[0]["lr"] = lr
        optim.SGD(0.9).step_(params, gradients(params, t), state, lr)
        for leaf, g in zip(leaves, gradients([p.detach() for p in leaves], t), strict=True):
            leaf.grad = g
        torchs.step()
    assert all(torch.allclose(p, leaf, rtol=0, atol=1e-14) for p, leaf in zip(params, leaves, strict=True))


@pytest.mark.parametrize("limit", [0.01, 1.0, 100.0])
def test_clipping_is_that_of_torch(limit):
    grads = [3 * g for g in start()]
    leaves = [torch.zeros_like(g).requires_grad_() for g in grads]
    for leaf, g in zip(leaves, grads, strict=True):
        leaf.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(leaves, limit)
    found = optim.clipped(grads, limit)
    for ours, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad, rtol=0, atol=1e-12)
    total = math.sqrt(sum(float(g.square().sum()) for g in found))
    assert total <= limit
    if limit == 100.0:  # nothing to clip
        assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


def stepped(torchs, rounds, **options):
    """A torch scheduler's rates, one per round."""
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    schedule, found = torchs(sgd, **options), []
    for _ in range(rounds):
        found.append(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    return found


S = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.Schedule(), [0.3] * 30),
        (optim.Schedule("exponential", 0.9), stepped(S.ExponentialLR, 30, gamma=0.9)),
        (optim.Schedule("step", 0.5, 7), stepped(S.StepLR, 30, gamma=0.5, step_size=7)),
        (optim.Schedule("cosine"), stepped(S.CosineAnnealingLR, 30, T_max=30)),
        (optim.Schedule("cosine", floor=0.1), stepped(S.CosineAnnealingLR, 30, T_max=30, eta_min=0.03)),
    ],
    ids=["constant", "exponential", "step", "cosine", "cosine to a floor"],
)
def test_schedules_are_those_of_torch_over_the_global_round(ours, theirs):
    found = [ours(0.3, r, 30) for r in range(30)]
    assert found == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_a_schedule_of_no_rounds_has_a_rate():
    assert all(optim.Schedule(k)(0.3, 0, 0) == 0.3 for k in ("constant", "exponential", "step", "cosine"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: optim.SGD(momentum=1.0), "momentum must be a number in [0, 1); found 1.0."),
        (lambda: optim.SGD(weight_decay=-1), "weight_decay must be a number >= 0; found -1."),
        (lambda: optim.SGD(nesterov=True), "nesterov must be off, or a momentum above 0; found True."),
        (lambda: optim.Adam(beta2=1.0), "beta2 must be a number in [0, 1); found 1.0."),
        (
            lambda: optim.Schedule("linear"),
            "schedule must be one of constant, exponential, step, cosine; found linear.",
        ),
        (lambda: optim.Schedule(decay=0.0), "decay must be a number in (0, 1]; found 0.0."),
    ],
)
def test_bad_values_say_what_was_expected(make, sentence):
    with pytest.raises(UsageError) as error:
        make()
    assert str(error.value) == sentence
