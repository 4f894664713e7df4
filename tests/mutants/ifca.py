"""Mistakes in ifca.py, and what notices them."""

import torch

from checks import CLIENTS, against, found
from idiolect.method import Facts, Rows, Up
from idiolect.tree import Tree

IFCA, IMAGES = against("ifca"), against("ifca", images=True)


def idle_models_stay(kind):
    one = found(kind(), sizes=(6, 3), ratio=1.0)
    still = [w.equals(one.context.state.server[j]) for j, w in one.server.items()]
    assert 2 <= sum(still) < 4


def models_begin_apart(kind):
    models = list(found(kind(), rounds=0).server.values())
    assert not any(a.equals(b) for k, a in enumerate(models) for b in models[:k])


def a_client_alone_is_heard_alone(kind):
    """Two replies for one model, one for another: plain means of whole models."""
    server = {f"cluster{j}": Tree({"w": torch.zeros(1)}) for j in range(3)}
    up = Up(rows={"model": Tree({"w": torch.tensor([[1.0], [2.0], [9.0]])}), "cluster": torch.tensor([2, 2, 0])})
    new, _ = kind(3).server(server, Rows({}), up, Facts(0, 5, (0, 1, 4), (100.0, 1.0, 1.0), 0.1, 1, 0))
    assert [float(w["w"]) for w in new.values()] == [9.0, 0.0, 1.5]


def clients_have_their_best(kind):
    one = found(kind())
    task = one.context.task
    for i in range(CLIENTS):
        x, y = one.context.shards.part("train", i)
        losses = [float(task.losses(task.logits(w, x), y).mean()) for w in one.server.values()]
        assert one.personal(i).equals(one.server[f"cluster{losses.index(min(losses))}"])


MUTANTS = [
    (".argmin()", ".argmax()", IFCA),
    (".argmin()", ".argmax()", clients_have_their_best),
    ('me.loss(down[f"cluster{j}"])', 'me.loss(down["cluster0"])', IFCA),
    ("enumerate([net.weights, *others])", "enumerate([net.weights] * self.clusters)", models_begin_apart),
    ('net.fresh(f"cluster {j}")', 'net.fresh("cluster")', models_begin_apart),
    ('me.train(down[f"cluster{j}"])', 'me.train(down["cluster0"])', IFCA),
    ('me.train(down[f"cluster{j}"])', 'down[f"cluster{j}"]', IFCA),
    ("new = dict(server)", "new = {k: v.zeros() for k, v in server.items()}", idle_models_stay),
    ("v[chose].mean(0)", "v.mean(0)", a_client_alone_is_heard_alone),
    ("v[chose].mean(0)", "v[chose].sum(0) / len(v)", IFCA),
    ("v[chose].mean(0)", "v[chose].sum(0)", a_client_alone_is_heard_alone),
    ('return down[f"cluster{self.closest(me, down)}"]', 'return down["cluster0"]', IFCA),
    ('"cluster": j}', '"cluster": j * 0}', IFCA),
]
