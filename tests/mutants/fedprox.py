"""Mistakes in fedprox.py's stragglers, and what notices them; those in its pull are in tests/contract/test_mutants.py."""

from functools import partial

from checks import against, fedprox_without_mu_is_fedavg, the_server_holds_the_mean_by_samples

HALF, ALL = against("fedprox", {"stragglers": 0.5}, epochs=4), against("fedprox", {"stragglers": 1.0}, epochs=4)
BY_SAMPLES = partial(the_server_holds_the_mean_by_samples, stragglers=1.0)

MUTANTS = [
    ("me.epochs + 1)", "me.epochs)", ALL),  # public code: never all epochs
    ("integers(1, me", "integers(0, me", ALL),
    ("draw.random() < self.stragglers", "draw.random() > self.stragglers", HALF),
    ("draw.random() < self.stragglers", "draw.random() > self.stragglers", fedprox_without_mu_is_fedavg),
    ("draw.random() < self.stragglers", "self.stragglers", HALF),
    ("else me.epochs", "else 1", HALF),
    (", epochs=self.work(me)", "", HALF),
    ('me.draw("stragglers")', 'me.draw(f"stragglers of {self.mu}")', HALF),
    ('mean={"model": w})', 'mean={"model": w}, weight=me.n * me.passes)', ALL),
    ('mean={"model": w})', 'mean={"model": w}, weight=1)', BY_SAMPLES),
]
