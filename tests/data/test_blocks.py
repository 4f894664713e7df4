"""PFLlib's pathological split: the holders and sizes of its loop."""

import numpy as np
import pytest
from divided import check_rows, histogram, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data.partition import Blocks
from idiolect.errors import UsageError


def holders(known, clients, classes):
    """The clients that `separate_data` chooses for each class."""
    left, chosen = [classes] * clients, []
    for _ in range(known):
        selected = [client for client in range(clients) if left[client] > 0][: -(-clients * classes // known)]
        for client in selected:
            left[client] -= 1
        chosen.append(selected)
    return chosen


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 12), seeds, st.booleans())
def test_holders_are_those_of_the_public_code(known, clients, classes, seed, balance):
    chosen = holders(known, clients, min(classes, known))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(known), 40))
    try:
        parts = Blocks(classes, balance)(labels, clients, seed)
    except UsageError:
        assert classes > known or not all(chosen)
        return
    check_rows(parts, len(labels), clients)
    counts = histogram(labels, parts)
    for number, of in enumerate(chosen):
        assert np.flatnonzero(counts[:, number]).tolist() == of
        part = 40 / len(of)
        first = counts[of[:-1], number]
        assert ((first == int(part)) if balance else (first <= part) & (first >= max(int(part / 10), 1))).all()


def test_rows_of_a_class_are_dealt_in_their_order():
    labels = np.tile(np.arange(2), 20)
    parts = list(Blocks(1)(labels, 4, 0))
    assert parts[0].max() < parts[1].min()
    assert parts[2].max() < parts[3].min()


def test_sizes_are_unequal_unless_asked():
    labels = np.repeat(np.arange(10), 200)
    assert np.ptp([len(rows) for rows in Blocks(2, balance=True)(labels, 20, 0)]) == 0
    assert np.ptp([len(rows) for rows in Blocks(2)(labels, 20, 0)]) > 50


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 10), seeds)
def test_every_holder_has_the_minimum(clients, classes, minimum, seed):
    labels = np.repeat(np.arange(4), 40)
    try:
        counts = histogram(labels, Blocks(classes, minimum=minimum)(labels, clients, seed))
    except UsageError:
        return
    assert counts[counts > 0].min() >= minimum


def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(UsageError, match=r"6 classes.* for 10 clients with classes=1; ask for classes=2 or 11 clients"):
        Blocks(1)(np.arange(60) % 6, 10, 0)
    with pytest.raises(UsageError, match="classes=11; ask for classes=10"):
        Blocks(11)(np.arange(100) % 10, 10, 0)
    with pytest.raises(UsageError, match="true or false for balance"):
        Blocks(2, balance=1)
