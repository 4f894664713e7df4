"""Mistakes in apfl.py, and what notices them."""

from checks import against

ALPHA, FAST = against("apfl", {"alpha": 0.3}), against("apfl", {"alpha": 0.6, "alpha_lr": 3.0})
FIXED, IMAGES = against("apfl", {"alpha": 0.3, "adaptive": False}), against("apfl", images=True)

MUTANTS = [
    (".lerp(v, alpha)", ".lerp(v, 1 - alpha)", ALPHA),
    (
        "v | w.drop(task.net.buffers).lerp(v, alpha)",
        "v | w | w.drop(task.net.buffers).lerp(v, alpha)",
        IMAGES,
    ),  # w's statistics
    ("w.detach(), v, alpha", "w, v, alpha", ALPHA),  # w learns from the mixture too
    ("task.loss(w, batch) +", "", FIXED),
    ("mixed = self.mixture(task, w.detach(), v, alpha)", "mixed = v", FIXED),  # public code: v's own gradient
    ("steps=1, ", "", FAST),
    ("lr=self.alpha_lr", "lr=None", FAST),
    ("optimizer=SGD()", "optimizer=None", FAST),
    ("project=unit_interval, ", "", FAST),
    ("order=0,\n        )", "order=1,\n        )", FAST),
    ("gradients=2, order=0", "gradients=2, order=1", FIXED),
    ("if self.adaptive:", "if not self.adaptive:", FIXED),
    ('"own": both.pick(v), "alpha": alpha}', '"own": both.pick(v), "alpha": mine["alpha"]}', FAST),
    ('{"own": both.pick(v),', '{"own": v,', FIXED),
    ("torch.full((), self.alpha", "torch.full((), 0.5", FIXED),
    ("given=(w, v), steps", "given=(v, w), steps", FAST),
    ('mean={"model": both.pick(w)}', 'mean={"model": both.under("own")}', FIXED),
    ('return self.mixture(me.task, down["model"],', 'return self.mixture(me.task, mine["own"].under("own"),', FIXED),
]
