"""Mistakes in pfedfda.py, and what notices them."""

from checks import against

FDA, IMAGES, GRID = against("pfedfda"), against("pfedfda", images=True), against("pfedfda", {"grid": 5})
IDENTITY = against("pfedfda", {"jitter": "identity", "shrinkage": 0.05})
SINGLE, LOCAL = against("pfedfda", {"single_beta": True}), against("pfedfda", {"local_beta": True})

MUTANTS = [
    ("- 0.5 * (mean * weight)", "+ 0.5 * (mean * weight)", FDA),
    ("prior.log() - 0.5", "-0.5", FDA),  # equal shares
    ("self.shrinkage * covariance.trace() / d", "self.shrinkage * covariance.trace()", IDENTITY),
    ("(1 - self.shrinkage) * covariance", "covariance", IDENTITY),
    ("counts < self.min_samples, shared", "counts < 1, shared", FDA),  # public code: a single sample is a mean
    ("/ max(len(z) - 1, 1)", "/ len(z)", FDA),
    ("z = z - mean[y]", "z = z - z.mean(0)", FDA),
    ("SMALL + identity if", "SMALL * identity if", FDA),
    ("else SMALL * identity", "else SMALL + identity", IDENTITY),
    ("share * u + (1 - share) * v", "share * v + (1 - share) * u", LOCAL),
    ("return z.new_zeros(2)", "return z.new_ones(2)", against("pfedfda", sizes=(6, 1, 1, 3, 9))),  # the other end
    ("return z.new_ones(2)", "return z.new_zeros(2)", LOCAL),
    ("((one, two), (two, one))", "((one, one), (two, two))", GRID),  # nothing is held out
    ("((one, two), (two, one))", "((one, two),)", FDA),
    ("several = member.sum(0)[y] >= FOLDS", "several = member.sum(0)[y] >= 1", FDA),
    ("(rank % FOLDS == k)", "(torch.arange(len(y)) % FOLDS == k)", GRID),
    ("1 if self.single_beta else 2", "2", SINGLE),
    ("max_iter=10", "max_iter=1", FDA),
    ("tolerance_grad=1e-3, ", "", FDA),
    ("(costs <= costs.min() + TIE).int().argmax()", "costs.argmax()", GRID),
    ("/ max(me.n, 1) + SMALL", "/ max(me.n, 1) + 1e-12", FDA),
    (", only=body).pick(body)", ").pick(body)", FDA),  # the head trains too
    ("named(head, dtype), only", "me.task.net.head, only", FDA),
    ("self.fitted(me, w, down)", "self.fitted(me, body, down)", FDA),  # statistics of before training
    ('"mean": mean.to(dtype)', '"mean": down["mean"]', FDA),
    ('"covariance": covariance.to(dtype)', '"covariance": down["covariance"]', FDA),
    ('named(self.head(*self.fitted(me, down["model"], down)), down["mean"].dtype)', 'named(self.head(down["mean"], down["covariance"], self.prior(me)), down["mean"].dtype)', IMAGES),
    ("(d**0.5 * net", "(net", FDA),
]  # fmt: skip
