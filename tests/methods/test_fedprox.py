"""FedProx: its reference, stragglers and what they do, refusals. Its reductions are among the invariants."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from checks import apart, known, same_personal, same_shared
from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Up
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedprox import FedProx
from reference import fedprox as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
LONG = {"epochs": 4}

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"mu": 1.0}, {"mu": 0.3, "stragglers": 0.5}, {"stragglers": 0.9}, {"mu": 0.0, "stragglers": 1.0}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedProx(**hyper), images=images, epochs=3))
    agree(found, reference.run(world(found.run), **hyper))


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(FedProx(stragglers=0.5), sizes=sizes, **LONG))
    agree(found, reference.run(world(found.run), stragglers=0.5))


# without stragglers


class Before(FedProx):
    """FedProx as it is where everybody does all epochs."""

    def local(self, me, down, mine):
        w = me.train(down["model"], correct=self.pull, given=(down["model"],))
        return Up(mean={"model": w}), mine


@IMAGES
def test_without_stragglers_everybody_does_all_epochs_to_the_bit(images):
    found, before = (run(experiment(m, images=images)) for m in (FedProx(mu=0.3), Before(mu=0.3)))
    same_shared(found, before)
    same_personal(found, before)
    assert [r["gradient_passes"] for r in found.rounds] == [r["gradient_passes"] for r in before.rounds]
    late = run(experiment(FedProx(mu=0.3, stragglers=0.9), images=images))
    assert moved(late.server["model"], before.server["model"]) > 1e-3


def test_where_there_is_one_epoch_nobody_can_do_less():
    one = {"epochs": 1}
    found, before = (run(experiment(FedProx(stragglers=s), **one)) for s in (1.0, 0.0))
    same_shared(found, before)
    assert (
        run(experiment(FedProx(mu=0.0, stragglers=1.0), **one))
        .server["model"]
        .equals(run(experiment(FedAvg(), **one)).server["model"])
    )


# stragglers


class Watched(FedProx):
    """Keeps how many epochs each client did."""

    seen: ClassVar[dict] = {}

    def work(self, me):
        self.seen[me.round, me.id] = found = super().work(me)
        return found


def watched(method: type[FedProx] = Watched, **fields) -> tuple[Result, dict[tuple[int, int], int]]:
    Watched.seen = {}
    hyper = {k: fields.pop(k) for k in ("mu", "stragglers") if k in fields}
    return run(experiment(method(**hyper), **fields)), Watched.seen


def test_stragglers_are_the_share_asked_for_and_do_one_to_all_epochs_alike():
    fields = {"rounds": 60, "ratio": 1.0, "epochs": 4, "lr": 1e-6, "evaluate_every": 1000}
    for share in (0.0, 0.5, 1.0):
        _, seen = watched(stragglers=share, **fields)
        counts = [sum(e == k for e in seen.values()) / len(seen) for k in range(1, 5)]
        assert set(seen.values()) <= {1, 2, 3, 4}
        assert len(seen) == 60 * 8
        for k in range(3):  # 480 draws: three deviations are 0.06
            assert counts[k] == pytest.approx(share / 4, abs=0.06)
        assert counts[3] == pytest.approx(1 - 3 * share / 4, abs=0.06)  # public code: a straggler never does all


def test_a_straggler_is_drawn_by_seed_round_and_client_alone():
    """Not by who else takes part, by mu, or by what was lost."""
    _, some = watched(stragglers=0.6, rounds=6, **LONG)
    _, everyone = watched(stragglers=0.6, rounds=6, ratio=1.0, mu=0.5, **LONG)
    _, lossy = watched(stragglers=0.6, rounds=6, drop=0.4, **LONG)
    assert all(everyone[k] == v for k, v in some.items())
    assert lossy == some
    _, other = watched(stragglers=0.6, rounds=6, ratio=1.0, seed=4, **LONG)
    assert other != everyone
    assert len({everyone[r, 0] for r in range(6)}) > 1
    assert len({everyone[0, i] for i in range(8)}) > 1


def test_a_higher_share_only_adds_stragglers():
    _, few = watched(stragglers=0.3, ratio=1.0, **LONG)
    _, many = watched(stragglers=0.8, ratio=1.0, **LONG)
    assert all(many[k] == v for k, v in few.items() if v < 4)
    assert sum(v < 4 for v in many.values()) > sum(v < 4 for v in few.values())


def test_a_straggler_s_epochs_are_the_first_ones_of_all_and_count_by_samples():
    found, seen = watched(stragglers=1.0, mu=0.0, rounds=1, ratio=1.0, **LONG)
    assert len(set(seen.values())) > 2
    alone = [
        run(experiment(FedAvg(), rounds=1, ratio=((i,),), epochs=seen[0, i])).server["model"] for i in range(len(SIZES))
    ]
    mean = sum(alone[i] * (n / sum(SIZES)) for i, n in enumerate(SIZES))
    assert moved(found.server["model"], mean) < 1e-12
    apart(found, known("fedavg", rounds=1, ratio=1.0, **LONG))


def test_stragglers_are_the_same_in_stacked_clients():
    for backend in ("serial", "stacked"):
        found, seen = watched(stragglers=0.7, backend=backend, **LONG)
        if backend == "serial":
            serial, before = found, dict(seen)
    assert seen == before
    assert moved(found.server["model"], serial.server["model"]) < 1e-10
    assert [r["gradient_passes"] for r in found.rounds] == [r["gradient_passes"] for r in serial.rounds]


# the rest


def test_bytes_and_passes_of_a_round():
    found, seen = watched(stragglers=0.7, **LONG)
    for row, plain in zip(found.rounds[1:], known("fedavg", **LONG).rounds[1:], strict=True):
        assert (row["bytes_down"], row["bytes_up"]) == (plain["bytes_down"], plain["bytes_up"])
        r = row["round"] - 1
        assert row["gradient_passes"] == pytest.approx(sum(seen[r, i] for i in row["participants"]) / 5)
        assert plain["gradient_passes"] == pytest.approx(4)


@pytest.mark.parametrize("hyper", [{"mu": -0.1}, {"stragglers": -0.1}, {"stragglers": 1.1}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedProx.{next(iter(hyper))} must be"):
        FedProx(**hyper)


def test_defaults():
    assert dataclasses.asdict(FedProx()) == {"mu": 0.01, "stragglers": 0.0}
