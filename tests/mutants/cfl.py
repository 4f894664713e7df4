"""Mistakes in cfl.py, and what notices them."""

import math
from functools import partial

import torch

from checks import CLIENTS, against, experiment, federation, found, known, moved
from idiolect.method import Facts, Rows, Up
from idiolect.tree import stack

ALWAYS = {"eps1": math.inf, "eps2": 0.0}
SPLIT = against("cfl", ALWAYS, ratio=1.0)
TURNS = against("cfl", ALWAYS, ratio=((0, 1, 2, 3), (2, 4, 5), (1, 6), (0, 7), (3, 5, 7), (1, 2, 6)), rounds=6)
IMAGES = against("cfl", ALWAYS, ratio=1.0, images=True)
MIDDLE = against("cfl", {"eps1": 0.3, "eps2": 0.4}, ratio=1.0, rounds=6)


def parted(kind, updates, expected, sizes=None, **hyper):
    """The clusters after a round in which these are the updates of all clients."""
    count = len(updates)
    sizes = sizes or (1.0,) * count
    context = experiment(kind(), federation=federation((4,) * count), network="mlp").context()
    w = context.net.weights
    replies = [w | {"head.bias": w["head.bias"] + torch.tensor([*u, 0.0], dtype=torch.float64)} for u in updates]
    facts = Facts(0, count, tuple(range(count)), sizes, 0.1, 4, 0)
    up = Up(rows={"model": stack(replies)})
    _, rows = kind(**hyper).server(context.state.server, Rows(context.state.rows), up, facts)
    assert [int(rows[i]["cluster"]) for i in range(count)] == expected


OPPOSED = partial(
    parted, updates=[[-1.0, 0.1], [9.0, 0.0], [-5.0, 0.0], [0.1, 0.01], [1.0, -0.1]], expected=[0, 1, 0, 1, 1], **ALWAYS
)
LONG = partial(parted, updates=[[9.0, 0.0], [3.0, 9.0], [0.1, 0.01]], expected=[0, 1, 0], **ALWAYS)
PAIR = {"updates": [[3.0, 4.0], [-3.0, 0.0]], "sizes": (1.0, 3.0)}  # the mean's norm is 1.803, the longest is 5
RESTS = partial(parted, **PAIR, expected=[0, 1], eps1=1.81, eps2=4.9)
MOVES = partial(parted, **PAIR, expected=[0, 0], eps1=1.80, eps2=4.9)
SHORT = partial(parted, **PAIR, expected=[0, 0], eps1=1.81, eps2=5.1)
WIDE = [[1.0, 0.0], [-0.5, math.sqrt(3) / 2]]  # at 120 degrees: 0.866
BELOW = partial(parted, updates=WIDE, expected=[0, 1], eps1=9.0, eps2=0.5, gamma=0.865)
ABOVE = partial(parted, updates=WIDE, expected=[0, 0], eps1=9.0, eps2=0.5, gamma=0.867)
CHAIN = partial(
    parted,
    updates=[[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in (0, 30, 60, 90, 120, 180, 210)],
    expected=[0, 0, 0, 0, 0, 1, 1],
    **ALWAYS,
)


def that_never_splits_is_fedavg(kind):
    one, fedavg = found(kind(eps1=0.0)), known("fedavg")
    assert max(moved(one.personal(i), fedavg.personal(i)) for i in range(CLIENTS)) < 1e-12


def nobody_is_split_before_all_are_known(kind):
    one = found(kind(**ALWAYS), ratio=((0, 1, 2, 3), (2, 4, 5), (1, 6)), rounds=3)
    assert not any(int(one.progress.rows[i]["cluster"]) for i in range(CLIENTS))


def numbers_go_on(kind):
    one = found(kind(**ALWAYS), ratio=1.0, rounds=8)
    assert sorted(int(one.progress.rows[i]["cluster"]) for i in range(CLIENTS)) == list(range(CLIENTS))


MUTANTS = [
    ("(updates, sizes).norm() < self.eps1", "(updates, sizes).norm() > self.eps1", RESTS),
    ("(updates, sizes).norm() < self.eps1", "(updates, [1.0] * len(sizes)).norm() < self.eps1", RESTS),  # plain mean
    ("not mean(updates, sizes).norm() < self.eps1", "False", MOVES),
    ("not mean(updates, sizes).norm() < self.eps1", "False", MIDDLE),
    (".max() > self.eps2", ".mean() > self.eps2", RESTS),
    (".max() > self.eps2", ".max() > 0 * self.eps2", SHORT),
    ("max(0.0, 1 - across) / 2", "max(0.0, 1 - across)", ABOVE),
    ("sqrt(max(0.0, 1 - across) / 2)", "across", BELOW),
    ("normalize(flat) @ normalize(flat).T", "flat @ flat.T", LONG),
    ("argsort(descending=True, stable=True)", "argsort(stable=True)", OPPOSED),
    ("argsort(descending=True, stable=True)", "argsort(stable=True)", CHAIN),
    ("left > 2 and", "left > 3 and", SPLIT),
    ("cosines[~other][:, other].max()", "cosines[~other][:, other].min()", partial(CHAIN, gamma=0.6, expected=[0] * 7)),
    ("if leaves]", "if not leaves]", OPPOSED),
    ("len(ids) < 2 or NEVER in sizes or", "len(ids) < 2 or", nobody_is_split_before_all_are_known),
    ("model(server, c) + mean(", "model(server, 0) + mean(", SPLIT),
    ('[float(rows[i]["size"]) for i in here]', "[1.0] * len(here)", that_never_splits_is_fedavg),
    ("server = kept(server, new, w)", "server = kept(server, new, model(server, 0))", SPLIT),
    ("server = kept(server, c, w)", "pass", that_never_splits_is_fedavg),
    ('new = len(server["clusters"]) // len(w)', "new = c + 1", numbers_go_on),
    ("rows = rows.with_(run.ids, update=told", "rows = type(rows)(rows.template).with_(run.ids, update=told", TURNS),
    ('update.pick(rows.template["update"])', "update", IMAGES),
    ('return {"model": model(server, row["cluster"])}', 'return {"model": model(server, 0)}', SPLIT),
]
