"""Clusters of like samples: found again where they are plain, and every size of federation."""

import numpy as np
import pytest
from divided import check_refusal, check_rows, same, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data import Dataset, federate, from_arrays
from idiolect.data.partition import Clusters, parse
from idiolect.errors import UsageError

DRAW = np.random.default_rng(0)
TRUE = DRAW.integers(0, 3, 240)
SAMPLES = (np.eye(3)[TRUE] @ DRAW.normal(size=(3, 20)) * 20 + DRAW.normal(size=(240, 20))).astype(np.float32)


def test_plain_clusters_are_found_and_a_client_has_one():
    parts = Clusters(3)(SAMPLES, 9, 0)
    check_rows(parts, 240, 9)
    of = [set(TRUE[rows]) for rows in parts]
    assert all(len(own) == 1 for own in of)
    assert set().union(*of) == {0, 1, 2}


def test_clusters_get_clients_by_their_rows_and_share_evenly():
    samples = np.repeat([[0.0, 0.0], [9.0, 9.0]], [90, 30], axis=0).astype(np.float32)
    samples += DRAW.normal(size=samples.shape).astype(np.float32) / 100
    assert [len(rows) for rows in Clusters(2)(samples, 4, 0)] == [30] * 4


def test_alpha_divides_clusters_over_all_clients():
    parts = Clusters(3, 1e6, 1)(SAMPLES, 4, 0)
    check_rows(parts, 240, 4)
    counts = np.stack([np.bincount(TRUE[rows], minlength=3) for rows in parts])
    assert np.abs(counts - np.bincount(TRUE) / 4).max() <= 2
    skewed = Clusters(3, 0.05, 10)(SAMPLES, 4, 0)
    check_rows(skewed, 240, 4)
    assert min(map(len, skewed)) >= 10


def test_seeds():
    assert same(Clusters(3)(SAMPLES, 6, 1), Clusters(3)(SAMPLES, 6, 1))
    assert not same(Clusters(3)(SAMPLES, 6, 1), Clusters(3)(SAMPLES, 6, 2))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 40), st.booleans(), seeds)
def test_any_sizes_are_divided_or_refused_with_what_can_be_had(rows, clusters, clients, equal, seed):
    samples = np.zeros((rows, 2), np.float32) if equal else SAMPLES[:rows]
    try:
        check_rows(Clusters(clusters)(samples, clients, seed), rows, clients)
    except UsageError:
        check_refusal(Clusters(clusters), samples, clients, seed)


def test_reads_the_samples_of_a_data_set():
    data = from_arrays(SAMPLES.reshape(240, 1, 4, 5), TRUE)
    federation = federate(data, "clusters:3", 6, 0)
    assert all(len(set(TRUE[rows])) == 1 for rows in federation.train)
    assert federation.recipe.startswith("arrays, clusters:3, 6 clients")


def test_refusals():
    with pytest.raises(UsageError, match="for each of clusters=3, found 2 clients; ask for clusters=2 or 3 clients"):
        Clusters(3)(SAMPLES, 2, 0)
    tokens = from_arrays(np.ones((9, 4), np.int64), np.arange(9) % 3)
    assert isinstance(tokens, Dataset)
    with pytest.raises(UsageError, match="numbers as samples for split 'clusters:2', found token ids in 'arrays'"):
        federate(tokens, "clusters:2", 3, 0)
    with pytest.raises(UsageError, match="alpha > 0"):
        Clusters(3, -1.0)
    assert parse("clusters:4,alpha=0.3") == Clusters(4, 0.3)
