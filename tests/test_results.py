"""The committed results are what the committed numbers say, and the runs behind them can run again."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from idiolect import catalogue
from idiolect.experiment import Run, flat
from idiolect.report import tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
COMPARISONS = sorted(RESULTS.rglob("comparison.json"))
every_comparison = pytest.mark.parametrize("path", COMPARISONS, ids=lambda p: str(p.parent.relative_to(RESULTS)))


def test_there_are_results():
    assert COMPARISONS


@every_comparison
def test_tables_follow_from_the_numbers(path):
    summary = json.loads(path.read_text())
    assert (
        path.with_suffix(".md").read_text() == f"{tables.markdown(summary)}\n![Accuracy over the rounds](curves.png)\n"
    )
    assert path.with_suffix(".csv").read_text() == tables.csv(summary)
    assert path.with_name("curves.png").read_bytes().startswith(b"\x89PNG")


@every_comparison
def test_its_runs_are_valid_today(path):
    """Every field and hyper-parameter still exists, has its type, and is not refused."""
    settings = json.loads(path.read_text())["settings"]
    for label, text in settings["runs"].items():
        table = tomllib.loads(text)
        method = dict(table.pop("method"))
        table.pop("device", None)  # a GPU may be far away
        built = catalogue.build(method.pop("name"), flat(method))
        made = Run.from_table({**table, "method": built})
        assert made.method == built, label
        assert not Path(str(made.data)).is_absolute()


@every_comparison
def test_a_page_shows_its_table_and_its_command(path):
    """Each comparison's table stands word for word on a page, below the command that made it."""
    table = "\n".join(line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("|"))
    pages = [page for page in [ROOT / "README.md", *RESULTS.glob("*.md")] if table in page.read_text()]
    assert pages, f"no page shows the table of {path.parent.name}"
    for page in pages:
        before = page.read_text().partition(table)[0]
        commands = re.findall(r"```sh\n(.*?)```", before, re.DOTALL)
        assert commands, f"{page.name} shows no command before the table of {path.parent.name}"
        summary = json.loads(path.read_text())
        if commands[-1].startswith("idiolect compare"):
            named = re.search(r"--methods ([\w,+]+)", commands[-1].replace("\\\n", " "))
            assert named is not None
            assert sorted(m.method.name for m in map(_run, named[1].split(","))) == sorted(
                entry["method"] for entry in summary["methods"]
            )
            seeds = re.search(r"--seeds ([\d,]+)", commands[-1])
            assert [int(s) for s in seeds[1].split(",")] == summary["seeds"] if seeds else summary["seeds"] == [0]
            rounds = re.search(r"--rounds (\d+)", commands[-1])
            assert int(rounds[1] if rounds else 50) == summary["rounds"]


def _run(name: str) -> Run:
    return Run(method=catalogue.build(name))
