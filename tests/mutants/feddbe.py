"""Mistakes in feddbe.py, and what notices them."""

import torch

from checks import against, found
from harness import world
from reference import feddbe as reference

DBE, RUNNING = against("feddbe", {"kappa": 1.0}), against("feddbe", {"kappa": 2.0, "mean_momentum": 0.3})
ALONE, UNBIASED = against("feddbe", {"kappa": 0.0}), against("feddbe", {"kappa": 1.0, "personal_bias": False})


def clients_predict_with_their_vector(kind):
    one = found(kind(kappa=1.0))
    expected = reference.run(world(one.run), kappa=1.0).extra["logits"]
    for i, scores in enumerate(expected):
        x = one.context.shards.part("train", i)[0]
        assert torch.allclose(kind().logits(one.context.task, one.personal(i), x), scores, atol=1e-10)


def the_common_mean_is_sent_once(kind):
    one = found(kind(), ratio=((0,),) * 4)
    size = one.context.net.weights.nbytes
    assert [r["bytes_down"] - size for r in one.rounds[1:]] == [8 * one.context.net.features, 0, 0, 0]


def rounds_of_nobody_change_no_common_mean(kind):
    one, usual = found(kind(), ratio="bernoulli:0.1"), found(kind())
    assert not one.run.participants(0)
    assert torch.equal(one.server["mean"], usual.server["mean"])


MUTANTS = [
    ("if self.kappa:", "if False:", DBE),  # public code: kappa is 0 by default
    ("loss + self.kappa *", "loss + 2 * self.kappa *", DBE),
    ("0.5 * (running - common).square().mean()", "0.5 * (running - common).square().sum()", DBE),
    ("0.5 * (running - common).square().mean()", "0.5 * (running - common).mean().square()", DBE),
    ("(1 - self.mean_momentum) * w", "self.mean_momentum * w", RUNNING),
    ("self.mean_momentum * centre(batch, z)", "centre(batch, z)", RUNNING),
    ("(1 - self.mean_momentum) * w", "0 * w", RUNNING),
    ('| {"running": torch.zeros_like(common)}', '| {"running": common}', RUNNING),
    ('z + w["bias"]), batch)\n        if', "z), batch)\n        if", DBE),
    ('features(w, x) + w["bias"])', "features(w, x))", clients_predict_with_their_vector),
    ("model | bias if self.personal_bias else model", "model | bias", UNBIASED),
    ("model | bias if self.personal_bias else model", "model", ALONE),
    ('carried=("running",), order=10', 'carried=("running",)', DBE),
    ("(sizes * means).sum(0) / sizes.sum()", "means.mean(0)", DBE),
    ('if server["mean"].any():', "if run.round:", rounds_of_nobody_change_no_common_mean),
    ('{"model": w.pick(bias), "mean": common}', '{**mine, "mean": common}', DBE),
    ('"mean": common}', '"mean": mine["mean"]}', DBE),
    ('down.get("mean", mine["mean"])', 'mine["mean"]', DBE),
    ("told=[torch.ones(", "told=[torch.zeros(", the_common_mean_is_sent_once),
]
