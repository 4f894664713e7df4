"""What README and docs quote: their fenced blocks, the commands in them, and how far print may differ from page.

In a ```console block a command stands after `$ ` and what it prints, errors too, below it; a line of dots alone stands
for any lines. The commands of a block are carried out one after the other in a directory that holds at first what the
page's ```python files blocks write there, nothing where there are none; those that are not ours (`make`, `pip`, `ls`)
are only read. Text has to be equal, whole numbers and hashes too. Not compared:
seconds, numbers in paths, the width of columns, and the order of a table's rows, which two close methods may swap.

Accuracies may differ: another CPU adds up in another order, and training makes much of little. How much, rounding shows:
`idiolect compare --rounds 20` with and without `--dtype float64` differs by up to 2.5 points in a mean over the 20
clients (one prediction of a client that has two), by 8 in `clients ±`, 15 in `worse` and 21 in `lowest tenth`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import idiolect

POINTS = 3.0
ROOM = {"lowest tenth": 25.0, "worse": 20.0, "clients ±": 10.0, "kB down": 0.0, "kB up": 0.0, "passes": 0.0}
IGNORED = ("s / round",)
DECIMAL = r"[+−-]?\d+\.\d+"
DOTS = {"...", "…"}


@dataclass(frozen=True)
class Block:
    info: str
    text: str
    line: int  # of its first line


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown page; a fence may be indented, as in a list."""
    lines = iter(enumerate(page.splitlines(), start=1))
    for number, line in lines:
        if opened := re.match(r"( *)(`{3,}|~{3,})(.*)$", line):
            indent, fence, info = len(opened[1]), opened[2], opened[3].strip()
            held = []
            for _, inner in lines:
                if inner.strip() == fence:
                    break
                held.append(inner[indent:] if not inner[:indent].strip() else inner)
            else:
                raise AssertionError(f"The block that begins in line {number} does not end.")
            yield Block(info, "".join(f"{one}\n" for one in held), number + 1)


def without_blocks(page: str) -> str:
    lines = page.splitlines()
    for block in blocks(page):
        for k in range(block.line - 2, block.line + block.text.count("\n")):  # with its fences
            lines[k] = ""
    return "\n".join(lines)


def prose(page: str) -> str:
    """A page without its blocks and without code in its lines."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(page))


# console


def commands(block: Block) -> list[tuple[str, str]]:
    """Each command, its continued lines joined, and what the page says that it prints."""
    text = re.sub(r"\\\n *", "", block.text)
    first, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    if first or not parts:
        raise AssertionError(f"A console block begins with '$ '; line {block.line} is: {text}")
    return [(command.strip(), printed) for command, _, printed in (part.partition("\n") for part in parts)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(idiolect.__file__).parents[1])}


def prepare(page: str, directory: Path) -> None:
    """Write the files that the page's commands are about."""
    for block in blocks(page):
        if block.info == "python files":
            subprocess.run(
                [sys.executable, "-c", block.text], cwd=directory, env=environment(), check=True, timeout=120
            )


def carried_out(command: str, directory: Path) -> str:
    """What it prints, on both streams."""
    program = ["-c", "from idiolect.cli import main; main(prog_name='idiolect')"]
    _, *words = shlex.split(command, comments=True)
    return subprocess.run(
        [sys.executable, *program, *words], cwd=directory, env=environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=600,
    ).stdout  # fmt: skip


def unlike(block: Block, directory: Path) -> list[str]:
    """Where the commands of a block print something else than the page says."""
    found = []
    for command, printed in commands(block):
        if re.match(r"idiolect\b", command):
            differences = differing(printed, carried_out(command, directory))
            found += [f"$ {command}\n{difference}" for difference in differences]
    return found


def differing(page: str, printed: str) -> list[str]:
    """What the page says otherwise, line by line."""
    expected, found = readable(page), readable(printed)
    if fits(expected, found):
        return []
    if DOTS.isdisjoint(expected):
        return [d for pair in zip_longest(expected, found, fillvalue="") if (d := difference(*pair))]
    strange = [line for line in expected if line not in DOTS and all(difference(line, other) for other in found)]
    return [f"page:    {line}\nprinted: no such line" for line in strange] or [
        "The lines are printed in another order."
    ]


def fits(expected: list[str], found: list[str]) -> bool:
    if not expected or not found:
        return not found and DOTS.issuperset(expected)
    if expected[0] in DOTS:
        return fits(expected[1:], found) or fits(expected, found[1:])
    return difference(expected[0], found[0]) is None and fits(expected[1:], found[1:])


def readable(text: str) -> list[str]:
    """Lines in which what is not compared is the same: widths, seconds, numbers in paths, the order of a table."""
    lines: list[str] = []
    header: list[str] = []
    rows: list[str] = []
    for line in [*text.rstrip().splitlines(), ""]:
        line = re.sub(r"-{2,}", "--", " ".join(line.split()))
        if line.startswith("|"):
            found = [cell.strip() for cell in line.strip("|").split("|")]
            if header:
                named = [f"{name}: {'#' if name in IGNORED else cell}" for name, cell in zip_longest(header, found)]
                rows.append("| " + " | ".join(named))
            else:
                header = found
                lines.append(line)
            continue
        lines += sorted(rows)
        header, rows = [], []
        line = re.sub(r"\b\d+(\.\d+)? s\b", "# s", line)
        lines.append(" ".join(re.sub(r"\d+", "#", word) if "/" in word else word for word in line.split(" ")))
    return lines[:-1]


def difference(expected: str, found: str) -> str | None:
    one, two = cells(expected), cells(found)
    if len(one) == len(two) and all(map(same, one, two)):
        return None
    return f"page:    {expected}\nprinted: {found}"


def cells(line: str) -> list[tuple[str, float]]:
    """A line in pieces, each with the room that its decimals have."""
    if line.startswith("| "):
        return [(cell, room(cell.removeprefix("| "))) for cell in line.split(" | ")]
    return [(line, POINTS if line.startswith(("received, ", "trained, ")) else 0.0)]


def room(cell: str) -> float:
    column, colon, _ = cell.partition(": ")
    return ROOM.get(column, POINTS) if colon else 0.0


def same(expected: tuple[str, float], found: tuple[str, float]) -> bool:
    """The same text, and the same numbers but for the room that they have."""
    (a, space), (b, _) = expected, found
    one, two = ([float(n.replace("−", "-")) for n in re.findall(DECIMAL, text)] for text in (a, b))
    alike = re.sub(DECIMAL, "#", a) == re.sub(DECIMAL, "#", b)
    return a == b or (alike and all(abs(x - y) < space + 1e-9 for x, y in zip(one, two, strict=True)))
