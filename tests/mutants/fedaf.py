"""Mistakes in fedaf.py, and what notices them."""

from functools import partial
from importlib import import_module

import torch

from checks import against, found, named
from harness import agree, world
from idiolect.engine.work import Job
from idiolect.method import Batch

QUICK = {"ipc": 2, "iterations": 4, "server_epochs": 2}
AF, STRONG = against("fedaf", QUICK), against("fedaf", QUICK | {"lam_loc": 2.0, "lam_glob": 3.0, "temperature": 0.5})
RESTART, IMAGES = against("fedaf", QUICK | {"restart": True, "averaged": 2}), against("fedaf", QUICK, images=True)


def images_are_the_reference_s(kind, **hyper):
    one = found(kind(**QUICK, **hyper))
    expected = import_module("reference.fedaf").run(world(one.run), **QUICK, **hyper)
    agree(one, expected)
    for i, known in enumerate(expected.extra["condensed"]):
        images = one.private(i)["images"].unflatten(0, (3, 2))
        for c in range(3):
            torch.testing.assert_close(images[c], known.get(c, torch.zeros_like(images[c])), rtol=0, atol=1e-10)


def both_exchanges_are_under_one_network(kind):
    context = found(named("fedaf", **QUICK), rounds=0).context
    w = context.net.weights
    me = [context.client(Job(k, 0, 1, 0, {}, {})) for k in ("ask", "local")]
    one, two = (kind(gamma=0.3).resampled(m, w) for m in me)
    assert one.equals(two)
    assert not one.equals(w)


def the_first_message_is_short(kind):
    """What the server was told in a round is not sent again in the next."""
    one = found(kind(**QUICK))
    assert not one.server["peers"]
    assert [r["bytes_down"] for r in one.rounds[1:]] == [5 * 8 * (one.context.net.weights.size + 9)] * 4


def a_class_that_the_batch_lacks_says_nothing(kind):
    task = found(named("fedaf", **QUICK), rounds=0).context.task
    w, soft = task.net.weights, torch.full((3, 3), 1 / 3, dtype=torch.float64)
    other = soft.clone()
    other[1] = torch.tensor([0.9, 0.1, 0.0])
    batch = Batch(torch.ones(2, 6, dtype=torch.float64), torch.tensor([0, 2]))
    assert float(kind().teaching(task, w, batch, soft)) == float(kind().teaching(task, w, batch, other))


SMALL = partial(images_are_the_reference_s, gamma=0.4, image_momentum=0.3)

MUTANTS = [
    ("random.lerp(w.pick(random), self.gamma)", "w.pick(random).lerp(random, self.gamma)", AF),
    ('me.fresh("resampled").drop(me.task.net.buffers)', 'me.fresh("resampled")', IMAGES),
    ('me.fresh("resampled")', "me.task.net.fresh('resampled')", AF),
    ('self.resampled(me, down["model"]))\n', 'down["model"])\n', STRONG),
    ('/ up.sum["held"].clamp(min=1)[:, None]  # V_c', "  # V_c", STRONG),
    ('"logits": peers})}', '"logits": 0 * peers})}', STRONG),
    ('me.fresh("resampled")', "me.fresh(repr(id(me)))", both_exchanges_are_under_one_network),
    ("if me.visits and not self.restart", "if me.visits", RESTART),
    ("if me.visits and not self.restart", "if me.round and not self.restart", AF),
    ('{"images": images}\n\n    def begun', "mine\n\n    def begun", SMALL),
    ("given=(class_means(me, me.features(w))", 'given=(class_means(me, me.features(down["model"]))', AF),
    ("optimizer=SGD(self.image_momentum)", "optimizer=None", SMALL),
    ("lr=self.image_lr", "lr=me.lr", AF),
    ('only=["images"]', "only=None", AF),
    ('soft = class_means(me, (me.logits(down["model"])', "soft = class_means(me, (me.logits(w)", STRONG),
    ("self.temperature).softmax(1))  # R_kc", "1.0).softmax(1))  # R_kc", STRONG),
    ("own * ((z - real)", "((z - real)", SMALL),
    (
        "self.lam_loc * sliced(logits - peers)",
        "self.lam_loc * sliced((logits - peers).detach())",
        STRONG,
    ),  # public code
    ("self.lam_loc * sliced", "sliced", STRONG),
    ("(z - real).square().sum(1)", "(z - real).square().mean(1)", AF),
    ("apart.square().mean(1)", "apart.square().sum(1)", STRONG),
    ("draw.integers(len(own), size=(self.ipc, self.averaged))", "draw.integers(len(own), size=(self.ipc, 1))", AF),
    ("/ own.sum(0).clamp(min=1)[:, None]  # R_c", "/ len(own)  # R_c", STRONG),
    ("own.nonzero()[:, 1]", "(own.nonzero()[:, 0] % 3)", AF),
    ("epochs=self.server_epochs", "epochs=1", AF),
    (
        '"peers": Tree()}, rows\n\n    def teaching',
        '"peers": server["peers"]}, rows\n\n    def teaching',
        the_first_message_is_short,
    ),
    ("said = (logits / self.temperature).softmax(1)", "said = (logits / self.temperature).detach().softmax(1)", STRONG),
    ("/ count.clamp(min=1)  # T_c", "  # T_c", STRONG),
    (
        "torch.where(count[:, 0] > 0, diverging(soft, said), 0.0)",
        "diverging(soft, said)",
        a_class_that_the_batch_lacks_says_nothing,
    ),
    ("apart.mean()", "apart.sum()", STRONG),
    ("(p - q).mul(", "p.mul(", STRONG),
    ("self.lam_glob * apart", "apart", STRONG),
]
