"""Checkpoints: all that a run is between two rounds, on disk, so that nothing is lost that was finished.

    checkpoint/20.json                     what the state after round 20 consists of: its files and their checksums
    checkpoint/20-server-0.safetensors     the server's slots
    checkpoint/20-private-0.safetensors    private states that changed since the checkpoint before; the others are in
    checkpoint/20-rows-0.safetensors       that one's files. Likewise the server's rows, the metrics and the notes
    checkpoint/20-rounds.parquet

Every file is written beside, flushed and renamed, the list of them last: a checkpoint is whole or not there. The one
before is kept until the next is whole, so that there is one to fall back to when a file turns out to be broken. What
both share is written twice, as `20-private-0.safetensors.twin`: of two copies one may be damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from idiolect.engine.progress import Progress
from idiolect.engine.work import checked
from idiolect.errors import ContractError, UsageError, said
from idiolect.files import write
from idiolect.method import Rows, Slots, Written
from idiolect.tree import Tree
from idiolect.tree import entries as named  # here entries are clients

FORMAT = 1
GENERATIONS = 2  # checkpoints that are kept
TWIN = ".twin"  # of a file that later checkpoints may share: all but the server's and the lists
LARGEST, MOST = 256 << 20, 20_000  # bytes and tensors of one file, about
LONGEST = 64 << 20  # bytes of a list of files
NOTES = "notes"
TABLES = ("rounds", "clients", NOTES)  # of a record
ODD = (  # what odd content comes to, of which the checksums are right all the same: none of it was written here
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, StopIteration,
    RuntimeError, ContractError,
)  # fmt: skip
Record = Mapping[str, list[dict[str, Any]]]  # the tables of metrics, and the notes
Entries = Callable[[list[int]], Iterable[tuple[str, Slots, int]]]  # clients -> their ids, slots and visits


class BrokenError(Exception):
    """A checkpoint that cannot be read, and why."""


@dataclass
class Checkpoints:
    """The checkpoints of one run in one folder. `about`: what must be equal for a run to go on from them."""

    folder: Path
    about: Mapping[str, str]
    history: list[dict[str, Any]] = field(default_factory=list)  # what the run was carried out with, so far
    seconds: float = 0.0  # that it took so far
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the last checkpoint: name -> size and checksum
    written: dict[str, int] = field(default_factory=dict)  # rows of each table that are in files
    rows: dict[int, Slots] = field(default_factory=dict)  # as they are in files
    mended: list[str] = field(default_factory=list)  # files that were damaged when they were read

    # writing

    def save(self, progress: Progress, record: Record) -> None:
        """The state after this round. Should it fail, the last checkpoint is as it was."""
        self.folder.mkdir(exist_ok=True)
        store, rows, r = progress.store, progress.rows.written, progress.round
        private = lambda ids: ((str(i), store.read(i), int(store.visits[i])) for i in ids)
        files = self._tensors(r, "server", [("server", progress.server, 0)])
        files |= self._entries_of(r, "private", sorted(store.changed), store.visits.nonzero()[0].tolist(), private)
        moved = [i for i, row in rows.items() if self.rows.get(i) is not row]
        files |= self._entries_of(r, "rows", moved, list(rows), lambda ids: ((str(i), rows[i], 0) for i in ids))
        for name, table in record.items():
            files |= {k: v for k, v in self.files.items() if _home(k) == name}
            fresh = table[self.written.get(name, 0) :]
            if fresh and name == NOTES:
                files |= self._tensors(r, name, ((str(k), note, 0) for k, note in enumerate(fresh)))
            elif fresh:
                files |= self._put(f"{r}-{name}.parquet", _parquet(fresh))
        self._list(r, files, sorted(progress.strangers))
        self.files, self.rows = files, dict(rows)
        self.written = {name: len(table) for name, table in record.items()}
        store.changed.clear()
        self._prune()

    def _entries_of(self, r: int, home: str, fresh: list[int], all_: list[int], entries: Entries) -> dict[str, Any]:
        """Files of what changed beside the earlier ones; of everything, once half of what they hold is overwritten."""
        earlier = {k: v for k, v in self.files.items() if _home(k) == home}
        held = sum(v["entries"] for v in earlier.values())
        if held + len(fresh) > 2 * len(all_):
            return self._tensors(r, home, entries(all_))
        return earlier | self._tensors(r, home, entries(fresh))

    def _tensors(self, r: int, home: str, entries: Iterable[tuple[str, Slots, int]]) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for number, group in enumerate(_groups(entries)):
            files |= self._put(f"{r}-{home}-{number}.safetensors", _packed(group), entries=len(group))
        return files

    def _put(self, name: str, content: bytes, **more: int) -> dict[str, dict[str, Any]]:
        for place in (name,) if _home(name) == "server" else (name, name + TWIN):
            write(self.folder / place, content)
        return {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **more}}

    def _list(self, r: int, files: Mapping[str, Any], strangers: list[int]) -> None:
        known = {"format": FORMAT, "round": r, "about": dict(self.about), "history": self.history}
        listed = {**known, "strangers": strangers, "seconds": self.seconds, "files": files}
        write(self.folder / f"{r}.json", json.dumps({**listed, "sha256": _signed(listed)}, indent=1).encode())
        _flush(self.folder)

    def _prune(self) -> None:
        """Remove what no kept checkpoint needs. What cannot be removed stays."""
        with suppress(OSError, ValueError, KeyError):
            kept = self.listed()[:GENERATIONS]
            needed = {name for file in kept for name in json.loads(file.read_text())["files"]} | {f.name for f in kept}
            for file in self.folder.iterdir():
                if file.name.removesuffix(TWIN) not in needed:
                    file.unlink()

    # reading

    def listed(self) -> list[Path]:
        """The lists of the checkpoints that are there, the newest first."""
        found = [file for file in self.folder.glob("*.json") if file.stem.isdecimal() and len(file.stem) < 10]
        return sorted(found, key=lambda file: -int(file.stem))

    def load(self, progress: Progress) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
        """Bring the newest whole checkpoint into `progress`; its record, and a sentence for all that is broken."""
        broken: list[str] = []
        damaged: list[Path] = []
        for file in self.listed():
            try:
                listed = self._read_list(file)
                record = self._restored(listed, progress)
            except BrokenError as why:
                broken.append(f"The checkpoint after round {int(file.stem)} is broken ({why}).")
                damaged.append(file)
                continue
            for useless in damaged:
                with suppress(OSError):
                    useless.unlink()
            told = [f"{sentence} The run goes on from the one before." for sentence in broken]
            return record, told + [f"{name} was damaged, and is mended from its twin." for name in self.mended]
        if broken:
            raise UsageError(f"{' '.join(broken)} None is whole; remove '{self.folder.parent}' to begin anew.")
        return {}, []

    def _read_list(self, file: Path) -> dict[str, Any]:
        content = _content(file, LONGEST)
        try:
            listed: dict[str, Any] = json.loads(content)
            signature = listed.pop("sha256")
        except (*ODD, MemoryError):
            raise BrokenError(f"{file.name} is not a list of files") from None
        if signature != _signed(listed):
            raise BrokenError(f"{file.name} has another checksum")
        try:
            self._check(file, listed)
        except UsageError:
            raise
        except ODD as error:
            raise BrokenError(f"{file.name} lists what it should not: {said(error)}") from None
        return listed

    def _check(self, file: Path, listed: Mapping[str, Any]) -> None:
        if listed["format"] != FORMAT:
            raise UsageError(f"{file} has format {listed['format']}, this version of Idiolect reads {FORMAT}.")
        for name, value in self.about.items():
            if listed["about"].get(name) != value:
                raise UsageError(f"{file} belongs to a run with another {name}; go on with the one that it is of.")
        if listed["round"] != int(file.stem):
            raise BrokenError(f"{file.name} is of another round")
        for name, entry in listed["files"].items():
            if name != Path(name).name:
                raise BrokenError(f"{file.name} names '{name}', which is not in its folder")
            self._whole(name, entry)

    def _whole(self, name: str, entry: Mapping[str, Any]) -> None:
        """Refuse a file that is not as it was listed; or mend it, where it has a twin that is."""
        try:
            _listed(self.folder / name, entry)
        except BrokenError as damage:
            try:
                write(self.folder / name, _listed(self.folder / (name + TWIN), entry))
            except (BrokenError, OSError):
                raise damage from None
            self.mended.append(name)

    def _restored(self, listed: Mapping[str, Any], progress: Progress) -> dict[str, list[dict[str, Any]]]:
        try:
            return self._restore(listed, progress)
        except UsageError:
            raise
        except ODD as error:
            raise BrokenError(f"its files hold something else: {said(error)}") from None

    def _restore(self, listed: Mapping[str, Any], progress: Progress) -> dict[str, list[dict[str, Any]]]:
        files = sorted(listed["files"], key=_place)
        server = next(slots for _, slots, _ in self._entries(files, "server"))
        checked("The checkpoint", "server", server, progress.server, f"round {listed['round']}")
        progress.store.visits[:] = 0  # what a broken checkpoint may have brought does not count
        rows = {int(i): row for i, row, _ in self._entries(files, "rows")}
        latest = {int(i): visits for i, _, visits in self._entries(files, "private", slots=False)}
        if any(not 0 <= i < len(progress.store.visits) for i in (*rows, *latest)):
            raise BrokenError("it names clients that there are none of")
        for i, mine, visits in self._entries(files, "private"):
            if latest[int(i)] == visits:
                checked("The checkpoint", "mine", mine, progress.store.template(int(i)), f"client {i}")
                progress.store.write(int(i), mine)
                progress.store.visits[int(i)] = visits
        record: dict[str, list[dict[str, Any]]] = {NOTES: [dict(slots) for _, slots, _ in self._entries(files, NOTES)]}
        for name in files:
            if name.endswith(".parquet") and _home(name) in TABLES:
                record.setdefault(_home(name), []).extend(_rows(self.folder / name))
        if [row["round"] for row in record["rounds"]] != list(range(listed["round"] + 1)):
            raise BrokenError("it does not have the metrics of every round")
        self.history, self.seconds = [dict(entry) for entry in listed["history"]], float(listed["seconds"])
        progress.server, progress.round = server, listed["round"]
        progress.strangers = frozenset(map(int, listed["strangers"]))
        progress.rows = Rows(progress.rows.template, Written(rows))
        self.files, self.rows, self.written = dict(listed["files"]), rows, {k: len(v) for k, v in record.items()}
        progress.store.changed.clear()
        return record

    def _entries(self, files: Iterable[str], home: str, slots: bool = True) -> Iterator[tuple[str, Slots, int]]:
        for name in files:
            if _home(name) == home and name.endswith(".safetensors"):
                yield from _unpacked(self.folder / name, slots)


def environment(round: int) -> dict[str, Any]:
    """What may change bits, should a run be carried out again or go on elsewhere."""
    import platform

    from idiolect import __version__

    return {
        "from_round": round,
        "idiolect": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


# names


def _home(name: str) -> str:
    return name.split("-")[1].partition(".")[0]


def _place(name: str) -> tuple[int, int]:
    """Files in the order in which they were written."""
    parts = name.partition(".")[0].split("-")
    return int(parts[0]), int(parts[2]) if len(parts) > 2 else 0


# files


def _content(file: Path, most: int) -> bytes:
    """All of a file that lies there itself, unless it has more bytes."""
    try:
        about = file.lstat()
        if not stat.S_ISREG(about.st_mode):
            raise BrokenError(f"{file.name} is no file")
        if about.st_size > most:
            raise BrokenError(f"{file.name} has another checksum")
        return file.read_bytes()
    except OSError as error:
        raise BrokenError(f"{file.name}: {error.strerror}") from None


def _listed(file: Path, entry: Mapping[str, Any]) -> bytes:
    """All of a file that is as it was listed."""
    content = _content(file, entry["bytes"])
    if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise BrokenError(f"{file.name} has another checksum")
    return content


def _flush(folder: Path) -> None:
    """The renamings as well."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _signed(listed: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def _groups(entries: Iterable[tuple[str, Slots, int]]) -> Iterator[list[tuple[str, Slots, int]]]:
    """Entries by files of a bounded size, so that memory is bounded, too."""
    group: list[tuple[str, Slots, int]] = []
    size = count = 0
    for entry in entries:
        found = [t for value in entry[1].values() for t in named(value).values()]
        if group and (size > LARGEST or count > MOST):
            yield group
            group, size, count = [], 0, 0
        group.append(entry)
        size, count = size + sum(t.numel() * t.element_size() for t in found), count + len(found)
    if group:
        yield group


def _packed(group: list[tuple[str, Slots, int]]) -> bytes:
    """A tensor that stands in several places is one tensor, then as before: what is sent once stays sent once."""
    tensors: dict[str, Tensor] = {}
    places: dict[Any, str] = {}
    outline = []
    for owner, slots, visits in group:
        shape: dict[str, Any] = {}
        for slot, value in slots.items():
            keys = {}
            for name, tensor in named(value).items():
                place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
                key = places.setdefault(place, f"{owner}/{slot}/{name}") if tensor.numel() else f"{owner}/{slot}/{name}"
                keys[name] = key
                if key not in tensors:
                    tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
            shape[slot] = keys if isinstance(value, Tree) else keys[""]
        outline.append((owner, visits, shape))
    return save(tensors, {"outline": json.dumps(outline)})


def _unpacked(file: Path, read: bool) -> Iterator[tuple[str, Slots, int]]:
    try:
        with safe_open(file, "pt") as held:
            outline = json.loads(held.metadata()["outline"])
            # copied: where a tensor lies in memory, as a file has it, may change the last bit of a sum over it
            tensors = {key: held.get_tensor(key).clone() for key in held.keys()} if read else {}  # noqa: SIM118
    except (OSError, SafetensorError, *ODD) as error:
        raise BrokenError(f"{file.name}: {said(error)}") from None
    for owner, visits, shape in outline:
        slots = {
            slot: tensors[keys] if isinstance(keys, str) else Tree({name: tensors[key] for name, key in keys.items()})
            for slot, keys in (shape.items() if read else ())
        }
        yield owner, slots, visits


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.ParquetFile(file).read().to_pylist()
        return rows
    except (OSError, pa.ArrowException) as error:
        raise BrokenError(f"{file.name}: {said(error)}") from None
