"""Mistakes in moon.py, and what notices them."""

from checks import against

MOON, IMAGES = against("moon"), against("moon", images=True)
PROJECTION = against("moon", {"projection": 3, "mu": 3.0, "tau": 0.3})

MUTANTS = [
    ("(far - near)", "(near - far)", MOON),
    ("/ self.tau", "* self.tau", MOON),
    ("loss + self.mu *", "loss + 0.0 *", MOON),  # public code: mu is 0 by default
    ("loss + self.mu *", "loss +", PROJECTION),
    ("*batch.beside)", "*batch.beside[::-1])", MOON),
    ('"previous": w.pick(mine["previous"])', '"previous": mine["previous"]', MOON),
    ('"previous": w.pick(mine["previous"])', '"previous": down["model"].pick(mine["previous"])', MOON),
    ("if me.visits else None", "if me.round else None", MOON),  # the initial model in place of none
    ("relu(linear(w,", "(linear(w,", PROJECTION),
    (', only=down["model"], loss', ", only=me.task.net.body, loss", IMAGES),
]
