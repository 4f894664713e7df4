"""Extended Dirichlet: exactly so many classes, skewed amounts, never a client without."""

import numpy as np
import pytest
from divided import check_rows, histogram, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data.partition import Extended, Pathological
from idiolect.errors import UsageError

LABELS = np.repeat(np.arange(10), 300)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 10), st.integers(1, 30), st.floats(1e-4, 1e4), st.integers(1, 10), seeds)
def test_every_client_holds_exactly_its_classes_with_some_rows_of_each(classes, clients, alpha, each, seed):
    if clients * classes < 10:
        return
    parts = Extended(classes, alpha, each)(LABELS, clients, seed)
    check_rows(parts, len(LABELS), clients)
    counts = histogram(LABELS, parts)
    assert ((counts > 0).sum(1) == classes).all()
    assert counts[counts > 0].min() >= each
    assert np.ptp((counts > 0).sum(0)) <= 1


def test_a_large_alpha_divides_evenly_and_a_small_one_does_not():
    even, skewed = (histogram(LABELS, Extended(2, alpha)(LABELS, 20, 0)) for alpha in (1e8, 0.1))
    assert np.ptp(even[even > 0]) <= 2
    assert np.ptp(skewed[skewed > 0]) > 150


def test_is_a_split_of_its_own():
    assert not isinstance(Pathological(2), Extended)
    assert [len(r) for r in Extended(2)(LABELS, 20, 0)] != [len(r) for r in Pathological(2)(LABELS, 20, 0)]


def test_what_cannot_be_is_refused():
    with pytest.raises(
        UsageError, match="extended: expected each=5 rows of each class for each of its holders, found 12"
    ):
        Extended(2)(np.repeat([0, 1], [100, 12]), 4, 0)
    with pytest.raises(UsageError, match="extended: expected a number alpha"):
        Extended(2, 0.0)
    with pytest.raises(UsageError, match="at least 1 for each"):
        Extended(2, 0.1, 0)
