"""Rounding to whole numbers, and the repair of clients that are too small."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from idiolect.data.apportion import apportion, reach_minimum


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), st.data())
def test_parts_sum_up_and_are_within_one_of_their_quota(weights, data):
    held = np.array(weights)
    total = data.draw(st.integers(0, int(held.sum())))
    counts = apportion(held, total)
    assert counts.sum() == total
    assert np.all(np.abs(counts - held * total / held.sum()) < 1)
    assert np.all(counts <= held)


def test_largest_remainders_get_what_is_left_and_lots_decide_ties():
    assert apportion(np.array([5, 3, 1]), 5).tolist() == [3, 2, 0]  # quotas 2.78, 1.67, 0.56
    assert apportion(np.array([1, 1, 1]), 1).tolist() == [1, 0, 0]
    assert apportion(np.array([1, 1, 1]), 1, lots=np.array([2, 1, 0])).tolist() == [0, 0, 1]


def test_nothing_goes_to_an_entry_without_weight():
    assert apportion(np.array([0.0, 1.0, 0.0]), 7).tolist() == [0, 7, 0]


@given(st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=8), st.data())
def test_repair_reaches_the_minimum_and_keeps_every_row(table, data):
    counts = np.array(table, np.int64)
    minimum = data.draw(st.integers(0, int(counts.sum()) // len(counts)))
    repaired = reach_minimum(counts, minimum)
    assert repaired.min() >= 0
    assert repaired.sum(1).min() >= minimum
    assert (repaired.sum(0) == counts.sum(0)).all()
    gave = repaired.sum(1) < counts.sum(1)
    assert (counts.sum(1)[gave] > minimum).all()  # nobody gives who has no more than the minimum


def test_repair_takes_the_class_that_the_receiver_holds_most_from_the_largest_that_has_it():
    counts = np.array([[1, 3, 0], [50, 0, 0], [9, 20, 0], [0, 12, 5]])
    assert reach_minimum(counts, 8).tolist() == [[1, 7, 0], [50, 0, 0], [9, 16, 0], [0, 12, 5]]


def test_repair_of_an_empty_client_takes_the_commonest_class_of_the_largest():
    assert reach_minimum(np.array([[0, 0], [3, 9], [5, 0]]), 4).tolist() == [[0, 4], [3, 5], [5, 0]]


def test_repair_leaves_a_table_alone_that_needs_none():
    counts = np.array([[4, 0], [0, 9]])
    assert reach_minimum(counts, 4).tolist() == counts.tolist()
