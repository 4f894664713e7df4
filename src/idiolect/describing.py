"""What a method is, told by itself: its docstring, its fields, and what it keeps, sends and can do in a rehearsal."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import idiolect
from idiolect import catalogue
from idiolect.errors import UsageError
from idiolect.experiment import Run
from idiolect.listing import headline
from idiolect.method import Method
from idiolect.rehearsing import HOMES, facts

COLUMNS = (
    "state", "sends", "partial", "equal networks", "extra passes", "predicts with", "secure", "FedLAG", "new clients"
)  # fmt: skip
PAGE = """# What each method can do

Written by `idiolect methods --markdown`; `idiolect methods --json` has the same under `capabilities`, `idiolect show`
in words. No column is kept by hand: each method runs with its default settings, with one local epoch, on four tiny
clients. Two take part in the first of 100 rounds and two in each of the last two, nobody in between, so that what
waits for a warm-up has begun. One client takes part each time, and one never does.

- **state**: a participant keeps something for its next round.
- **sends**: "individuals" where the server is told something client by client, in a round or in a first message (rows
  of `Up`, `hello`); "sums" where it gets means and sums over the participants alone.
- **partial**: the run with clients away is not refused, and every number in it is finite.
- **equal networks**: a weight of the body, told by its shape, is sent or received. Where none is, bodies may differ, as
  long as what is shared fits.
- **extra passes**: over a client's samples in its third round. Gradient passes beyond the run's local epoch (below 0:
  it trains on fewer), passes without gradients, samples trained on that are not the client's, and passes that a
  prediction takes before it.
- **predicts with**: "shared" where all predict with the same weights; "personal" through what makes them differ.
  Weights are looked at again with the private state, or the row at the server, as it began, and with another client's
  data. "training": on the client's own data, before it predicts.
- **secure**: nothing reaches the server client by client. A run with `secure=true` refuses all others.
- **FedLAG**: it can be put around the method.
- **new clients**: the training of others moved what a client that never took part predicts with. Where not, that client
  predicts with what it began with.

"""

REFUSED: dict[str, dict[str, Any]] = {
    "momentum=0": {"momentum": 0.9},
    "optimizer=sgd": {"optimizer": "adam"},
    "no clip": {"clip": 1.0},
}


def describe(name: str) -> dict[str, Any]:
    """An entry of `idiolect methods --json`. A wrapper is shown around FedAvg."""
    kind, found = catalogue.find(name), facts(catalogue.build(name))
    title, paper = headline(kind.__doc__)
    return {
        "name": name,
        "title": title,
        "paper": paper,
        "wraps": catalogue.wraps(name),
        "keeps": list(found.keeps),
        "sends": {
            "down": list(found.down),
            "up": {"mean": list(found.mean), "sum": list(found.sum), "rows": list(found.rows)},
        },
        "needs": needs(name),
        "capabilities": capabilities(name),
        "hyper_parameters": {f.name: f.default for f in _fields(kind)},
    }


def page(name: str) -> str:
    """The page of one method, in plain text."""
    parts, found = catalogue.split(name), facts(catalogue.build(name))
    lines: list[str] = [catalogue.build(name).name, ""]
    for part in parts:
        kind = catalogue.find(part)
        lines += [inspect.getdoc(kind) or "", "", f"source: {_source(kind)}", *_hyper_parameters(part, kind), ""]
    sent = {f"{slot} ({home})": size for home in HOMES for slot, size in getattr(found, home).items()}
    lines += [
        "Bytes of a client for the default network of digits (convnet3, 10 classes):",
        f"  keeps     {_slots(found.keeps)}",
        f"  receives  {_slots(found.down)}",
        f"  sends     {_slots(sent)}",
        f"  needs     {', '.join(needs(name)) or 'nothing more'}",
        "",
        "With its default settings, as a rehearsal shows:",
        *(f"  {label:<26}{said}" for label, said in in_words(capabilities(name)).items()),
    ]
    return "\n".join(lines)


def _slots(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{slot} {size:,}" for slot, size in sizes.items()) or "nothing"


def _hyper_parameters(part: str, kind: type[Method]) -> Iterator[str]:
    width = max((len(f.name) for f in _fields(kind)), default=0)
    for f in _fields(kind):
        yield f"  --set {part}.{f.name:<{width}} = {'none' if f.default is None else f.default}   ({f.type})"


def _fields(kind: type[Method]) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(kind) if f.name != "inner"]


def _source(kind: type[Method]) -> str:
    root = Path(idiolect.__file__).parent
    return str(Path(inspect.getfile(kind)).relative_to(root.parent))


# what it can do, seen


def needs(name: str) -> list[str]:
    """What a run has to grant the method."""
    method = catalogue.build(name)
    found, wanted = facts(method), []
    if found.keeps:
        wanted.append("state kept by clients")
    if found.rows_of:
        wanted.append("individual replies at the server")
    if method.says_hello:
        wanted.append("a first message from every client")
    if method.asks:
        wanted.append("two exchanges in a round")
    if found.predicting.gradient:
        wanted.append("training before prediction")
    return wanted + [need for need, fields in REFUSED.items() if _refuses(method, fields)]


def capabilities(name: str) -> dict[str, Any]:
    """What the method can do with its default settings; docs/methods/capabilities.md says how each is found."""
    found = facts(catalogue.build(name))
    return {
        "keeps_state": bool(found.keeps),
        "sends": "individuals" if found.rows_of else "sums" if found.mean or found.sum else "nothing",
        "partial_participation": found.partial,
        "equal_architectures": found.equal_networks,
        "extra_passes": {
            "gradient": round(found.passes.gradient - 1, 3),
            "without_gradient": found.passes.without_gradient,
            "other_samples": found.passes.other_samples,
            "prediction_gradient": found.predicting.gradient,
            "prediction_without_gradient": found.predicting.without_gradient,
        },
        "evaluated_model": {"model": "personal" if found.through else "shared", "through": list(found.through)},
        "secure_aggregation": not found.rows_of,
        "wrapped_by_fedlag": _wrapped(name, "fedlag"),
        "new_clients": found.served,
    }


@cache
def _wrapped(name: str, wrapper: str) -> bool:
    """Whether the wrapper goes through a rehearsal around the method."""
    try:
        facts(catalogue.build(f"{name}+{wrapper}"))
    except UsageError:
        return False
    return True


def _refuses(method: Method, fields: Mapping[str, Any]) -> bool:
    try:
        method.check(Run(method="fedavg", **fields))
    except UsageError:
        return True
    return False


def in_words(can: Mapping[str, Any]) -> dict[str, str]:
    """Capabilities in plain words, in the order of the page's columns."""
    yes, evaluated = {True: "yes", False: "no"}, can["evaluated_model"]
    return {
        "clients keep state": yes[can["keeps_state"]],
        "the server gets": can["sends"],
        "works with clients away": yes[can["partial_participation"]],
        "needs equal networks": yes[can["equal_architectures"]],
        "extra passes over data": _passes(can["extra_passes"]),
        "predicts with a model": ": ".join(filter(None, [evaluated["model"], ", ".join(evaluated["through"])])),
        "secure aggregation": yes[can["secure_aggregation"]],
        "can be wrapped by FedLAG": yes[can["wrapped_by_fedlag"]],
        "serves new clients": yes[can["new_clients"]],
    }


def _passes(extra: Mapping[str, float]) -> str:
    said = {
        "gradient": "gradient {:+g}",
        "without_gradient": "without gradients {:g}",
        "other_samples": "other samples {:,}",
        "prediction_gradient": "to predict {:g}",
        "prediction_without_gradient": "to predict without gradients {:g}",
    }
    return ", ".join(text.format(extra[key]) for key, text in said.items() if extra[key]) or "none"


def markdown() -> str:
    """docs/methods/capabilities.md."""
    lines = [_line("method", *COLUMNS), "|---" * (1 + len(COLUMNS)) + "|"]
    for name in catalogue.names():
        title = re.match(r"\w*", inspect.getdoc(catalogue.find(name)) or "")
        lines.append(_line(f"[{title and title[0]}]({name}.md)", *in_words(capabilities(name)).values()))
    return PAGE + "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
