"""Mistakes in fedrod.py, and what notices them."""

from functools import partial

import torch

import checks
from checks import CLIENTS, against, found, known, moved

ROD, HALF, IMAGES = against("fedrod"), against("fedrod", {"gamma": 0.5}), against("fedrod", images=True)
ZERO, HYPER = against("fedrod", {"personal_init": "zero"}), against("fedrod", {"hyper": 4})
WEIGHTED = checks.the_server_holds_the_mean_by_samples


def without_gamma_it_is_fedavg(kind):
    checks.same_shared(found(kind(gamma=0.0)), known("fedavg"))


def the_generic_model_knows_nothing_of_personal_heads(kind):
    assert moved(*(found(kind(personal_init=p)).server["model"] for p in ("copy", "zero"))) == 0


def clients_predict_with_both_heads(kind):
    one = found(kind())
    task, w = one.context.task, one.server["model"]
    for i in range(CLIENTS):
        x, own = one.context.shards.part("train", i)[0], one.personal(i)
        both = task.features(w, x) @ own["personal.weight"].T + own["personal.bias"] + task.logits(w, x)
        torch.testing.assert_close(kind().logits(task, own, x), both, rtol=0, atol=1e-12)


MUTANTS = [
    ("(g + self.gamma *", "(g - self.gamma *", ROD),
    ("g + self.gamma * counts", "g + counts", HALF),
    (".masked_fill(counts == 0, -torch.inf)", "", ROD),
    ("        if not self.gamma:\n            return g\n", "", without_gamma_it_is_fedavg),
    ("self.balanced(g, counts), batch)", "g, batch)", ROD),  # the plain loss: FedAvg's
    ("z.detach())", "z)", the_generic_model_knows_nothing_of_personal_heads),
    ("z.detach())", "z)", IMAGES),  # public code: the personal loss reaches the body
    ("g.detach() + own", "g + own", ROD),
    ("g.detach() + own", "g + own", the_generic_model_knows_nothing_of_personal_heads),
    ("g.detach() + own", "own", ROD),  # public code: the personal head answers alone
    ("return task.head(w, z) + added(w, z)", "return added(w, z)", clients_predict_with_both_heads),
    ("return task.head(w, z) + added(w, z)", "return task.head(w, z)", clients_predict_with_both_heads),
    ('{"model": w.pick(own)}', "mine", ROD),
    ('mean={"model": w.pick(shared)}', 'mean={"model": shared}', ROD),  # public code: what is averaged is not used
    ('mean={"model": w.pick(shared)})', 'mean={"model": w.pick(shared)}, weight=1)', ROD),
    ('mean={"model": w.pick(shared)})', 'mean={"model": w.pick(shared)}, weight=1)', partial(WEIGHTED, hyper=3)),
    ("else net.head.zeros()", "else net.head", ZERO),
    ("counts / counts.sum()", "counts", HYPER),
    ("torch.relu(linear(", "(linear(", HYPER),
    (".reshape(classes, d)", ".reshape(d, classes).T", HYPER),
    ('return w.drop(k for k in w if k.startswith("hyper"))', "return w", HYPER),
]
