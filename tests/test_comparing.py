"""`compare`: its numbers by hand, what it takes over, what it refuses, and that its files say what it says."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest

from harness import experiment, federation
from idiolect import Run, compare, run
from idiolect.comparing import Found, last, measure, over_seeds
from idiolect.errors import UsageError
from idiolect.report import figures

FIELDS = ("data", "split", "clients", "network", "network_options", "batch_size", "dtype", "backend", "lr")


def fields(**given: Any) -> dict[str, Any]:
    made = experiment("local", rounds=2)
    return {name: getattr(made, name) for name in FIELDS} | {"rounds": 2} | given


def found(accuracies: dict[int, float], rounds: int = 2, moment: str = "received", loss: float = 1.0) -> Found:
    """A run of which only the last round's accuracies matter, out of 100 test rows a client."""
    clients = [
        {"round": r, "client": i, "moment": moment, "split": "test", "correct": round(100 * a) if r == rounds else 0,
         "total": 100, "loss": 0.0}
        for r in range(rounds + 1)
        for i, a in accuracies.items()
    ]  # fmt: skip
    kept = {k: {"last": None, "best": None, "last10": None} for k in ("plain", "weighted")}
    summary = {
        "accuracy": {"received": kept, "trained": kept},
        "bytes": {"down": 600, "up": 300},
        "replies": {"refused": 0, "failed": 0},
        "gradient_passes": 2.5,
        "seconds": {"total": 9.0, "train": 4.0, "evaluate": 3.0},
    }
    taking_part: list[list[int]] = [[], [0, 1], [2]]
    rounds = [{"round": r, "participants": ids, "received_loss": loss} for r, ids in enumerate(taking_part)]
    return Found(summary, rounds, clients)


def test_what_each_client_gains_over_training_alone():
    alone = found({0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8})
    numbers = measure(found({0: 0.9, 1: 0.6, 2: 0.6, 3: 0.9}), alone)["received"]
    assert numbers["gain_over_local"] == pytest.approx((0.4 + 0.0 - 0.1 + 0.1) / 4)
    assert numbers["worse_than_local"] == 0.25  # a tie is not worse
    assert "gain_over_local" not in measure(alone, None)["received"]


def test_how_clients_differ():
    numbers = measure(found({i: i / 100 for i in range(20)}), None)["received"]
    assert numbers["worst_decile"] == pytest.approx(0.005)  # of 20 clients, the lowest two
    assert numbers["std_over_clients"] == pytest.approx((sum((i - 9.5) ** 2 for i in range(20)) / 19) ** 0.5 / 100)
    one = measure(found({0: 0.3}), None)["received"]
    assert one["std_over_clients"] is None
    assert one["worst_decile"] == 0.3


def test_bytes_are_of_a_participant_and_seconds_of_a_round():
    numbers = measure(found({0: 0.5}), None)
    assert numbers["bytes_per_participant"] == {"down": 200, "up": 100}  # three replies in two rounds
    assert numbers["seconds"]["round"] == 2.0
    assert numbers["seconds"]["total"] == 9.0


def test_a_loss_that_is_no_number_is_told():
    assert measure(found({0: 0.5}), None)["diverged"] is False
    assert measure(found({0: 0.5}, loss=float("nan")), None)["diverged"] is True
    assert measure(found({0: 0.5}, loss=float("inf")), None)["diverged"] is True


def test_a_run_that_diverges_is_marked_in_the_table_and_its_files_stay_json(tmp_path):
    comparison = compare(["local", "fedavg"], out=tmp_path / "far", **fields(lr=1e200))
    assert comparison.methods["fedavg"]["diverged"]["mean"] == 1.0
    assert "| fedavg (diverged) |" in str(comparison)
    for path in (tmp_path / "far").rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


def test_the_last_round_in_which_a_moment_was_evaluated_counts():
    one = found({0: 0.5, 1: 0.25})
    assert last(one, "received") == {0: 0.5, 1: 0.25}
    assert last(one, "trained") == {}


def test_over_seeds():
    assert over_seeds([{"a": 1.0}, {"a": 3.0}]) == {"a": {"mean": 2.0, "std": 2**0.5, "values": [1.0, 3.0]}}
    assert over_seeds([None, 3.0]) == {"mean": 3.0, "std": None, "values": [None, 3.0]}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "here"
    return out, compare(["local", "fedavg", ("near", "fedprox")], seeds=[0, 1], out=out, **fields())


def test_its_numbers_are_those_of_the_runs(compared):
    _, comparison = compared
    for label, method in {"local": "local", "fedavg": "fedavg", "near": "fedprox"}.items():
        alone = [run(Run(method=method, **fields(seed=seed))).summary for seed in (0, 1)]
        expected = [s["accuracy"]["received"]["plain"]["last"] for s in alone]
        assert comparison.methods[label]["received"]["plain"]["last"]["values"] == expected
        assert comparison.methods[label]["method"] == method


def test_the_best_comes_first(compared):
    means = [entry["received"]["plain"]["last"]["mean"] for entry in compared[1].summary["methods"]]
    assert means == sorted(means, reverse=True)


def test_its_files_agree(compared):
    out, comparison = compared
    assert sorted(p.name for p in out.iterdir() if p.is_file()) == [
        "comparison.csv", "comparison.json", "comparison.md", "curves.png",
    ]  # fmt: skip
    assert json.loads((out / "comparison.json").read_text())["methods"] == list(comparison.methods.values())
    assert (out / "comparison.md").read_text().startswith(str(comparison))
    with (out / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == list(comparison.methods)
    for row in rows:
        assert (
            float(row["received.plain.last.mean"])
            == comparison.methods[row["label"]]["received"]["plain"]["last"]["mean"]
        )
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_a_row_for_each_method_and_says_what_was_evaluated(compared):
    text = str(compared[1])
    assert "as received (after download, before local training): all 8 clients, plain mean over clients" in text
    lines = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert lines[2:] == list(compared[1].methods)


def test_finished_runs_are_taken_over(compared):
    out, comparison = compared
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/seed-*/*")}
    heard = []
    again = compare(
        ["local", "fedavg", ("near", "fedprox")], seeds=[0, 1], out=out,
        watch=lambda label, seed, report: heard.append(report), **fields(),
    )  # fmt: skip
    assert heard == [None] * 6
    assert {p: p.stat().st_mtime_ns for p in out.glob("*/seed-*/*")} == before
    assert again.summary["methods"] == comparison.summary["methods"]


def test_what_was_cut_off_runs_again(compared, tmp_path):
    _, comparison = compared
    place = tmp_path / "cut"
    first = compare(["local"], seeds=[0], out=place, **fields())
    assert first.methods["local"]
    (place / "comparison.json").unlink()
    (place / "local" / "seed-0" / "summary.json").unlink()  # a run that was killed has no summary
    again = compare(["local", "fedavg", ("near", "fedprox")], seeds=[0, 1], out=place, **fields())
    for label, entry in again.methods.items():
        assert entry["received"] == comparison.methods[label]["received"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lr": 0.2}, "holds a finished comparison with other settings"),
        ({"methods": ["local"]}, "holds a finished comparison with other settings"),
        ({"seeds": "0"}, "seeds must be a list of different whole numbers"),
        ({"seeds": [1, 1]}, "seeds must be a list of different whole numbers"),
        ({"methods": ["local", "local"]}, "'local' is there twice"),
        ({"methods": [("../up", "local")]}, "A label is the name of a directory"),
        ({"methods": "local"}, "Expected a list of methods"),
        ({"seed": 3}, "give seeds="),
    ],
    ids=str,
)
def test_refusals_leave_everything_as_it_was(change, says, compared):
    out, _ = compared
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    given = {"methods": ["local", "fedavg", ("near", "fedprox")], "seeds": [0, 1]} | fields() | change
    with pytest.raises(UsageError, match=says):
        compare(given.pop("methods"), out=out, **given)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_other_things_are_not_buried(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds other things \(thesis.tex\)"):
        compare(["local"], out=tmp_path, **fields())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_everything_is_checked_before_the_first_run(tmp_path):
    """SCAFFOLD refuses momentum; Local before it has not run."""
    with pytest.raises(UsageError, match="momentum"):
        compare(["local", "scaffold"], out=tmp_path / "out", **fields(momentum=0.9))
    assert not (tmp_path / "out").exists()


def test_methods_see_the_same_clients(compared):
    _, comparison = compared
    assert len(set(comparison.summary["split_hash"].values())) == 1  # a given federation
    assert federation().split_hash in comparison.summary["split_hash"].values()


def test_the_figure_has_room_for_the_names_of_many_methods(recwarn):
    labels = [f"method {k}" for k in range(44)]
    summary = {"methods": [{"label": label} for label in labels], "seeds": [0], "data": "d", "split": "s", "clients": 3}
    assert figures.png(summary, {label: {0: {0: 0.1, 9: 0.5}} for label in labels}).startswith(b"\x89PNG")
    assert not recwarn.list
