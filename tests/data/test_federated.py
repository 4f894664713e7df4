"""Federations: what is trained on, what is tested on, and by what a division is known."""

import dataclasses
import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data import Dataset, Split, federate, from_arrays
from idiolect.errors import UsageError


def data_with(labels, classes=None, official=None, group=None):
    labels = torch.as_tensor(labels)
    return Dataset(
        "d",
        torch.zeros(len(labels), 1),
        labels,
        classes or int(labels.max()) + 1,
        "mlp",
        group,
        official_test=official,
    )


def official_data(train, test, classes):
    """Rows of the training set first, then the test set's, by given numbers of rows per class."""
    labels = np.concatenate([np.repeat(np.arange(classes), train), np.repeat(np.arange(classes), test)])
    return data_with(labels, classes, np.arange(len(labels)) >= sum(train))


LABELS = np.random.default_rng(0).integers(0, 5, 600)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
    st.integers(0, 2**32),
    st.data(),
)
def test_parts_are_disjoint_stratified_and_sized_as_asked(labels, test, validation, seed, data):
    if test + validation >= 1:
        validation = 0.0
    clients = data.draw(st.integers(1, len(labels)))
    labels = np.array(labels)
    federation = federate(data_with(labels, 5), "iid", clients, seed, test, validation)
    everything = np.concatenate([*federation.train, *federation.validation, *federation.test])
    assert np.array_equal(np.sort(everything), np.arange(len(labels)))
    for train, held, tested in zip(federation.train, federation.validation, federation.test, strict=True):
        rows = len(train) + len(held) + len(tested)
        assert len(train) >= 1
        if test and rows >= 2:
            assert len(tested) == min(max(int(rows * test + 0.5), 1), rows - 1)
        else:
            assert len(tested) == 0
        assert len(held) == (
            0 if validation == 0 else min(max(int(rows * validation + 0.5), 1), rows - len(tested) - 1)
        )
        own = np.bincount(labels[np.concatenate([train, held, tested])], minlength=5)
        in_test = np.bincount(labels[tested], minlength=5)
        assert (np.abs(in_test - own * len(tested) / rows) < 1).all()  # the client's own proportions
        rest = own - in_test
        in_validation = np.bincount(labels[held], minlength=5)
        assert (np.abs(in_validation - rest * len(held) / rest.sum()) < 1).all()


def test_a_single_row_is_trained_with():
    federation = federate(data_with([0, 1]), "iid", 2, 0)
    assert [len(rows) for rows in federation.train] == [1, 1]
    assert [len(rows) for rows in federation.test] == [0, 0]


def test_ties_between_classes_are_decided_by_lot():
    labels = np.tile(np.arange(8), 40)  # each group has each class once; a quarter of eight rows is two classes
    federation = federate(data_with(labels, group=np.arange(320) // 8), "given", 40, 0)
    tested = np.bincount(labels[np.concatenate(federation.test)], minlength=8)
    assert tested.sum() == 80
    assert tested.min() > 0
    assert tested.max() < 25


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    data = data_with(LABELS)
    first, again = federate(data, "dirichlet:0.3", 6, 1), federate(data, "dirichlet:0.3", 6, 1)
    assert first.split_hash == again.split_hash
    assert len(first.split_hash) == 64
    assert all(np.array_equal(a, b) for a, b in zip(first.test, again.test, strict=True))
    others = [
        federate(data, "dirichlet:0.3", 6, 2),
        federate(data, "dirichlet:0.4", 6, 1),
        federate(data, "dirichlet:0.3", 7, 1),
        federate(data, "dirichlet:0.3", 6, 1, test=0.3),
        federate(data, "dirichlet:0.3", 6, 1, validation=0.1),
    ]
    assert len({first.split_hash, *(other.split_hash for other in others)}) == 6


def test_the_hash_tells_apart_which_part_and_which_client_a_row_is_in():
    data = data_with([0, 0, 0, 0], 1, group=np.array([0, 0, 1, 1]))
    train = federate(data, "given", 2, 0, test=0.0)
    half = federate(data, "given", 2, 0, test=0.5)
    swapped = federate(dataclasses.replace(data, group=np.array([1, 1, 0, 0])), "given", 2, 0, test=0.0)
    one = federate(dataclasses.replace(data, group=np.array([0, 0, 0, 0])), "given", 1, 0, test=0.0)
    assert len({f.split_hash for f in (train, half, swapped, one)}) == 4
    by_hand = hashlib.sha256(struct.pack("<q", 2))  # clients; then length and rows of train, validation, test
    for rows in ((0, 1), (), (), (2, 3), (), ()):
        by_hand.update(struct.pack(f"<{1 + len(rows)}q", len(rows), *rows))
    assert train.split_hash == by_hand.hexdigest()


def test_a_clients_holdout_depends_on_its_own_rows_alone():
    """More rows elsewhere do not move the rows of a client between its parts."""
    group = np.repeat([0, 1], 40)
    small = federate(data_with(LABELS[:80], 5, group=group), "given", 2, 0)
    more = federate(data_with(LABELS[:120], 5, group=np.repeat([0, 1, 2], 40)), "given", 3, 0)
    assert np.array_equal(small.test[1], more.test[1])
    assert np.array_equal(small.train[0], more.train[0])


def test_the_table_counts_rows_classes_and_entropy():
    group = np.array([0] * 8 + [1] * 4)
    labels = [0, 0, 0, 0, 1, 1, 2, 2] + [1] * 4
    federation = federate(data_with(labels, 4, group=group), "given", 2, 0, validation=0.2)
    assert federation.clients == 2
    assert federation.table() == [
        {
            "client": 0,
            "train": 4,
            "validation": 2,
            "test": 2,
            "labels": [4, 2, 2, 0],
            "entropy": pytest.approx(1.5),
        },
        {"client": 1, "train": 2, "validation": 1, "test": 1, "labels": [0, 4, 0, 0], "entropy": 0.0},
    ]


def test_the_recipe_says_it_all():
    data = official_data([30, 30], [10, 10], 2)
    recipe = federate(data, "dirichlet:0.5,minimum=3", 4, 7, validation=0.1, test_from="merged").recipe
    assert recipe == "d, dirichlet:0.5,minimum=3, 4 clients, seed 7, test 0.25 of each client's rows, validation 0.1"
    federation = federate(data, "iid", 4, 7, test_from="official")
    assert federation.recipe == "d, iid, 4 clients, seed 7, official test rows dealt"
    assert repr(federation).startswith("Federation('d, iid, 4 clients")


# The official test set


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(0, 2**32), st.floats(0.05, 10))
def test_official_test_rows_are_dealt_by_the_clients_own_proportions(clients, seed, alpha):
    data = official_data([120, 90, 60, 30], [40, 30, 20, 10], 4)
    federation = federate(data, f"dirichlet:{alpha},minimum=5", clients, seed, test_from="official", validation=0.1)
    kept = np.sort(np.concatenate([*federation.train, *federation.validation]))
    assert np.array_equal(kept, np.arange(300))
    assert np.array_equal(np.sort(np.concatenate(federation.test)), np.arange(300, 400))  # each once
    for train, held, tested in zip(federation.train, federation.validation, federation.test, strict=True):
        own = np.bincount(data.strata[np.concatenate([train, held])], minlength=4)
        dealt = np.bincount(data.strata[tested], minlength=4)
        assert len(tested) >= 1
        assert np.abs(dealt - own / 3).max() <= 2
        assert abs(len(tested) - own.sum() / 3) <= 2
        assert not dealt[own == 0].any()


def test_rounding_does_not_starve_clients_that_hold_little_of_everything():
    data = official_data([40] * 10, [10] * 10, 10)
    federation = federate(data, "iid", 40, 0, test_from="official")  # ten rows each, 0.25 test rows per class
    sizes = [len(rows) for rows in federation.test]
    assert sum(sizes) == 100
    assert min(sizes) >= 1
    assert max(sizes) <= 4


def test_a_client_that_rounding_leaves_with_nothing_is_given_a_test_row_of_a_class_that_it_holds():
    group = np.array([0] * 20 + [1] * 20 + [2] + [0] * 4)
    labels = np.array([0] * 20 + [1] * 20 + [1] + [0, 0, 1, 1])
    data = data_with(labels, 2, np.arange(45) >= 41, group)
    federation = federate(data, "given", 3, 0, test_from="official")
    assert [labels[rows].tolist() for rows in federation.test] == [[0, 0], [1], [1]]


def test_a_class_that_nobody_trains_on_is_not_tested():
    data = official_data([6, 0], [2, 2], 2)
    federation = federate(data, "iid", 2, 0, test_from="official")
    assert sorted(np.concatenate(federation.test).tolist()) == [6, 7]


def test_the_share_of_training_rows_left_out_is_left_out_of_the_test_too():
    labels = np.zeros(50, np.int64)
    group = np.array([0] * 10 + [1] * 10 + [2] * 20 + [9] * 10)
    data = data_with(labels, 1, np.arange(50) >= 40, group)
    federation = federate(data, "given:largest", 1, 0, test_from="official")
    assert federation.train[0].tolist() == list(range(20, 40))
    assert len(federation.test[0]) == 5


def test_merged_splits_the_official_test_rows_like_all_others():
    data = official_data([30, 30], [10, 10], 2)
    federation = federate(data, "iid", 4, 0, test_from="merged")
    assert np.array_equal(np.sort(np.concatenate([*federation.train, *federation.test])), np.arange(80))


def test_the_official_test_set_is_the_default_where_there_is_one():
    data = official_data([30, 30], [10, 10], 2)
    found = federate(data, "iid", 4, 0)
    assert found.split_hash == federate(data, "iid", 4, 0, test_from="official").split_hash
    assert found.recipe.endswith("official test rows dealt")
    plain = data_with(LABELS)
    nobodys = dataclasses.replace(plain, official_test=np.zeros(len(LABELS), bool))
    for without in (plain, nobodys):
        found = federate(without, "iid", 4, 0)
        assert found.split_hash == federate(without, "iid", 4, 0, test_from="merged").split_hash


# Splits that repeat rows


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 70), st.floats(0, 0.5), st.floats(0, 0.4),
    st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_what_anybody_trains_with_nobody_is_tested_on(labels, clients, test, validation, official, seed):
    data = data_with(labels, 5, np.arange(len(labels)) % 3 == 2)
    test_from = "official" if official and len(labels) > 2 else "merged"
    federation = federate(data, "resampled:0.3", clients, seed, test, validation, test_from)
    pools = [
        set(np.concatenate(list(part)).tolist()) for part in (federation.train, federation.validation, federation.test)
    ]
    assert not any(a & b for k, a in enumerate(pools) for b in pools[k + 1 :])
    assert federation.clients == clients
    assert all(len(rows) for rows in federation.train)
    assert len({len(rows) for rows in federation.test}) == 1
    if test_from == "official":
        assert pools[2] <= set(np.flatnonzero(data.official_test).tolist())
        assert not pools[0] & set(np.flatnonzero(data.official_test).tolist())


def test_a_client_is_tested_on_the_proportions_it_trains_on():
    data = data_with(np.tile(np.arange(5), 400))
    federation = federate(data, "resampled:0.2,share=20", 6, 0)
    for train, tested in zip(federation.train, federation.test, strict=True):
        own, held = (np.bincount(data.strata[rows], minlength=5) / len(rows) for rows in (train, tested))
        assert np.abs(own - held).max() < 0.04
    assert [len(rows) for rows in federation.train] == [5000] * 6
    assert [len(rows) for rows in federation.test] == [1667] * 6


# Clients held out


def test_clients_held_out_come_last_with_their_rows():
    data = data_with(LABELS)
    whole = federate(data, "dirichlet:0.3", 6, 1, validation=0.1)
    apart = whole.holding_out(2, 5)
    assert apart.clients == 6
    assert len(apart.held_out) == 2
    order = [k for k in range(6) if k not in apart.held_out] + list(apart.held_out)
    for part in ("train", "validation", "test"):
        before, after = getattr(whole, part), getattr(apart, part)
        assert all(np.array_equal(after[k], before[was]) for k, was in enumerate(order))
    assert apart.split_hash != whole.split_hash
    assert apart.recipe == f"{whole.recipe}, 2 clients held out"
    assert apart.split_hash == whole.holding_out(2, 5).split_hash
    assert len({whole.holding_out(2, seed).held_out for seed in range(9)}) > 3


def test_what_cannot_be_dealt_officially_is_refused():
    with pytest.raises(UsageError, match="found none in 'd'; use test_from='merged'"):
        federate(data_with(LABELS), "iid", 2, 0, test_from="official")
    with pytest.raises(
        UsageError, match=r"official test row for each of 5 clients, found 4 .* ask for 4 clients or fewer"
    ):
        federate(official_data([10, 10], [2, 2], 2), "iid", 5, 0, test_from="official")
    with pytest.raises(UsageError, match="'merged' or 'official', found 'both'"):
        federate(data_with(LABELS), "iid", 2, 0, test_from="both")


# Refusals


def test_more_clients_than_samples_are_refused():
    with pytest.raises(UsageError, match="found 600 rows for 601 clients"):
        federate(data_with(LABELS), "iid", 601, 0)
    with pytest.raises(UsageError, match="found 20 rows for 21 clients"):
        federate(official_data([10, 10], [20, 20], 2), "iid", 21, 0, test_from="official")


@pytest.mark.parametrize("shares", [(1.0, 0.0), (-0.1, 0.0), (0.5, 0.5), (0.0, 1.0), (0.2, -0.1), (float("nan"), 0.0)])
def test_shares_that_leave_nothing_for_training_are_refused(shares):
    with pytest.raises(UsageError, match="their sum must be less than 1"):
        federate(data_with(LABELS), "iid", 2, 0, *shares)


def test_natural_clients_need_a_group():
    with pytest.raises(UsageError, match="clients named by the data for split 'given', found none in 'd'"):
        federate(data_with(LABELS), "given", 2, 0)


@dataclass(frozen=True)
class Broken(Split):
    """A split that gives row 0 to everybody."""

    def __call__(self, labels, clients, seed):
        return [np.array([0, client + 1]) for client in range(clients)]


def test_a_split_of_ones_own_is_taken_and_checked():
    @dataclass(frozen=True)
    class Odd(Split):
        def __call__(self, labels, clients, seed):
            return [np.arange(client, len(labels), clients) for client in range(clients)]

    federation = federate(from_arrays(np.zeros((9, 1)), np.arange(9) % 2), Odd(), 3, 0, test=0.0)
    assert [rows.tolist() for rows in federation.train] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert federation.recipe.startswith("arrays, odd, 3 clients")
    with pytest.raises(UsageError, match=r"split 'broken' to give 3 clients .* found 3 clients with 6 rows, 4 of them"):
        federate(data_with(LABELS), Broken(), 3, 0)
