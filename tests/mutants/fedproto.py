"""Mistakes in fedproto.py, and what notices them."""

from functools import partial

import checks
from checks import CLIENTS, against, apart, found, known
from idiolect.tree import Tree

PROTO, PLAIN = against("fedproto"), against("fedproto", {"lam": 0.3, "aggregate": "plain"})
HEAD, BATCHNORM = against("fedproto", {"predict": "head"}), against("fedproto", images=True)
QUIET = {"ratio": ((0, 1, 2, 5), (3,), (3,), (3,))}  # most classes are held by nobody after the first round
ALONE = partial(against("fedproto"), **QUIET)


def without_lam_it_is_local(kind):
    one = found(kind(lam=0.0, predict="head"))
    checks.same_personal(one, known("local"))
    apart(found(kind(predict="head")), known("local"))


def only_own_classes_are_answered(kind):
    """Far out, where a class of distance 100 would be the nearest."""
    one = found(kind(), ratio=1.0)
    task, method = one.context.task, kind()
    for i in range(CLIENTS):
        x, y = one.context.shards.part("train", i)
        w = one.personal(i) | Tree({"prototype": 50 * one.personal(i)["prototype"]})
        assert set(method.logits(task, w, 30 * x).argmax(1).tolist()) <= set(y.tolist())


MUTANTS = [
    ("if self.lam else loss", "if self.lam else 0 * loss", without_lam_it_is_local),
    ("loss + self.lam * self.distance", "loss + self.distance", PLAIN),
    ("loss + self.lam * self.distance", "loss - self.lam * self.distance", PROTO),
    (".square().mean(1) * known", ".square().sum(1) * known", PROTO),
    (" * known[batch.y])", ")", PROTO),
    ("z - prototype[batch.y]", "z - prototype[batch.y].mean(0)", PROTO),
    ("sums, counts = me.sweep(w, ", "sums, counts = me.sweep(mine['model'], ", PROTO),
    ('{"model": w}\n', "mine\n", PROTO),
    ('{"model": w}\n', "mine\n", without_lam_it_is_local),
    ("sums / counts.clamp(min=1)[:, None], (counts > 0)", "sums, (counts > 0)", PLAIN),
    ("(counts > 0).to(counts.dtype)", "counts", PLAIN),
    ('self.aggregate == "plain"', 'self.aggregate == "count"', PROTO),
    ('server["prototype"])  # eq. 6', "0.0)  # eq. 6", ALONE),
    ('server["known"] | held', "held", ALONE),
    (
        "sums / counts.clamp(min=1)[:, None], server",
        "sums / counts.clamp(min=1)[:, None] / len(run.ids), server",
        PROTO,
    ),
    ("(me.counts > 0) & down", "down", PROTO),
    ("(me.counts > 0) & down", "down", only_own_classes_are_answered),
    ("2 * lowest - BEHIND", "-BEHIND", only_own_classes_are_answered),
    ('return mine["model"]\n        held', 'return down.get("model", mine["model"].zeros())\n        held', HEAD),
]
