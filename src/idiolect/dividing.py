"""`divide`: make a split, say what it is like, and keep it as a file with a picture and its measures beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idiolect.data import Federation
from idiolect.data.heterogeneity import Profile
from idiolect.data.split_file import check_name, save
from idiolect.errors import UsageError
from idiolect.experiment import Run
from idiolect.files import write
from idiolect.report import bubbles, division

Doing = Callable[[str], AbstractContextManager[None]]
BESIDE = (".png", ".svg", ".json")


@dataclass(frozen=True)
class Divided:
    federation: Federation
    profile: Profile
    text: str
    files: tuple[Path, ...]


def divide(
    fields: Mapping[str, Any], out: str | Path | None = None, doing: Doing = lambda what: nullcontext()
) -> Divided:
    """The division that a run with these fields has. With `out`, FILE.parquet, and beside it .png, .svg and .json."""
    path = Path(out) if out is not None else None
    if path is not None:
        _refuse(path)
    experiment = Run(method="fedavg", **fields)
    with doing("reading the data"):
        _ = experiment.dataset
    with doing(f"dividing {len(experiment.dataset):,} rows over {experiment.clients:,} clients"):
        federation = experiment.federation
    with doing("measuring how the clients differ"):
        profile = Profile.of(federation)
        text = division.text(federation, profile)
    files = () if path is None else _keep(path, federation, profile, doing)
    return Divided(federation, profile, text, files)


def _refuse(path: Path) -> None:
    """Names that cannot be taken, before anything takes its time."""
    check_name(path)
    for beside in map(path.with_suffix, BESIDE):
        if beside.exists():
            raise UsageError(f"'{beside}' is there already and is never overwritten; choose another name.")


def _keep(path: Path, federation: Federation, profile: Profile, doing: Doing) -> tuple[Path, ...]:
    """The split itself comes last: where it is, the others are."""
    with doing("drawing and writing"):
        facts = (json.dumps(division.facts(federation, profile), indent=1) + "\n").encode()
        images = bubbles.draw(federation)
        beside = [path.with_suffix(kind) for kind in BESIDE]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            for place, content in zip(beside, (images["png"], images["svg"], facts), strict=True):
                write(place, content)
            save(federation, path)
        except BaseException:
            for place in beside:
                place.unlink(missing_ok=True)
            raise
    return (path, *beside)
