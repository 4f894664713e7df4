"""All readers of local files: who reads what, what is refused, and every form from the command line."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forms import FORMS, OTHERS, WHO, X, Y, csv_file, idx_bytes, images_by_class, lines, npz, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from idiolect import Run, run
from idiolect.cli import main
from idiolect.data import Dataset, from_arrays, load, options_of, readers
from idiolect.errors import UsageError

READER = {
    "csv": "csv", "parquet": "parquet", "images": "folders", "idx": "idx", "cifar10": "cifar", "cifar100": "cifar",
    "npz": "npz", "safetensors": "safetensors",
}  # fmt: skip


@pytest.fixture(params=FORMS, scope="module")
def made(request, tmp_path_factory):
    """Form, path and options; to be read only."""
    return request.param, *FORMS[request.param](tmp_path_factory.mktemp("form"))


def test_each_form_has_its_reader_and_loads_whole(made):
    form, path, options = made
    assert readers.reader_of(path).__name__.endswith(f".{READER[form.partition('_')[0]]}")
    data = load(path, **options)
    assert len(data) == (18 if form == "idx_file" else 24)
    assert (data.class_names or ("0", "1"))[-1] in ("dog", "1", "19")
    assert sorted(data.y.bincount().tolist())[-2:] == [len(data) // 2] * 2
    has_test = form in {
        "csv_train_test",
        "parquet_folder",
        "images_train_test",
        "idx_folder",
        "cifar10",
        "cifar100",
        "npz_parts",
    }
    assert (data.official_test is not None) == has_test
    has_group = form in {
        "csv_file",
        "csv_zipped",
        "csv_by_client",
        "csv_train_test",
        "parquet_file",
        "images_by_client",
        "npz",
    }
    assert (data.group is not None) == has_group
    if has_group:
        assert sorted(data.group.tolist()) == WHO.tolist()
    again = load(path, **options)
    assert again.digest == data.digest


def test_each_form_runs_from_the_command_line(made, tmp_path, monkeypatch):
    _, path, options = made
    monkeypatch.chdir(tmp_path)
    given = [word for name, value in options.items() for word in ("--data-options", f"{name}={value}")]
    data = load(path, **options)
    split = ["--split", "given" if data.group is not None else "iid"]
    words = ["run", "fedavg", "--data", str(path), "--rounds", "1", "--clients", "3", "--backend", "serial"]
    said = CliRunner().invoke(main, [*words, "--network", "mlp", *split, *given], prog_name="idiolect")
    assert (said.exit_code, said.stderr) == (0, ""), said.stderr
    assert said.stdout.startswith(f"fedavg: {data.name}, {split[1]}, 3 clients")


def test_nothing_is_written_beside_the_data(made, tmp_path):
    _, path, options = made
    folder = path if path.is_dir() else path.parent
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    load(path, **options)
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


READER_OF_OTHERS = {
    "images_as_on_the_hub": "hub", "texts_with_labels": "texts", "texts_by_client": "text_files",
    "signals_table": "signals", "signals_arrays": "signals", "signals_windows": "signals", "npy_folder": "npy",
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_each_other_form_has_its_reader_and_loads(form, tmp_path):
    path, options = OTHERS[form](tmp_path)
    assert readers.reader_of(path).__name__.endswith(f".{READER_OF_OTHERS.get(form, form)}")
    assert load(path, **options).digest == load(path, **options).digest


def test_every_reader_has_a_form_that_is_broken_below():
    tried = {*READER.values(), *(READER_OF_OTHERS.get(form, form) for form in OTHERS)}
    assert tried == set(readers.readers())


# broken bytes


def files(path):
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("form", [*FORMS, *OTHERS])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_broken_files_are_refused_or_read_and_nothing_else(form, data, tmp_path):
    """Cut off, overwritten in places, or made of anything: a sentence, never another error."""
    home = tmp_path / form
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    path, options = (FORMS | OTHERS)[form](home)
    file = data.draw(st.sampled_from(files(path)), "file")
    file.write_bytes(broken(data, file.read_bytes()))
    assert_read_or_refused(path, options)


def assert_read_or_refused(path, options):
    said = ""
    try:
        assert isinstance(load(path, **options), Dataset)
    except UsageError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    assert len(said) < 1500


def broken(data, whole):
    kind = data.draw(st.sampled_from(["cut", "overwritten", "anything", "empty", "longer"]), "kind")
    if kind == "cut":
        return whole[: data.draw(st.integers(0, len(whole) - 1), "length")]
    if kind == "overwritten":
        at = data.draw(st.integers(0, len(whole) - 1), "place")
        new = data.draw(st.binary(min_size=1, max_size=8), "bytes")
        return whole[:at] + new + whole[at + len(new) :]
    return {"anything": data.draw(st.binary(max_size=300), "bytes"), "empty": b"", "longer": whole + b"\0\xff"}[kind]


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv.gz", "a.parquet", "a.npz", "a.safetensors", "a-images-idx3-ubyte", "plain"]
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from([b"", b"PK\x03\x04", b"\x93NUMPY\x01\0", b"\x1f\x8b\x08\0", b"PAR1", b"\0\0\x08\x03"]),
    held=st.binary(max_size=200),
)
def test_any_bytes_under_any_name(name, start, held, tmp_path):
    put(tmp_path / name, start + held)
    assert_read_or_refused(tmp_path / name, {})


# who reads what


def test_what_nobody_reads_is_told_with_what_is_read(tmp_path):
    put(tmp_path / "notes" / "a.doc", "hello")
    with pytest.raises(
        UsageError, match=r"Nobody reads .*, a folder with 1 \.doc files\. What can be read: .*\.csv.*\.npz"
    ):
        load(tmp_path / "notes")
    with pytest.raises(UsageError, match=r"a \.doc file\. What"):
        load(tmp_path / "notes" / "a.doc")
    with pytest.raises(UsageError, match=r"Unknown form of data 'cvs'\. Did you mean csv"):
        load(tmp_path / "notes", form="cvs")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("m.pt", "save the tensors x and y as .safetensors"), ("m.pkl", "a pickle can run any program"), ("m.zip", "unpack it"), ("m.tar.gz", "unpack it"), ("m.xlsx", "as .csv"), ("m.H5", "as .npz")],
)  # fmt: skip
def test_known_forms_that_are_not_read_come_with_what_to_do(tmp_path, name, hint):
    with pytest.raises(UsageError, match=hint):
        load(put(tmp_path / name, b"\x80\x04whatever"))


def test_a_path_that_is_not_there_comes_with_the_nearest(tmp_path):
    put(tmp_path / "patients.csv", "")
    with pytest.raises(UsageError, match=r"found nothing there; did you mean .*patients\.csv"):
        load(tmp_path / "patient.csv")
    with pytest.raises(UsageError, match="found nothing there; check the path"):
        load(tmp_path / "elsewhere" / "x.npz", form="npz")


def test_of_two_readers_the_user_chooses(tmp_path):
    path, options = csv_file(tmp_path)
    npz(tmp_path)
    put(tmp_path / "train-images-idx3-ubyte", idx_bytes(np.zeros((2, 8, 8), np.uint8)))
    with pytest.raises(
        UsageError, match=r"can be read as a \.csv.* or as IDX files.*form=, one of csv, idx.*--data-options form=csv"
    ):
        load(tmp_path)
    path.rename(tmp_path / "one.csv")
    assert len(load(tmp_path, form="csv", features=["u", "v", "w"], **options)) == 24


def test_images_go_before_the_list_beside_them(tmp_path):
    folder, _ = images_by_class(tmp_path)
    put(folder / "labels.csv", lines(range(24)))
    assert load(folder).x.shape == (24, 1, 8, 8)


def test_every_reader_says_what_it_reads_and_goes_before_readers_that_are_there():
    known = readers.readers()
    for name, reader in known.items():
        assert callable(reader.reads), name
        assert callable(reader.load), name
        assert set(getattr(reader, "BEFORE", ())) <= set(known) - {name}
    assert all(len(readers.form_of(known[name])) > len(name) + 5 for name in known)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "who"}, "Unknown option of data set .* 'labels'. Did you mean label"),
        ({"label": 1.5}, "expected label as a word or a whole number, found 1.5"),
        ({"features": "u"}, r"expected features as a list, as \[1, 2\], found 'u'"),
        ({"features": [1.5]}, "expected features as a list"),
        ({"standardise": "yes"}, "expected standardise as true or false, found 'yes'"),
        ({"classes": True}, "expected classes as a whole number"),
        ({"mean": 0.5}, "expected mean as a list"),
    ],
)
def test_options_of_another_kind_are_refused(tmp_path, options, message):
    path, _ = csv_file(tmp_path)
    with pytest.raises(UsageError, match=message):
        load(path, **options)


# data in memory


def test_a_run_takes_arrays_tensors_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"clients": 2, "rounds": 1, "split": "iid", "backend": "serial"}
    found = [
        run(Run(method="fedavg", data=data, **small))
        for data in (
            (X, Y),
            (torch.tensor(X), torch.tensor(Y)),
            (X.tolist(), Y.tolist()),
            from_arrays(X, Y),
            npz(tmp_path)[0],
        )
    ]
    assert len({result.summary["accuracy"]["received"]["plain"]["last"] for result in found}) == 1
    assert len({one.run.dataset.digest for one in found}) == 1
    text = Run(method="fedavg", data=(X, Y), **small).to_toml()
    assert "<given: arrays, " in text
    with pytest.raises(UsageError, match="hand it over as data="):
        Run.from_toml(text)


def test_a_path_as_an_object_is_never_a_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Run(method="fedavg", data=Path("digits")).data == os.path.join(".", "digits")
    path = npz(tmp_path)[0].relative_to(tmp_path)
    data = Run(method="fedavg", data=path, clients=2)
    assert Run.from_toml(data.to_toml()) == data


def test_tuples_that_are_not_x_and_y_are_refused():
    with pytest.raises(UsageError, match=r"expected two arrays, \(x, y\), found 3"):
        Run(method="fedavg", data=(X, Y, WHO))
    with pytest.raises(UsageError, match="one y per row"):
        Run(method="fedavg", data=(X, Y[:5]), clients=2)
    with pytest.raises(UsageError, match=r"its path or arrays \(x, y\); found 3"):
        Run(method="fedavg", data=3)


LINES = {  # of docs/data/README.md
    "table": "csv", "images": "folders", "IDX": "idx", "CIFAR": "cifar", "arrays": "npz", "large arrays": "npy",
    "as on the Hub": "hub", "LEAF": "leaf", "signals": "signals", "texts": "texts", "text by client": "text_files",
    "UCI HAR": "uci_har", "PFLlib": "pfllib",
}  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "data" / "README.md"


def test_every_reader_is_in_the_list_that_an_error_gives_and_says_its_form():
    assert [name for name, reader in readers.readers().items() if not hasattr(reader, "FORM")] == []


@pytest.mark.parametrize("form", LINES)
def test_the_page_has_the_options_of_each_form_and_no_others(form):
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {form} |")]
    named = set(re.findall(r"`(\w+)`", line.rpartition(" | ")[2]))
    assert named == set(options_of.kinds(readers.readers()[LINES[form]].load, positional=1)) - {"network"}


def test_the_page_has_every_reader():
    assert set(readers.readers()) - set(LINES.values()) == {"parquet", "safetensors"}  # which share a line with another
