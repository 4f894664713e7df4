"""Mistakes in feddyn.py, and what notices them."""

from checks import against

DYN, IMAGES = against("feddyn", {"alpha": 0.3}), against("feddyn", {"alpha": 0.3}, images=True)

MUTANTS = [
    ("grad - g + self.alpha", "grad + g + self.alpha", DYN),
    ("grad - g + self.alpha", "grad - g - self.alpha", DYN),
    ("grad - g + self.alpha * (w - received)", "grad - g", DYN),
    ("grad - g + self.alpha * (w - received)", "grad + self.alpha * (w - received)", DYN),
    ("g - self.alpha * (w", "g + self.alpha * (w", DYN),
    ("g - self.alpha * (w", "0 * g - self.alpha * (w", DYN),
    ('{"g": g - self.alpha * (w - received).pick(g)}', "mine", DYN),
    (", weight=1)", ")", DYN),
    ("len(run.ids) / run.num_clients", "1", DYN),  # h by the participants alone
    ("h - self.alpha * share", "h + self.alpha * share", DYN),
    ("h - self.alpha * share", "0 * h - self.alpha * share", DYN),
    ("- h / self.alpha)", "+ h / self.alpha)", DYN),
    ("- h / self.alpha)", "- h)", DYN),
    ("mean | (mean.pick(h) - h / self.alpha)", "mean", DYN),  # public code: what is evaluated
    ("zero = net.trainable.zeros()", "zero = net.weights.zeros()", IMAGES),
]
