"""A division of rows over clients as text: a line per client, or the first ones and how the rest are spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import combining, east_asian_width

import numpy as np

from idiolect import __version__
from idiolect.data.federated import Federation
from idiolect.data.heterogeneity import DEFINITIONS, Profile

ALL, FIRST = 30, 10  # so many clients have a line each; of more, the first ones
CLASSES = 12  # so many classes have a column each
LETTERS = 12  # of the name of a class


def text(federation: Federation, profile: Profile) -> str:
    measures = profile.measures()
    entropy, apart = measures["label_entropy_bits"], measures["total_variation"]
    said = [f"label entropy {entropy['mean']:.2f} bits (mean over clients)" if entropy else "no labels"]
    said += [f"total variation {apart['mean']:.3f} (mean over all pairs of clients)"] if apart else []
    said += [f"size Gini {measures['size_gini']:.3f}"]
    blocks = [federation.recipe, _clients(federation), "; ".join(said), f"split hash {federation.split_hash}"]
    if federation.clients > ALL:
        blocks.insert(2, _spread(federation, profile))
    return "\n\n".join(blocks)


def facts(federation: Federation, profile: Profile) -> dict[str, Any]:
    """What stands beside a split file, for programs."""
    parts = {part: len(getattr(federation, part).rows) for part in _parts(federation)}
    return {
        "idiolect": __version__,
        "data": federation.dataset.name,
        "recipe": federation.recipe,
        "made_with": dict(federation.made_with),
        "split_hash": federation.split_hash,
        "clients": federation.clients,
        "parts": parts,
        "class_names": federation.dataset.class_names,
        "heterogeneity": profile.measures(),
        "definitions": DEFINITIONS,
    }


def _parts(federation: Federation) -> list[str]:
    return ["train", *(["validation"] if len(federation.validation.rows) else []), "test"]


def _clients(federation: Federation) -> str:
    shown = federation.clients if federation.clients <= ALL else FIRST
    table, parts = federation.table(slice(shown)), _parts(federation)
    classes = federation.dataset.classes if federation.dataset.loss == "cross_entropy" else 0
    labels = _classes(federation.dataset.classes_called[:classes]) if classes <= CLASSES else ["classes"]
    rows = [["client", *parts, *labels, *(["entropy"] if classes else [])]]
    for line in table:
        counts = line["labels"] if classes <= CLASSES else [np.count_nonzero(line["labels"])]
        own = [str(n) for n in counts[: len(labels)]] + ([f"{line['entropy']:.2f}"] if classes else [])
        rows.append([str(line["client"]), *(str(line[part]) for part in parts), *own])
    left = federation.clients - shown
    return _aligned(rows) + (f"\n... and {left:,} more" if left else "")


def _classes(names: Sequence[str]) -> list[str]:
    """Heads of columns. Numbers do not say by themselves that they are classes."""
    plain = all(name.lstrip("-").isdecimal() for name in names)
    return [f"class {name}" if k == 0 and plain else shorten(name, LETTERS) for k, name in enumerate(names)]


def shorten(text: str, letters: int) -> str:
    """On one line, and no longer than this."""
    line = " ".join(text.split())
    return line if len(line) <= letters else line[: letters - 1] + "…"


def _width(text: str) -> int:
    """Places that it takes on a terminal: two for a character of East Asia, none for an accent of the one before."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _spread(federation: Federation, profile: Profile) -> str:
    columns: dict[str, Any] = {"rows": profile.sizes}
    columns |= {part: getattr(federation, part).sizes for part in _parts(federation)}
    columns |= {"classes": profile.classes, "entropy": profile.entropies} if profile.labelled else {}
    points = {"smallest": 0, "lowest tenth": 0.1, "median": 0.5, "highest tenth": 0.9, "largest": 1}
    rows = [[f"{federation.clients:,} clients", *columns]]
    spread = {name: np.quantile(values, list(points.values())) for name, values in columns.items()}
    for k, point in enumerate(points):
        rows.append([point, *(f"{spread[name][k]:.{2 if name == 'entropy' else 0}f}" for name in columns)])
    rows.append(["mean", *(f"{values.mean():.{2 if name == 'entropy' else 1}f}" for name, values in columns.items())])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    first, *others = (max(map(_width, column)) for column in zip(*rows, strict=True))
    gaps = ([" " * (w - _width(c)) for c, w in zip(row, (first, *others), strict=True)] for row in rows)
    lines = (
        [row[0] + gap[0], *(g + c for g, c in zip(gap[1:], row[1:], strict=True))]
        for row, gap in zip(rows, gaps, strict=True)
    )
    return "\n".join("  ".join(line) for line in lines)
