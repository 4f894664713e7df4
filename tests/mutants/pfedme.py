"""Mistakes in pfedme.py, and what notices them."""

from checks import against

PLAIN = {"momentum": 0.0, "lr": 0.05}
ME, IMAGES = against("pfedme", **PLAIN), against("pfedme", images=True, **PLAIN)
HALF = against("pfedme", {"beta": 0.5, "inner_steps": 2}, **PLAIN)
SAMPLES = against("pfedme", {"weights": "samples"}, **PLAIN)

MUTANTS = [
    ("self.lam * (theta - w))", "self.lam * (w - theta))", ME),
    ("g + self.lam * (theta - w)", "g", ME),
    ("+ decay * theta", "+ (decay + 1e-3) * theta", ME),  # public code: a weight decay of its own
    ("+ decay * theta", "", ME),
    ("theta - self.personal_lr", "theta - lr", ME),
    ("(w - lr * self.lam", "(w - self.personal_lr * self.lam", ME),
    ("(w - theta)).prefixed", "(theta - w)).prefixed", ME),
    ("self.lam * (w - theta)", "(w - theta)", ME),
    (
        "task.loss(both | v, batch), theta)",
        "task.loss(both | v, batch), both.pick(w))",
        ME,
    ),  # every step from the first
    ("range(self.inner_steps)", "range(1)", ME),
    ('both.under("w"), self.beta', 'both.under("w"), 1.0', HALF),
    ("x.lerp(both", "(0 * x).lerp(both", HALF),
    ('{"model": theta}\n', '{"model": sent}\n', ME),  # public code: w is evaluated
    ('{"model": theta}\n', "mine\n", ME),  # public code: the initial model is
    ('        return mine["model"]\n', '        return down["model"]\n', ME),  # public code: the shared model is
    ("sent = theta | x", "sent = received | x", IMAGES),
    ('1 if self.weights == "uniform" else None', "None", ME),
    ('1 if self.weights == "uniform" else None', "1", SAMPLES),
    ("beta: float = 1.0", "beta: float = 0.0", ME),  # public code
]
