"""Mistakes in fedsimsup.py, and what notices them."""

from functools import partial

import checks

FALLING = {"C": 0.5, "gamma": 0.3, "T": 20}
REFERENCE = checks.fedsimsup_is_its_reference
PLAIN = partial(REFERENCE, hyper=FALLING)
EAGER = partial(REFERENCE, hyper=FALLING | {"mixing": "eager"})
ALIKE = partial(REFERENCE, hyper=FALLING | {"similarity": False})
SERIAL = partial(REFERENCE, hyper=FALLING | {"structure": "serial"})
PHASES = partial(REFERENCE, hyper={"tau_s": 2, "tau_theta": 3})
IMAGES = partial(REFERENCE, hyper=FALLING, images=True)
LAZY = checks.fedsimsup_mixes_lazily_as_eagerly
STRANGERS = partial(REFERENCE, sizes=(1, 1, 1, 1), ratio=((3,), (0,), (1,), (2,)))
SAID = checks.fedsimsup_clients_say_their_labels_once

MUTANTS = [
    # the client
    ("q = me.logits(s, part)", 'q = me.logits(mine["supervisor"], part)', PLAIN),
    ("beside=me.logits(theta)", "beside=0 * me.logits(theta)", PLAIN),
    ("+ batch.beside, batch)", ", batch)", PLAIN),
    ("q + task.logits(w, x, _part", "0 * q + task.logits(w, x, _part", checks.fedsimsup_predicts_with_the_sum_of_two_networks),
    ("beside=q, epochs=self.tau_theta, order=1", "beside=q, epochs=self.tau_theta, order=0", PHASES),
    ("beside=me.logits(theta), epochs=self.tau_s,", "beside=me.logits(theta), epochs=self.tau_theta,", PHASES),
    ('Up(rows={"model": theta}), {"supervisor": s}', 'Up(rows={"model": theta}), mine', PLAIN),
    ('Up(rows={"model": theta}), {"supervisor": s}', 'Up(rows={"model": down["model"]}), {"supervisor": s}', PLAIN),
    ("w = me.train(w, only=theta", "w = me.train(theta | s, only=theta", SERIAL),
    ("theta | s, only=s,", "theta | s, ", SERIAL),
    ('"labels": me.counts / me.n', '"labels": me.counts', SAID),
    # the server
    ("t, like = run.round + 1,", "t, like = run.round,", EAGER),
    ("s = normalize(a.double()) @ normalize(b.double()).T", "s = a.double() @ b.double().T", PLAIN),
    ("return s if self.similarity else torch.ones_like(s)", "return s", ALIKE),
    ("beta * M / (M + K * size)", "beta * M / (M + size)", PLAIN),
    ("beta * M / (M + K * size)", "beta * K * size / (M + K * size)", PLAIN),
    ("(flat / t) ** 2", "flat / t", PLAIN),
    ("(flat / t) ** 2", "(t / flat) ** 2", PLAIN),
    ("rounds**self.gamma", "rounds", PLAIN),
    ("self.T or run.rounds", "run.rounds", PLAIN),
    ("torch.where(total > 0, total, 1.0))[:, of]", "1.0)[:, of]", PLAIN),  # eq. 7 without its sum of the s_ij
    ("a * ((total > 0) &", "a * ((total >= 0) &", STRANGERS),
    ("(at < torch.tensor(rounds))", "(at <= torch.tensor(rounds))", LAZY),
    ("(1 - a).flip(1).cumprod(1).flip(1)", "(1 - a).cumprod(1)", LAZY),
    ("left[:, 1:], torch.ones_like", "left[:, :-1], torch.ones_like", LAZY),
    ("left[:, :1]\n", "left[:, -1:]\n", LAZY),
    ('log = server["log"] | news', "log = news", LAZY),
    ("len(seen) < clients", "len(seen) < 3", LAZY),
    ("rows, log = rows.with_(away, theta=now, at=[at] * len(away)), Tree()", "log = Tree()", EAGER),
    ('up.rows["model"][k].flatten(1) for k in like', 'up.rows["model"][k].flatten(1).flip(1) for k in like', IMAGES),
]  # fmt: skip
