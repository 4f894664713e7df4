"""`idiolect split`: what it shows and writes, that `run` and `compare` take it, and what it refuses."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import idiolect
from idiolect import dividing
from idiolect.cli import main
from idiolect.data import SplitFile, load

KINDS = {"skewed.parquet", "skewed.png", "skewed.svg", "skewed.json"}
SMALL = ["split", "small.npz", "--split", "dirichlet:0.3,minimum=3", "--clients", "4", "--seed", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    np.savez(tmp_path / "small.npz", x=x, y=np.arange(80) % 3)
    np.savez(tmp_path / "other.npz", x=x, y=np.arange(80)[::-1] % 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def say(*words):
    return CliRunner().invoke(main, list(words), prog_name="idiolect")


def good(*words):
    said = say(*words)
    assert (said.exit_code, said.stderr) == (0, ""), said.stderr
    return said.stdout


def refused(sentence, *words):
    said = say(*words)
    assert (said.exit_code, said.stdout) == (2, "")
    assert sentence in said.stderr
    assert said.stderr.count("\n") == 1


def names(path="."):
    return {p.name for p in Path(path).iterdir()} - {"small.npz", "other.npz"}


def test_without_out_it_shows_and_writes_nothing():
    shown = good(*SMALL)
    assert shown.startswith("small, dirichlet:0.3,minimum=3, 4 clients, seed 1, test 0.25 of each client's rows\n")
    assert sum(line.split()[:1] == [str(k)] for k, line in enumerate(shown.splitlines()[3:7])) == 4
    assert "label entropy" in shown
    assert names() == set()


def test_out_keeps_the_file_the_picture_and_the_measures():
    shown = good(*SMALL, "--test", "0.2", "--validation", "0.1", "--out", "deep/skewed.parquet")
    assert names("deep") == KINDS
    assert shown.endswith("\ndeep/skewed.parquet\ndeep/skewed.png\ndeep/skewed.svg\ndeep/skewed.json\n")
    facts = json.loads(Path("deep/skewed.json").read_text())
    found = SplitFile.named("deep/skewed.parquet").open(load("small.npz"))
    assert facts["split_hash"] == found.split_hash
    assert f"split hash {found.split_hash}\n" in shown
    assert facts["made_with"] == {
        "split": "dirichlet:0.3,minimum=3", "clients": 4, "seed": 1, "test": 0.2, "validation": 0.1, "test_from": "merged",
    }  # fmt: skip
    assert f"size Gini {facts['heterogeneity']['size_gini']:.3f}" in shown
    assert f"total variation {facts['heterogeneity']['total_variation']['mean']:.3f}" in shown


def test_a_file_that_is_there_is_shown_as_it_was_made():
    made = good(*SMALL, "--out", "skewed.parquet").partition("\n\nskewed.parquet")[0]
    assert good("split", "small.npz", "--split", "skewed.parquet").strip() == made


def test_run_and_compare_take_the_file_and_say_its_hash():
    good(*SMALL, "--out", "skewed.parquet")
    facts = json.loads(Path("skewed.json").read_text())
    quick = ["--data", "small.npz", "--split", "skewed.parquet", "--rounds", "1", "--backend", "serial"]
    shown = good("run", "fedavg", *quick, "--out", "one")
    assert f"split hash {facts['split_hash'][:12]}" in shown
    assert json.loads(Path("one/summary.json").read_text())["split_hash"] == facts["split_hash"]
    assert f'split = "skewed.parquet#{facts["split_hash"]}"\nclients = 4\n' in Path("one/run.toml").read_text()
    shown = good("compare", "--methods", "local,fedavg", "--seeds", "0,1", *quick, "--clients", "4", "--out", "two")
    assert f"hash {facts['split_hash'][:12]}." in shown
    assert set(json.loads(Path("two/comparison.json").read_text())["split_hash"].values()) == {facts["split_hash"]}
    good("run", "--config", "one/run.toml", "--out", "again")
    same = [Path(place, "clients.parquet").read_bytes() for place in ("one", "again")]
    assert same[0] == same[1]


def test_what_does_not_fit_the_file_is_refused():
    good(*SMALL, "--out", "skewed.parquet")
    quick = ["run", "fedavg", "--data", "small.npz", "--split", "skewed.parquet", "--out", "one"]
    refused("clients must be the 4 of 'skewed.parquet'; found 20. Leave clients out.", *quick, "--clients", "20")
    refused("test must be the 0.25 of 'skewed.parquet'; found 0.3. Leave test out.", *quick, "--test", "0.3")
    refused("give the data, and the data options, that it was made for", *quick, "--data", "other.npz")
    refused("Expected a split file at 'skewd.parquet', found nothing there", *quick, "--split", "skewd.parquet")
    Path("skewed.parquet").write_bytes(Path("skewed.parquet").read_bytes()[:-9])
    refused("'skewed.parquet' is damaged, or no split file", *quick)
    assert names() == KINDS


def test_a_run_again_refuses_a_file_that_changed():
    good(*SMALL, "--out", "skewed.parquet")
    good(
        "run",
        "fedavg",
        "--data",
        "small.npz",
        "--split",
        "skewed.parquet",
        "--rounds",
        "0",
        "--backend",
        "serial",
        "--out",
        "one",
    )
    for name in KINDS:
        Path(name).unlink()
    good(*SMALL, "--seed", "2", "--out", "skewed.parquet")
    refused("the file has changed", "run", "--config", "one/run.toml", "--out", "again")
    assert names() == KINDS | {"one"}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_nothing_is_overwritten(name):
    Path(name).write_text("mine")
    refused(f"'{name}' is there already and is never overwritten", *SMALL, "--out", "skewed.parquet")
    assert (names(), Path(name).read_text()) == ({name}, "mine")


def test_bad_input_is_one_sentence_and_nothing_is_written():
    refused("A split file's name ends in .parquet", *SMALL, "--out", "skewed.csv")
    refused("Unknown split 'dirichlett'", "split", "--split", "dirichlett", "--out", "skewed.parquet")
    refused(
        "found 80 rows for 81 clients", "split", "small.npz", "--split", "iid", "--clients", "81", "--out", "s.parquet"
    )
    refused("No such option '--rounds'", *SMALL, "--rounds", "3")
    refused("Unknown data set 'digitz'. Did you mean digits", "split", "digitz")
    assert names() == set()


def test_what_fails_on_the_way_leaves_nothing(monkeypatch):
    monkeypatch.setattr(
        dividing, "save", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left", "skewed.parquet"))
    )
    refused("No space left", *SMALL, "--out", "skewed.parquet")
    assert names() == set()


def test_help_teaches_with_examples():
    shown = good("split", "--help")
    assert "idiolect split digits --split dirichlet:0.1 --clients 20 --seed 1 --out skewed.parquet" in shown
    assert "idiolect split digits --split skewed.parquet " in shown
    assert "--test-from" in shown
    assert "--rounds" not in shown


def test_a_terminal_sees_what_takes_its_time():
    environment = {**os.environ, "PYTHONPATH": str(Path(idiolect.__file__).parents[1]), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "idiolect", *SMALL], stdout=subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # a terminal's end, on Linux
        pass
    out, _ = done.communicate(timeout=60)
    os.close(ours)
    assert done.returncode == 0
    assert b"dividing 80 rows over 4 clients" in shown
    assert b"split hash" in out
