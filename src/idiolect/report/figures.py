"""Accuracy over the rounds as a picture: one line for each method, named where it ends."""

from __future__ import annotations

import io
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

Curves = dict[int, dict[int, float]]  # seed -> round -> plain mean over clients of the accuracy received
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", ":", "-.")


def png(summary: Mapping[str, Any], of: Mapping[str, Curves]) -> bytes:
    """The mean over seeds, in a band of one standard deviation where there are several."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, max(4.5, 0.8 + 0.2 * len(of))), layout="constrained")  # room for every name
    axes = figure.add_subplot()
    ends: dict[str, tuple[float, float, str]] = {}
    lowest = 100.0  # after the first tenth of the rounds: the steep beginning is not what one looks for
    for k, entry in enumerate(summary["methods"]):
        by_seed = list(of[entry["label"]].values())
        rounds = sorted(set.intersection(*(set(curve) for curve in by_seed)))
        if not rounds:
            continue
        values = [[100 * curve[r] for curve in by_seed] for r in rounds]
        means, colour = [fmean(v) for v in values], COLOURS[k % len(COLOURS)]
        axes.plot(rounds, means, color=colour, linestyle=DASHES[k // len(COLOURS) % len(DASHES)], linewidth=1.6)
        if len(by_seed) > 1:
            spread = [stdev(v) for v in values]
            low, high = ([m + side * s for m, s in zip(means, spread, strict=True)] for side in (-1, 1))
            axes.fill_between(rounds, low, high, color=colour, alpha=0.12, linewidth=0)
        ends[entry["label"]] = (rounds[-1], means[-1], colour)
        lowest = min([lowest, *(m for r, m in zip(rounds, means, strict=True) if 10 * r >= rounds[-1])])
    seeds = summary["seeds"]
    over = f"mean and standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    title = f"{summary['data']}, {summary['split']}, {summary['clients']} clients; {over}"
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy as received, plain mean over clients, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.margins(x=0)
    if ends:
        axes.set_ylim(max(lowest - 2, 0), min(axes.get_ylim()[1], 100.5))
    _name_lines(axes, ends)
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(image, dpi=130, metadata={"Software": None})
    return image.getvalue()


def _name_lines(axes: Any, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Each line's name at its right end, moved apart where lines end close together."""
    low, high = axes.get_ylim()
    apart, top = (high - low) / max(20, len(ends)), float("inf")
    places: dict[str, float] = {}
    for label, (_, y, _) in sorted(ends.items(), key=lambda item: -item[1][1]):
        places[label] = top = min(y, top - apart)
    below = max(0.0, low - top)  # the lowest one stays in the picture
    for label, (x, y, colour) in ends.items():
        axes.annotate(
            label,
            (x, y),
            xytext=(1.02, places[label] + below),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
            color=colour,
            fontsize=9,
            va="center",
        )
