"""Mistakes in fedadam.py, and what notices them."""

from checks import against

ADAM, IMAGES = against("fedadam", {"beta2": 0.7, "tau": 0.05}), against("fedadam", images=True)

MUTANTS = [
    ("zero + self.tau**2", "zero", ADAM),  # public code
    ("zero + self.tau**2", "zero + self.tau", ADAM),
    ("self.beta1 * m + (1 - self.beta1) * delta", "self.beta1 * m + delta", ADAM),
    ("self.beta1 * m + (1 - self.beta1) * delta", "delta", ADAM),
    ("self.beta2 * v + (1 - self.beta2)", "self.beta1 * v + (1 - self.beta1)", ADAM),
    ("self.beta2 * v + (1 - self.beta2)", "v + (1 - self.beta2)", ADAM),
    ("* delta.sq()", "* delta", ADAM),
    ('self.second(server["v"], delta)', 'self.second(server["v"], m)', ADAM),
    ("(v.map(torch.sqrt) + self.tau)", "(v + self.tau)", ADAM),
    ("(v.map(torch.sqrt) + self.tau)", "(v + self.tau**2).map(torch.sqrt)", ADAM),
    ("self.server_lr * m /", "m /", ADAM),
    ("w.pick(m) + step", "mean.pick(m) + step", ADAM),
    ("w.pick(m) + step", "w.pick(m) - step", ADAM),
    ("mean | (w.pick(m)", "w | (w.pick(m)", IMAGES),
    ("Up(mean=", "Up(weight=1, mean=", ADAM),
]
