"""Labels by clients as a picture: the area of a bubble is the number of rows."""

from __future__ import annotations

import io
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.data.federated import Federation
from idiolect.data.heterogeneity import histograms
from idiolect.report.division import shorten

COLUMNS, ROWS = 50, 64  # what an eye can tell apart
LETTERS = 24  # of the name of a class
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
        mean over equally many neighbours in that order. Beyond so many classes, as many neighbours are added up for
        each row, which the first and the last number name."""
        classes = federation.dataset.classes if federation.dataset.loss == "cross_entropy" else 1
        clients, columns = federation.clients, min(federation.clients, COLUMNS)
        column = _order(federation) * columns // clients if clients > COLUMNS else np.arange(clients)
        area = np.zeros((columns, classes))
        for start, labels in histograms(federation):
            np.add.at(area, column[start : start + len(labels)], labels)
        area /= np.bincount(column)[:, None]
        together = -(-classes // ROWS)
        area = np.add.reduceat(area, np.arange(0, classes, together), axis=1)
        names = _rows(federation, classes, together)
        if clients <= COLUMNS:
            return Bubbles(area, [str(k) for k in range(clients)], names, "client")
        said = (
            f"{clients:,} clients by their most frequent class; a column is the mean over {_range(np.bincount(column))}"
        )
        return Bubbles(area, [], names, said)


def _rows(federation: Federation, classes: int, together: int) -> list[str]:
    if together > 1:
        return [f"{k}–{min(k + together, classes) - 1}" for k in range(0, classes, together)]
    called = [shorten(name, LETTERS) for name in federation.dataset.classes_called[:classes]]
    return [name if _drawable(name) else str(k) for k, name in enumerate(called)]


def _drawable(text: str) -> bool:
    """Whether the font of the picture, which is matplotlib's own, has all its characters."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return all(font.get_char_index(ord(character)) for character in text)


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
    cell = 0.34 if max(columns, rows) <= 25 else 0.22  # inches
    width, height = max(columns * cell, 3.5), max(rows * cell, 0.8)
    beside = 2.2 + 0.06 * max(map(len, bubbles.classes))  # the legend, and what rows are called
    figure = Figure(figsize=(width + beside, height + 2.4), layout="constrained")
    sizes, axes = figure.subplots(2, 1, sharex=True, height_ratios=[0.9, height])
    sizes.bar(range(columns), bubbles.area.sum(1), color=GREY, width=0.7)
    sizes.set_ylabel("rows of a client", fontsize=8)
    recipe = "".join(letter if _drawable(letter) else "?" for letter in federation.recipe)
    title = fill(recipe, int(13 * width))  # letters to an inch
    sizes.set_title(f"{title}\nsplit hash {federation.split_hash[:12]}", fontsize=9, loc="left", parse_math=False)
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
    axes.set_yticks(range(rows), bubbles.classes, parse_math=False)
    axes.set_xticks(range(len(bubbles.columns)), bubbles.columns, rotation=90 if columns > 25 else 0)
    axes.set_xlabel(bubbles.said, fontsize=8)
    axes.set_ylabel("class", fontsize=8)
    for value in _round_numbers(most):
        axes.scatter([], [], s=full * value / most, color=BLUE, linewidths=0, label=f"{value:,}")
    axes.figure.legend(
        title="rows", loc="outside right upper", frameon=False, fontsize=7, title_fontsize=8, borderpad=1,
        labelspacing=3 * cell / 0.34, handletextpad=2 * cell / 0.34,
    )  # fmt: skip


def _round_numbers(most: float) -> list[int]:
    """Up to three numbers of one digit and zeros, the largest no more than this."""
    found = []
    for part in (most, most / 4, most / 16):
        digit = 10 ** int(np.floor(np.log10(max(part, 1))))
        found.append(int(max(part, 1) // digit * digit))
    return list(dict.fromkeys(found))
