"""Mistakes in fedbn.py, and what notices them."""

from checks import against

NORM, PLAIN = against("fedbn", images=True), against("fedbn")

MUTANTS = [
    ('k.rpartition(".")[0] in net.norms', '"bn" in k', NORM),  # public code
    ('k.rpartition(".")[0] in net.norms', "k in net.buffers", NORM),  # SiloBN: statistics alone
    ('k.rpartition(".")[0] in net.norms', "k in net.trainable", PLAIN),
    ("in net.norms", "not in net.norms", NORM),
    ("net.weights.drop(own)", "net.weights", NORM),
    ("me.train(shared | own)", "me.train(shared | own, only=shared)", NORM),
    ("me.train(shared | own)", "me.train(shared | me.task.net.weights.pick(own))", NORM),
    ('{"model": w.pick(own)}', "mine", NORM),
    ("Up(mean=", "Up(sum=", PLAIN),
    ('mean={"model": w.pick(shared)}', 'mean={"model": shared}', PLAIN),
    ('{"model": w.pick(shared)})', '{"model": w.pick(shared)}, weight=1)', PLAIN),
]
