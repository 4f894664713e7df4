"""PFLlib's Dirichlet: its draw step by step, its minimum without its retries."""

import numpy as np
import pytest
from divided import LABELS, check_rows, histogram, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data.partition import Balanced, Dirichlet
from idiolect.data.streams import stream


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=200), st.floats(1e-3, 1e3), st.integers(1, 500), seeds, st.data()
)
def test_every_number_of_clients_is_served_whatever_the_minimum(labels, alpha, minimum, seed, data):
    labels = np.array(labels)
    clients = data.draw(st.integers(1, len(labels)))
    parts = Balanced(alpha, minimum)(labels, clients, seed)
    check_rows(parts, len(labels), clients)
    assert min(map(len, parts)) >= max(1, min(minimum, len(labels) // (2 * clients)))


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_the_public_code_up_to_rounding(seed):
    """The loop of `separate_data`, on the same draws."""
    clients, alpha = 8, 0.5
    drawn = stream(seed, "balanced proportions").dirichlet(np.full(clients, alpha), 10)
    sizes, expected = [0] * clients, []
    for k in range(10):
        n = int((k == LABELS).sum())
        p = np.array([p * (size < len(LABELS) / clients) for p, size in zip(drawn[k], sizes, strict=True)])
        cuts = (np.cumsum(p / p.sum()) * n).astype(int)[:-1]
        given = np.diff([0, *cuts, n])
        expected.append(given)
        sizes = [size + more for size, more in zip(sizes, given, strict=True)]
    found = histogram(LABELS, Balanced(alpha, 1)(LABELS, clients, seed)).T
    assert np.abs(found - expected).max() <= 1


def test_sizes_differ_less_than_under_dirichlet():
    def spread(split):
        return np.mean([np.std([len(rows) for rows in split(LABELS, 20, seed)]) for seed in range(5)])

    assert spread(Balanced(0.1, 1)) < 0.7 * spread(Dirichlet(0.1, 1))


def test_a_draw_that_leaves_no_share_to_those_with_room_is_divided_evenly():
    labels = np.repeat(np.arange(50), 4)  # alpha so small that each class goes to one client, also to full ones
    for seed in range(20):
        check_rows(Balanced(1e-5, 1)(labels, 3, seed), 200, 3)


def test_needs_no_luck_for_many_clients():
    parts = Balanced(0.01)(LABELS, 200, 0)
    assert min(map(len, parts)) >= 5  # half of the average of 10
