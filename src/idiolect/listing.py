"""The methods' names and what each says of itself, read from their files without importing them: a list of them needs
no torch, which takes seconds to import."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PLACES = {"methods": False, "wrap": True}  # directory -> whether its classes wrap


@dataclass(frozen=True)
class Line:
    """A method in the list."""

    name: str
    wraps: bool
    title: str
    paper: str | None


def lines() -> list[Line]:
    """Every method, then every wrapper, by name."""
    return [line for place in PLACES for line in _of(place)]


def _of(place: str) -> Iterator[Line]:
    for file in sorted(Path(__file__).with_name(place).glob("[!_]*.py")):
        classes = [node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)]
        yield Line(file.stem, PLACES[place], *headline(ast.get_docstring(classes[0]) if classes else None))


def headline(docstring: str | None) -> tuple[str, str | None]:
    """What the method does in a sentence, and its paper, out of the first paragraph: `Name. Paper: what it does.`"""
    first = " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())
    rest = re.sub(r"^[\w-]+[.:]? +", "", first)
    cited = re.match(r"([^:]*?(?:\b(?:19|20)\d\d\b|Algorithm)[^:.]*)[:.] (.*)", rest)
    paper, text = (re.sub("[()]", "", cited[1]), cited[2]) if cited else (None, rest)
    return text.split(". ")[0].rstrip("."), paper
