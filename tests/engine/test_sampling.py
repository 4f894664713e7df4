"""Who takes part: a function of (seed, round), the same for every method."""

import pytest

from harness import experiment, federation
from idiolect import Run, catalogue
from idiolect.engine import orders
from idiolect.errors import UsageError
from idiolect.sampling import sampler

ROUNDS = 400


def drawn(ratio, clients=10, seed=0, rounds=ROUNDS):
    rule = sampler(ratio, clients)
    return [orders.participants(rule, clients, seed, r) for r in range(rounds)]


def well_formed(lists, clients=10):
    return all(ids == sorted(set(ids)) and all(0 <= i < clients for i in ids) for ids in lists)


@pytest.mark.parametrize(("ratio", "count"), [(0.3, 3), ("0.3", 3), (1.0, 10), (1, 10), (0.55, 5), (0.01, 1), (0.7, 7)])
def test_a_ratio_is_always_the_same_number(ratio, count):
    lists = drawn(ratio)
    assert well_formed(lists)
    assert all(len(ids) == count for ids in lists)
    seen = [sum(i in ids for ids in lists) / ROUNDS for i in range(10)]
    assert all(abs(share - count / 10) < 0.1 for share in seen)  # nobody is favoured


def test_a_ratio_of_ninths_does_not_lose_a_client_to_rounding():
    assert all(len(ids) == 7 for ids in drawn(0.7, clients=10, rounds=5))
    assert all(len(ids) == 29 for ids in drawn(0.29, clients=100, rounds=5))


def test_bernoulli_draws_each_client_alone_and_may_draw_nobody():
    lists = drawn("bernoulli:0.2")
    assert well_formed(lists)
    counts = [len(ids) for ids in lists]
    assert 1.7 < sum(counts) / ROUNDS < 2.3
    assert 0 in counts
    assert max(counts) > 4
    both = sum(0 in ids and 1 in ids for ids in lists) / ROUNDS
    assert abs(both - 0.04) < 0.03  # independent of each other


def test_a_range_draws_its_ratio_anew_each_round():
    lists = drawn("0.5..1")
    assert well_formed(lists)
    counts = [len(ids) for ids in lists]
    assert set(counts) == {5, 6, 7, 8, 9, 10}
    assert all(40 < counts.count(c) < 100 for c in set(counts))  # uniformly


def test_given_lists_come_in_turn_and_sorted():
    assert drawn([[3, 1], [0], [9, 8, 7]], rounds=5) == [[1, 3], [0], [7, 8, 9], [1, 3], [0]]


@pytest.mark.parametrize("ratio", [0.3, "bernoulli:0.3", "0.2..0.9"])
def test_a_round_is_known_without_the_rounds_before_and_seeds_differ(ratio):
    rule = sampler(ratio, 10)
    lists = drawn(ratio)
    assert [orders.participants(rule, 10, 0, r) for r in (17, 3, 17)] == [lists[17], lists[3], lists[17]]
    assert drawn(ratio, seed=1) != lists
    assert len({tuple(ids) for ids in lists}) > 20


def test_every_method_sees_the_same_participants():
    fed = federation()
    found = set()
    for name in catalogue.names():
        run = experiment(catalogue.build(name), federation=fed, momentum=0.0)
        found.add(tuple(tuple(run.participants(r)) for r in range(20)))
    assert len(found) == 1


@pytest.mark.parametrize(
    "ratio",
    [
        0,
        0.0,
        -0.5,
        1.5,
        "0",
        "bernoulli:0",
        "bernoulli:2",
        "0.9..0.5",
        "0..1",
        "0.1..0.2..0.3",
        "some",
        "",
        None,
        float("nan"),
        3,
        [3],
    ],
)
def test_no_ratio_is_refused_with_the_forms_that_are(ratio):
    with pytest.raises(UsageError, match=r"ratio must be a ratio in \(0, 1\] such as 0.1"):
        Run(method="fedavg", ratio=ratio)


@pytest.mark.parametrize("lists", [[], [[]], [[0, 20]], [[-1]], [[1, 1]], [[0], []]])
def test_impossible_lists_are_refused(lists):
    with pytest.raises(UsageError, match="Lists of participants name clients 0 to 19, each once a round, none empty"):
        Run(method="fedavg", ratio=lists)


@pytest.mark.parametrize("ratio", [0.05, 0.33, 1.0, "0.1..0.5", "bernoulli:0.2", ((0, 1), (2, 3, 4))])
def test_no_round_is_larger_than_the_largest(ratio):
    rule = Run(method="fedavg", ratio=ratio).sampler
    sizes = [len(rule(20, orders.draw(0, "participants", r), r)) for r in range(200)]
    assert max(sizes) <= rule.largest(20)
    assert rule.kind == "bernoulli" or max(sizes) == rule.largest(20)
