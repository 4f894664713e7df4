"""Signals by subject: windows, activities, standardising by those trained on; every form, and what is refused."""

import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idiolect import Run, run
from idiolect.data import Federation, federate, load, signals
from idiolect.data.readers import reader_of
from idiolect.data.readers import signals as reader
from idiolect.data.signals import Recording
from idiolect.errors import UsageError

DRAW = np.random.default_rng(0)


def table(file, activity, group=None, time=True, **channels):
    """A .csv with these columns."""
    count = len(activity)
    columns = {"time": np.arange(count) / 50} if time else {}
    columns |= {"subject": group} if group is not None else {}
    columns |= channels or {"ax": DRAW.normal(size=count), "ay": DRAW.integers(0, 9, count)}
    columns["activity"] = activity
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return columns


def of(recordings, tmp_path, **options):
    given = {"length": 4, "stride": None, "window_label": "majority", "mean": None, "std": None, "network": None}
    return signals.dataset(tmp_path / "here", recordings, **{**given, **options})


def fitted(data, train):
    rest = np.setdiff1d(np.arange(len(data)), train)
    return Federation(data, *([np.array(rows, np.int64)] for rows in (train, [], rest)), "hash", "by hand").dataset


# windows


@given(st.data())
def test_windows_and_their_classes_are_those_of_a_loop(tmp_path_factory, data):
    length, stride = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    rule = data.draw(st.sampled_from(["majority", "last"]))
    recordings, x, y, group = [], [], [], []
    for subject in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(length, 20))
        readings, activity = DRAW.normal(size=(size, 2)).astype("f4"), DRAW.integers(0, 3, size)
        recordings.append(Recording(f"s{subject}", readings, activity))
        for at in range(0, size - length + 1, stride):
            window = activity[at : at + length].tolist()
            x.append(readings[at : at + length].T[:, None])
            y.append(window[-1] if rule == "last" else min(set(window), key=lambda a: (-window.count(a), a)))
            group.append(f"s{subject}")
    found = of(recordings, tmp_path_factory.getbasetemp(), length=length, stride=stride, window_label=rule)
    names = sorted({a for one in recordings for a in one.activity.tolist()})
    assert np.array_equal(found.x, np.stack(x))
    assert found.y.tolist() == [names.index(a) for a in y]
    assert found.group.tolist() == group
    assert found.classes == len(names)
    assert found.class_names == (None if names == list(range(len(names))) else tuple(map(str, names)))


def test_channels_are_standardised_by_the_windows_trained_on(tmp_path):
    readings = (DRAW.normal(size=(40, 3)) * [1, 50, 0] + [0, 1000, 7]).astype("f4")
    raw = of([Recording("a", readings, np.arange(40) % 2)], tmp_path)
    train = [0, 2, 3, 7]
    data = fitted(raw, train)
    seen = raw.x[train].double().numpy()
    mean, std = seen.mean((0, 2, 3)), seen.std((0, 2, 3))
    std[2] = 1  # it never changes
    assert np.allclose(data.x, (raw.x.numpy() - mean[:, None, None]) / std[:, None, None], atol=1e-4)
    assert (data.x[:, 2] == 0).all()
    assert not np.allclose(data.x, fitted(raw, [1, 4]).x, atol=1e-2)
    assert data.digest == raw.digest


def test_statistics_may_be_given(tmp_path):
    recording = Recording("a", DRAW.normal(size=(40, 2)).astype("f4"), np.zeros(40, int))
    raw = of([recording], tmp_path)
    data = fitted(of([recording], tmp_path, mean=[1, 2], std=[3, 4]), [0])
    assert torch.allclose(data.x[:, 1], (raw.x[:, 1] - 2) / 4)
    data = fitted(of([recording], tmp_path, mean=[0, 0]), [0, 1])
    assert torch.allclose(data.x[:, 1], raw.x[:, 1] / raw.x[:2, 1].std(correction=0))
    for options in ({"mean": [0]}, {"std": [1, 0]}, {"std": [1, -1]}, {"mean": [0, float("nan")]}):
        with pytest.raises(UsageError, match="as 2 finite numbers, one a channel"):
            of([recording], tmp_path, **options)


# forms


def test_one_table_of_all_subjects(tmp_path):
    who = ["b"] * 9 + ["a"] * 10 + ["b"]
    columns = table(tmp_path / "walks.csv", ["sit"] * 12 + ["go"] * 8, who)
    assert reader_of(tmp_path / "walks.csv") is reader
    data = load(tmp_path / "walks.csv", length=5)
    assert (data.name, data.network, data.shape, data.classes) == ("walks", "mlp", (2, 1, 5), 2)
    assert data.group.tolist() == ["a", "a", "b", "b"]
    order = [*range(9, 14), *range(14, 19), *range(0, 5), *range(5, 9), 19]
    for channel, name in enumerate(["ax", "ay"]):
        assert np.allclose(data.x[:, channel].flatten(), np.array(columns[name], float)[order])
    assert data.y.tolist() == [1, 0, 1, 1]
    assert data.class_names == ("go", "sit")


def test_a_table_a_subject(tmp_path):
    folder = tmp_path / "Läufer"
    for subject, count in {"Zoë": 8, "Åsa": 13}.items():
        table(folder / f"{subject}.csv", [1, 7] * (count // 2) + [7] * (count % 2))
    (folder / ".DS_Store").write_bytes(b"\0")
    assert reader_of(folder) is reader
    data = load(folder, length=4, stride=2, window_label="last")
    assert data.group.tolist() == ["Zoë"] * 3 + ["Åsa"] * 5
    assert data.y.tolist() == [1] * 8
    assert data.classes == 2
    assert load(folder, length=4, channels=["ay"]).shape == (1, 1, 4)


def test_columns_may_be_named(tmp_path):
    table(tmp_path / "a.csv", [0] * 8, time=False, who=["x"] * 4 + ["y"] * 4, kind=[3, 4] * 4, ax=[1.5] * 8)
    data = reader.load(tmp_path / "a.csv", length=4, label="kind", group="who", channels=["ax"])
    assert data.group.tolist() == ["x", "y"]
    assert data.shape == (1, 1, 4)
    assert data.y.tolist() == [0, 0]
    for options, message in (
        ({}, r"one column called subject or user or participant .* found none; name it by group="),
        ({"group": "whom"}, "Did you mean who"),
        ({"group": "who", "channels": ["az"]}, "Did you mean ax"),
        ({"group": "who", "channels": ["who"]}, "Expected numbers in column 'who' .* found string"),
    ):
        with pytest.raises(UsageError, match=message):
            reader.load(tmp_path / "a.csv", length=4, **options)


def test_arrays_of_each_subject(tmp_path):
    x, y = DRAW.normal(size=(12, 3)), np.arange(12) // 6
    for subject in ("1", "2"):
        (tmp_path / "npy").mkdir(exist_ok=True)
        (tmp_path / "npz").mkdir(exist_ok=True)
        np.save(tmp_path / "npy" / subject, np.column_stack([x, y]))
        np.savez(tmp_path / "npz" / subject, x=x, y=y)
    assert reader_of(tmp_path / "npy") is reader_of(tmp_path / "npz") is reader
    one, two = load(tmp_path / "npy", length=4), load(tmp_path / "npz", length=4)
    assert torch.equal(one.x, two.x)
    assert one.y.tolist() == two.y.tolist() == [0, 0, 1] * 2  # a tie goes to the first class
    assert one.group.tolist() == ["1"] * 3 + ["2"] * 3


def test_big_endian_and_integer_arrays_are_numbers_as_any(tmp_path):
    x, y = np.arange(24).reshape(12, 2), np.arange(12) % 2
    np.savez(tmp_path / "a", x=x.astype(">f8"), y=y.astype(">i4"))
    np.savez(tmp_path / "b", x=x.astype("i2"), y=y.astype("u1"))
    data = load(tmp_path, length=6)
    assert torch.equal(data.x[:2], data.x[2:])
    assert data.x[0, 0, 0].tolist() == [0, 2, 4, 6, 8, 10]
    assert data.y.tolist() == [0, 0, 0, 0]
    assert data.classes == 2


def test_windows_that_are_cut_already(tmp_path):
    x, y = DRAW.normal(size=(5, 2, 8)).astype("f4"), np.array([0, 1, 2, 1, 0])
    np.savez(tmp_path / "a", x=x, y=y)
    data = load(tmp_path)
    assert np.array_equal(data.x, x[:, :, None])
    assert data.y.tolist() == y.tolist()


def uci(folder, part, subjects, channels=("body_acc_x", "body_gyro_z"), seed=0):
    draw = np.random.default_rng(seed)
    inside = folder / part / "Inertial Signals"
    inside.mkdir(parents=True)
    x = {name: draw.normal(size=(len(subjects), 6)) for name in channels}
    for name, values in x.items():
        np.savetxt(inside / f"{name}_{part}.txt", values, fmt="%16.7e")
    np.savetxt(folder / part / f"subject_{part}.txt", subjects, fmt="%d")
    np.savetxt(folder / part / f"y_{part}.txt", np.arange(len(subjects)) % 3 + 1, fmt="%d")
    return np.stack([x[name] for name in channels], 1)


def test_uci_har(tmp_path):
    folder = tmp_path / "UCI HAR Dataset"
    train, test = uci(folder, "train", [3, 3, 1, 3]), uci(folder, "test", [2, 2], seed=1)
    (folder / "README.txt").write_text("Human activity\n")
    assert reader_of(folder).__name__.endswith("uci_har")
    data = load(folder)
    assert data.group.tolist() == ["1", "3", "3", "3", "2", "2"]
    assert np.allclose(data.x[:, :, 0], np.concatenate([train[[2, 0, 1, 3]], test]), atol=1e-6)
    assert data.y.tolist() == [2, 0, 1, 0, 0, 1]
    assert data.official_test.tolist() == [False] * 4 + [True] * 2
    assert data.name == "UCI HAR Dataset"
    seen = federate(data, "given", 2, 0, test_from="official").dataset
    assert torch.allclose(seen.x[:4].mean((0, 2, 3)), torch.zeros(2), atol=1e-6)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "y_train.txt").unlink(), r"Expected numbers in .*y_train\.txt"),
        (lambda f: (f / "y_train.txt").write_text("1\n2\n"), "a line for each window"),
        (lambda f: (f / "y_train.txt").write_text("1\n2\n3.5\n1\n"), "activities .* as whole numbers or words"),
        (lambda f: (f / "y_train.txt").write_text(""), "Expected numbers in"),
        (lambda f: (f / "y_train.txt").write_text("a\nb\nc\nd\n"), "Expected numbers in"),
        (lambda f: (f / "y_train.txt").write_bytes(b"\xff\xfe1\x00"), "Expected numbers in"),
        (lambda f: next((f / "Inertial Signals").iterdir()).write_text("1 2\n3\n"), "Expected numbers in"),
        (lambda f: next((f / "Inertial Signals").iterdir()).write_text("1 2\n3 4\n"), "a line for each window"),
        (lambda f: [file.unlink() for file in (f / "Inertial Signals").iterdir()], "found none; unpack"),
    ],
)
def test_uci_har_that_is_spoilt_is_refused(tmp_path, spoil, message):
    uci(tmp_path, "train", [1, 1, 2, 2])
    spoil(tmp_path / "train")
    with pytest.raises(UsageError, match=message):
        load(tmp_path)


def test_the_signals_of_train_and_test_must_agree(tmp_path):
    uci(tmp_path, "train", [1, 1])
    uci(tmp_path, "test", [2, 2], channels=("body_acc_y", "body_gyro_z"))
    with pytest.raises(UsageError, match="the same signals in train and test"):
        load(tmp_path)


def test_other_files_are_left_to_other_readers(tmp_path):
    table(tmp_path / "features.csv", [0, 1], ["a", "b"], time=False)  # a row a sample, as in UCI's 561 features
    assert reader_of(tmp_path / "features.csv") is not reader
    assert not reader.reads(tmp_path)
    np.save(tmp_path / "train.npy", np.zeros(3))
    assert not reader.reads(tmp_path / "train.npy")
    for name in ("a.npz", "train"):
        (tmp_path / "peer" / name).mkdir(parents=True)
    assert not reader.reads(tmp_path / "peer")


@pytest.mark.parametrize(("network", "length"), [("mlp", 16), ("harcnn", 32)])
def test_it_trains(tmp_path, network, length):
    for subject in range(3):
        activity = np.arange(640) // 32 % 2
        ax = 500 + 20 * activity + 10 * DRAW.normal(size=640)  # far from 0: it is learnt once it is standardised
        table(tmp_path / f"{subject}.csv", activity, ax=ax, ay=DRAW.normal(size=640))
    found = run(
        Run(
            method="fedper", data=str(tmp_path), data_options={"length": length}, split="given", clients=3, rounds=4,
            lr=0.1, backend="serial",
        )
    )  # fmt: skip
    assert found.run.dataset.network == network
    assert found.summary["accuracy"]["received"]["plain"]["best"] > 0.8


# what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expected a table"),
        (b"time,ax,activity\n", "found no rows"),
        (b"time,ax,activity\n1,2,0\n3\n", "Expected a table in .*Expected 3 columns, got 1"),
        (b"time,ax,ax,activity\n1,2,3,0\n", "found two columns 'ax'"),
        (b"time,ax,activity\n1,2,caf\xe9\n", "Expected text in UTF-8 in column 'activity'"),
        (b"time,ax,activity\n1,fast,0\n", "Expected numbers in column 'ax' .* found string"),
        (b"time,ax,activity\n" + b"1,2,0\n" * 5 + b"1,,0\n", r"NaN or inf at 1 times .* its row 5"),
        (b"time,ax,activity\n" + b"1,2,0\n" * 5 + b"1,inf,0\n", "NaN or inf"),
        (b"time,ax,activity\n" + b"1,2,0\n" * 5 + b"1,2,\n", "a value in every row of column 'activity'"),
        (b"time,ax,activity\n" + b"1,2,0.5\n" * 6, "whole numbers or words, found float64"),
        (b"time,activity\n" + b"1,0\n" * 6, "Expected columns of readings"),
        (
            b"time,ax,label,activity\n" + b"1,2,0,0\n" * 6,
            "one column called activity or label .* found label, activity",
        ),
        (b"time,ax,activity\n" + b"1,2,0\n" * 3, "at least 4 readings .* found 3 of 'a'"),
        ("time,ax,activity\n1,2,0\n".encode("utf-16"), "Expected "),
    ],
)
def test_tables_that_cannot_be_taken_are_refused(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        reader.load(tmp_path, length=4)


def test_a_mark_of_byte_order_is_passed_over_and_one_class_taken(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftime,ax,activity\n" + b"1,2,0\n" * 4)
    data = load(tmp_path, length=4)
    assert data.shape == (1, 1, 4)
    assert data.classes == 1


def written(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def bomb():
    """An archive with a pickle, which would write a file if anybody loaded it."""
    buffer = io.BytesIO()
    payload = np.lib.format.magic(1, 0) + (
        len(header := b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n").to_bytes(2, "little") + header
    )
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", payload + b"cos\nsystem\n(S'touch EXECUTED'\ntR.")
        archive.writestr("y.npy", payload)
    return buffer.getvalue()


WHOLE = written(x=np.zeros((8, 2)), y=np.zeros(8, int))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expected plain arrays"),
        (WHOLE[:-40], "Expected plain arrays"),
        (WHOLE.replace(b"'descr'", b"'decsr'"), "Expected plain arrays"),
        (bomb(), "Expected plain arrays"),
        (written(x=np.zeros((8, 2))), r"found x \[8, 2\] of float64"),
        (written(x=np.zeros((8, 2)), y=np.zeros(7, int)), r"y \[7\] of int64"),
        (written(x=np.zeros(8), y=np.zeros(8, int)), r"found x \[8\]"),
        (written(x=np.array([["a"] * 2] * 8), y=np.zeros(8, int)), "Expected numbers x"),
        (written(x=np.full((8, 2), 1e300), y=np.zeros(8, int)), "NaN or inf at 8 times"),
        (written(x=np.zeros((8, 2)), y=np.full(8, np.nan)), "whole numbers or words"),
        (written(x=np.zeros((0, 2)), y=np.zeros(0, int)), "found 0 of 'b'"),
        (written(x=np.zeros((8, 3)), y=np.zeros(8, int)), "the same channels of every subject"),
        (written(x=np.zeros((8, 2, 4)), y=np.zeros(8, int)), "the same channels of every subject"),
        (written(x=np.zeros((8, 2)), y=np.array(["sit"] * 8)), "all as words or all as numbers"),
    ],
)
def test_arrays_that_cannot_be_taken_are_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    np.savez(folder / "a", x=np.zeros((8, 2)), y=np.zeros(8, int))
    (folder / "b.npz").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load(folder, length=4)
    assert not (tmp_path / "EXECUTED").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("array", [np.zeros(5), np.zeros((5, 1)), np.zeros((5, 2, 2)), np.array([{}])])
def test_single_arrays_need_a_last_column(tmp_path, array):
    np.save(tmp_path / "a", array, allow_pickle=True)
    with pytest.raises(UsageError, match=r"Expected (an array \[time, channels \+ 1\]|plain arrays)"):
        load(tmp_path)


def test_options_out_of_range_are_refused(tmp_path):
    table(tmp_path / "a.csv", [0] * 8)
    for options in ({"length": 0}, {"stride": 0}, {"window_label": "first"}):
        with pytest.raises(UsageError, match="Expected"):
            load(tmp_path, **{"length": 4, **options})


def test_files_that_are_no_arrays_and_names_that_are_no_text_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x", b"text")
        archive.writestr("y", b"text")
    with pytest.raises(UsageError, match=r"Expected plain arrays in .*a\.npz"):
        load(tmp_path)
    (tmp_path / "a.csv").write_bytes(b"time,activity,subject,a\xffx\n1,2,3,4\n")
    with pytest.raises(UsageError, match=r"Expected a table in .*a\.csv"):
        load(tmp_path / "a.csv")
