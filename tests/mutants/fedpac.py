"""Mistakes in fedpac.py, and what notices them."""

from functools import partial

import torch

import checks
from checks import against, known, moved
from harness import experiment, run
from reference import fedpac as reference

PAC, IMAGES = against("fedpac"), against("fedpac", images=True)
STRONG, SHORT = against("fedpac", {"lam": 5.0}), against("fedpac", {"head_epochs": 3, "body_epochs": 1})
EVERYBODY = partial(PAC, ratio=1.0)
NEW = partial(PAC, ratio=((3,), (0, 1, 2), (3,), (3,)))  # classes that have no centroid yet
OLD = partial(PAC, ratio=((0, 1, 2), (3,), (0, 1, 2), (0, 1, 2)))  # classes that nobody holds for a round


def drawn(clients, seed=0):
    draw = torch.Generator().manual_seed(seed)
    H = torch.randn(clients, 4, 3, generator=draw, dtype=torch.float64)
    return H, 3 * torch.rand(clients, generator=draw, dtype=torch.float64)


def two_clients_are_mixed_in_closed_form(kind):
    H, v = drawn(2)
    delta = (H[0] - H[1]).square().sum()
    expected = (v[1] + delta) / (v.sum() + delta)
    assert abs(float(kind().weights(H, v)[0, 0] - expected)) < 1e-7


def weights_are_the_reference_s(kind):
    """More clients than dimensions: entries leave the active set on the way."""
    for seed, noise in ((0, 0.1), (1, 1.0), (2, 10.0)):
        H, v = drawn(7, seed)
        H, v = H[:, :1, :2], noise * v
        for i, a in enumerate(kind().weights(H, v)):
            Q = reference.quadratic(i, list(H), v.tolist())
            expected = reference.trimmed(reference.simplex_minimum(Q))
            assert float((a - expected).abs().max()) < 1e-9


def small_weights_are_dropped(kind):
    H, _ = drawn(3)
    a = kind().weights(0 * H, torch.tensor([1.0, 1.0, 5e3], dtype=torch.float64))
    assert a[0].tolist() == [0.5, 0.5, 0.0]


def with_own_heads_it_is_fedrep(kind):
    own = {"weights": lambda self, H, v: torch.eye(len(v), dtype=v.dtype), "__module__": kind.__module__}
    one = run(experiment(type(kind.__name__, (kind,), own)(lam=0.0, head_lr=None)))
    checks.same_shared(one, known("fedrep", {"head_epochs": 1}))


def v_is_never_negative(kind):
    """One sample, in numbers whose squares are rounded."""

    class One:
        counts, n = torch.tensor([1.0]), 1

        def sweep(self, w, fn):
            return {"sums": torch.tensor([[3.0]]).double(), "squares": torch.tensor(9 - 1e-9, dtype=torch.float64)}

    assert float(kind().statistics(One(), None)[2]) >= 0


def heads_stay_with_a_client_that_is_away(kind):
    before, after = (run(experiment(kind(), ratio=((0, 1), (2, 5)), rounds=r)) for r in (1, 2))
    head = before.context.net.head
    assert after.personal(0).pick(head).equals(before.personal(0).pick(head))
    assert moved(before.personal(0).pick(head), head) > 1e-3


MUTANTS = [
    ("rows.with_(run.ids, head=heads)", "rows.with_(run.ids[::-1], head=heads)", PAC),  # public code: another order
    ("rows.with_(run.ids, head=heads)", "rows.with_(range(run.num_clients), head=[heads.map(lambda h: h[0])] * run.num_clients)", heads_stay_with_a_client_that_is_away),
    ("(alpha.to(h.dtype) @", "(alpha.T.to(h.dtype) @", EVERYBODY),
    ("row[i] - row[:, None] - row + gram", "row[i] - row[:, None] - row - gram", two_clients_are_mixed_in_closed_form),
    ("row[i] - row[:, None] - row + gram", "gram", weights_are_the_reference_s),
    ("torch.diag(v.double() + RIDGE)", "torch.diag(0 * v.double() + RIDGE)", two_clients_are_mixed_in_closed_form),
    ("torch.diag(v.double() + RIDGE)", "torch.diag(v.double().sqrt() + RIDGE)", PAC),
    ("if not (z < 0).any():", "if True:", weights_are_the_reference_s),
    ("free = free & (until > until.min())", "return z.clamp(min=0)", weights_are_the_reference_s),
    ("slope = torch.where(y > 0, -torch.inf, 1 - Q @ y)", "slope = torch.where(y > 0, -torch.inf, 1 - 2 * Q @ y)", weights_are_the_reference_s),
    (".clamp(max=LEAST), 0.0, alpha)", ".clamp(max=0.0), 0.0, alpha)", small_weights_are_dropped),
    ("return alpha / alpha.sum(1, keepdim=True)", "return alpha", small_weights_are_dropped),
    ('found["sums"] / me.n\n', 'found["sums"] / me.counts.clamp(min=1)[:, None]\n', PAC),
    ("H.square().sum()) / me.n", "H.square().sum())", PAC),
    ("v.clamp(min=0)", "v", v_is_never_negative),
    ("epochs=self.head_epochs, lr=self.head_lr", "epochs=self.head_epochs", PAC),
    ("epochs=self.head_epochs", "epochs=1", SHORT),
    ("only=body, epochs=self.body_epochs", "only=body", SHORT),
    ("me.train(w, only=body", "me.train(body | head, only=body", PAC),
    ("me.train(w, only=body", "me.train(w, only=body | head", with_own_heads_it_is_fedrep),
    ("+ self.lam * apart", "+ apart", STRONG),
    (".square().mean(1))", ".square().sum(1))", PAC),
    ('down["centroid"], mu)', 'down["centroid"], 0 * mu)', NEW),
    ("if self.lam and known.any()", "if self.lam", PAC),
    ("sums = me.sweep(w, ", "sums = me.sweep(body | head, ", PAC),
    ('server["centroid"])\n', "0.0)\n", OLD),
    ('server["known"] | held', "held", OLD),
    ('"head": w.pick(head), "H"', '"head": head, "H"', PAC),
    ('return down["model"] | down["head"]', 'return down["model"] | down["head"].zeros()', IMAGES),
]  # fmt: skip
