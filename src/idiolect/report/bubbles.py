"""Labels by clients as a picture: the area of a bubble is the number of rows."""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import pairwise
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.data.federated import Federation
from idiolect.data.heterogeneity import histograms

COLUMNS, ROWS = 50, 40  # what an eye can tell apart
BLUE, GREY = "#0072B2", "#999999"


@dataclass(frozen=True)
class Bubbles:
    """Rows of each class [columns, classes], a column for a client or the mean of some alike."""

    area: NDArray[np.float64]
    columns: list[str]
    classes: list[str]
    said: str  # what a column is

    @staticmethod
    def of(federation: Federation) -> Bubbles:
        """Beyond so many clients, they are ordered by their most frequent class and its share, and each column is the
        mean over equally many neighbours in that order. Beyond so many classes, neighbours are added up."""
        classes = federation.dataset.classes if federation.dataset.loss == "cross_entropy" else 1
        clients, columns = federation.clients, min(federation.clients, COLUMNS)
        column = _order(federation) * columns // clients if clients > COLUMNS else np.arange(clients)
        area = np.zeros((columns, classes))
        for start, labels in histograms(federation):
            np.add.at(area, column[start : start + len(labels)], labels)
        area /= np.bincount(column)[:, None]
        edges = np.linspace(0, classes, min(classes, ROWS) + 1).astype(int)
        names = [f"{a}" if b - a == 1 else f"{a}–{b - 1}" for a, b in pairwise(edges)]
        area = np.add.reduceat(area, edges[:-1], axis=1)
        if clients <= COLUMNS:
            return Bubbles(area, [str(k) for k in range(clients)], names, "client")
        said = (
            f"{clients:,} clients by their most frequent class; a column is the mean over {_range(np.bincount(column))}"
        )
        return Bubbles(area, [], names, said)


def _order(federation: Federation) -> NDArray[np.int64]:
    """Each client's place when they are sorted by their most frequent class, and by its share, the largest first."""
    main, share = [], []
    for _, labels in histograms(federation):
        main.append(labels.argmax(1))
        share.append(labels.max(1) / np.maximum(labels.sum(1), 1))
    places = np.empty(federation.clients, np.int64)
    places[np.lexsort((-np.concatenate(share), np.concatenate(main)))] = np.arange(federation.clients)
    return places


def _range(sizes: NDArray[np.int64]) -> str:
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low:,} of them" if low == high else f"{low:,} to {high:,} of them"


def draw(federation: Federation) -> dict[str, bytes]:
    """The picture as "png" and as "svg"."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure = _figure(Bubbles.of(federation), federation)
    found = {}
    with mpl.rc_context({"svg.hashsalt": "idiolect"}):  # the same bytes again
        for kind, canvas, unset in (("png", FigureCanvasAgg, "Software"), ("svg", FigureCanvasSVG, "Date")):
            image = io.BytesIO()
            canvas(figure).print_figure(image, format=kind, dpi=130, metadata={unset: None})
            found[kind] = image.getvalue()
    return found


def _figure(bubbles: Bubbles, federation: Federation) -> Any:
    from matplotlib.figure import Figure

    columns, rows = bubbles.area.shape
    cell = 0.34 if columns <= 25 else 0.22  # inches
    width, height = max(columns * cell, 3.5), max(rows * cell, 0.8)
    figure = Figure(figsize=(width + 2.2, height + 2.4), layout="constrained")
    sizes, axes = figure.subplots(2, 1, sharex=True, height_ratios=[0.9, height])
    sizes.bar(range(columns), bubbles.area.sum(1), color=GREY, width=0.7)
    sizes.set_ylabel("rows of a client", fontsize=8)
    title = fill(federation.recipe, int(13 * width))  # letters to an inch
    sizes.set_title(f"{title}\nsplit hash {federation.split_hash[:12]}", fontsize=9, loc="left")
    _place(axes, bubbles, cell)
    for part in (sizes, axes):
        part.spines[["top", "right"]].set_visible(False)
        part.tick_params(labelsize=7, length=0)
    return figure


def _place(axes: Any, bubbles: Bubbles, cell: float) -> None:
    columns, rows = bubbles.area.shape
    most, full = bubbles.area.max(), (0.95 * 72 * cell) ** 2  # the largest bubble just fits its cell
    x, y = np.nonzero(bubbles.area)
    axes.scatter(x, y, s=full * bubbles.area[x, y] / most, color=BLUE, linewidths=0)
    axes.set_xlim(-0.7, columns - 0.3)
    axes.set_ylim(-0.7, rows - 0.3)
    axes.set_yticks(range(rows), bubbles.classes)
    axes.set_xticks(range(len(bubbles.columns)), bubbles.columns, rotation=90 if columns > 25 else 0)
    axes.set_xlabel(bubbles.said, fontsize=8)
    axes.set_ylabel("class", fontsize=8)
    for value in _round_numbers(most):
        axes.scatter([], [], s=full * value / most, color=BLUE, linewidths=0, label=f"{value:,}")
    axes.legend(
        title="rows", loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7, title_fontsize=8,
        labelspacing=1.2,
    )  # fmt: skip


def _round_numbers(most: float) -> list[int]:
    """Up to three numbers of one digit and zeros, the largest no more than this."""
    found = []
    for part in (most, most / 4, most / 16):
        digit = 10 ** int(np.floor(np.log10(max(part, 1))))
        found.append(int(max(part, 1) // digit * digit))
    return list(dict.fromkeys(found))
