"""Checkpoints: a file of the newest of two is replaced, and the run goes on from what can be read.

With `MARK` the checkpoint's list is made to agree with the input, sizes, checksums and signature: what is tried then is
the code behind them. No file outside the folder may be opened.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzzing import MARK, Harness
from idiolect import Run
from idiolect.engine import checkpoint
from idiolect.engine.progress import Progress
from idiolect.method import Rows
from idiolect.running import run

EXPERIMENT = Run(
    method="fedamp", data="toy2d", clients=3, split="iid", rounds=4, backend="serial", checkpoint_every=1,
    network="mlp", network_options={"hidden": [3]},
)  # fmt: skip
WHOLE: dict[str, bytes] = {}
ABOUT: dict[str, str] = {}
CONTEXT = EXPERIMENT.context()


class CutOffError(Exception):
    pass


def whole(folder: Path) -> dict[str, bytes]:
    """The files of two checkpoints of one run."""

    def cut(report: Any) -> None:
        if report.round == 4:
            raise CutOffError

    if not WHOLE:
        with suppress(CutOffError):
            run(EXPERIMENT, folder / "run", cut)
        held = sorted((folder / "run" / "checkpoint").iterdir())
        WHOLE.update({file.name: file.read_bytes() for file in held})
        ABOUT.update(json.loads(WHOLE["3.json"])["about"])
        sys.addaudithook(watched)
    return WHOLE


INSIDE: list[Path] = []  # the folder that is being read


def watched(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and INSIDE and isinstance(arguments[0], str):
        opened = Path(arguments[0]).resolve()
        assert INSIDE[0] in opened.parents or opened.suffix in (".py", ".pyc", ".so"), f"{opened} was opened"


def newest() -> list[str]:
    return [*sorted(json.loads(WHOLE["3.json"])["files"]), "3.json"]


def seeds(folder: Path) -> list[bytes]:
    held = whole(folder)
    return [bytes([mark | k]) + held[name] for mark in (0, MARK) for k, name in enumerate(newest())]


def attempt(folder: Path, data: bytes) -> None:
    held, place = whole(folder), folder / "tried"
    first, content = data[0] if data else 0, data[1:]
    name = newest()[(first & ~MARK) % len(newest())]
    tried = {"3.json": held["3.json"], name: content}
    if first & MARK:
        tried["3.json"] = signed(name, content, held["3.json"])
    if not place.exists():
        place.mkdir()
        tried = {**held, **tried}
    for file, bytes_ in tried.items():
        (place / file).write_bytes(bytes_)
    progress = Progress(CONTEXT.state.server, Rows(CONTEXT.state.rows), CONTEXT.store(EXPERIMENT.clients))
    INSIDE[:] = [place.resolve()]
    try:
        record, broken = checkpoint.Checkpoints(place, ABOUT).load(progress)
    finally:
        INSIDE.clear()
        (place / name).write_bytes(held[name])
    assert progress.round in (2, 3) or first & MARK
    assert len(broken) == (progress.round == 2), broken
    assert record.keys() <= {"rounds", "clients", "notes"}


def signed(name: str, content: bytes, listed: bytes) -> bytes:
    """The list that says of this file what it is; the list itself with another signature."""
    with suppress(ValueError, RecursionError):
        said = json.loads(content if name == "3.json" else listed)
        if not isinstance(said, dict):
            return content
        if name != "3.json":
            said["files"][name] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        said.pop("sha256", None)
        return json.dumps({**said, "sha256": checkpoint._signed(said)}).encode()
    return content


warnings.simplefilter("ignore")
HARNESSES = [Harness("checkpoints", seeds, attempt)]
