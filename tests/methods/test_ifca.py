"""IFCA: its reference, FedAvg as its limit, who chooses which model and what becomes of it, groups that are found."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from harness import CLASSES, SIZES, agree, experiment, federation, moved, opposed, run, world
from idiolect import Result
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Facts, Rows, Up
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.ifca import IFCA
from idiolect.tree import Tree
from reference import ifca as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))


def losses(found: Result, i: int, split: str = "train") -> list[float]:
    """Client i's loss of each of the server's models."""
    task, (x, y) = found.context.task, found.context.shards.part(split, i)
    return [float(task.losses(task.logits(w, x), y).mean()) for w in found.server.values()]


def compared(clusters: int, **fields) -> tuple[Result, dict]:
    found = run(experiment(IFCA(clusters), **fields))
    expected = reference.run(world(found.run), clusters)
    agree(found, expected)
    assert list(found.server) == [f"cluster{j}" for j in range(clusters)]
    for w, known in zip(found.server.values(), expected.extra["models"], strict=True):
        assert moved(w, Tree(known)) < 1e-10
    return found, expected.extra


# the reference


@IMAGES
@pytest.mark.parametrize("clusters", [1, 2, 4])
def test_engine_equals_reference(clusters, images):
    _, extra = compared(clusters, images=images)
    assert clusters == 1 or len({j for of in extra["chosen"] for j in of.values()}) > 1  # several were chosen


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    compared(3, sizes=sizes)


def test_more_models_than_clients():
    found, extra = compared(4, sizes=(6, 3), ratio=1.0)
    idle = set(range(4)) - {j for of in extra["chosen"] for j in of.values()}
    assert len(idle) >= 2
    for j in idle:
        assert found.server[f"cluster{j}"].equals(found.context.state.server[f"cluster{j}"])


# FedAvg as its limit


@IMAGES
def test_one_model_of_equal_clients_is_fedavg(images):
    fields = {"sizes": (8,) * 8, "images": images}
    found, fedavg, several = (run(experiment(m, **fields)) for m in (IFCA(1), FedAvg(), IFCA()))
    assert moved(found.server["cluster0"], fedavg.server["model"]) < 1e-12
    assert max(moved(found.personal(i), fedavg.personal(i)) for i in EVERYONE) < 1e-12
    assert max(moved(several.personal(i), fedavg.personal(i)) for i in EVERYONE) > 1e-3


def test_models_are_averaged_alike_whatever_their_clients_have():
    fields = {"rounds": 1, "sizes": (12, 3), "ratio": 1.0}
    whole, *alone = (run(experiment(IFCA(1), **(fields | {"ratio": r}))) for r in (1.0, ((0,),), ((1,),)))
    mean = (alone[0].server["cluster0"] + alone[1].server["cluster0"]) / 2
    assert moved(whole.server["cluster0"], mean) < 1e-12
    fedavg = run(experiment(FedAvg(), **fields)).server["model"]
    assert moved(fedavg, mean) > 1e-3


# the models


def test_models_begin_apart_and_the_first_is_the_network():
    context = experiment(IFCA()).context()
    models = list(context.state.server.values())
    assert models[0].equals(context.net.weights)
    assert min(moved(a, b) for k, a in enumerate(models) for b in models[:k]) > 1e-2
    again = list(experiment(IFCA(clusters=6)).context().state.server.values())
    assert all(a.equals(b) for a, b in zip(models, again, strict=False))  # more of them change none


def test_a_network_that_always_begins_alike_is_refused():
    with pytest.raises(UsageError, match="begin apart"):
        run(experiment(IFCA(), network="point", network_options={}))
    run(experiment(IFCA(1), network="point", network_options={}, rounds=1))


# who chooses what


def test_a_client_has_the_model_with_its_lowest_training_loss():
    found = run(experiment(IFCA()))
    for i in EVERYONE:
        own = losses(found, i)
        assert found.personal(i).equals(found.server[f"cluster{own.index(min(own))}"])
    assert len({losses(found, i).index(min(losses(found, i))) for i in EVERYONE}) > 1


def test_test_samples_choose_nothing():
    """In public code they do, by their labels."""
    fed = federation()
    flipped = fed.dataset.y.clone()
    for rows in fed.test:
        flipped[rows] = (flipped[rows] + 1) % CLASSES
    other = dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, y=flipped))
    found, known = (run(experiment(IFCA(), federation=f)) for f in (other, fed))
    assert all(found.personal(i).equals(known.personal(i)) for i in EVERYONE)
    leaked = [losses(found, i, "test") for i in EVERYONE]
    assert any(not found.personal(i).equals(found.server[f"cluster{v.index(min(v))}"]) for i, v in enumerate(leaked))


def test_only_chosen_models_move_and_only_by_who_chose_them():
    fields = {"rounds": 1}
    start = run(experiment(IFCA(), rounds=0))
    chosen = {i: losses(start, i).index(min(losses(start, i))) for i in EVERYONE}
    found = run(experiment(IFCA(), ratio=((0, 4),), **fields))
    for j in range(4):
        before, after = start.server[f"cluster{j}"], found.server[f"cluster{j}"]
        assert (moved(before, after) > 1e-4) == (j in (chosen[0], chosen[4]))
    assert chosen[0] != chosen[4]
    alone = run(experiment(IFCA(), ratio=((0,),), **fields))
    assert alone.server[f"cluster{chosen[0]}"].equals(found.server[f"cluster{chosen[0]}"])


def test_after_training_a_client_has_its_own_model():
    found = run(experiment(IFCA(), rounds=1, ratio=((0,),)))
    rows = {r["moment"]: r for r in found.clients if r["client"] == 0 and r["round"] == 1}
    task, (x, y) = found.context.task, found.context.shards.part("test", 0)
    (j,) = [j for j, w in found.server.items() if not w.equals(found.context.state.server[j])]
    own = float(task.losses(task.logits(found.server[j], x), y).sum())
    assert rows["trained"]["loss"] == pytest.approx(own, rel=1e-12)


def test_a_model_that_fell_apart_is_chosen_by_nobody():
    context = run(experiment(IFCA(), rounds=0)).context
    down = dict(context.state.server)
    down["cluster0"] = down["cluster0"].map(lambda v: v * math.nan)
    me = context.client(Job("local", 0, 0, 0, down, {}))
    assert int(IFCA().closest(me, down)) > 0


def test_of_equally_good_models_the_first_is_chosen():
    context = run(experiment(IFCA(), rounds=0)).context
    down = dict.fromkeys(context.state.server, context.net.weights)
    assert int(IFCA().closest(context.client(Job("local", 0, 0, 0, down, {})), down)) == 0


def test_the_server_by_hand():
    server = {f"cluster{j}": Tree({"w": torch.full((2,), float(j))}) for j in range(3)}
    up = Up(
        rows={
            "model": Tree({"w": torch.tensor([[1.0, 5.0], [2.0, 4.0], [9.0, 9.0]])}),
            "cluster": torch.tensor([2, 2, 0]),
        }
    )
    rows = Rows({})
    new, kept = IFCA(3).server(server, rows, up, Facts(0, 5, (0, 1, 4), (100.0, 1.0, 1.0), 0.1, 1, 0))
    assert {j: w["w"].tolist() for j, w in new.items()} == {
        "cluster0": [9.0, 9.0], "cluster1": [1.0, 1.0], "cluster2": [1.5, 4.5],
    }  # fmt: skip
    assert kept is rows


# what it is for


def test_groups_of_clients_are_found_and_served_better_than_by_one_model():
    fields = {
        "federation": opposed(), "ratio": 1.0, "rounds": 30, "epochs": 3, "lr": 0.1, "schedule": "constant",
        "network_options": {"hidden": (16,)},
    }  # fmt: skip
    found, fedavg = (run(experiment(m, **fields)) for m in (IFCA(2), FedAvg()))
    chosen = [losses(found, i).index(min(losses(found, i))) for i in EVERYONE]
    assert chosen in ([0, 1] * 4, [1, 0] * 4)
    assert found.rounds[-1]["received_loss"] < 0.7 * fedavg.rounds[-1]["received_loss"]


# the rest


@pytest.mark.parametrize("clusters", [1, 3])
def test_bytes_and_passes_of_a_round(clusters):
    found, fedavg = (run(experiment(m)) for m in (IFCA(clusters), FedAvg()))
    size = 8 * found.context.net.weights.size
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == 5 * clusters * size
        assert a["bytes_up"] == 5 * (size + 8)
        assert a["gradient_passes"] == b["gradient_passes"]


@pytest.mark.parametrize("clusters", [0, -1])
def test_impossible_values_are_refused(clusters):
    with pytest.raises(UsageError, match=r"IFCA\.clusters must be"):
        IFCA(clusters)


def test_the_default_is_several_models():
    assert IFCA() == IFCA(clusters=4)
