"""Mistakes in fedavgm.py, and what notices them."""

from checks import against

AVGM, IMAGES = against("fedavgm", {"server_momentum": 0.8, "server_lr": 0.6}), against("fedavgm", images=True)

MUTANTS = [
    ("self.server_momentum * v +", "v +", AVGM),
    ("self.server_momentum * v +", "0 * v +", AVGM),
    ("(mean - w).pick(v)", "(1 - self.server_momentum) * (mean - w).pick(v)", AVGM),  # public code: a mean of updates
    ("(mean - w).pick(v)", "(w - mean).pick(v)", AVGM),
    ("w.pick(v) + self.server_lr * v", "mean.pick(v) + self.server_lr * v", AVGM),
    ("self.server_lr * v)", "v)", AVGM),
    ('"v": v}', '"v": server["v"]}', AVGM),
    ("mean | (w.pick(v)", "w | (w.pick(v)", IMAGES),
    ('"v": net.trainable.zeros()', '"v": net.weights.zeros()', IMAGES),
    ("Up(mean=", "Up(weight=1, mean=", AVGM),
]
