"""Mistakes in knnper.py, and what notices them."""

from functools import partial
from importlib import import_module

import torch

from checks import CLIENTS, against, found, same_shared
from checks import known as run_of
from harness import world

PLAIN = against("knnper")


def answers_are_the_reference_s(kind, **hyper):
    one, reference = found(kind(**hyper)), import_module("reference.knnper")
    for i, expected in enumerate(reference.run(world(one.run), **hyper).extra["probabilities"]):
        x = one.context.shards.part("train", i)[0]
        given = kind(**hyper).logits(one.context.task, one.personal(i), x).exp()
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-10)


def every_class_has_a_score(kind):
    one = found(kind(k=1, lam=1.0))
    for i in range(CLIENTS):
        x = one.context.shards.part("test", i)[0]
        assert kind(k=1, lam=1.0).logits(one.context.task, one.personal(i), x).isfinite().all()


def it_trains_as_fedavg(kind):
    same_shared(found(kind()), run_of("fedavg"))


FEW = partial(answers_are_the_reference_s, k=3, lam=0.3, sigma=0.5)

MUTANTS = [
    ('"features": me.features(w)', '"features": me.features(me.task.net.weights)', PLAIN),
    ('"labels": me.labels', '"labels": me.labels.flip(0)', PLAIN),
    ('        w = down["model"]\n', '        w = me.train(down["model"])\n', PLAIN),
    ("Up(mean=", "Up(sum=", it_trains_as_fedavg),
    ('me.train(down["model"])}', 'me.train(down["model"])}, weight=1', it_trains_as_fedavg),
    ("/ self.sigma", "* self.sigma", FEW),
    ("-far[:, : self.k]", "far[:, : self.k]", FEW),
    ("-far[:, : self.k] / self.sigma", "-far[:, : self.k].square() / self.sigma", FEW),  # public code
    ("-far[:, : self.k] / self.sigma, dim=1)", "-far / self.sigma, dim=1)[:, : self.k]", FEW),
    ("order[:, : self.k]", "order[:, -self.k :]", FEW),
    ("_log(1 - self.lam), own + _log(self.lam)", "_log(self.lam), own + _log(1 - self.lam)", FEW),
    ("shared + _log(1 - self.lam)", "shared", FEW),
    ("task.head(w, z).log_softmax(1)", "task.head(w, z)", FEW),
    (".clamp(min=torch.finfo(z.dtype).tiny)", "", every_class_has_a_score),
]
