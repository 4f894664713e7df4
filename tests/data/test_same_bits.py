"""Splits made of whole arrays are the bits that client-by-client loops give, and those of earlier versions."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plain_splits as plain
from idiolect.data import Dataset, federate, load
from idiolect.data.apportion import apportion, apportion_each, reach_minimum
from idiolect.data.federated import split_hash
from idiolect.data.partition.split import Split
from idiolect.data.streams import stream, streams
from idiolect.errors import UsageError

SPLITS = {  # text -> the plain function of (labels, clients, seed)
    "iid": plain.iid,
    "given:largest": plain.largest,
    "given:merge": plain.merge,
    "pathological:2": lambda *a: plain.pathological(*a, 2),
    **{f"dirichlet:{a},minimum={m}": lambda *r, a=a, m=m: plain.dirichlet(*r, a, m) for a in (0.05, 1) for m in (1, 4)},
    **{f"quantity:{a},minimum={m}": lambda *r, a=a, m=m: plain.quantity(*r, a, m) for a in (0.05, 1) for m in (1, 4)},
}


@settings(deadline=None, max_examples=250)
@given(
    st.sampled_from(list(SPLITS)),
    st.integers(1, 6),
    st.integers(1, 120),
    st.integers(0, 2**32),
    st.sampled_from([(0.25, 0.0), (0.0, 0.2), (0.3, 0.3), (0.0, 0.0), (0.9, 0.05)]),
    st.sampled_from(["merged", "official"]),
    st.data(),
)
def test_a_federation_is_what_plain_loops_make(text, classes, rows, seed, shares, test_from, data):
    random = np.random.default_rng(seed)
    labels = random.choice(classes, rows, p=random.dirichlet(np.ones(classes)))
    group = (3 * random.integers(0, 12, rows)).astype(str)
    official = np.arange(rows) >= rows - rows // 3
    clients = data.draw(st.integers(1, 14))
    dataset = Dataset(
        "d", torch.zeros(rows, 1), torch.from_numpy(labels), classes, "mlp", group, official_test=official
    )
    try:
        found = federate(dataset, text, clients, seed, *shares, test_from)
    except UsageError:
        return
    keys = group if text.startswith("given") else labels
    split = lambda pool, *rest: SPLITS[text](keys[pool], *rest)
    expected = plain.federate(split, labels, official, clients, seed, *shares, test_from)
    for part, rows in zip((found.train, found.validation, found.test), zip(*expected, strict=True), strict=True):
        assert [mine.tolist() for mine in part] == [theirs.tolist() for theirs in rows]
    assert found.split_hash == plain.split_hash(expected)
    assert found.split_hash == split_hash(*zip(*expected, strict=True))  # of lists as well


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 2**32), st.data())
def test_repair_moves_what_a_search_through_all_clients_moves(clients, classes, seed, data):
    random = np.random.default_rng(seed)
    counts = random.integers(0, data.draw(st.sampled_from([2, 5, 30])), (clients, classes))
    counts[random.random(counts.shape) < data.draw(st.sampled_from([0.0, 0.5, 0.9]))] = 0
    minimum = data.draw(st.integers(0, int(counts.sum()) // clients))
    before = counts.copy()
    assert reach_minimum(counts, minimum).tolist() == plain.reach_minimum(counts, minimum).tolist()
    assert (counts == before).all()


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_shares_of_many_at_once_are_those_of_each(held, data):
    held = [[1, *weights] for weights in held]
    totals = np.array([data.draw(st.integers(0, sum(weights))) for weights in held])
    lots = [np.random.default_rng(k).permutation(len(weights)) for k, weights in enumerate(held)]
    owner = np.repeat(np.arange(len(held)), [len(weights) for weights in held])
    found = apportion_each(np.concatenate(held), owner, totals, np.concatenate(lots))
    each = [apportion(np.array(w), int(t), lot) for w, t, lot in zip(held, totals, lots, strict=True)]
    assert found.tolist() == np.concatenate(each).tolist()


def test_streams_are_each_what_stream_gives_however_much_was_drawn_before():
    purposes = [f"client {k}" for k in range(5)]
    draw = lambda random, k: [*random.permutation(k + 3), random.random(), *random.integers(0, 9, k)]
    found = [draw(random, k) for k, random in enumerate(streams(7, purposes))]
    assert found == [draw(stream(7, purpose), k) for k, purpose in enumerate(purposes)]


EARLIER = {  # recorded with the version before whole arrays: (data, split, clients, seed, test, validation, test_from)
    ("digits", "dirichlet:0.1,minimum=1", 60, 0, 0.25, 0.0, "merged"): "0e16a7d9407cc5198f5a363ae56eca87fd8812b6a072ebdff380476134a5e924",
    ("digits", "dirichlet:5,minimum=2", 150, 0, 0.25, 0.0, "merged"): "48341482e95c9391bb62abfd204048f4ffcd921819115d9cb18121de2cafda8c",
    ("digits", "quantity:0.05,minimum=10", 60, 3, 0.2, 0.1, "merged"): "2c88b776281fe55fb0c4d8184c389fb9a219046414ecd92979433ffd190ea935",
    ("digits", "quantity:0.3,minimum=1", 60, 3, 0.2, 0.1, "merged"): "9431085c3493c28dff41d7f209f9c020d11e2fcd9db1f3fb99571c7f96866867",
    ("mid", "dirichlet:0.03,minimum=12", 12, 0, 0.25, 0.0, "merged"): "ea51caebd1d547925af11da0d735dff289e2e0c78db4fe34d256050ef0ab7bd6",
    ("mid", "dirichlet:0.03,minimum=12", 60, 5, 0.0, 0.3, "official"): "7a18885b30e5b0ac724ea155a62dfc0fdd7d7536c72bb298bd976f4a79c39f98",
    ("mid", "dirichlet:0.1,minimum=1", 60, 5, 0.0, 0.3, "official"): "57a01c98c26ec6ab317e765dbae2af3f9571773858d79c36cc1c066a5e46b8fd",
    ("mid", "dirichlet:0.1,minimum=5", 25, 5, 0.0, 0.3, "official"): "9640175f8eed6a427c296a734ab077a95c8777ca7299f59cbb0f0bee6d21ba2d",
    ("mid", "dirichlet:0.1,minimum=5", 60, 0, 0.25, 0.0, "merged"): "5acab93b433a7ba7e09cbd12c11afe79f188891712ccdb60c1be8989fba334dd",
    ("mid", "dirichlet:5,minimum=2", 1, 5, 0.0, 0.3, "official"): "eeaa94e0bde7ab58e51c29b960ad0d94a5485f97b1003e2c4bb780ecec24b613",
    ("mid", "given:largest", 25, 3, 0.2, 0.1, "merged"): "d0292fe22831c69482645ae18a7c14c0c22c8235f3e7ca4ca956e7e59623fc3d",
    ("mid", "given:largest", 60, 5, 0.0, 0.3, "official"): "5cb51fc9dfff8c1d92882e0c5eafe249db3bbd6a5b66f14db218631e898d6e31",
    ("mid", "given:merge", 12, 5, 0.0, 0.3, "official"): "07139ae245404d5b2e280615b07db0beb9186f585333643fea5c0989b9a889fb",
    ("mid", "given:merge", 25, 3, 0.2, 0.1, "merged"): "35961ffd7e6485564613157f9e0bbcbc2d9f5bcd4ccd0f15163770fd1f4cfe75",
    ("mid", "given", 60, 0, 0.25, 0.0, "merged"): "0c7dea255277e0febb5aab777e04fc38b5ff98ddaf58cc0d52bdc8d8f86e6be3",
    ("mid", "given", 60, 5, 0.0, 0.3, "official"): "5cb51fc9dfff8c1d92882e0c5eafe249db3bbd6a5b66f14db218631e898d6e31",
    ("mid", "iid", 12, 3, 0.2, 0.1, "merged"): "9a468d5c59bc6e1dcc5e7a570d5f272f96bf53ab175248f90711b0a463fc2639",
    ("mid", "iid", 7, 5, 0.0, 0.3, "official"): "532c52a91d188e6040f5da32ab2ec2b159c18efff64b8baca6376cacee4fb387",
    ("mid", "pathological:3", 12, 3, 0.2, 0.1, "merged"): "070c6a5c254f70a9cac2947d455ed9c07b68c3eed560f4fb5fa87ca86da90d7c",
    ("mid", "pathological:3", 7, 5, 0.0, 0.3, "official"): "0bad457c271a8291df7dcdb0c146768179bbf80864dec68deb0432bcac9d8c2f",
    ("mid", "quantity:0.05,minimum=10", 1, 5, 0.0, 0.3, "official"): "eeaa94e0bde7ab58e51c29b960ad0d94a5485f97b1003e2c4bb780ecec24b613",
    ("mid", "quantity:0.3,minimum=1", 150, 5, 0.0, 0.3, "official"): "f6c941c808abc647cffe28937ed94b35742524ccf6d2b15b6f934208c9f04234",
}  # fmt: skip


def mixed():
    random = np.random.default_rng(3010)
    labels = np.sort(random.integers(0, 10, 3000))
    group = (random.integers(0, 60, 3000) * 7).astype(str)
    return Dataset(
        "mid", torch.zeros(3000, 1), torch.from_numpy(labels), 10, "mlp", group, official_test=np.arange(3000) >= 2300
    )


@pytest.mark.parametrize("made", EARLIER, ids=lambda made: "-".join(map(str, made)))
def test_hashes_are_those_of_earlier_versions(made):
    name, *how = made
    assert federate(load("digits") if name == "digits" else mixed(), *how).split_hash == EARLIER[made]


# what is not as it should be


def test_a_split_of_ones_own_may_give_lists_in_any_order_but_no_row_that_is_not_there():
    @dataclass(frozen=True)
    class Own(Split):
        rows: tuple = field(default=())

        def __call__(self, labels, clients, seed):
            return [np.array(these) for these in self.rows]

    data = Dataset("d", torch.zeros(6, 1), torch.tensor([0, 1, 0, 1, 0, 1]), 2, "mlp")
    federation = federate(data, Own(((5, 0, 3), (4, 1, 2))), 2, 0, test=0.0)
    assert [rows.tolist() for rows in federation.train] == [[0, 3, 5], [1, 2, 4]]
    for rows, found in [
        (((0, 1), (2, 6)), "2 clients with 4 rows, 3 of"),
        (((0, -1), (2,)), "3 rows, 2 of"),
        (((0,), ()), "smallest with 0"),
        ((), "0 clients"),
    ]:
        with pytest.raises(UsageError, match=f"split 'own.*' to give 2 clients .*{found}"):
            federate(data, Own(rows), 2, 0)
