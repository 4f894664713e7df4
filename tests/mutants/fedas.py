"""Mistakes in fedas.py, and what notices them."""

from checks import against

AS, IMAGES = against("fedas", {"align_lr": 0.4}), against("fedas", {"align_lr": 0.4}, images=True)
SAMPLE = against("fedas", {"fisher": "sample"})

MUTANTS = [
    ("me.sweep(own, self.class_sums)", "me.sweep(own | body, self.class_sums)", AS),  # prototypes of the received body
    ("/ me.counts.clamp(min=1)[:, None]", "", AS),
    (".mean(1, keepdim=True)", ".sum(1, keepdim=True)", AS),
    ("(batch.by_class(gap, task.classes) / count).sum()", "batch.mean(gap[:, 0])", AS),
    ("own | body, only", "own, only", AS),  # public code elsewhere: the received body is never taken
    ("lr=self.align_lr", "lr=me.lr", AS),
    ("optimizer=SGD(), ", "", AS),
    ("me.train(aligned, order=0)", "me.train(own | body, order=0)", AS),
    ("self.trace(me, w)\n", "1.0\n", AS),
    ("self.trace(me, w)\n", "self.trace(me, aligned)\n", AS),
    ("return w + square(batch)", "return w.zeros() + square(batch)", AS),
    ("given=(w,), epochs=1, order=10", "given=(w,), epochs=1, order=0", AS),
    ('me.n if self.fisher == "sample" else 1', "1", SAMPLE),
    ('if self.fisher == "batch":', "if True:", SAMPLE),
    ('{"model": w}\n', '{"model": w | aligned.pick(body)}\n', AS),
    ('{"model": w}\n', '{"model": own | w.pick(body)}\n', AS),
    ('Up(mean={"model": w.pick(body)}, weight=weight)', 'Up(mean={"model": w.pick(body)})', AS),
    ("model.drop(task.net.buffers)", "model.pick(task.net.head)", IMAGES),
    ('return mine["model"]', 'return mine["model"] | down["model"]', AS),
]
