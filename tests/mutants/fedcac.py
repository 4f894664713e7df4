"""Mistakes in fedcac.py, and what notices them."""

from functools import partial

import torch

import checks
from checks import against, found, known
from idiolect.method import Facts, Rows, Tree, Up

CAC, LATE = against("fedcac", {"beta": 6}), against("fedcac", {"tau": 0.9, "beta": 2})
IMAGES = against("fedcac", images=True)
SINGLE = partial(against("fedcac"), ratio=((2,), (5,), (2,), (0,)))


def without_tau_it_is_fedavg(kind):
    checks.same_shared(found(kind(tau=0.0)), known("fedavg"))
    checks.same_personal(found(kind(tau=0.0)), known("fedavg"))


def alone_it_is_local(kind):
    own = {"partners": lambda self, overlap, t: torch.eye(len(overlap)).double(), "__module__": kind.__module__}
    checks.same_personal(found(type(kind.__name__, (kind,), own)(tau=1.0), ratio=1.0), known("local", ratio=1.0))


def what_did_not_move_is_not_critical(kind):
    w = torch.tensor([1.0, -2.0, 3.0])
    assert kind(tau=1.0).critical(w, w).tolist() == [False] * 3
    assert kind(tau=1.0).critical(w, w * torch.tensor([1.0, 1.0, 1.1])).tolist() == [False, False, True]


def the_largest_overlap_passes_at_last(kind):
    pairs = torch.tensor([[1, 0.2, 0.4], [0.6, 1, 0.8], [0.0, 0.4, 1]], dtype=torch.float64)
    assert kind(beta=4).partners(pairs, 3).tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert kind(beta=4).partners(pairs, 4).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert kind(beta=10).partners(0.1 + 0.7 * pairs, 9).sum() == 4  # to rounding


MASKS = torch.tensor([[255, 255, 0], [255, 0, 0], [0, 0, 0]], dtype=torch.uint8)  # 16, 8 of these, and nothing


def overlaps_are_of_the_own(kind):
    assert kind.server.__globals__["overlaps"]({"": MASKS}).tolist() == [[1, 0.75, 0.5], [0.5, 1, 0.5], [0, 0, 0]]


def partners_are_of_the_row(kind):
    """Client 0 overlaps with client 1 as nobody else does with anybody."""
    trained = Tree({"": torch.tensor([[1.0], [3.0], [7.0]])})
    up = Up(mean={"model": trained}, rows={"trained": trained, "critical": Tree({"": MASKS})})
    _, rows = kind(beta=1).server(
        {}, Rows({"custom": Tree(), "critical": Tree()}), up, Facts(0, 3, (0, 1, 2), (1, 1, 1), 0.1, 1, 0)
    )
    assert [float(rows[i]["custom"][""]) for i in range(3)] == [2.0, 3.0, 7.0]


MUTANTS = [
    ("(after - before) * after", "(after - before)", CAC),
    ("(after - before) * after", "(after - before) * before", CAC),
    ("int(self.tau * s.numel())", "round(self.tau * s.numel())", CAC),
    ("int(self.tau * s.numel())", "max(1, int(self.tau * s.numel()))", without_tau_it_is_fedavg),
    ("kthvalue(s.numel() - count + 1)", "kthvalue(count)", CAC),
    (" & (s > 0)", "", what_did_not_move_is_not_critical),
    ('self.critical(down["model"][k], v)', "self.critical(0 * v, v)", CAC),
    ("(t + 1) / self.beta", "t / self.beta", LATE),
    ("(t + 1) / self.beta", "(t + 1) * self.beta", CAC),
    ("others = overlap[own == 0]", "others = overlap.flatten()", CAC),  # with the diagonal
    ("threshold - SLACK", "threshold + SLACK", the_largest_overlap_passes_at_last),
    ("threshold - SLACK, 1.0, own)", "threshold - SLACK, 1.0, 0.0)", LATE),
    ("            return own\n", "            return 0 * own\n", SINGLE),
    ("share / share.sum(1, keepdim=True)", "share / len(share)", CAC),
    ("share / share.sum(1, keepdim=True)", "share.T / share.T.sum(1, keepdim=True)", partners_are_of_the_row),
    ("run.ids, custom=custom", "run.ids[::-1], custom=custom", CAC),
    ('rows.with_(run.ids, custom=custom, critical=up.rows["critical"])', "rows.with_(run.ids, custom=custom)", CAC),
    ('critical=up.rows["critical"])', 'critical=up.rows["critical"]) if run.round else rows.with_(run.ids, critical=up.rows["critical"])', partial(CAC, rounds=1)),  # public code
    ("v, w[k]) for k", "w[k], v) for k", CAC),
    ('return {"model": w | own}', 'return {"model": w}', alone_it_is_local),
    ("size + size.T - 2 * both", "size + size.T - both", overlaps_are_of_the_own),
    ("(2 * size).clamp(min=1)", "(2 * size.T).clamp(min=1)", overlaps_are_of_the_own),
    ("(2 * size).clamp(min=1)", "(size + size.T).clamp(min=1)", overlaps_are_of_the_own),
    ("torch.where(size > 0, 1 -", "torch.where(size >= 0, 1 -", overlaps_are_of_the_own),
    ("w.drop(me.task.net.buffers)", "w", IMAGES),
]  # fmt: skip
