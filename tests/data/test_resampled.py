"""Dirichlet with replacement: sizes, proportions, rows of the right class, and what a pool without a class changes."""

import numpy as np
import pytest
from divided import LABELS, histogram, same, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data.partition import Resampled
from idiolect.errors import UsageError


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.integers(1, 100),
    st.floats(1e-6, 1e6),
    st.floats(0.01, 5),
    seeds,
)
def test_equal_sizes_whatever_is_asked(labels, clients, alpha, share, seed):
    labels = np.array(labels)
    parts = Resampled(alpha, share)(labels, clients, seed)
    assert {len(rows) for rows in parts} == {max(1, round(share * len(labels) / clients))}
    assert len(parts) == clients
    for rows in parts:
        assert rows.dtype == np.int64
        assert rows.min() >= 0
        assert rows.max() < len(labels)
        assert (np.diff(rows) >= 0).all()


def test_seeds():
    assert same(Resampled()(LABELS, 10, 3), Resampled()(LABELS, 10, 3))
    assert not same(Resampled()(LABELS, 10, 3), Resampled()(LABELS, 10, 4))


def test_rows_repeat():
    parts = Resampled()(LABELS, 10, 0)
    assert len(np.unique(np.concatenate(list(parts)))) < len(LABELS)
    assert any(len(np.unique(rows)) < len(rows) for rows in parts)


def test_proportions_have_the_moments_of_the_distribution():
    alpha, classes = 0.5, 10
    shares = histogram(LABELS, Resampled(alpha, 200.0)(LABELS, 400, 0)) / 1000
    assert shares.mean(0) == pytest.approx(np.full(classes, 0.1), abs=0.03)
    a0 = classes * alpha
    assert shares.var() == pytest.approx((alpha / a0) * (1 - alpha / a0) / (a0 + 1), rel=0.15)


def test_every_row_of_a_class_is_as_likely():
    labels = np.repeat([0, 1], [10, 30])
    rows = np.concatenate(list(Resampled(1e6, 1000.0)(labels, 4, 0)))
    found = np.bincount(rows, minlength=40)
    assert found[:10] == pytest.approx(np.full(10, 2000), rel=0.1)  # half of 40,000 over ten rows
    assert found[10:] == pytest.approx(np.full(30, 2000 / 3), rel=0.2)


def test_a_pool_without_a_class_keeps_the_proportions_of_the_others():
    labels = np.repeat([0, 1, 2], 100)
    full = histogram(labels, Resampled(1.0, 100.0)(labels, 5, 0)).astype(float)
    there = np.flatnonzero(labels != 1)
    part = histogram(labels, [there[rows] for rows in Resampled(1.0, 100.0)(labels[there], 5, 0)])
    assert (full[:, 0] / full[:, [0, 2]].sum(1)) == pytest.approx(part[:, 0] / part.sum(1), abs=0.05)


@pytest.mark.parametrize("share", [0, -1.0, float("nan"), float("inf"), True])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(UsageError, match="share > 0"):
        Resampled(0.1, share)


def test_other_refusals():
    with pytest.raises(UsageError, match="alpha > 0"):
        Resampled(0.0)
    with pytest.raises(UsageError, match="whole number of clients"):
        Resampled()(LABELS, 0, 0)
