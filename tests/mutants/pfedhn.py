"""Mistakes in pfedhn.py, and what notices them."""

import torch

from checks import CLIENTS, against, experiment, found
from idiolect.method import Facts, Rows, Up
from idiolect.tree import Tree, stack

SMALL = {"hidden": 7, "server_lr": 0.1}
HN, DEEP = against("pfedhn", SMALL), against("pfedhn", SMALL | {"embedding": 5, "layers": 2})
IMAGES = against("pfedhn", {"hidden": 6}, images=True)


def all_participants_count_alike(kind):
    """One reply twice is one reply, whatever samples are behind it."""
    method = kind(**SMALL)
    context = experiment(method).context()
    ended = []
    for ids in ((0,), (0, 1)):
        facts = Facts(0, 8, ids, (9.0, 1.0)[: len(ids)], 0.1, 4, 3)
        server, rows = method.plan(context.state.server, Rows(context.state.rows), facts)
        rows = rows.with_(ids, embedding=[rows[0]["embedding"]] * len(ids))
        reply = method.down(server, rows[0])["model"].map(lambda v: v + 1)
        up = Up(rows={"model": stack([reply] * len(ids))}, mean={"buffers": Tree()})
        new, rows = method.server(server, rows, up, facts)
        ended.append(new["hyper"] | {"embedding": rows[0]["embedding"]})
    assert max(float((v - ended[1][k]).abs().max()) for k, v in ended[0].items()) < 1e-12


def vectors_are_every_client_s_own(kind):
    one = found(kind(**SMALL), rounds=1, ratio=((0,),))
    drawn = torch.stack([one.progress.rows[i]["embedding"] for i in range(CLIENTS)])
    assert len(drawn.unique(dim=0)) == CLIENTS
    assert float(drawn.norm(dim=1).min()) > 0


def the_absent_s_vectors_stay(kind):
    runs = [found(kind(**SMALL), rounds=r, ratio=((0,), (1,))) for r in (1, 2)]
    first, second = ([one.progress.rows[i]["embedding"] for i in range(CLIENTS)] for one in runs)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [i != 1 for i in range(CLIENTS)]


MUTANTS = [
    ("-delta.dot(", "delta.dot(", HN),  # the sign of the update
    ("trained - self.made(phi, v, names)", "trained", HN),  # weights in place of their update
    ("v = relu(linear(", "v = (linear(", HN),
    ("range(1, self.layers + 1):\n            v = relu", "range(1, self.layers):\n            v = relu", HN),
    ("names)) / len(v)", "names))", HN),
    ("names)) / len(v)", "names))", all_participants_count_alike),
    ('len(v) * g["embedding"]', 'g["embedding"]', HN),
    ('len(v) * g["embedding"]', 'g["embedding"]', all_participants_count_alike),
    ("v - self.server_lr * (own", "v + self.server_lr * (own", HN),
    ("(own + decay * v)", "own", DEEP),
    ("+ phi * decay", "", HN),
    ('server["velocity"] * self.server_momentum', 'server["velocity"] * 0', HN),
    ('"velocity": velocity,', '"velocity": server["velocity"],', HN),
    ("phi - velocity * self.server_lr", "phi - velocity", HN),
    ("rows = rows.with_(run.ids, embedding=", "dict(embedding=", HN),  # vectors that never learn
    ("if rows.written:", "if False:", the_absent_s_vectors_stay),  # drawn anew in every round
    ("if rows.written:", "if False:", HN),
    ('run.draw("embedding", i)', 'run.draw("embedding", 0)', vectors_are_every_client_s_own),
    ("range(run.num_clients), rows", "run.ids, rows", vectors_are_every_client_s_own),
    ("self.embedding or 1 + net.clients // 4", "self.embedding or 1 + net.clients", HN),
    ("self.embedding or 1 + net.clients // 4", "1 + net.clients // 4", DEEP),
    ("weight=1", "weight=me.n", IMAGES),
    ('w.pick(down["buffers"])}', 'down["buffers"]}', IMAGES),
]
