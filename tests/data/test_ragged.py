"""Rows per client: two arrays that read as a sequence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idiolect.data.ragged import Ragged

PARTS = st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8)


@given(PARTS)
def test_reads_as_the_arrays_that_it_was_made_of(parts):
    ragged = Ragged.of([np.array(part, np.int64) for part in parts])
    assert [rows.tolist() for rows in ragged] == parts
    assert [ragged[k].tolist() for k in range(-len(parts), 0)] == parts
    assert [rows.tolist() for rows in ragged[1:]] == parts[1:]
    assert len(ragged) == len(parts)
    assert ragged.sizes.tolist() == [len(part) for part in parts]
    assert ragged.owner.tolist() == [client for client, part in enumerate(parts) for _ in part]


@given(st.lists(st.integers(-2, 4), max_size=40), st.data())
def test_by_owner_gives_each_client_its_rows_in_order(owner, data):
    owner = np.array(owner, np.int64)
    clients = data.draw(st.integers(int(owner.max(initial=0)) + 1, 7))
    found = Ragged.by_owner(owner, clients)
    assert [rows.tolist() for rows in found] == [np.flatnonzero(owner == k).tolist() for k in range(clients)]
    named = Ragged.by_owner(owner, clients, 10 * np.arange(len(owner)))
    assert [rows.tolist() for rows in named] == [(10 * np.flatnonzero(owner == k)).tolist() for k in range(clients)]


def test_there_is_no_client_beyond_the_last():
    ragged = Ragged.of([np.arange(2)])
    for client in (1, -2):
        with pytest.raises(IndexError):
            ragged[client]
