"""CONTRIBUTING's "add a method in ten minutes": its files, written into a copy of the tree, and its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FILES = re.findall(r"^`([\w/]+\.py)`\n\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[0].splitlines()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    unwanted = shutil.ignore_patterns("__pycache__")
    for folder in ("src", "tests", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for name, text in FILES:
        assert not (tree / name).exists()
        (tree / name).write_text(text)
    return tree


def test_the_page_has_the_files_of_a_method():
    parts = ["tests/reference", "src/idiolect/methods", "tests/methods", "tests/mutants"]
    assert [str(Path(name).parent) for name, _ in FILES] == parts
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_work(command, tree):
    words = command.replace("-k mapper", "-k mapper -p no:cacheprovider").split()
    found = subprocess.run(
        [sys.executable, "-m", *words], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "src")}, text=True,
        capture_output=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert "mapper" in found.stdout or " passed" in found.stdout or "100%" in found.stdout


def test_the_files_are_formatted(tree):
    written = [str(tree / name) for name, _ in FILES]
    found = subprocess.run([sys.executable, "-m", "ruff", "check", *written], cwd=tree, text=True, capture_output=True)
    assert found.returncode == 0, found.stdout
