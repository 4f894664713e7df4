"""Mistakes in fedcp.py, and what notices them."""

from types import SimpleNamespace

import numpy as np
import torch

from checks import against
from idiolect.tree import Tree


def the_context_is_of_the_own_head(kind):
    """As a round begins; in a run with plain SGD and one first head that is every head's."""
    seen = {}

    def train(w, given=(), **options):
        seen["k"] = given[0]
        return w

    names = ("global.weight", "global.bias", "head.weight", "head.bias")
    draw = torch.Generator().manual_seed(0)
    w = Tree({k: torch.randn(3, 4, generator=draw) if "weight" in k else torch.zeros(3) for k in names})
    me = SimpleNamespace(train=train, features=lambda w: w, draw=lambda purpose: np.random.default_rng(0))
    kind().local(me, {"model": w.pick(names[:2])}, {"model": w.pick(names[2:])})
    own = w["head.weight"].sum(0)
    torch.testing.assert_close(seen["k"], own / own.norm())


CP, IMAGES, QUIET = against("fedcp"), against("fedcp", images=True), against("fedcp", {"lam": 0.7, "noise": False})

MUTANTS = [
    ("loss + self.lam * mmd", "loss + mmd", CP),
    ("loss + self.lam * mmd", "loss - self.lam * mmd", QUIET),
    ("loss + self.lam * mmd(f, batch.beside, batch.mask) if self.lam else loss", "loss", CP),
    ("sign @ K @ sign /", "sign @ K @ sign.abs() /", QUIET),
    ("torch.cat([real, -real])", "torch.cat([real, real])", CP),
    ("(10, 15, 20, 50)", "(10, 15, 20)", CP),
    ("-D / (2 * a)", "-D / a", CP),
    (".clamp(min=1.0).square()", ".clamp(min=1.0)", CP),
    ("fresh(f) if self.noise", "0.0 if self.noise", CP),
    ("fresh(f) if self.noise", "0 * fresh(f) if self.noise", CP),
    ("-torch.log(-torch.log(u))", "torch.log(-torch.log(u))", CP),
    ("generator.random((len(f), 2, f.shape[1]))", "generator.random((len(f), 2, 1))", CP),
    (".relu().unflatten", ".unflatten", CP),
    ("unflatten(1, (2, -1))", "unflatten(1, (-1, 2)).mT", QUIET),  # pairs of neighbours
    ("dim=1).unbind(1)", "dim=1).flip(1).unbind(1)", QUIET),
    ('linear(w, "policy", f * k)', 'linear(w, "policy", f)', CP),  # no context
    ("self.context(head), gumbel", 'self.context(Tree({"head.weight": model["global.weight"]})), gumbel', the_context_is_of_the_own_head),
    ('w["head.weight"].sum(0)', 'w["head.weight"][0]', CP),
    ('normalize(w["head.weight"].sum(0), dim=0)', 'w["head.weight"].sum(0)', CP),
    (' if not k.startswith("global.")', "", CP),  # the shared head trains too
    ("(own + received) / 2", "own", CP),
    ("(own + received) / 2", "received", CP),
    ('{"model": w.pick(head)}', "mine", CP),
    ("beside=me.features(model)", "beside=0 * me.features(model)", CP),
    ("beside=me.features(model)", "beside=me.features(me.task.net.weights)", IMAGES),  # the initial body
]  # fmt: skip
