"""CFL: its reference, FedAvg and single clients as its limits, who is split when and how, groups that are found."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from harness import SIZES, agree, experiment, federation, moved, opposed, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Facts, Rows, Up
from idiolect.methods.cfl import CFL
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.local import Local
from idiolect.tree import Tree, stack
from reference import cfl as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
ALWAYS = {"eps1": math.inf, "eps2": 0.0}
TURNS = ((0, 1, 2, 3), (2, 4, 5), (1, 6), (0, 7), (3, 5, 7), (1, 2, 6))  # all are known after the fourth


def numbers(found: Result) -> list[int]:
    """Each client's cluster."""
    return [int(found.progress.rows[i]["cluster"]) for i in range(found.run.clients)]


def compared(hyper: dict, **fields) -> tuple[Result, dict]:
    found = run(experiment(CFL(**hyper), **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    assert [numbers(found)] == (expected.extra["cluster"][-1:] or [[0] * found.run.clients])
    for i, update in expected.extra["updates"].items():
        assert moved(Tree(update), found.progress.rows[i]["update"]) < 1e-10
    return found, expected.extra


# the reference


@IMAGES
@pytest.mark.parametrize(
    ("hyper", "fields", "splits"),
    [
        ({}, {}, False),
        (ALWAYS, {}, True),
        (ALWAYS, {"ratio": 1.0}, True),
        (ALWAYS, {"ratio": TURNS, "rounds": 6}, True),
        (ALWAYS | {"gamma": 0.5}, {"ratio": 1.0}, True),
        ({"eps1": 0.3, "eps2": 0.4}, {"ratio": 1.0, "rounds": 6}, True),
    ],
    ids=str,
)
def test_engine_equals_reference(hyper, fields, splits, images):
    found, _ = compared(hyper, images=images, **fields)
    assert (len(set(numbers(found))) > 1) == splits


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (40, 2), (5,)], ids=str)
@pytest.mark.parametrize("hyper", [{}, ALWAYS], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, hyper):
    found, _ = compared(hyper, sizes=sizes, ratio=1.0, rounds=5)
    assert not hyper or len(set(numbers(found))) == len(sizes)


# its limits


@IMAGES
@pytest.mark.parametrize(
    "never", [{"eps1": 0.0}, {"eps1": math.inf, "eps2": math.inf}, ALWAYS | {"gamma": 1.0}], ids=str
)
def test_that_never_splits_is_fedavg(never, images):
    found, fedavg, split = (
        run(experiment(m, images=images, ratio=1.0)) for m in (CFL(**never), FedAvg(), CFL(**ALWAYS))
    )
    assert max(moved(found.personal(i), fedavg.personal(i)) for i in EVERYONE) < 1e-12
    assert max(moved(split.personal(i), fedavg.personal(i)) for i in EVERYONE) > 1e-3


@IMAGES
def test_a_first_round_is_fedavg_whatever_is_split_after_it(images):
    found, fedavg = (run(experiment(m, images=images, ratio=1.0, rounds=1)) for m in (CFL(**ALWAYS), FedAvg()))
    assert len(set(numbers(found))) == 2
    assert max(moved(found.personal(i), fedavg.personal(i)) for i in EVERYONE) < 1e-12


class Alone(CFL):
    """Every client in a cluster of its own, from the start."""

    def plan(self, server, rows, run):
        if run.round:
            return server, rows
        models = Tree()
        every = range(run.num_clients)
        for i in every:
            models |= server["initial"].prefixed(str(i))
        return {**server, "clusters": models}, rows.with_(every, cluster=torch.arange(run.num_clients))


@IMAGES
def test_clusters_of_one_client_are_local_training(images):
    found, local = (run(experiment(m, images=images)) for m in (Alone(**ALWAYS), Local()))
    assert numbers(found) == list(EVERYONE)
    took_part = {i for r in range(4) for i in found.run.participants(r)}
    assert max(moved(found.personal(i), local.personal(i)) for i in took_part) < 1e-12
    assert len(took_part) > 5


def test_clusters_know_nothing_of_each_other():
    """After a split each part goes on as FedAvg among its own."""
    found, after = (run(experiment(CFL(**ALWAYS), ratio=1.0, rounds=r)) for r in (1, 2))
    for c in (0, 1):
        members = tuple(i for i in EVERYONE if numbers(found)[i] == c)
        only = run(experiment(CFL(**ALWAYS), ratio=(tuple(EVERYONE), members), rounds=2))
        assert all(moved(only.personal(i), after.personal(i)) < 1e-12 for i in members)
        assert all(only.personal(i).equals(found.personal(i)) for i in EVERYONE if i not in members)


# when


def test_nobody_is_split_before_all_are_known():
    """Also of those that are away only what they sent last counts."""
    history = [numbers(run(experiment(CFL(**ALWAYS), ratio=TURNS, rounds=r))) for r in range(7)]
    assert [max(of) + 1 for of in history[:5]] == [1, 1, 1, 1, 2]
    assert max(history[6]) > 1


def test_a_cluster_without_participants_is_not_looked_at():
    first = numbers(run(experiment(CFL(**ALWAYS), ratio=1.0, rounds=1)))
    alone = next(c for c in (0, 1) if first.count(c) == 1)
    turns = (tuple(EVERYONE), (first.index(alone),), (first.index(alone),))
    assert numbers(run(experiment(CFL(**ALWAYS), ratio=turns, rounds=3))) == first


def test_a_reply_that_is_lost_is_no_update():
    found = run(experiment(CFL(**ALWAYS), ratio=1.0, rounds=1, drop=0.4))
    assert found.rounds[1]["dropped"]
    assert numbers(found) == [0] * 8


def settled(updates: list[list[float]], sizes: tuple[float, ...], **hyper) -> list[int]:
    """The clusters after a round in which these are the updates of all clients."""
    method = CFL(**hyper)
    context = experiment(CFL(), federation=federation((4,) * len(sizes)), network="mlp").context()
    w = context.net.weights
    spot = "head.bias"
    replies = [w | {spot: w[spot] + torch.tensor([*u, 0.0], dtype=w[spot].dtype)} for u in updates]
    ids = tuple(range(len(sizes)))
    facts = Facts(0, len(sizes), ids, sizes, 0.1, 4, 0)
    up = Up(rows={"model": stack(replies)})
    _, rows = method.server(context.state.server, Rows(context.state.rows), up, facts)
    return [int(rows[i]["cluster"]) for i in ids]


def test_the_criterion_by_hand():
    """The mean by samples of (3, 4) and (-3, 0) with 1 and 3 samples is (-1.5, 1), of norm 1.803; the norms are 5, 3."""
    updates, sizes = [[3.0, 4.0], [-3.0, 0.0]], (1.0, 3.0)
    assert settled(updates, sizes, eps1=1.81, eps2=4.9) == [0, 1]
    assert settled(updates, sizes, eps1=1.80, eps2=4.9) == [0, 0]
    assert settled(updates, sizes, eps1=1.81, eps2=5.1) == [0, 0]
    assert settled(updates, (1.0, 1.0), eps1=1.81, eps2=4.9) == [0, 0]  # the mean's norm is 2
    assert settled(updates, (1.0, 1.0), eps1=2.01, eps2=4.9) == [0, 1]


def test_gamma_by_hand():
    """Two at an angle of 120 degrees: sqrt((1 + 1/2) / 2) = 0.866."""
    updates = [[1.0, 0.0], [-0.5, math.sqrt(3) / 2]]
    assert settled(updates, (1.0, 1.0), eps1=9.0, eps2=0.5, gamma=0.865) == [0, 1]
    assert settled(updates, (1.0, 1.0), eps1=9.0, eps2=0.5, gamma=0.867) == [0, 0]


def test_a_client_alone_has_nobody_to_part_from():
    assert settled([[1.0, 0.0]], (3.0,), **ALWAYS) == [0]


def test_clients_that_do_not_move_break_nothing():
    assert settled([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.9, 0.1]], (1.0,) * 4, **ALWAYS)[2:] in ([0, 0], [1, 1])
    assert settled([[0.0, 0.0]] * 3, (1.0,) * 3, **ALWAYS) == [0, 0, 0]  # no norm is above 0


# how


def test_the_part_with_the_lowest_number_stays():
    updates = [[-1.0, 0.1], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.1], [1.0, -0.1]]
    assert settled(updates, (1.0,) * 5, **ALWAYS) == [0, 1, 0, 1, 1]


def test_lengths_do_not_count_only_directions():
    updates = [[-1.0, 0.1], [100.0, 0.0], [-50.0, 0.0], [0.01, 0.001], [1.0, -0.1]]
    assert settled(updates, (1.0,) * 5, **ALWAYS) == [0, 1, 0, 1, 1]


def test_a_chain_stays_together():
    """Neighbours are 30 degrees apart, its ends 120: the gap of 60 is what separates; complete linkage would cut it."""
    angles = [0, 30, 60, 90, 120, 180, 210]
    updates = [[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in angles]
    assert settled(updates, (1.0,) * 7, **ALWAYS) == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_are_those_with_the_least_largest_cosine_of_all(seed):
    count = 2 + seed % 6
    updates = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    alike = torch.nn.functional.normalize(updates) @ torch.nn.functional.normalize(updates).T
    ways = [(0, *more) for k in range(count - 1) for more in itertools.combinations(range(1, count), k)]
    best = min(ways, key=lambda one: float(alike[list(one)][:, [k for k in range(count) if k not in one]].max()))
    assert settled(updates.tolist(), (1.0,) * count, **ALWAYS) == [int(k not in best) for k in range(count)]


def test_splits_only_nest_and_numbers_go_on():
    history = [numbers(run(experiment(CFL(**ALWAYS), ratio=1.0, rounds=r))) for r in range(9)]
    assert sorted(history[-1]) == list(EVERYONE)
    for before, after in itertools.pairwise(history):
        for c in set(before):
            members = [i for i in EVERYONE if before[i] == c]
            assert after[members[0]] == c
            assert len({after[i] for i in members}) <= 2
        assert all(len({before[i] for i in EVERYONE if after[i] == c}) == 1 for c in set(after))
        assert set(after) == set(range(max(after) + 1))


def test_both_parts_go_on_from_the_whole_cluster_s_new_model():
    found, start = (run(experiment(CFL(**ALWAYS), ratio=1.0, rounds=r)) for r in (1, 0))
    stayed, left = (next(i for i in EVERYONE if numbers(found)[i] == c) for c in (0, 1))
    assert found.personal(stayed).equals(found.personal(left))
    assert moved(found.personal(left), start.personal(left)) > 1e-3


def test_a_client_s_update_is_what_it_sent_last():
    fields = {"ratio": ((0, 1), (1, 2)), "rounds": 2, "sizes": (6, 6, 6)}
    found, before = (run(experiment(CFL(), **(fields | {"rounds": r}))) for r in (2, 1))
    for i in range(3):
        row, earlier = found.progress.rows[i]["update"], before.progress.rows[i]["update"]
        assert row.equals(earlier) == (i == 0)
        assert moved(row, row.zeros()) > 1e-3
    assert set(row) == set(found.context.net.trainable)
    trained = run(experiment(CFL(), **(fields | {"ratio": ((0, 1), (2,))}))).personal(0)
    received = before.personal(0)
    assert moved(received + found.progress.rows[2]["update"], trained) < 1e-12


def test_normalisation_statistics_are_averaged_and_not_compared():
    found = run(experiment(CFL(**ALWAYS), images=True, ratio=1.0))
    buffers = found.context.net.buffers
    assert buffers
    assert not buffers & set(found.progress.rows[0]["update"])
    name = next(k for k in buffers if k.endswith("running_mean"))
    assert moved(found.personal(0).pick([name]), found.context.net.weights.pick([name])) > 1e-3


# what it is for


@pytest.mark.parametrize("ratio", [1.0, 0.65])
def test_clients_that_contradict_each_other_are_parted_and_served_better_than_by_one_model(ratio):
    fields = {
        "federation": opposed(), "ratio": ratio, "rounds": 40, "epochs": 3, "lr": 0.1, "schedule": "constant",
        "network_options": {"hidden": (16,)},
    }  # fmt: skip
    found, fedavg = (run(experiment(m, **fields)) for m in (CFL(eps1=0.4, eps2=0.8, gamma=0.8), FedAvg()))
    assert numbers(found) == [0, 1] * 4
    assert found.rounds[-1]["received_loss"] < 0.7 * fedavg.rounds[-1]["received_loss"]


# the rest


def test_bytes_and_passes_of_a_round():
    found, fedavg = (run(experiment(m, ratio=1.0)) for m in (CFL(**ALWAYS), FedAvg()))
    assert len(set(numbers(found))) > 2
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        for column in ("bytes_down", "bytes_up", "gradient_passes"):
            assert a[column] == b[column]
    assert found.rounds[1]["bytes_up"] == 8 * 8 * found.context.net.weights.size


@pytest.mark.parametrize("hyper", [{"eps1": -0.1}, {"eps2": -1.0}, {"gamma": -0.5}, {"eps1": math.nan}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=rf"CFL\.{next(iter(hyper))} must be"):
        CFL(**hyper)


def test_defaults_are_those_of_the_authors_code():
    assert CFL() == CFL(eps1=0.4, eps2=1.6, gamma=0.0)
