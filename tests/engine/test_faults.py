"""Faults of participation: functions of (seed, round, client), as frequent as asked, in the rounds in which they belong."""

from __future__ import annotations

import pytest

from idiolect.engine.faults import FAULTS, Faults

CLIENTS, ROUNDS = range(400), 40


def test_without_faults_everybody_is_there_and_in_time():
    faults = Faults(0, ROUNDS)
    assert faults.there(3, CLIENTS) == (list(CLIENTS), [])
    assert not any(faults.lost(3, i) for i in CLIENTS)
    assert {faults.pace(3, i) for i in CLIENTS} == {1.0}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_they_are_as_frequent_as_asked(share):
    count = lambda values: sum(values) / len(CLIENTS)
    near = pytest.approx(share, abs=0.08)  # three standard deviations
    assert count(i in Faults(1, ROUNDS, absent=share).there(5, CLIENTS)[1] for i in CLIENTS) == near
    assert count(Faults(1, ROUNDS, drop=share).lost(5, i) for i in CLIENTS) == near
    paces = [Faults(1, ROUNDS, slow=share).pace(5, i) for i in CLIENTS]
    assert count(p < 1 for p in paces) == near
    assert all(0 < p <= 1 for p in paces)
    late, leave = Faults(1, ROUNDS, late=share), Faults(1, ROUNDS, leave=share)
    assert count(not late.belongs(0, i) for i in CLIENTS) == near
    assert count(not leave.belongs(ROUNDS - 1, i) for i in CLIENTS) == near
    assert all(late.belongs(ROUNDS // 2, i) and leave.belongs(ROUNDS // 2 - 1, i) for i in CLIENTS)


@pytest.mark.parametrize("fault", ["late", "leave"])
def test_who_came_stays_and_who_left_stays_away(fault):
    faults = Faults(2, ROUNDS, **{fault: 0.5})
    for i in CLIENTS:
        there = [faults.belongs(r, i) for r in range(ROUNDS)]
        assert there == sorted(there, reverse=fault == "leave")


@pytest.mark.parametrize("fault", FAULTS)
def test_they_depend_on_the_seed_and_on_nothing_else(fault):
    def what(seed, ids=CLIENTS):
        faults = Faults(seed, ROUNDS, **{fault: 0.5})
        there = [faults.there(r, ids)[0] for r in (10, 30)]
        return {i: ([i in some for some in there], faults.lost(7, i), faults.pace(7, i)) for i in ids}

    assert what(0) == what(0)
    assert what(0) != what(1)
    some = range(3, 200, 7)
    assert what(0, some) == {i: v for i, v in what(0).items() if i in some}


@pytest.mark.parametrize("fault", ["absent", "drop", "slow"])
def test_another_round_is_drawn_anew(fault):
    faults = Faults(0, ROUNDS, **{fault: 0.5})
    what = lambda r: [(i in faults.there(r, CLIENTS)[0], faults.lost(r, i), faults.pace(r, i)) for i in CLIENTS]
    assert what(1) != what(2)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_short_run_has_its_faults_too(rounds):
    faults = Faults(0, rounds, late=1.0, leave=1.0)
    assert all(isinstance(faults.belongs(r, i), bool) for r in range(rounds) for i in range(20))
