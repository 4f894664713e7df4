"""A comparison as a table: the same cells for Markdown and the terminal, all numbers for CSV."""

from __future__ import annotations

import csv as comma
import io
from collections.abc import Iterator, Mapping
from typing import Any

Entry = Mapping[str, Any]
MINUS = "−"
LISTED = 10  # clients in one sentence


def headline(summary: Mapping[str, Any]) -> str:
    """Which evaluation the table shows."""
    seeds = summary["seeds"]
    hashes = ", ".join(dict.fromkeys(h[:12] for h in summary["split_hash"].values()))
    listed = ", ".join(map(str, seeds))
    over = f"mean ± standard deviation over seeds {listed}" if len(seeds) > 1 else f"seed {listed}"
    return (
        f"Test accuracy in % as received (after download, before local training): {_whose(summary)}, "
        f"plain mean over clients, last round of {summary['rounds']}; {over}. "
        f"Data {summary['data']}, split {summary['split']}, hash {hashes}."
    )


def _whose(summary: Mapping[str, Any]) -> str:
    evaluated = str(summary["evaluation"]["received"]).split(", ", 2)[2]
    clients = f"all {summary['clients']} clients" if evaluated == "all clients" else evaluated
    return clients + (f" that train, without the {summary['held_out']} held out" if "held_out" in summary else "")


def footnote(summary: Mapping[str, Any]) -> str:
    """What the other columns are."""
    apart = "held out: the same of the clients that never train; " if "held_out" in summary else ""
    alone = "gain: points over Local, client by client; worse: clients below what they reach alone, in %; "
    return (
        "last 10, best: the same accuracy, over the last ten evaluations and at its best on the test rows; weighted: "
        "over test samples; clients ±: standard deviation over clients; lowest tenth: mean over the worst tenth of the "
        f"clients; {alone if 'gain_over_local' in summary['methods'][0]['received'] else ''}trained: the round's "
        f"participants after local training; {apart}kB, passes: sent, and gradient passes over its own data, per "
        "participant and round; s / round: seconds of a round without its evaluation."
    )


def table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row of cells for each method, the best one first."""
    rows = [dict(_cells(entry)) for entry in summary["methods"]]
    return list(rows[0]), [list(row.values()) for row in rows]


def _cells(entry: Entry) -> Iterator[tuple[str, str]]:
    received, plain = entry["received"], entry["received"]["plain"]
    lacking = {of: entry[of]["mean"] for of in ("refused", "failed") if of in entry and entry[of]["mean"]}
    odd = ["diverged"] if entry["diverged"]["mean"] else [f"{100 * v:.1f} % {of}" for of, v in lacking.items()]
    yield "method", entry["label"] + (f" ({', '.join(odd)})" if odd else "")
    yield "accuracy", percent(plain["last"], spread=True)
    yield "last 10", percent(plain["last10"])
    yield "best", percent(plain["best"])
    yield "weighted", percent(received["weighted"]["last"])
    yield "clients ±", percent(received["std_over_clients"])
    yield "lowest tenth", percent(received["worst_decile"])
    if "gain_over_local" in received:
        yield "gain", percent(received["gain_over_local"], sign=True)
        yield "worse", percent(received["worse_than_local"])
    yield "trained", percent(entry["trained"]["plain"]["last"])
    if "held_out" in entry:
        yield "held out", percent(entry["held_out"]["plain"]["last"], spread=True)
    yield "kB down", f"{entry['bytes_per_participant']['down']['mean'] / 1000:.0f}"
    yield "kB up", f"{entry['bytes_per_participant']['up']['mean'] / 1000:.0f}"
    yield "passes", f"{entry['gradient_passes']['mean']:.1f}"
    yield "s / round", f"{entry['seconds']['round']['mean']:.2f}"


def percent(value: Mapping[str, Any], spread: bool = False, sign: bool = False) -> str:
    """A fraction over the seeds, in per cent."""
    if value["mean"] is None:
        return "–"
    text = f"{100 * value['mean']:{'+' if sign else ''}.1f}".replace("-", MINUS)
    return f"{text} ± {100 * value['std']:.1f}" if spread and value["std"] is not None else text


def markdown(summary: Mapping[str, Any]) -> str:
    header, rows = table(summary)
    first, *others = (max(map(len, column)) for column in zip(header, *rows, strict=True))
    lines = [
        [row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))]
        for row in [header, *rows]
    ]
    lines.insert(1, ["-" * first, *("-" * (w - 1) + ":" for w in others)])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{headline(summary)}\n\n{body}\n\n{footnote(summary)}\n"


def csv(summary: Mapping[str, Any]) -> str:
    """Every number of comparison.json, a row for each method, named by its path in it."""
    rows = [dict(_flat(entry)) for entry in summary["methods"]]
    text = io.StringIO()
    writer = comma.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "values":  # one column for each number, whatever the number of seeds
                yield from _flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


WHAT = {
    "refused": "{} of {} replies had NaN or inf in them and were refused: {}.",
    "failed": "{} of {} replies never came, as the client failed twice: {}.",
    "unscored": "{0} evaluations are missing, as the client failed twice in them: {2}.",
}


def lacking(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each kind of thing that a run should have and has not, naming the clients."""
    replies = summary["replies"]
    said = [
        WHAT[of].format(replies[of], replies["participants"], _listed(replies[f"{of}_of"]))
        for of in WHAT
        if replies[of]
    ]
    if without := summary.get("without_model"):
        said.append(f"No model is kept of these clients, which failed twice: {_listed(without)}.")
    return said


def _listed(clients: Mapping[str, Any]) -> str:
    """So many of them, with their numbers of times; what they were given for is in the run's files."""
    shown = [f"client {i}" + (f" ({v} times)" if isinstance(v, int) and v > 1 else "") for i, v in clients.items()]
    more = f" and {len(shown) - LISTED} more" if len(shown) > LISTED else ""
    return ", ".join(shown[:LISTED]) + more


def run(summary: Mapping[str, Any]) -> str:
    """What one run found, in a few lines."""
    lines = [
        f"{summary['method']}: {summary['split']}; {summary['rounds']} rounds; split hash {summary['split_hash'][:12]}",
        f"{'test accuracy, %':<20}{'last':>7}{'last 10':>9}{'best':>7}",
    ]
    accuracy = dict(summary["accuracy"])
    if "held_out" in summary:
        accuracy[f"{len(summary['held_out']['clients'])} held out"] = summary["held_out"]["accuracy"]
    for moment, averages in accuracy.items():
        for average, over in averages.items():
            last, last10, best = (percent({"mean": over[k]}) for k in ("last", "last10", "best"))
            lines.append(f"{f'{moment}, {average}':<20}{last:>7}{last10:>9}{best:>7}")
    down, up = (summary["bytes"][way] / 1e6 for way in ("down", "up"))
    passes, seconds = summary["gradient_passes"], summary["seconds"]["total"]
    lines.append(f"{down:.1f} MB down, {up:.1f} MB up, {passes:.1f} gradient passes a round, {seconds:.1f} s")
    if measured := summary.get("steps_measured"):
        found = ", ".join(f"{way} {1000 * t:.2f}" for way, t in measured.items())
        lines.append(f"steps: {summary['steps']} (measured, ms for ten steps: {found})")
    return "\n".join(lines)
