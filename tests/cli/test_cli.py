"""The command line: what it prints and writes, what it refuses, and that an interruption costs nothing finished."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

import idiolect
from idiolect import catalogue
from idiolect.cli import main
from idiolect.errors import ClientError, UsageError

SMALL = ["--data", "small.npz", "--split", "iid", "--clients", "3", "--rounds", "2", "--lr", "0.1"]
SERIAL = [*SMALL, "--backend", "serial"]
COMMANDS = sorted(main.commands)
RUN_FILES = {"run.toml", "rounds.parquet", "clients.parquet", "summary.json", "models"}
SAVED = {"comparison.json", "comparison.md", "comparison.csv", "curves.png"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty directory but for some data, sound and unsound."""
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = np.tile([0, 1, 2], 20)
    x[np.arange(60), y] += 1.5
    holed = x.copy()
    holed[7, 2] = np.nan
    np.savez(tmp_path / "small.npz", x=x, y=y)
    np.savez(tmp_path / "holed.npz", x=holed, y=y)
    np.savez(tmp_path / "halves.npz", x=x, y=y + 0.5)
    np.savez(tmp_path / "words.npz", x=x, y=np.array(["a", "b", "c"])[y])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def say(*words):
    """The command in this process."""
    return CliRunner().invoke(main, list(words), prog_name="idiolect")


def good(*words):
    said = say(*words)
    assert (said.exit_code, said.stderr) == (0, ""), said.stderr
    return said.stdout


def command(*words):
    environment = {**os.environ, "PYTHONPATH": str(Path(idiolect.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-m", "idiolect", *words], "env": environment}


def process(*words):
    """The command in a process of its own."""
    return subprocess.run(**command(*words), capture_output=True, text=True, timeout=120)


def tree(path):
    """Every file and directory below: what it holds, and when it was last written."""
    return {p: (p.read_bytes() if p.is_file() else None, p.stat().st_mtime_ns) for p in Path(path).rglob("*")}


def summary(path):
    return json.loads(Path(path, "summary.json").read_text())


def refused(code, out, err, *sentences):
    """Exit code 2 and one line, which is a sentence."""
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for sentence in sentences:
        assert sentence in err


# what is refused

BAD = {  # words for `run`, words for `compare` (None: the same after --methods local,fedavg), the sentence
    "an unknown method": (["fedavgg"], ["--methods", "local,fedavgg"], "Unknown method 'fedavgg'. Did you mean fedavg"),
    "an unknown wrapper": (["fedrep+fedlagg"], ["--methods", "fedrep+fedlagg"], "Unknown method 'fedlagg'. Did you mean fedlag"),
    "no method": ([], ["--methods", ""], "method"),
    "an unknown field": (["fedprox", "--set", "muu=1"], ["--methods", "fedprox", "--set", "muu=1"], "Unknown hyper-parameter of fedprox 'muu'. Did you mean mu?"),
    "a field that no part has": (["fedrep", "--set", "zzz=1"], ["--methods", "fedrep", "--set", "zzz=1"], "Known: body_epochs, head_epochs."),
    "an unknown part": (["fedrep", "--set", "fedrap.head_epochs=1"], ["--methods", "fedrep", "--set", "fedrap.head_epochs=1"], "Unknown method in --set 'fedrap'. Did you mean fedrep?"),
    "a word for a number": (["fedprox", "--set", "mu=much"], ["--methods", "fedprox", "--set", "mu=much"], "fedprox.mu must be a number; found 'much'."),
    "a value out of range": (["fedprox", "--set", "mu=-1"], ["--methods", "fedprox", "--set", "mu=-1"], "FedProx.mu must be 0 or more; found -1"),
    "a setting without a value": (["fedprox", "--set", "mu"], ["--methods", "fedprox", "--set", "mu"], "--set takes NAME=VALUE; found 'mu'."),
    "a field that two parts have": (["fedexp+fedlag", "--set", "weights=uniform"], ["--methods", "fedexp+fedlag", "--set", "weights=uniform"], "'weights' is a field of fedexp and of fedlag; write fedexp.weights or fedlag.weights."),
    "what wraps nothing": (["fedrep+fedavg"], ["--methods", "fedrep+fedavg"], "'fedavg' wraps nothing and cannot follow a '+'; wrappers: fedlag, finetune."),
    "ratio 0": (["fedavg", "--ratio", "0"], None, "ratio must be a ratio in (0, 1] such as 0.1"),
    "more clients than samples": (["fedavg", "--clients", "61"], None, "found 60 rows for 61 clients; ask for 60 clients or fewer."),
    "a word for a whole number": (["fedavg", "--clients", "many"], None, "clients must be a whole number; found 'many'."),
    "a fraction for a whole number": (["fedavg", "--rounds", "1.5"], None, "rounds must be a whole number; found '1.5'."),
    "a NaN in the data": (["fedavg", "--data", "holed.npz"], None, "expected finite numbers in x, found NaN or inf in 1 rows, the first is row 7; drop or repair those rows."),
    "labels that are fractions": (["fedavg", "--data", "halves.npz"], None, "expected integer labels, found 0.5 among them; pass class numbers."),
    "labels that are words": (["fedavg", "--data", "words.npz"], None, "expected integer labels, found <U1; number the classes from 0"),
    "no such file": (["fedavg", "--data", "smal.npz"], None, "Expected a data set at 'smal.npz', found nothing there; did you mean 'small.npz'?"),
    "an unknown data set": (["fedavg", "--data", "digitz"], None, "Unknown data set 'digitz'. Did you mean digits?"),
    "an unknown split": (["fedavg", "--split", "dirichlett:0.1"], None, "Unknown split 'dirichlett'. Did you mean dirichlet?"),
    "an unknown network": (["fedavg", "--network", "mpl"], None, "Unknown network 'mpl'. Did you mean mlp"),
    "an unknown option of the network": (["fedavg", "--network-options", "hiden=[3]"], None, "mlp has no option 'hiden'. Did you mean hidden?"),
    "an unknown backend": (["fedavg", "--backend", "gpu"], None, "backend must be one of workers, serial, stacked; found 'gpu'."),
    "an unknown option": (["fedavg", "--round", "3"], None, "No such option '--round'. (Did you mean one of: '--drop', '--out', '--rounds'?)"),
    "a run file that is not there": (["fedavg", "--config", "no.toml"], None, "Cannot read the run file no.toml: No such file or directory."),
    "a run file that is none": (["fedavg", "--config", "small.npz"], None, "small.npz is not TOML: it is not even text."),
}  # fmt: skip


def bad(case, name):
    own, others, sentence = BAD[case]
    others = ["--methods", "local,fedavg", *own[1:]] if others is None else others
    return [name, *SERIAL, *(own if name == "run" else others), "--out", "deep/out"], sentence


@pytest.mark.parametrize("name", ["run", "compare"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2_and_nothing_is_written(case, name, here):
    words, sentence = bad(case, name)
    before = tree(here)
    said = say(*words)
    refused(said.exit_code, said.stdout, said.stderr, sentence)
    assert tree(here) == before


@pytest.mark.parametrize(("case", "name"), [("an unknown method", "run"), ("a NaN in the data", "compare")])
def test_so_it_is_in_a_process(case, name, here):
    words, sentence = bad(case, name)
    before = tree(here)
    found = process(*words)
    refused(found.returncode, found.stdout, found.stderr, sentence)
    assert tree(here) == before


def test_what_only_a_comparison_is_asked_is_refused_too(here):
    before = tree(here)
    for words, sentence in {
        ("--seeds", "0,x"): "--seeds takes whole numbers with commas, as in 0,1,2; found '0,x'.",
        ("--seeds", "0,0"): "seeds must be a list of different whole numbers, such as [0, 1, 2]; found [0, 0].",
        ("--seeds", "-1"): "seed must be a whole number >= 0; found -1.",
        ("--methods", "local,local"): "'local' is there twice",
        ("--seed", "3"): "'--seeds'",
        (
            "--methods",
            "ditto,fedamp",
            "--set",
            "lam=1",
        ): "'lam' is a field of ditto and of fedamp; write ditto.lam or fedamp.lam.",
    }.items():
        said = say("compare", *SERIAL, *words)
        refused(said.exit_code, said.stdout, said.stderr, sentence)
    assert tree(here) == before


def test_an_unknown_command_and_none_at_all():
    said = say("runn")
    refused(said.exit_code, said.stdout, said.stderr, "No such command 'runn'. Did you mean 'run'?")
    said = say()
    assert (said.exit_code, said.stdout) == (2, "")
    assert "idiolect compare" in said.stderr


def test_a_finished_run_stays_as_it_is_to_the_byte(here):
    good("run", "fedavg", *SERIAL, "--out", "one")
    before = tree(here)
    for words in (["run", "fedavg"], ["run", "local"], ["compare", "--methods", "local,fedavg"]):
        said = say(*words, *SERIAL, "--out", "one")
        refused(said.exit_code, said.stdout, said.stderr, "one holds ", "choose an")
        assert tree(here) == before
    found = process("run", "fedavg", *SERIAL, "--out", "one")
    refused(found.returncode, found.stdout, found.stderr, "one holds a finished run, which is never overwritten")
    assert tree(here) == before


def test_debug_shows_where(here):
    assert isinstance(say("--debug", "run", "fedavgg").exception, UsageError)
    found = process("--debug", "show", "fedavgg")
    assert found.returncode == 1
    assert "Traceback" in found.stderr
    assert "catalogue.py" in found.stderr


def test_what_fails_at_a_client_is_one_sentence_too(monkeypatch):
    def fail(*_, **__):
        raise ClientError("fedavg.local, client 3, round 7: no.\n--- in the worker ---\nTraceback ...")

    monkeypatch.setattr("idiolect.running.run", fail)
    said = say("run", "fedavg", *SERIAL)
    refused(said.exit_code, said.stdout, said.stderr, "client 3, round 7: no. ('idiolect --debug ...' shows where.)")


def test_replies_that_were_refused_are_told_in_the_end(here):
    said = say("run", "fedavg", *SERIAL, "--lr", "1e38", "--out", "one")
    assert said.exit_code == 0
    replies = json.loads((here / "one" / "summary.json").read_text())["replies"]
    sentence = (
        f"{replies['refused']} of {replies['participants']} replies had NaN or inf in them and were refused: client "
    )
    assert replies["refused"]
    assert said.stderr.startswith(sentence)
    assert said.stderr.endswith(".\n")
    assert "Traceback" not in said.stderr


# help


def test_help_teaches_and_it_and_the_list_import_no_torch():
    program = f"""if True:
        import sys
        from idiolect.cli import main
        for words in {[["methods"], ["--help"], *([c, "--help"] for c in COMMANDS)]}:
            try:
                main(words, prog_name="idiolect")
            except SystemExit as end:
                assert end.code == 0
        assert "idiolect.cli" in sys.modules
        print(sorted({{"torch", "numpy", "pyarrow", "matplotlib"}} & set(sys.modules)))"""
    found = subprocess.run(
        [*command()["args"][:1], "-c", program], env=command()["env"], capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.endswith("\n[]\n")
    for name in ("", *COMMANDS):
        assert f"Usage: idiolect {name}".rstrip() in found.stdout


@pytest.mark.parametrize(
    ("options", "begun"),
    [([], True), (["--backend", "workers"], True), (["--backend", "serial"], False), (["--config", "a.toml"], False)],
)
@pytest.mark.parametrize("which", ["run", "compare"])
def test_what_workers_are_forks_of_begins_before_torch_is_imported(which, options, begun):
    program = f"""if True:
        import sys
        from idiolect import cli
        from idiolect.engine import forking
        begin = forking.begin
        def watched():
            begin()
            print("begun", {{"torch", "numpy"}} & set(sys.modules), forking.forkserver._forkserver._forkserver_pid > 0)
        forking.begin = watched
        cli.main([{which!r}, *{options}, "--rounds", "x"])"""
    found = subprocess.run(
        [*command()["args"][:1], "-c", program], env=command()["env"], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert found.stdout == ("begun set() True\n" if begun else "")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_examples_in_help_are_commands(name):
    text = good(*name.split(), "--help")
    examples = [re.split(r"  +", line.strip())[0] for line in text.splitlines() if line.startswith("  idiolect ")]
    assert len(examples) >= 2
    for _, which, *words in map(shlex.split, examples):
        assert name in ("", which)
        given = main.commands[which].make_context(which, words).params
        names = [n for n in (given.get("method"), *given.get("methods", "").split(",")) if n]
        settings = dict(setting.split("=") for setting in given.get("settings", ()))
        for one, own in catalogue.share_out(names, settings).items():
            assert catalogue.build(one, own).name


def test_every_field_of_a_run_has_an_option():
    text = good("run", "--help")
    assert all(f"--{f.name.replace('_', '-')} " in text for f in dataclasses.fields(idiolect.Run) if f.name != "method")
    assert good("--version") == f"idiolect, version {idiolect.__version__}\n"


# methods and show


def test_the_methods_as_json():
    entries = json.loads(good("methods", "--json"))
    assert [e["name"] for e in entries] == catalogue.names()
    for entry in entries:
        assert {"name", "paper", "keeps", "sends", "needs"} <= set(entry)
        assert entry["paper"] is None or re.search(r"\b(19|20)\d\d\b|review", entry["paper"])
        assert set(entry["sends"]) == {"down", "up"}
        assert set(entry["sends"]["up"]) == {"mean", "sum", "rows"}
        assert all(isinstance(word, str) for word in entry["keeps"] + entry["sends"]["down"] + entry["needs"])
    known = {e["name"]: e for e in entries}
    assert known["local"]["sends"] == {"down": [], "up": {"mean": [], "sum": [], "rows": []}}
    assert (known["fedavg"]["keeps"], known["fedavg"]["sends"]["down"]) == ([], ["model"])
    assert "state kept by clients" in known["ditto"]["needs"]
    assert "momentum=0" in known["scaffold"]["needs"]
    assert known["fedrep"]["hyper_parameters"] == catalogue.build("fedrep").fields()


def test_the_methods_in_a_list():
    listed, _, wrappers = good("methods").partition("\nWrappers")
    for entry in json.loads(good("methods", "--json")):
        cited = f" [{entry['paper']}]" if entry["paper"] else ""
        line = rf"^{entry['name']} +{re.escape(entry['title'] + cited)}$"
        assert re.search(line, wrappers if catalogue.wraps(entry["name"]) else listed, re.MULTILINE)
    assert len((listed + wrappers).strip().splitlines()) == len(catalogue.names()) + 1


@pytest.mark.parametrize("name", ["fedrep", "fedlag", "fedrep+fedlag"])
def test_one_method_is_shown(name):
    text = good("show", name)
    assert text.startswith(catalogue.build(name).name + "\n")
    for part in catalogue.split(name):
        kind = catalogue.find(part)
        assert kind.__doc__.split("\n")[0] in text
        assert f"source: {kind.__module__.replace('.', '/')}.py\n" in text
    for field in catalogue.settings(catalogue.build(name)):
        assert f"--set {field} " in text
    for word in ("keeps", "receives", "sends", "needs"):
        assert re.search(rf"^  {word} +\S", text, re.MULTILINE)


def test_an_unknown_method_cannot_be_shown():
    said = say("show", "fedrap")
    refused(said.exit_code, said.stdout, said.stderr, "Unknown method 'fedrap'. Did you mean", "fedrep")


# run


def test_a_run_in_a_process_is_quiet_and_leaves_its_directory(here):
    found = process("run", "fedper", *SMALL, "--workers", "1")
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert lines[0].startswith("fedper: small, iid, 3 clients, seed 0")
    path = here / lines[-1]
    assert path.parent == here / "runs"
    assert {p.name for p in path.iterdir()} == RUN_FILES
    assert {p.name for p in path.glob("models/*")} >= {"index.json", "client-00000.safetensors"}
    last = summary(path)["accuracy"]["received"]["plain"]["last"]
    assert re.search(rf"^received, plain +{100 * last:.1f} ", found.stdout, re.MULTILINE)


def test_a_cache_that_cannot_be_written_is_one_sentence(here):
    picture = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(picture, "PNG")
    cells = pa.array([{"bytes": picture.getvalue()}] * 12, pa.struct([("bytes", pa.binary())]))
    Path("images").mkdir()
    pq.write_table(pa.table({"image": cells, "label": [0, 1] * 6}), "images/train-0.parquet")
    Path("cache").write_text("a file")
    words = ["run", "fedper", *SERIAL[2:], "--data", "images", "--data-options", "std=[1]"]
    asked = command(*words)
    found = subprocess.run(
        asked["args"], env=asked["env"] | {"IDIOLECT_CACHE": "cache"}, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr.count("\n")) == (0, 1), found.stderr
    assert found.stderr.startswith("Decoded images cannot be kept in 'cache'")
    assert good(*words, "--out", "again").splitlines()[-1] == "again"


def test_models_need_not_be_saved(here):
    path = good("run", "fedper", *SERIAL, "--no-models").splitlines()[-1]
    assert {p.name for p in Path(path).iterdir()} == RUN_FILES - {"models"}


def test_few_clients_can_be_scored_and_training_images_augmented(here):
    path = good("run", "fedper", *SERIAL, "--evaluate-clients", "2").splitlines()[-1]
    assert "2 of 3 clients, drawn once from the seed" in summary(path)["evaluation"]
    assert (summary(path)["clients"], Path(path, "run.toml").read_text().count("evaluate_clients = 2")) == (3, 1)
    said = say("run", "fedper", *SERIAL, "--augment", "flip")
    refused(said.exit_code, said.stdout, said.stderr, "augment changes images", "Use augment=none")


def test_directories_are_numbered(here):
    for n in (1, 2):
        assert good("run", "fedrep+fedlag", *SERIAL).splitlines()[-1] == f"runs/fedrep+fedlag-small.npz-{n}"
    assert good("compare", *SERIAL, "--methods", "local").splitlines()[-1] == "runs/compare-1/comparison.md"


def test_a_run_file_gives_the_same_run(here):
    words = ["--ratio", "0.5..1", "--momentum", "0.5", "--seed", "4", "--network-options", "hidden=[7]"]
    good("run", "fedrep+finetune", *SERIAL, *words, "--set", "head_epochs=2", "--out", "one")
    good("run", "--config", "one/run.toml", "--out", "two")
    for name in ("run.toml", "clients.parquet", "models/client-00001.safetensors"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()
    one, two = summary("one"), summary("two")
    for known in ("accuracy", "loss", "bytes", "split_hash", "method", "seed"):
        assert one[known] == two[known]


def test_options_win_over_the_file(here):
    good(
        "run",
        "fedrep",
        *SERIAL,
        "--set",
        "head_epochs=2",
        "--set",
        "body_epochs=3",
        "--nesterov",
        "--momentum",
        "0.5",
        "--out",
        "one",
    )
    good(
        "run",
        "--config",
        "one/run.toml",
        "--rounds",
        "1",
        "--seed",
        "5",
        "--no-nesterov",
        "--set",
        "head_epochs=4",
        "--out",
        "two",
    )
    one, two = (tomllib.loads(Path(name, "run.toml").read_text()) for name in ("one", "two"))
    assert one["nesterov"] is True
    del one["nesterov"]
    assert two == {
        **one,
        "rounds": 1,
        "seed": 5,
        "method": {"name": "fedrep", "fedrep": {"head_epochs": 4, "body_epochs": 3}},
    }
    assert (summary("two")["rounds"], summary("two")["seed"]) == (1, 5)


def test_a_method_on_the_command_line_takes_the_file_s_place(here):
    good("run", "fedrep", *SERIAL, "--set", "head_epochs=2", "--out", "one")
    good("run", "fedper", "--config", "one/run.toml", "--out", "two")
    assert tomllib.loads(Path("two/run.toml").read_text())["method"] == {"name": "fedper"}
    good("compare", "--methods", "local,fedrep", "--config", "one/run.toml", "--out", "three")
    text = Path("three/fedrep/seed-0/run.toml").read_text()
    assert tomllib.loads(text)["method"]["fedrep"]["head_epochs"] == catalogue.build("fedrep").head_epochs
    assert tomllib.loads(text)["data"] == "small.npz"


def settings_of(path):
    return tomllib.loads(Path(path, "run.toml").read_text())["method"]


def test_hyper_parameters_are_set_by_full_and_by_plain_names(here):
    good(
        "run",
        "fedrep+fedlag",
        *SERIAL,
        "--set",
        "fedlag.top_k=3",
        "--set",
        "head_epochs=2",
        "--set",
        "warmup=1",
        "--out",
        "one",
    )
    found = settings_of("one")
    assert found["name"] == "fedrep+fedlag"
    assert (found["fedlag"]["top_k"], found["fedlag"]["warmup"], found["fedrep"]["head_epochs"]) == (3, 1, 2)
    good("run", "fedlag", *SERIAL, "--set", "top_k=2", "--out", "two")
    assert settings_of("two")["name"] == "fedavg+fedlag"
    assert settings_of("two")["fedlag"]["top_k"] == 2


# compare


def test_a_comparison_leaves_a_table_and_a_figure(here):
    printed = good(
        "compare",
        *SERIAL,
        "--methods",
        "fedavg,local,fedrep+finetune",
        "--seeds",
        "0,1",
        "--set",
        "head_epochs=2",
        "--out",
        "all",
    )
    assert {p.name for p in Path("all").iterdir()} == {*SAVED, "fedavg", "local", "fedrep+finetune"}
    for label in ("fedavg", "local", "fedrep+finetune"):
        for seed in (0, 1):
            assert {p.name for p in Path("all", label, f"seed-{seed}").iterdir()} == RUN_FILES - {"models"}
    assert settings_of("all/fedrep+finetune/seed-1")["fedrep"]["head_epochs"] == 2
    found = json.loads(Path("all/comparison.json").read_text())
    accuracies = {e["label"]: e["received"]["plain"]["last"] for e in found["methods"]}
    assert list(accuracies.values()) == sorted(accuracies.values(), key=lambda a: -a["mean"])
    for label, accuracy in accuracies.items():
        runs = [summary(f"all/{label}/seed-{seed}")["accuracy"]["received"]["plain"]["last"] for seed in (0, 1)]
        assert accuracy["values"] == runs
        assert accuracy["mean"] == pytest.approx(sum(runs) / 2)
        assert f"| {label} " in printed
        assert f" {100 * accuracy['mean']:.1f} ± {100 * accuracy['std']:.1f} |" in printed
    text = Path("all/comparison.md").read_text()
    assert text.startswith(printed.removesuffix("all/comparison.md\n").rstrip())
    assert "![Accuracy over the rounds](curves.png)" in text
    with Path("all/comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == list(accuracies)
    assert [float(row["received.plain.last.mean"]) for row in rows] == [a["mean"] for a in accuracies.values()]
    assert Path("all/curves.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_what_was_killed_runs_again_and_what_is_finished_does_not(here):
    words = ["compare", *SERIAL, "--methods", "local,fedavg", "--out", "all"]
    good(*words)
    known = json.loads(Path("all/comparison.json").read_text())
    kept = tree("all/local")
    cut = Path("all/fedavg/seed-0")
    (cut / "summary.json").rename(cut / "summary.json.part")
    for name in SAVED:
        Path("all", name).unlink()
    good(*words)
    assert tree("all/local") == kept
    assert {p.name for p in cut.iterdir()} == RUN_FILES - {"models"}
    again = json.loads(Path("all/comparison.json").read_text())
    for one, two in zip(known["methods"], again["methods"], strict=True):
        assert one | {"seconds": 0} == two | {"seconds": 0}


def test_a_comparison_is_not_mixed_with_other_things(here):
    words = ["compare", *SERIAL, "--methods", "local,fedavg", "--out", "all"]
    good(*words)
    for other, sentence in {
        (
            "--lr",
            "0.2",
        ): "all holds a finished comparison with other settings, which is never overwritten; choose another directory.",
        ("--seeds", "0,1"): "all holds a finished comparison with other settings",
        ("--methods", "local"): "all holds a finished comparison with other settings",
    }.items():
        before = tree(here)
        said = say(*words, *other)
        refused(said.exit_code, said.stdout, said.stderr, sentence)
        assert tree(here) == before
    for name in SAVED:
        Path("all", name).unlink()
    before = tree(here)
    said = say(*words, "--lr", "0.2")
    refused(said.exit_code, said.stdout, said.stderr, "all/local/seed-0 holds a finished run with other settings")
    said = say(*words, "--methods", "local")
    refused(
        said.exit_code, said.stdout, said.stderr, "all holds other things (fedavg); choose an empty or new directory."
    )
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    said = say(*words[:-1], "mine")
    refused(
        said.exit_code,
        said.stdout,
        said.stderr,
        "mine holds other things (notes.txt); choose an empty or new directory.",
    )
    said = say(*words[:-1], "mine/notes.txt")
    refused(said.exit_code, said.stdout, said.stderr, "mine/notes.txt is a file; choose a directory.")
    assert {p: v for p, v in tree(here).items() if not p.is_relative_to(here / "mine")} == before
    assert Path("mine/notes.txt").read_text() == "mine"


STOPPING = "Stopping after this round, with a checkpoint; once more to stop at once.\n"


def interrupted(words):
    """What the command printed that was interrupted once one of its runs was finished."""
    going = subprocess.Popen(
        **command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: finished(), going)
    os.killpg(going.pid, signal.SIGINT)
    out, err = going.communicate(timeout=60)
    return going.returncode, out, err


def test_a_comparison_that_is_interrupted_goes_on(here):
    """Ctrl-C reaches all the processes of a terminal: the command, its workers and what started them."""
    words = [
        "compare",
        *SMALL,
        "--workers",
        "1",
        "--methods",
        "local,fedavg,fedper",
        "--seeds",
        "0,1,2",
        "--out",
        "all",
    ]
    for _ in range(5):
        said = interrupted(words)
        if said[0] != 0:
            break
        shutil.rmtree("all")  # over before it was heard, on a busy machine: once more, but not for ever
    assert said[:2] == (130, "")
    told = "What is finished is kept; 'idiolect compare --resume all' goes on.\n\nInterrupted.\n"
    assert said[2] in (f"{STOPPING}{told}", told)  # between two runs nothing has to be stopped
    kept = {path: tree(path) for path in finished()}
    assert 0 < len(kept) < 9
    assert not Path("all/comparison.json").exists()
    cut_off = {str(p.parent) for p in Path("all").rglob("run.toml")} - kept.keys()
    assert all(list(Path(place, "checkpoint").glob("*.json")) for place in cut_off)  # and one at most:
    assert len(cut_off) <= 1
    found = process("compare", "--resume", "all")
    assert (found.returncode, found.stderr) == (0, "")
    assert not list(Path("all").rglob("checkpoint"))
    assert {path: tree(path) for path in kept} == kept
    assert len(finished()) == 9
    assert {p.name for p in Path("all").iterdir()} == {*SAVED, "local", "fedavg", "fedper"}


def finished():
    return sorted(str(p.parent) for p in Path("all").rglob("summary.json"))


def wait_for(condition, going):
    for _ in range(6000):
        if condition():
            return
        assert going.poll() is None, going.communicate()
        time.sleep(0.01)
    raise AssertionError("It took more than a minute.")


def children(pid):
    """The living processes that this one started, and theirs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            found.append((int(fields[1]), int(stat.parent.name)))
    own = [child for parent, child in found if parent == pid]
    return own + [grandchild for child in own for grandchild in children(child)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("waits", [1, 7, 12])
def test_a_run_killed_with_its_workers_at_work_goes_on_with_the_same_bits(here, waits):
    """SIGKILL once a checkpoint after so many rounds is there; workers notice and leave, and nothing stays in memory."""
    words = [*SMALL, "--workers", "2", "--rounds", "25", "--checkpoint-every", "1"]
    good("run", "fedrep", *words, "--out", "whole")
    going = subprocess.Popen(**command("run", "fedrep", *words, "--out", "one"), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(int(p.stem) >= waits for p in Path("one/checkpoint").glob("[0-9]*.json")), going)
    started = children(going.pid)
    going.kill()
    going.communicate(timeout=60)
    assert len(started) >= 2
    for _ in range(1000):
        if not any(Path(f"/proc/{pid}").exists() for pid in started):
            break
        time.sleep(0.01)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not Path("one/summary.json").exists()
    good("run", "--resume", "one", "--workers", "1")
    assert summary("one")["accuracy"] == summary("whole")["accuracy"]
    assert {p.name: p.read_bytes() for p in Path("one/models").iterdir()} == {
        p.name: p.read_bytes() for p in Path("whole/models").iterdir()
    }
    assert {p.name for p in Path("one").iterdir()} == RUN_FILES
    for table in ("rounds", "clients"):
        one, whole = (pq.read_table(f"{at}/{table}.parquet") for at in ("one", "whole"))
        same = [name for name in whole.column_names if "seconds" not in name]
        assert one.select(same).equals(whole.select(same))


def test_an_interrupted_run_says_how_it_goes_on(here):
    words = ["run", "fedavg", *SMALL, "--workers", "1", "--rounds", "500", "--checkpoint-every", "500", "--out", "one"]
    going = subprocess.Popen(**command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: Path("one/run.toml").exists() and children(going.pid), going)
    going.send_signal(signal.SIGTERM)
    out, err = going.communicate(timeout=60)
    assert (going.returncode, out) == (130, "")
    assert err == f"{STOPPING}What is finished is kept; 'idiolect run --resume one' goes on.\n\nInterrupted.\n"
    assert good("run", "--resume", "one").endswith("one\n")
    assert summary("one")["rounds"] == 500


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "fedavg", "--resume", "one"], "leave out METHOD."),
        (["run", "--resume", "one", "--lr", "0.2", "--set", "mu=1"], "leave out --set, --lr."),
        (["run", "--resume", "nowhere"], "Cannot read the run file nowhere/run.toml"),
        (["compare", "--resume", "nowhere"], "Expected a comparison in nowhere, found no plan.json there"),
        (["compare", "--resume", "all", "--methods", "local"], "leave out --methods."),
    ],
)
def test_what_goes_on_takes_nothing_else(here, words, sentence):
    said = say(*words)
    refused(said.exit_code, said.stdout, said.stderr, sentence)


def test_a_finished_comparison_has_nothing_to_go_on_with(here):
    good("compare", *SERIAL, "--methods", "local", "--out", "all")
    said = say("compare", "--resume", "all")
    refused(
        said.exit_code, said.stdout, said.stderr, "all holds a finished comparison; there is nothing to go on with."
    )


def test_an_interrupted_run_leaves_nothing(here, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("idiolect.running.loop", interrupt)
    before = tree(here)
    said = say("run", "fedavg", *SERIAL)
    assert (said.exit_code, said.stdout, said.stderr.strip()) == (130, "", "Interrupted.")
    assert tree(here) == before


# on a terminal


def test_a_terminal_is_shown_rounds_clients_and_the_time_left(here):
    ours, theirs = pty.openpty()
    asked = command("compare", *SERIAL, "--methods", "local,fedavg", "--out", "all")
    asked["env"] |= {"COLUMNS": "160", "TERM": "xterm"}
    going = subprocess.Popen(**asked, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while more := os.read(ours, 1 << 16):
            seen += more
    except OSError:  # how Linux says that nobody writes there any more
        pass
    os.close(ours)
    assert going.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"fedavg, seed 0 .* 4/4 rounds, 3 clients, accuracy \d+\.\d % \d:\d\d:\d\d left", text)
    table = text[text.index("lowest tenth") :]
    for label in ("local", "fedavg"):
        assert re.search(rf"│ {label} +│", table)
    assert "plain mean over clients" in table
    assert text.rstrip().endswith("all/comparison.md")
