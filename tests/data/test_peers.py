"""Splits of other libraries: the very clients, with the very rows that each trains and tests on."""

import json
import os
import pickle
import shlex
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from idiolect.data import federate, from_arrays, load, parse
from idiolect.errors import UsageError
from idiolect.experiment import Run

SIZES = [(5, 2), (7, 3), (4, 1)]
RANDOM = np.random.default_rng(0)


def clients(shape=(1, 4, 4), classes=3):
    """Rows that differ in their first number, and labels, of each client's training and test set."""
    row = iter(range(100))
    made = []
    for sizes in SIZES:
        parts = []
        for size in sizes:
            x = RANDOM.random((size, *shape)).astype("f4")
            x.reshape(size, -1)[:, 0] = [next(row) for _ in range(size)]
            parts.append({"x": x, "y": np.arange(size) % classes})
        made.append(parts)
    return made


def save(folder, made, **config):
    """As PFLlib's dataset/utils/dataset_utils.py saves it."""
    for part, number in (("train", 0), ("test", 1)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for idx, parts in enumerate(made):
            with open(folder / part / f"{idx}.npz", "wb") as f:
                np.savez_compressed(f, data=parts[number])
    about = {
        "num_clients": len(made),
        "num_classes": 3,
        "non_iid": True,
        "balance": False,
        "partition": "dir",
        "alpha": 0.1,
    }
    (folder / "config.json").write_text(json.dumps({**about, **config}))
    return folder


@pytest.fixture
def made():
    return clients()


@pytest.fixture
def folder(tmp_path, made):
    return save(tmp_path / "Ä MNIST", made)


def test_pfllibs_clients_come_with_their_own_training_and_test_rows(folder, made):
    data = load(folder)
    assert data.name == "Ä MNIST"
    assert data.classes == 3
    assert data.shape == (1, 4, 4)
    for test_from in ("merged", "official"):
        federation = federate(data, "given", 3, seed=5, test=0.5, test_from=test_from)
        assert "own test rows" in federation.recipe
        for client, (train, test) in enumerate(made):
            for rows, part in ((federation.train[client], train), (federation.test[client], test)):
                np.testing.assert_array_equal(data.x[rows].numpy(), part["x"])
                np.testing.assert_array_equal(data.y[rows].numpy(), part["y"])
            assert len(federation.validation[client]) == 0


def test_clients_are_in_the_order_of_their_numbers(tmp_path):
    made = [
        [{"x": np.full((2, 3), k, "f4"), "y": np.arange(2)}, {"x": np.full((1, 3), k, "f4"), "y": [1]}]
        for k in range(12)
    ]
    data = load(save(tmp_path, made, num_classes=2))
    federation = federate(data, "given", 12, seed=0)
    assert [data.x[rows, 0].unique().tolist() for rows in federation.train] == [[k] for k in range(12)]
    assert [data.x[rows, 0].tolist() for rows in federation.test] == [[k] for k in range(12)]
    largest = federate(data, "given:largest", 5, seed=0)
    assert [data.x[rows, 0].tolist() for rows in largest.test] == [[0], [1], [2], [3], [4]]
    merged = federate(data, "given:merge", 5, seed=0)
    for train, test in zip(merged.train, merged.test, strict=True):
        assert set(data.x[train, 0].tolist()) == set(data.x[test, 0].tolist())


def test_a_validation_share_is_taken_from_the_training_rows(folder):
    whole, held = (federate(load(folder), "given", 3, 0, validation=share) for share in (0.0, 0.4))
    for client in range(3):
        assert len(held.validation[client]) > 0
        both = np.sort(np.concatenate([held.train[client], held.validation[client]]))
        assert both.tolist() == whole.train[client].tolist()
        assert held.test[client].tolist() == whole.test[client].tolist()


def test_other_splits_take_all_rows_as_of_any_data_set(folder):
    federation = federate(load(folder), "iid", 2, 0, test=0.25)
    assert sum(map(len, [*federation.train, *federation.test])) == sum(map(sum, SIZES))


def test_files_with_x_and_y_as_arrays(tmp_path, made):
    for part, number in (("train", 0), ("test", 1)):
        (tmp_path / part).mkdir()
        for idx, parts in enumerate(made):
            np.savez(tmp_path / part / f"{idx}.npz", **parts[number])
    federation = federate(load(tmp_path), "given", 3, 0)
    assert [len(rows) for rows in federation.train] == [5, 7, 4]


def test_texts_are_token_ids_with_their_number(tmp_path):
    texts = np.empty((2, 2), object)
    texts[:] = [[[4, 5, 0], 2], [[6, 0, 0], 1]]
    one = {"x": texts, "y": np.array([0, 1])}
    data = load(save(tmp_path, [[one, one]], num_classes=2))
    assert data.x.tolist() == [[4, 5, 0], [6, 0, 0]] * 2
    assert data.network == "fasttext"


def test_wider_floats_and_other_byte_orders(tmp_path):
    one = {"x": np.arange(6.0).reshape(2, 3).astype(">f8"), "y": np.array([0, 1], ">i2")}
    data = load(save(tmp_path, [[one, one]], num_classes=2))
    assert data.x.tolist() == [[0, 1, 2], [3, 4, 5]] * 2
    assert data.y.tolist() == [0, 1, 0, 1]


def test_a_client_may_have_no_test_rows(tmp_path, made):
    made[1][1] = {"x": np.zeros((0, 1, 4, 4), "f4"), "y": np.zeros(0, np.int64)}
    federation = federate(load(save(tmp_path, made)), "given", 3, 0)
    assert [len(rows) for rows in federation.test] == [2, 0, 1]


class Poison:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def test_what_would_run_is_refused_and_not_run(folder, tmp_path, made):
    mark = tmp_path / "ran"
    np.savez_compressed(folder / "test" / "1.npz", data={**made[1][1], "z": Poison(mark)})
    with pytest.raises(UsageError, match=r"test/1\.npz.*system; nothing in it was run"):
        load(folder)
    assert not mark.exists()


def change(made, client, part, **arrays):
    made[client][part] = {**made[client][part], **arrays}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f, m: change(m, 1, 0, y=m[1][0]["y"][:3]), r"one label in y per row of x in .*train/1\.npz.*\[3\]"),
        (lambda f, m: change(m, 1, 1, x=np.ones((3, 2))), r"one shape.*\[1, 4, 4\] in train/0.npz and \[2\] in test/1"),
        (lambda f, m: change(m, 2, 1, y=np.array([3])), r"labels in 0\.\.2, found 3"),
        (lambda f, m: change(m, 2, 1, y=np.array([-1])), r"labels in 0\.\.2, found -1"),
        (lambda f, m: change(m, 2, 1, y=np.array([0.5])), r"integer labels, found 0\.5"),
        (lambda f, m: change(m, 2, 1, y=["a"]), r"numbers of one shape as y in .*test/2\.npz"),
        (lambda f, m: change(m, 0, 0, x=[[1], [1, 2]]), r"numbers of one shape as x in .*train/0\.npz"),
        (lambda f, m: change(m, 0, 0, x=np.full_like(m[0][0]["x"], np.nan)), r"finite numbers in x"),
        (lambda f, m: change(m, 0, 0, x=m[0][0]["x"][:0], y=m[0][0]["y"][:0]), r"to train, found no row in train/0\.npz"),
        (lambda f, m: m[0].__setitem__(0, {"x": m[0][0]["x"]}), r"x and y of a client in .*train/0\.npz"),
        (lambda f, m: m[0].__setitem__(0, [1, 2]), r"train/0\.npz"),
    ],
)  # fmt: skip
def test_contents_that_cannot_be_taken_are_named(tmp_path, made, harm, message):
    harm(tmp_path, made)
    with pytest.raises(UsageError, match=message):
        load(save(tmp_path, made))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "test" / "1.npz").unlink(), "clients 0..2 in .*test', found none for client 1"),
        (lambda f: (f / "train" / "1.npz").rename(f / "train" / "7.npz"), "clients 0..2 in .*train', found none for client 1"),
        (lambda f: (f / "test" / "9.npz").write_bytes(b""), "found one for client 9"),
        (lambda f: (f / "config.json").write_text('{"num_clients": 4}'), "clients 0..3 .*found none for client 3"),
        (lambda f: (f / "config.json").write_text("{"), "numbers of clients and classes in .*config.json"),
        (lambda f: (f / "config.json").write_text('{"num_classes": "many"}'), "numbers of clients and classes"),
        (lambda f: (f / "config.json").write_text("[]") and (f / "config.json").write_text("3"), "clients and classes"),
        (lambda f: (f / "train" / "0.npz").write_bytes((f / "train" / "0.npz").read_bytes()[:-40]), "whole .npz file in .*train/0.npz"),
        (lambda f: np.savez(f / "train" / "0.npz", data=np.arange(3)), "x and y of a client in .*train/0.npz"),
    ],
)  # fmt: skip
def test_folders_that_are_not_whole_are_refused(folder, harm, message):
    harm(folder)
    with pytest.raises(UsageError, match=message):
        load(folder)


def test_the_number_of_clients_is_that_of_the_files(folder):
    with pytest.raises(UsageError, match="for 20 clients; ask for 3 clients"):
        federate(load(folder), "given", 20, 0)


def test_from_the_command_line(folder, made, tmp_path):
    command = f"run fedavg --split given --clients 3 --rounds 1 --network mlp --backend serial --data '{folder}'"
    command = [sys.executable, "-m", "idiolect", *shlex.split(command)]
    done = subprocess.run([*command, "--out", "out"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = Run.from_toml((tmp_path / "out" / "run.toml").read_text())
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["split_hash"] == run.federation.split_hash
    assert [len(rows) for rows in run.federation.test] == [2, 3, 1]
    (folder / "test" / "0.npz").unlink()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


# FL-bench

LABELS = np.repeat([0, 1, 2], 8)
DATA = from_arrays(np.arange(24, dtype="f4")[:, None], LABELS, name="rows")


def partition(**changes):
    """As FL-bench's generate_data.py makes it; three of the 24 rows belong to nobody."""
    order = np.random.default_rng(1).permutation(24)
    indices = []
    for start in range(0, 21, 7):
        rows = order[start : start + 7]
        indices.append({"train": rows[:4], "val": rows[4:5], "test": rows[5:]})
    return {
        "separation": {"train": [0, 1, 2], "val": [], "test": [0, 1, 2], "total": 3},
        "data_indices": indices,
        **changes,
    }


def dump(path, held):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as f:
        pickle.dump(held, f)
    return path


LISTS = lambda p: [{part: rows.tolist() for part, rows in one.items()} for one in p]
FORMS = {
    "arrays": lambda p: p,
    "lists": LISTS,
    "lists of NumPy's numbers": lambda p: [{part: list(rows) for part, rows in one.items()} for one in p],
    "a dictionary": lambda p: dict(enumerate(p)),
    "without val": lambda p: [{part: rows for part, rows in one.items() if part != "val"} for one in LISTS(p)],
}


@pytest.mark.parametrize("form", FORMS)
def test_flbenchs_clients_come_with_their_rows(tmp_path, form):
    held = partition()
    file = dump(tmp_path / "ä, b=c" / "partition.pkl", {**held, "data_indices": FORMS[form](held["data_indices"])})
    split = parse(f"flbench:{file}")
    assert parse(str(split)) == split
    federation = federate(DATA, split, 3, seed=9, test=0.5)
    for client, one in enumerate(held["data_indices"]):
        assert federation.train[client].tolist() == sorted(one["train"])
        assert federation.test[client].tolist() == sorted(one["test"])
        assert federation.validation[client].tolist() == ([] if form == "without val" else sorted(one["val"]))
    assert federation.recipe == f"rows, flbench:{file}, 3 clients"


def statistics(held, labels):
    stats = {}
    for client, one in enumerate(held["data_indices"]):
        indices = np.concatenate(list(one.values()))
        stats[client] = {"x": len(indices), "y": Counter(labels[indices].tolist())}
    return {**stats, "samples_per_client": {"std": 0.0, "mean": 7.0}}


def test_flbenchs_own_counts_tell_of_rows_in_another_order(tmp_path):
    held = partition()
    file = dump(tmp_path / "partition.pkl", held)
    (tmp_path / "all_stats.json").write_text(json.dumps(statistics(held, LABELS)))
    federate(DATA, f"flbench:{file}", 3, 0)
    (tmp_path / "all_stats.json").write_text(json.dumps(statistics(held, LABELS[::-1])))
    with pytest.raises(
        UsageError, match=r"at client \d the classes that .*all_stats.json' counts.*torchvision's order"
    ):
        federate(DATA, f"flbench:{file}", 3, 0)
    (tmp_path / "all_stats.json").write_text("[1")
    with pytest.raises(UsageError, match="FL-bench's own counts"):
        federate(DATA, f"flbench:{file}", 3, 0)


def harmed(client, **parts):
    indices = LISTS(partition()["data_indices"])
    indices[client] |= parts
    return partition(data_indices=indices)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"separation": {}}, "rows of each client as data_indices"),
        ([1, 2], "rows of each client as data_indices"),
        (partition(data_indices=[]), "rows of each client as data_indices"),
        (partition(data_indices=[np.arange(3)]), "train, test and, where there is one, val of client 0"),
        (partition(data_indices=[{"train": [0]}]), "of client 0 .*found train;"),
        (partition(data_indices=dict(enumerate(LISTS(partition()["data_indices"]), 1))), r"clients 0\.\.2 .*found no client 0"),
        (partition(data_indices=partition()["data_indices"][:2]), "found 2 there and 3 asked for; ask for 2 clients"),
        (harmed(1, train=[]), "no training row of client 1.*--split sample"),
        (harmed(1, train=[24]), r"row numbers in 0\.\.23 .*found 24 at client 1"),
        (harmed(1, test=[-1]), r"row numbers in 0\.\.23 .*found -1 at client 1"),
        (harmed(1, test=[0.5]), "row numbers of client 1"),
        (harmed(1, test=[[1], [2, 3]]), "row numbers of client 1"),
        (harmed(1, test=[[1]]), "row numbers of client 1"),
        (harmed(1, test=["a"]), "row numbers of client 1"),
        (harmed(1, test=3), "row numbers of client 1"),
        (harmed(1, train=[3, 3]), "every row once .*found row 3 2 times|every row once .*row 3 3 times"),
        (harmed(1, train=partition()["data_indices"][0]["train"]), r"every row once .*2 times, at client 0 and 1"),
        ({"data_indices": Poison("ran")}, "nothing in it was run"),
        (pickle.Pickler, "nothing in it was run"),
    ],
)  # fmt: skip
def test_partitions_that_cannot_be_taken_are_named(tmp_path, monkeypatch, held, message):
    monkeypatch.chdir(tmp_path)
    dump(tmp_path / "partition.pkl", held)
    with pytest.raises(UsageError, match=message) as error:
        federate(DATA, "flbench:partition.pkl", 3, 0)
    assert "partition.pkl" in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_files_that_are_not_there():
    with pytest.raises(UsageError, match=r"Expected a file at 'no\.pkl': No such file"):
        federate(DATA, "flbench:no.pkl", 3, 0)
    for text in ("flbench", "flbench:"):
        with pytest.raises(UsageError, match="flbench: expected a file, as in flbench:PATH"):
            parse(text)


def test_a_partition_in_a_run_file(tmp_path):
    file = dump(tmp_path / "partition.pkl", partition())
    np.savez(tmp_path / "rows.npz", x=np.arange(24, dtype="f4")[:, None], y=LABELS)
    run = Run(method="local", data=str(tmp_path / "rows.npz"), split=f"flbench:{file}", clients=3)
    again = Run.from_toml(run.to_toml())
    assert again == run
    assert (
        again.federation.split_hash == run.federation.split_hash == federate(DATA, f"flbench:{file}", 3, 1).split_hash
    )
