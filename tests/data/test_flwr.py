"""The adapter of flwr-datasets: its partitions, row by row, and its refusals as ours."""

import sys

import numpy as np
import pytest
from divided import LABELS, check_rows, same

from idiolect.data import federate, from_arrays, parse
from idiolect.errors import UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flwr:DirichletPartitioner,alpha", "options as name=value, found 'alpha'"),
        ("flwr:DirichletPartitioner,alpha=", "options as name=value"),
        ("flwr:DirichletPartitioner,alpha=1,alpha=2", "gives 'alpha' twice"),
        ("flwr:DirichletPartitioner,seed=3", "seed is the run's seed; leave it out"),
        ("flwr:IidPartitioner,num_partitions=3", "num_partitions is the run's clients"),
        ("flwr:DirichletPartitioner,partition_by=digit", "partition_by to be label or group, found 'digit'"),
    ],
)
def test_texts_are_checked_without_the_package(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)


@pytest.mark.parametrize(
    "text", ["flwr", "flwr:DirichletPartitioner,alpha=[0.1, 0.5],shuffle=false", "flwr:NaturalIdPartitioner"]
)
def test_texts_come_back(text):
    assert str(parse(text)) == text


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(UsageError, match=r"needs flwr-datasets.*pip install 'idiolect\[flwr-datasets\]'"):
        parse("flwr")(LABELS, 3, 0)


@pytest.fixture
def partitioners():
    return pytest.importorskip("flwr_datasets.partitioner")


def theirs(partitioner):
    """Their partitions of the same table, made without the adapter."""
    import datasets

    partitioner.dataset = datasets.Dataset.from_dict({"label": LABELS.tolist(), "at": list(range(len(LABELS)))})
    return [np.sort(partitioner.load_partition(k)["at"]) for k in range(partitioner.num_partitions)]


def test_partitions_are_theirs(partitioners):
    expected = theirs(partitioners.DirichletPartitioner(10, "label", alpha=0.1, min_partition_size=5, seed=7))
    found = parse("flwr:DirichletPartitioner,alpha=0.1,min_partition_size=5")(LABELS, 10, 7)
    check_rows(found, len(LABELS), 10)
    assert same(found, expected)
    assert not same(found, parse("flwr:DirichletPartitioner,alpha=0.1,min_partition_size=5")(LABELS, 10, 8))
    expected = theirs(partitioners.ShardPartitioner(10, "label", num_shards_per_partition=2, seed=1))
    assert same(parse("flwr:ShardPartitioner,num_shards_per_partition=2")(LABELS, 10, 1), expected)
    assert same(parse("flwr")(LABELS, 10, 1), theirs(partitioners.IidPartitioner(10)))


def test_natural_ids_are_the_groups_of_the_data(partitioners):
    group = np.array(["b", "a", "c"] * 20)
    data = from_arrays(np.zeros((60, 2)), np.arange(60) % 2, group=group)
    federation = federate(data, "flwr:NaturalIdPartitioner", 3, 0)
    assert [set(group[rows]) for rows in federation.train] == [{"a"}, {"b"}, {"c"}]
    with pytest.raises(UsageError, match="found none in 'arrays'"):
        federate(from_arrays(np.zeros((60, 2)), np.arange(60) % 2), "flwr:NaturalIdPartitioner", 3, 0)


def test_what_they_refuse_is_a_sentence(partitioners):
    with pytest.raises(UsageError, match=r"Unknown partitioner of flwr-datasets 'Dirichlt'. Did you mean Dirichlet"):
        parse("flwr:Dirichlt")(LABELS, 10, 0)
    with pytest.raises(UsageError, match=r"Unknown option of DirichletPartitioner 'alfa'. Did you mean alpha"):
        parse("flwr:DirichletPartitioner,alfa=1")(LABELS, 10, 0)
    with pytest.raises(UsageError, match=r"refuses .* attempts \(10\) was reached"):
        parse("flwr:DirichletPartitioner,alpha=0.0001,min_partition_size=200")(LABELS, 10, 0)
    with pytest.raises(UsageError, match="makes 5 partitions of this data, found 10 clients; ask for 5 clients"):
        parse("flwr:GroupedNaturalIdPartitioner,group_size=2")(LABELS, 10, 0)
