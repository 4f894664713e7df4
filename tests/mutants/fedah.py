"""Mistakes in fedah.py, and what notices them."""

from checks import against

AH, LONG = against("fedah"), against("fedah", {"head_epochs": 3})
FAST, LOCAL = against("fedah", {"weight_lr": 25.0}), against("fedah", {"head_epochs": 2, "weight_lr": None})

MUTANTS = [
    ("(old + (new.pick(old) - old) * mix)", "(new.pick(old) + (old - new.pick(old)) * mix)", AH),
    ("(old + (new.pick(old) - old) * mix)", "(old + (new.pick(old) - old) * (1 - mix))", AH),
    ("project=unit_interval, order=9", "order=9", FAST),
    ("optimizer=SGD(), project", "project", AH),
    ("lr=self.weight_lr", "lr=None", AH),
    ("lr=self.weight_lr", "lr=self.weight_lr or 1.0", LOCAL),
    ("unit_interval, order=9", "unit_interval, order=0", AH),
    ("epochs=self.head_epochs,\n", "epochs=1,\n", LONG),
    ("epochs=self.head_epochs, order=0", "epochs=1, order=0", LONG),
    ("only=old, epochs", "epochs", AH),
    ("me.train(w, only=w.drop(old), epochs", "me.train(w, epochs", AH),
    ("only=w.drop(old), epochs=self.body_epochs", "only=w.drop(old), epochs=self.head_epochs", LONG),
    ('"mix": mix}', '"mix": mine["mix"]}', AH),
    ('{"model": w.pick(old), "mix"', '{"model": new.pick(old), "mix"', AH),
    ('mean={"model": w}', 'mean={"model": w | new.pick(old)}', AH),
    ('mine["model"], self.learn(me, new, mine))', 'mine["model"], mine["mix"])', AH),
]
