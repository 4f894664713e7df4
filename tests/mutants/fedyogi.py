"""Mistakes in fedyogi.py, and what notices them."""

from checks import against

YOGI, IMAGES = against("fedyogi", {"beta2": 0.7, "tau": 0.05}), against("fedyogi", images=True)

MUTANTS = [
    ("zero + self.tau**2", "zero", YOGI),  # public code
    ("zero + self.tau**2", "zero + self.tau", YOGI),
    ("self.beta1 * m + (1 - self.beta1) * delta", "self.beta1 * m + delta", YOGI),
    ("self.beta1 * m + (1 - self.beta1) * delta", "delta", YOGI),
    ("return v - (1 - self.beta2)", "return self.beta2 * v - (1 - self.beta2)", YOGI),
    ("return v - (1 - self.beta2)", "return v + (1 - self.beta2)", YOGI),
    ("(v - delta.sq()).map(torch.sign)", "(delta.sq() - v).map(torch.sign)", YOGI),
    ("(v - delta.sq()).map(torch.sign)", "delta.map(torch.sign)", YOGI),
    ("* (v - delta.sq()).map(torch.sign)", "", YOGI),
    ("(v - delta.sq()).map(torch.sign)", "(v - delta.sq())", YOGI),
    ('self.second(server["v"], delta)', 'self.second(server["v"], m)', YOGI),
    ("(v.map(torch.sqrt) + self.tau)", "(v + self.tau)", YOGI),
    ("(v.map(torch.sqrt) + self.tau)", "(v + self.tau**2).map(torch.sqrt)", YOGI),
    ("self.server_lr * m /", "m /", YOGI),
    ("w.pick(m) + step", "mean.pick(m) + step", YOGI),
    ("w.pick(m) + step", "w.pick(m) - step", YOGI),
    ("mean | (w.pick(m)", "w | (w.pick(m)", IMAGES),
    ("Up(mean=", "Up(weight=1, mean=", YOGI),
]
