"""McMahan's shards."""

import numpy as np
import pytest
from divided import check_rows, histogram, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data.partition import Shards
from idiolect.errors import UsageError


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=200), st.integers(1, 5), seeds, st.data())
def test_each_client_has_whole_shards_of_the_sorted_rows(labels, shards, seed, data):
    labels = np.array(labels)
    clients = data.draw(st.integers(1, max(1, len(labels) // shards)))
    if clients * shards > len(labels):
        return
    parts = Shards(shards)(labels, clients, seed)
    check_rows(parts, len(labels), clients)
    place = np.empty(len(labels), int)
    place[np.argsort(labels, kind="stable")] = np.arange(len(labels))
    cut = [piece.tolist() for piece in np.array_split(np.arange(len(labels)), clients * shards)]
    sizes = {len(piece) for piece in cut}
    for rows in parts:
        own = np.sort(place[rows])
        runs = np.split(own, np.flatnonzero(np.diff(own) > 1) + 1)
        assert len(runs) <= shards  # neighbouring shards make one run
        assert min(sizes) * shards <= len(own) <= max(sizes) * shards


def test_the_papers_shards():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    counts = histogram(labels, Shards(2)(labels, 100, 0))
    assert (counts.sum(1) == 60).all()
    assert set(np.unique(counts)) <= {0, 30, 60}
    assert ((counts > 0).sum(1) <= 2).all()
    assert (counts == 60).any()  # two shards of one digit
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) > 25


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"4 \* 3 = 12 shards, found 10 rows; ask for shards=2 or 3 clients"):
        Shards(3)(np.zeros(10, int), 4, 0)
    with pytest.raises(UsageError, match="at least 1 for shards"):
        Shards(0)
