"""Mistakes in perfedavg.py, and what notices them."""

from checks import against

PLAIN = {"momentum": 0.0}
FO = against("perfedavg", {"alpha": 0.2, "beta": 0.3}, **PLAIN)
FREE = against("perfedavg", **PLAIN)
HF = against("perfedavg", {"variant": "hf", "alpha": 0.2, "beta": 0.3, "delta": 0.1}, **PLAIN)
EXACT = against("perfedavg", {"variant": "exact", "alpha": 0.2, "beta": 0.3}, **PLAIN)
IMAGES = against("perfedavg", {"alpha": 0.2, "beta": 0.03}, images=True, **PLAIN)
SAMPLES = against("perfedavg", {"weights": "samples", "beta": 0.3}, **PLAIN)

MUTANTS = [
    ("adapted = here - alpha", "adapted = here + alpha", FO),
    ("adapted = here - alpha", "adapted = here - beta", FO),  # PFLlib: one rate for both steps
    ("adapted = here - alpha * self", "adapted = here - 0 * self", FO),
    ("self.slope(task, w, batches[1], adapted", "self.slope(task, w, batches[0], adapted", FO),
    ("return here - beta * v", "return adapted - beta * v", FO),  # the inner step is not taken back
    ("+ decay * at", "", FO),
    ("+ decay * v", "", EXACT),
    ("v - alpha * self.curved", "v + alpha * self.curved", EXACT),
    ("v - alpha * self.curved", "v - self.curved", EXACT),
    ("batches[2], here, v", "batches[1], here, v", EXACT),
    ("batches[2], here, v", "batches[2], adapted, v", HF),
    ('if self.variant != "fo":', "if False:", EXACT),
    ('if self.variant == "exact":', "if True:", HF),
    ("(2 * self.delta)", "self.delta", HF),
    ("at - self.delta * v", "at", HF),  # a one-sided difference
    ("still = w.detach()", "still = w", IMAGES),  # the pass at w moves the statistics too
    ("v = self.slope(task, w, batches[1]", "v = self.slope(task, still, batches[1]", IMAGES),
    ("0.1 * me.lr if self.beta is None", "me.lr if self.beta is None", FREE),
    ("me.lr if self.alpha is None else", "0.1 if self.alpha is None else", FREE),
    ("max(me.epochs, math.ceil(k / me.steps(1)))", "me.epochs", against("perfedavg", epochs=1, **PLAIN)),
    ("            lr=beta,\n", "", FO),
    ('weight=1 if self.weights == "uniform" else None', "weight=None", FO),
    ('weight=1 if self.weights == "uniform" else None', "weight=1", SAMPLES),
    ("steps=1, lr=self.inner_lr(me), order=8", "lr=self.inner_lr(me), order=8", FO),  # an epoch, not a step
    ("lr=self.inner_lr(me), order=8", "lr=0.0, order=8", FO),  # prediction without adaptation
    ("lr=self.inner_lr(me), order=8", "order=8", FO),
]
