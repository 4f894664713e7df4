"""Mistakes in lgfedavg.py, and what notices them."""

from functools import partial

import checks
from checks import against, found, known

LG, BOTTOM = against("lgfedavg"), against("lgfedavg", {"shared": "bottom"})
TWO = against("lgfedavg", {"layers": 2}, images=True)
WEIGHTED = checks.the_server_holds_the_mean_by_samples


def with_the_body_shared_it_is_fedper(kind):
    checks.same_personal(found(kind(shared="bottom")), known("fedper"))


def with_every_layer_private_it_is_local(kind):
    checks.same_personal(found(kind(shared="bottom", layers=2)), known("local"))


MUTANTS = [
    ("(top, bottom) if", "(bottom, top) if", LG),  # public code: the lower layers are shared
    ('if self.shared == "top" else (bottom, top)', "if True else (bottom, top)", with_the_body_shared_it_is_fedper),
    ("net.last(self.layers)", "net.last(1)", TWO),
    ("top = net.weights.pick(k for k in net.weights if", "top = net.trainable.pick(k for k in net.trainable if", TWO),
    ('{"model": w.pick(own)}', "mine", LG),
    ('{"model": w.pick(own)}', "mine", with_every_layer_private_it_is_local),
    ('mean={"model": w.pick(shared)}', 'mean={"model": shared}', LG),
    ('mean={"model": w.pick(shared)})', 'mean={"model": w.pick(shared)}, weight=1)', LG),
    (
        'mean={"model": w.pick(shared)})',
        'mean={"model": w.pick(shared)}, weight=1)',
        partial(WEIGHTED, shared="bottom"),
    ),
    ("me.train(shared | own)", "me.train(me.train(shared | own, only=own), only=shared)", LG),
    ("me.train(shared | own)", "me.train(shared | own, only=shared)", BOTTOM),
]
