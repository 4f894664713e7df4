"""Mistakes in gpfl.py, and what notices them."""

import torch

from checks import against, found
from harness import world
from reference import gpfl as reference

GP, STALE, IMAGES = against("gpfl"), against("gpfl", {"condition": "stale"}), against("gpfl", images=True)
STRONG = against("gpfl", {"lam": 1.0, "mu": 0.0})


def clients_predict_through_the_valve(kind):
    one = found(kind())
    expected = reference.run(world(one.run)).extra["logits"]
    for i, scores in enumerate(expected):
        x = one.context.shards.part("train", i)[0]
        assert torch.allclose(kind().logits(one.context.task, one.personal(i), x), scores, atol=1e-10)


def at_the_embeddings_nothing_is_nan(kind):
    table = torch.eye(3).double()
    f = table.clone().requires_grad_()

    class Batch:
        y, mask = torch.arange(3), None

    assert torch.autograd.grad(kind().magnitude(f, table, Batch), f)[0].isfinite().all()


def stacked_clients_are_the_reference(kind):
    against("gpfl", {"lam": 1.0}, backend="stacked")(kind)


MUTANTS = [
    ("+ 1) * f +", ") * f +", GP),
    ('* f + route(w, "cov.beta", v))', '* f - route(w, "cov.beta", v))', GP),
    ("return relu((route", "return ((route", GP),
    ("a = relu(linear(w, name, v))", "a = linear(w, name, v)", GP),
    ("normalize(f) @", "f @", GP),
    ("@ normalize(table).T", "@ table.T", GP),
    ("torch.linalg.vector_norm(gap)", "gap.square().sum()", STRONG),
    ("torch.linalg.vector_norm(gap)", "torch.linalg.vector_norm(gap) / len(gap)", STRONG),
    ("torch.linalg.vector_norm(gap)", "gap.square().sum().sqrt()", at_the_embeddings_nothing_is_nan),
    ("gap = torch.where(batch.mask[:, None] > 0, gap, 0.0)", "pass", stacked_clients_are_the_reference),
    ("self.lam * self.magnitude", "self.magnitude", GP),
    ("self.magnitude(f, old, batch)", 'self.magnitude(f, w["gce"], batch)', STRONG),
    ("self.valve(w, f, g), w, batch", "self.valve(w, f, q), w, batch", GP),
    ("self.valve(w, f, q)), batch", "self.valve(w, f, g)), batch", GP),
    ("(me.counts / me.n) @ table", "table.mean(0)", GP),
    ("(me.counts / me.n) @ table", "(me.counts / me.counts.max()) @ table", GP),
    ('self.condition == "stale" else down["model"]', 'self.condition != "stale" else down["model"]', STALE),
    ('{"own": w["gce"]} if', '{"own": shared["gce"]} if', STALE),
    ('k.startswith(("gce", "cov."))', 'k.startswith("gce")', GP),
    ("self.mu * beside", "self.mu * gradient.pick(beside)", GP),
    ("correct=self.decay if self.mu else None", "correct=None", GP),  # public code: mu is 0 by default
    ('{"model": w.pick(mine["model"]), **own}', '{"model": mine["model"], **own}', GP),
    ('mean={"model": w.pick(shared)}', 'mean={"model": w.pick(shared) | {"gce": shared["gce"]}}', IMAGES),
    ("math.sqrt(2) * torch.erfinv", "torch.erfinv", GP),
    ('self.valve(w, task.features(w, x), w["condition"])', "task.features(w, x)", clients_predict_through_the_valve),
]
