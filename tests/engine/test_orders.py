"""Orders: randomness is a function of (seed, purpose, round, client, ...), never of what ran before."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idiolect.engine import orders
from idiolect.method import Facts

small = st.integers(1, 60)


@given(small, small)
def test_cuts_cover_an_epoch_and_leave_no_batch_of_one(n, size):
    cuts = orders.cuts(n, size)
    assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
    assert cuts[-1][1] == n
    lengths = [b - a for a, b in cuts]
    assert all(length == size for length in lengths[:-1])
    if size > 1:
        assert min(2, n) <= lengths[-1] <= size + 1
    else:
        assert lengths == [1] * n


@pytest.mark.parametrize(
    ("n", "size", "lengths"),
    [(8, 4, [4, 4]), (9, 4, [4, 5]), (10, 4, [4, 4, 2]), (3, 4, [3]), (1, 4, [1]), (5, 4, [5])],
)
def test_a_last_batch_of_one_joins_the_one_before(n, size, lengths):
    assert [b - a for a, b in orders.cuts(n, size)] == lengths


@given(small, small, st.integers(0, 5), st.integers(0, 5), st.integers(0, 3), st.floats(0.05, 1.0))
def test_an_epoch_holds_every_sample_once(n, size, round, client, epoch, share):
    batches = orders.batches(n, size, 7, round, client, 0, epoch, share)
    used = torch.cat(batches).tolist()
    assert len(used) == len(set(used)) == math.ceil(share * n)
    assert set(used) <= set(range(n))


def test_a_share_is_one_subset_for_all_epochs_of_a_phase():
    chosen = [set(orders.epoch_order(40, 0, 2, 1, 9, epoch, 0.5).tolist()) for epoch in range(4)]
    assert all(c == chosen[0] for c in chosen)
    orderings = [orders.epoch_order(40, 0, 2, 1, 9, epoch, 0.5).tolist() for epoch in range(4)]
    assert len({tuple(o) for o in orderings}) == 4
    assert set(orders.epoch_order(40, 0, 3, 1, 9, 0, 0.5).tolist()) != chosen[0]  # of the next round


def test_every_part_of_a_key_counts():
    base = {"n": 50, "seed": 1, "round": 2, "client": 3, "order": 4, "epoch": 5}
    first = orders.epoch_order(**base)
    assert torch.equal(first, orders.epoch_order(**base))
    for name in ("seed", "round", "client", "order", "epoch"):
        assert not torch.equal(first, orders.epoch_order(**(base | {name: base[name] + 1}))), name


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["order", "share", "drop"])), max_size=3))
def test_a_draw_does_not_depend_on_the_draws_before(earlier):
    for seed, purpose in earlier:
        orders.draw(seed, purpose).random(7)
    assert orders.draw(0, "order", 1).integers(1 << 30) == 639130832


def test_keys_are_63_bits_and_of_all_arguments():
    keys = {orders.key(0), orders.key(1), orders.key(0, "a"), orders.key(0, "a", 1), orders.key(0, "a", "1")}
    assert len(keys) == 5
    assert all(0 <= k < 2**63 for k in keys)
    assert orders.key(0, 1, 23) != orders.key(0, 12, 3)


def test_keys_are_the_same_in_another_process():
    """Python's own hash() differs from process to process."""
    code = "from idiolect.engine.orders import key; print(key(5, 'order', 2, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == orders.key(5, "order", 2, 3)


def test_what_the_server_draws_about_a_client_is_of_the_run_the_round_and_the_client():
    facts = Facts(round=2, num_clients=9, ids=(4, 7), weights=(1.0, 1.0), lr=0.1, rounds=5, seed=3)
    drawn = facts.draw("partners", 4).integers(1 << 30)
    assert drawn == orders.draw(3, "partners", 2, 4).integers(1 << 30)
    others = [replace(facts, seed=4), replace(facts, round=3)]
    assert drawn not in [other.draw("partners", 4).integers(1 << 30) for other in others]
    assert drawn not in [facts.draw("partners", 7).integers(1 << 30), facts.draw("ties", 4).integers(1 << 30)]
