"""Mistakes in fedaims.py, and what notices them."""

from checks import against

ONE, SUM = against("fedaims", images=True), against("fedaims", {"mu": 0.3, "alignment": "sum"}, images=True)
NEAR, FULL = (against("fedaims", h, images=True) for h in ({"auxiliary": "prototype"}, {"supervision": "all"}))
SELDOM = against("fedaims", {"similarity_every": 2}, images=True, rounds=6)
ABSENT = against("fedaims", images=True, ratio=((0, 1, 2, 5), (3,), (0, 1, 3), (3,)))

MUTANTS = [
    ("self.class_sums) / me.counts.clamp(min=1)[:, None]", "self.class_sums)", ONE),
    ('up.mean["prototype"] / held[:, None], server["prototype"])', 'up.mean["prototype"], server["prototype"])', ONE),
    ('/ held[:, None], server["prototype"])', "/ held[:, None], 0.0)", ABSENT),  # eq. 4 as it stands
    ('server["known"] | (held > 0)', "held > 0", ABSENT),
    ("main / len(z) + sum(beside) * ((1 - 1 / len(z)) / len(blocks))", "main + sum(beside)", ONE),
    ("((1 - 1 / len(z)) / len(blocks))", "(1 - 1 / len(z))", FULL),
    ("gap.mean(1) if", "gap.sum(1) if", ONE),
    ("else gap.sum(1)", "else gap.mean(1)", SUM),
    ("gap * known[batch.y]", "gap", ONE),
    ("-(z[:, None] - target).square()", "(z[:, None] - target).square()", NEAR),
    ("scores.masked_fill(~known,", "scores.masked_fill(known,", NEAR),
    ("relu(linear(w,", "(linear(w,", ONE),
    ("z[j - 1]", "z[j]", ONE),
    ('"extra": extra | w.pick(used)', '"extra": extra', ONE),
    ('{"model": w.pick(head), "extra"', '{"model": head, "extra"', ONE),
    ("members.sort(key=len)", "members.sort(key=len, reverse=True)", ONE),
    ("min(smallest, key=", "max(smallest, key=", ONE),
    ("chosen = supervised(similarity,", "chosen = supervised(-similarity,", SELDOM),
    ("(run.round + 1) % self.similarity_every", "run.round % self.similarity_every", SELDOM),
]
