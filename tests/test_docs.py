"""What README and docs say is so: commands print it, examples run, links lead somewhere, every method is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pages
from idiolect import Run, catalogue

ROOT = Path(__file__).parents[1]
METHODS = ROOT / "docs" / "methods"
OTHER = {"README", "capabilities"}  # pages of all methods
EXAMPLE = """
# An example

It is [here](README.md#the-methods), [there](https://example.org) and [below](#an-example); `[x](y)` is code.

```console
$ idiolect run fedavg --data toy2d --clients 2 --rounds 1 --split iid \\
    --backend serial   # small
fedavg: toy2d, iid, 2 clients, seed 0, test 0.25 of each client's rows; 1 rounds; split hash HASH
test accuracy, %     last  last 10  best
...
0.0 MB down, 0.0 MB up, 1.0 gradient passes a round, 7.5 s
runs/fedavg-toy2d-7
$ make tea
tea
$ idiolect run --config runs/fedavg-toy2d-1/run.toml --clients 0
clients must be a whole number >= 1; found 0.
$ idiolect run fedavg --config mine.toml
rounds must be a whole number >= 0; found -1.
```

```python files
open("mine.toml", "w").write("rounds = -1")
```

```toml
rounds = 3

[method]
name = "fedrep+finetune"
head_epochs = 2
```

1. In a list:

   ```python
   from idiolect import Run
   ```

```python no-run
raise SystemExit("not run")
```

```python
assert Run(method="fedavg", rounds=1).rounds == 1
```
"""
HASH = Run(method="fedavg", data="toy2d", clients=2, split="iid").federation.split_hash[:12]
EXAMPLE = EXAMPLE.replace("HASH", HASH)
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = {"example": EXAMPLE, **{str(path.relative_to(ROOT)): path.read_text() for path in FILES}}
BLOCKS = [(f"{name}:{block.line}", block) for name, page in PAGES.items() for block in pages.blocks(page)]


def of(language):
    return [pytest.param(block, id=where) for where, block in BLOCKS if block.info == language]


# what the pages hold


@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(where.rpartition(":")[0], block, id=where) for where, block in BLOCKS if block.info == "console"],
)
def test_commands_print_what_the_page_says(page, block, tmp_path):
    pages.prepare(PAGES[page], tmp_path)
    assert not pages.unlike(block, tmp_path)


@pytest.mark.parametrize("block", [b for b in of("toml") if re.search(r"^\[method\]", b.values[0].text, re.MULTILINE)])
def test_run_files_are_runs(block):
    run = Run.from_toml(block.text)
    assert Run.from_toml(run.to_toml()) == run


def script(page):
    """The examples of a page, one after the other, in their lines."""
    lines = [""] * len(page.splitlines())
    for block in pages.blocks(page):
        if block.info == "python":
            held = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(held)] = held
    return "\n".join(lines)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if script(page).strip()])
def test_examples_in_python_run(name, tmp_path):
    """As a file, which is what a reader makes of them: worker processes import it once more."""
    (tmp_path / "example.py").write_text(script(PAGES[name]))
    found = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=pages.environment(),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert found.returncode == 0, f"{name}: {found.stderr[-3000:]}"


def test_blocks_say_what_they_are():
    known = {"", "console", "toml", "python", "python files", "python no-run", "sh", "text", "json"}
    assert {where: block.info for where, block in BLOCKS if block.info not in known} == {}


def slugs(page):
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ +(.*)$", pages.without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lost(page, folder):
    """Links that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", pages.prose(page)):
        place, _, anchor = link.partition("#")
        target = folder / place
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in slugs(target.read_text() if place else page)):
            yield link


@pytest.mark.parametrize("path", [*FILES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert not list(lost(path.read_text(), path.parent))


# methods


def test_every_method_has_a_page_and_a_line_and_nothing_else_has():
    named = set(catalogue.names())
    held = {path.stem for path in METHODS.glob("*.md")} - OTHER
    listed = re.findall(r"^\| \[.+?\]\((\w+)\.md\) \|", (METHODS / "README.md").read_text(), re.MULTILINE)
    wrong = {
        "methods without a page": named - held,
        "pages without a method": held - named,
        "methods without a line in docs/methods/README.md": named - set(listed),
        "lines without a method": set(listed) - named,
        "lines that are there twice": {name for name in listed if listed.count(name) > 1},
    }
    assert not any(wrong.values()), "; ".join(f"{what}: {', '.join(sorted(of))}" for what, of in wrong.items() if of)


def letters(title):
    return re.sub(r"[^a-z0-9]", "", title.lower())


def test_pages_and_lines_carry_the_method_s_name():
    lines = re.findall(r"^\| \[(.+?)\]\((\w+)\.md\) \|", (METHODS / "README.md").read_text(), re.MULTILINE)
    headings = [(path.read_text().partition("\n")[0].removeprefix("# "), path.stem) for path in METHODS.glob("*.md")]
    assert [pair for pair in [*lines, *headings] if letters(pair[0]) != pair[1] and pair[1] not in OTHER] == []


# make


def targets():
    return re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()


def make(*words):
    return subprocess.run(["make", *words], cwd=ROOT, text=True, capture_output=True)


def test_the_pages_name_targets_alone_and_readme_its_two():
    text = {str(path.relative_to(ROOT)): path.read_text() for path in [*FILES, ROOT / "CONTRIBUTING.md"]}
    named = {name: re.findall(r"(?:`|^\$ )make ([a-z]+)", page, re.MULTILINE) for name, page in text.items()}
    assert {name: unknown for name, of in named.items() if (unknown := set(of) - set(targets()))} == {}
    assert {"demo", "test"} <= set(named["README.md"])


def test_make_help_tells_of_every_target():
    for words in ([], ["help"]):
        found = make(*words)
        assert re.findall(r"^make (\w+) +\S", found.stdout, re.MULTILINE) == [t for t in targets() if t != "help"]


@pytest.mark.parametrize(
    ("target", "does"), [("demo", "idiolect compare --out runs/demo-"), ("test", "pytest -n auto")]
)
def test_the_two_commands_do_what_they_are_for(target, does):
    assert does in make("--dry-run", target).stdout


# that a wrong page is noticed

SHOWN = """\
Test accuracy in % as received: all 20 clients, last round of 50; seed 0. Data digits, hash 3ec8315dd77a.

| method | accuracy | worse | gain | trained | kB down | passes | s / round |
| ------ | -------: | ----: | ---: | ------: | ------: | -----: | ------: |
| fedrep |     95.1 |  10.0 | +1.2 |    96.0 |     120 |   11.0 |    12.3 |
| local  |     93.9 |   0.0 | +0.0 |    93.9 |       0 |    1.0 |     9.8 |

received, plain 93.1 92.5 93.9
1.5 MB down, 1.5 MB up, 1.0 gradient passes a round, 116.3 s
runs/compare-1/comparison.md
"""
ALIKE = {
    "itself": ("", ""),
    "another accuracy": ("95.1", "93.2"),
    "a gain of another sign": ("+1.2", "−0.3"),
    "another share of so few clients": ("10.0", "20.0"),
    "seconds": ("116.3 s", "8.9 s"),
    "seconds in a table, and its width": ("    12.3 |", "1112.3 |"),
    "a number in a path": ("compare-1/", "compare-23/"),
    "widths": ("| fedrep |     95.1", "| fedrep | 95.1"),
    "another row first": ("fedrep |     95.1", "fedrep |     93.1"),
    "lines left out": ("1.5 MB down, 1.5 MB up, 1.0 gradient passes a round, 116.3 s\n", "...\n"),
    "everything left out": (SHOWN, "...\n"),
    "the end left out": ("runs/compare-1/comparison.md\n", "...\n"),
}
UNLIKE = {
    "a word": ("as received", "as trained"),
    "an accuracy": ("95.1", "92.0"),
    "an accuracy of a run": ("92.5", "95.6"),
    "clients": ("20 clients", "21 clients"),
    "a hash": ("3ec8", "3ec9"),
    "kB": ("120 |", "121 |"),
    "passes": ("11.0", "10.0"),
    "passes of a run": ("1.0 gradient", "1.1 gradient"),
    "MB": ("1.5 MB up", "1.6 MB up"),
    "a method": ("| local ", "| ditto "),
    "a column": ("| trained ", "| learnt "),
    "a line too few": ("runs/compare-1/comparison.md\n", ""),
    "a line too many": ("runs/compare-1/comparison.md\n", "runs/compare-1/comparison.md\nmore\n"),
    "a path": ("comparison.md", "comparison.txt"),
    "a row too few": ("| local  |     93.9 |   0.0 | +0.0 |    93.9 |       0 |    1.0 |     9.8 |\n", ""),
    "a wrong line among those left out": ("received, plain 93.1 92.5 93.9\n1.5 MB down", "...\n1.6 MB down"),
    "lines left out, and others in another order": (SHOWN, "runs/compare-1/comparison.md\n...\nreceived, plain 93.1 92.5 93.9\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_what_may_differ_is_let_pass(case):
    assert ALIKE[case][0] in SHOWN
    assert pages.differing(SHOWN.replace(*ALIKE[case]), SHOWN) == []


def test_rows_may_change_places():
    lines = SHOWN.splitlines(keepends=True)
    lines[4], lines[5] = lines[5], lines[4]
    assert pages.differing("".join(lines), SHOWN) == []


@pytest.mark.parametrize("case", UNLIKE)
def test_what_is_wrong_is_noticed(case):
    assert UNLIKE[case][0] in SHOWN
    assert pages.differing(SHOWN.replace(*UNLIKE[case]), SHOWN) != []


def test_a_difference_shows_both_lines():
    (found,) = pages.differing(SHOWN.replace("20 clients", "21 clients"), SHOWN)
    page, printed = found.splitlines()
    assert page.startswith("page:    Test accuracy in % as received: all 21 clients")
    assert printed.startswith("printed: Test accuracy in % as received: all 20 clients")


def test_a_wrong_page_is_noticed(tmp_path):
    wrong = EXAMPLE.replace(f"hash {HASH}", "hash 000").replace("0.0 MB up", "0.1 MB up").replace("found 0", "found 1")
    (block,) = [b for b in pages.blocks(wrong) if b.info == "console"]
    pages.prepare(wrong, tmp_path)
    one, two, three = pages.unlike(block, tmp_path)
    assert all(found.startswith("$ idiolect run ") for found in (one, two, three))
    assert "hash 000" in one
    assert "0.1 MB up" in two
    assert "found 1" in three


def test_the_example_is_read_right():
    found = list(pages.blocks(EXAMPLE))
    assert [b.info for b in found] == ["console", "python files", "toml", "python", "python no-run", "python"]
    assert all(EXAMPLE.splitlines()[b.line - 1].strip() == b.text.splitlines()[0] for b in found)
    assert [command.split()[:2] for command, _ in pages.commands(found[0])] == [
        ["idiolect", "run"],
        ["make", "tea"],
        ["idiolect", "run"],
        ["idiolect", "run"],
    ]
    assert script(EXAMPLE).split("\n")[found[-1].line - 1].startswith("assert Run")
    assert script(EXAMPLE).count("\n") == EXAMPLE.count("\n") - 1
    assert list(lost(EXAMPLE, METHODS)) == []
    wrong = EXAMPLE.replace("README.md#the-methods", "READ.md").replace("(#an-example)", "(#another)")
    assert list(lost(wrong, METHODS)) == ["READ.md", "#another"]


def test_a_page_that_cannot_be_read_says_where():
    with pytest.raises(AssertionError, match="The block that begins in line 2 does not end"):
        list(pages.blocks("\n```toml\nrounds = 3\n"))
    with pytest.raises(AssertionError, match=r"A console block begins with '\$ '; line 2 is: idiolect run"):
        pages.commands(pages.Block("console", "idiolect run fedavg\n", 2))
