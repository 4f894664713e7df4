"""Splits: every row once, the sizes, the skew, and what is refused."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from divided import LABELS, check_refusal, check_rows, histogram, same, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.cli import run_fields
from idiolect.data import IID, Dirichlet, Given, Pathological, Quantity, parse
from idiolect.data import shift as shifts
from idiolect.data.partition import SPLITS as KNOWN
from idiolect.data.partition import Balanced, Blocks, Extended, Shards, describe
from idiolect.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "data" / "splits.md"
SPLITS = [
    Dirichlet(),
    Dirichlet(100.0, 1),
    Balanced(),
    Pathological(),
    Pathological(5),
    Extended(),
    Shards(),
    Blocks(),
    Blocks(2, balance=True),
    IID(),
    Quantity(),
    Given(),
    Given("merge"),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_each_row_goes_to_exactly_one_client(split):
    check_rows(split(LABELS, 10, 3), len(LABELS), 10)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_same_seed_gives_the_same_rows_whatever_was_drawn_before(split):
    first = split(LABELS, 10, 3)
    np.random.seed(5)
    np.random.rand(3)
    before = np.random.get_state()[1].copy()
    assert same(first, split(LABELS, 10, 3))
    assert (np.random.get_state()[1] == before).all()  # and global state is left alone
    if not isinstance(split, Given) and split != Blocks(2, balance=True):  # which draw nothing
        assert not same(first, split(LABELS, 10, 4))


def test_another_process_gives_the_same_rows():
    texts = [
        "dirichlet:0.3",
        "balanced",
        "pathological:2",
        "extended:2",
        "shards",
        "blocks:3",
        "resampled",
        "iid",
        "quantity:1",
    ]
    code = (
        "import json, sys, numpy as np; from idiolect.data import parse;"
        "print(json.dumps([[p.tolist() for p in parse(s)(np.arange(500) % 7, 9, 11)] for s in sys.argv[1:]]))"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code, *texts], capture_output=True, check=True, env=env)
    here = [[rows.tolist() for rows in parse(text)(np.arange(500) % 7, 9, 11)] for text in texts]
    assert json.loads(done.stdout) == here


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_labels_are_not_changed(split):
    labels = LABELS.copy()
    labels.setflags(write=False)
    split(labels, 10, 0)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("clients", [0, -1, 2.0, True])
def test_numbers_of_clients_that_are_none_are_refused(split, clients):
    with pytest.raises(UsageError, match="whole number of clients"):
        split(LABELS, clients, 0)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_more_clients_than_rows_are_refused(split):
    with pytest.raises(UsageError, match="at least one row per client, found 5 rows for 6 clients"):
        split(LABELS[:5], 6, 0)


# Dirichlet


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=200), st.floats(1e-3, 1e3), seeds, st.data())
def test_dirichlet_reaches_every_feasible_minimum(labels, alpha, seed, data):
    labels = np.array(labels)
    clients = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(1, len(labels) // clients))
    parts = Dirichlet(alpha, minimum)(labels, clients, seed)
    check_rows(parts, len(labels), clients)
    assert min(map(len, parts)) >= minimum


def test_dirichlet_is_more_skewed_for_a_small_alpha():
    def largest_share(alpha):
        counts = histogram(LABELS, Dirichlet(alpha, 1)(LABELS, 10, 0))
        return (counts.max(1) / counts.sum(1)).mean()

    shares = [largest_share(alpha) for alpha in (0.05, 0.5, 5, 1000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6
    assert shares[-1] < 0.2


def test_dirichlet_proportions_have_the_variance_of_the_distribution():
    labels, clients, alpha = np.zeros(10_000, int), 8, 0.7
    sizes = np.stack([[len(rows) for rows in Dirichlet(alpha, 1)(labels, clients, s)] for s in range(300)])
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert (sizes / 10_000).var() == pytest.approx(expected, rel=0.15)
    assert (sizes / 10_000).mean(0) == pytest.approx(np.full(clients, 1 / clients), abs=0.05)


def test_dirichlet_survives_an_alpha_that_gives_each_class_to_one_client():
    parts = Dirichlet(1e-6, 1)(LABELS, 5, 0)
    check_rows(parts, len(LABELS), 5)
    assert (histogram(LABELS, parts) > 0).sum() <= 10 + 5 * 2


def test_dirichlet_needs_no_luck_for_many_clients():
    parts = Dirichlet(0.01, 10)(LABELS, 200, 0)  # every single row is needed
    assert {len(rows) for rows in parts} == {10}


def test_dirichlet_refuses_a_minimum_that_cannot_be_and_names_the_nearest():
    with pytest.raises(UsageError, match=r"10 \* 300 = 3000 rows, found 2000; .* minimum=6, or 200 clients\."):
        Dirichlet(0.1)(LABELS, 300, 0)
    with pytest.raises(UsageError, match=r"50 \* 1 = 50 rows, found 30; .* minimum=30\."):
        Dirichlet(0.1, 50)(LABELS[:30], 1, 0)


@pytest.mark.parametrize("alpha", [0, -1, np.nan, np.inf, 1e300, "a", True])
@pytest.mark.parametrize("split", [Dirichlet, Quantity])
def test_an_alpha_that_is_none_is_refused(split, alpha):
    with pytest.raises(UsageError, match="alpha > 0"):
        split(alpha)


@pytest.mark.parametrize("minimum", [0, -1, 2.5, True])
@pytest.mark.parametrize("split", [Dirichlet, Quantity])
def test_a_minimum_that_is_none_is_refused(split, minimum):
    with pytest.raises(UsageError, match="whole number of at least 1 for minimum"):
        split(0.5, minimum)


# Pathological


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 12), st.integers(1, 30), seeds, st.data())
def test_pathological_clients_hold_exactly_their_classes(classes, clients, seed, data):
    held = data.draw(st.integers(-(-classes // clients), classes))
    most = -(-clients * held // classes)
    labels = np.repeat(np.arange(classes) * 3, data.draw(st.integers(most, most + 5)))  # labels need not be 0..C-1
    parts = Pathological(held)(labels, clients, seed)
    check_rows(parts, len(labels), clients)
    counts = histogram(labels, parts)[:, ::3]
    assert ((counts > 0).sum(1) == held).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for column in counts.T:
        shares = column[column > 0]
        assert shares.max() - shares.min() <= 1


def test_pathological_meetings_of_classes_are_random():
    labels = np.repeat(np.arange(10), 100)
    pairs = {tuple(np.unique(labels[rows])) for rows in Pathological(2)(labels, 100, 0)}
    assert len(pairs) > 25  # of 45; consecutive classes or fixed blocks would give 5 or 10


def test_pathological_refuses_what_cannot_be_and_names_the_nearest():
    with pytest.raises(UsageError, match=r"found 3 \* 2; ask for classes=4 or 5 clients"):
        Pathological(2)(LABELS, 3, 0)
    with pytest.raises(UsageError, match=r"found classes=11; ask for classes=10\."):
        Pathological(11)(LABELS, 20, 0)
    with pytest.raises(UsageError, match="found 3 rows of class 1 for 4 clients; ask for classes=1 or 3 clients"):
        Pathological(2)(np.array([0] * 9 + [1] * 3), 4, 0)
    for classes in (0, 1.5, True):
        with pytest.raises(UsageError, match="whole number of at least 1 for classes"):
            Pathological(classes)


# IID, Quantity


@given(st.integers(1, 300), seeds, st.data())
def test_iid_sizes_differ_by_at_most_one(rows, seed, data):
    clients = data.draw(st.integers(1, rows))
    parts = IID()(np.zeros(rows), clients, seed)
    check_rows(parts, rows, clients)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_iid_clients_are_alike_even_where_rows_are_sorted_by_class():
    labels = np.repeat(np.arange(4), 1000)
    counts = histogram(labels, IID()(labels, 4, 0))
    assert np.abs(counts - 250).max() < 60  # more than four standard deviations


@given(st.integers(1, 300), st.floats(0.01, 100), seeds, st.data())
def test_quantity_reaches_every_feasible_minimum(rows, alpha, seed, data):
    clients = data.draw(st.integers(1, rows))
    minimum = data.draw(st.integers(1, rows // clients))
    parts = Quantity(alpha, minimum)(np.zeros(rows), clients, seed)
    check_rows(parts, rows, clients)
    assert min(map(len, parts)) >= minimum


def test_quantity_skews_sizes_and_not_labels():
    labels = np.repeat(np.arange(4), 2500)

    def spread(alpha):
        return np.std([len(rows) for rows in Quantity(alpha)(labels, 10, 0)])

    assert spread(0.2) > spread(2) > spread(200)
    parts = [rows for rows in Quantity(0.5)(labels, 10, 0) if len(rows) > 500]
    shares = [np.bincount(labels[rows], minlength=4) / len(rows) for rows in parts]
    assert np.abs(np.array(shares) - 0.25).max() < 0.1


def test_quantity_refuses_a_minimum_that_cannot_be():
    with pytest.raises(UsageError, match="minimum=6, or 200 clients"):
        Quantity()(LABELS, 300, 0)


# Given

GROUPS = np.array(["b", "a", "c", "a", "d", "a", "b", "c", "c"])


def test_given_groups_come_in_the_order_of_their_names():
    assert [rows.tolist() for rows in Given()(GROUPS, 4, 0)] == [[1, 3, 5], [0, 6], [2, 7, 8], [4]]


def test_given_refuses_a_number_of_clients_that_is_not_the_number_of_groups():
    with pytest.raises(UsageError, match="found 4 groups for 3 clients; ask for 4 clients, or 'given:largest'"):
        Given()(GROUPS, 3, 0)
    for surplus in ("refuse", "largest", "merge"):
        with pytest.raises(UsageError, match="found 4 groups for 5 clients; ask for 4 clients"):
            Given(surplus)(GROUPS, 5, 0)


def test_given_keeps_the_largest_groups_or_merges_them():
    assert [rows.tolist() for rows in Given("largest")(GROUPS, 2, 0)] == [[1, 3, 5], [2, 7, 8]]
    merged = Given("merge")(GROUPS, 2, 0)
    assert [rows.tolist() for rows in merged] == [[0, 1, 3, 5, 6], [2, 4, 7, 8]]
    with pytest.raises(UsageError, match="refuse, largest, merge, found 'drop'"):
        Given("drop")


# What a refusal names instead


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.one_of(
        st.integers(1, 8).map(Pathological),
        st.builds(Extended, st.integers(1, 8), st.just(0.3), st.integers(1, 9)),
        st.integers(1, 8).map(Shards),
        st.builds(Blocks, st.integers(1, 8), st.booleans(), st.integers(1, 9)),
        st.integers(1, 60).map(lambda m: Balanced(0.3, m)),
        st.builds(Given, st.sampled_from(["refuse", "largest", "merge"]), st.integers(1, 9)),
        st.integers(1, 30).map(lambda m: Dirichlet(0.3, m)),
        st.integers(1, 30).map(lambda m: Quantity(0.3, m)),
        st.sampled_from([IID(), Given(), Given("largest"), Given("merge")]),
    ),
    st.integers(1, 60),
    seeds,
)
def test_what_a_refusal_names_can_be_had(sizes, split, clients, seed):
    check_refusal(split, np.repeat(np.arange(len(sizes)), sizes), clients, seed)


@pytest.mark.parametrize(
    ("split", "clients", "nearest"),
    [
        (Pathological(2), 30, "ask for 12 clients."),  # 4 classes of 6 rows each: 24 places
        (Pathological(2), 20, "ask for classes=1 or 12 clients."),
        (Pathological(3), 1, "ask for classes=4 or 2 clients"),
        (Pathological(9), 5, "ask for classes=4."),
        (Pathological(9), 25, "ask for classes=1 and 24 clients"),
        (Dirichlet(0.3, 5), 30, "ask for 4 clients or fewer"),
        (Dirichlet(0.3, 25), 30, "ask for minimum=1 and 24 clients or fewer"),
        (Quantity(0.3, 5), 6, "the nearest that can be had is minimum=4, or 4 clients"),
        (Given(), 30, "ask for 4 clients"),
        (IID(), 30, "ask for 24 clients or fewer"),
    ],
)
def test_nothing_nearer_could_be_had(split, clients, nearest):
    with pytest.raises(UsageError) as error:
        split(np.arange(24) % 4, clients, 0)
    assert nearest in str(error.value)


# Texts


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("iid", IID()),
        ("given", Given()),
        ("given:merge", Given("merge")),
        ("dirichlet:0.1", Dirichlet(0.1)),
        ("dirichlet:1", Dirichlet(1.0)),
        ("dirichlet:0.1,minimum=5", Dirichlet(0.1, 5)),
        ("pathological:2", Pathological(2)),
        ("quantity:0.5", Quantity(0.5)),
        ("quantity:1e-05,minimum=3", Quantity(1e-5, 3)),
        ("balanced:0.1", Balanced(0.1)),
        ("shards:3", Shards(3)),
        ("blocks:2,balance=true", Blocks(2, True)),
        ("extended:3,alpha=0.5,each=2", Extended(3, 0.5, 2)),
        ("given:largest,minimum=4", Given("largest", 4)),
        ("given:minimum=4", Given(minimum=4)),
    ],
)
def test_a_text_names_a_split_and_comes_back(text, split):
    assert parse(text) == split
    assert str(split) == text


def test_other_ways_to_write_a_split():
    assert parse(" dirichlet: 0.3 , 7 ") == Dirichlet(0.3, 7)
    assert parse("dirichlet:minimum=7") == Dirichlet(minimum=7)
    assert parse("dirichlet") == Dirichlet()
    assert parse("quantity:minimum=4,alpha=2") == Quantity(2.0, 4)


@given(st.floats(1e-6, 1e6), st.integers(1, 10**6))
def test_every_split_round_trips(alpha, whole):
    for split in (Dirichlet(alpha, whole), Quantity(alpha, whole), Pathological(whole)):
        assert parse(str(split)) == split


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirichlt:0.1", "Unknown split 'dirichlt'. Did you mean dirichlet"),
        ("", "Unknown split ''"),
        ("dirichlet:", "options alpha=0.1, minimum=10, found ''"),
        ("dirichlet:x", "found 'x' in 'dirichlet:x'"),
        ("dirichlet:0.1,5,6", "found '6'"),
        ("dirichlet:minimum=5,0.1", "found '0.1'"),
        ("dirichlet:0.1,minimum=5.5", "found 'minimum=5.5'"),
        ("dirichlet:0.1,minimun=5", "Unknown option of split 'dirichlet' 'minimun'. Did you mean minimum"),
        ("dirichlet:0.1,alpha=5", "gives 'alpha' twice"),
        ("dirichlet:-1", "alpha > 0"),
        ("pathological:2.5", "found '2.5'"),
        ("pathological:0", "at least 1 for classes"),
        ("iid:3", "'iid' has no options"),
        ("given:some", "found 'some'"),
        ("given:minimum=0", "at least 1 for minimum"),
        ("blocks:2,maybe", "found 'maybe'"),
    ],
)
def test_malformed_texts_are_refused_with_what_was_expected(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)


def test_every_split_is_found_by_its_file_described_and_named_by_help():
    described = {name: (options, line) for name, options, line in describe()}
    assert list(described) == sorted(KNOWN)
    for name, (options, line) in described.items():
        assert KNOWN[name].__module__ == f"idiolect.data.partition.{name}"
        assert len(options.split(", ")) == max(len(fields(KNOWN[name])), 1)
        assert line.endswith(".")
        assert name in run_fields()["split"][2]
    assert described["dirichlet"][0] == "alpha=0.1, minimum=10"


def test_the_page_of_splits_has_them_all_with_their_options():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    table = dict(tuple(cell.strip(" `") for cell in line.split("|")[1:3]) for line in lines)
    for name, options, _ in describe():
        assert table[name] == options
    for text, _ in shifts.describe():
        assert text.partition(":")[0] in {name.partition(":")[0] for name in table}


def test_given_leaves_out_groups_that_are_too_small():
    assert [rows.tolist() for rows in Given(minimum=2)(GROUPS, 3, 0)] == [[1, 3, 5], [0, 6], [2, 7, 8]]
    with pytest.raises(UsageError, match="groups of 3 rows or more, found 2 groups for 3 clients; ask for 2 clients"):
        Given(minimum=3)(GROUPS, 3, 0)
    with pytest.raises(UsageError, match="at least minimum=4 rows, the largest has 3"):
        Given(minimum=4)(GROUPS, 1, 0)


def test_given_merges_a_hundred_thousand_groups():
    groups = np.arange(300_000) % 100_000
    parts = Given("merge")(groups, 1000, 0)
    check_rows(parts, len(groups), 1000)
    assert {len(rows) for rows in parts} == {300}
