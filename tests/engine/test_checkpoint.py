"""Checkpoints: a run that is killed at any moment, or whose files are damaged, goes on and ends with the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from contract.test_contract import CutOffError, measured, prepared, same, table
from idiolect import running
from idiolect.engine import checkpoint
from idiolect.engine.progress import Progress
from idiolect.errors import UsageError
from idiolect.method import Rows

# one with each kind of state: the server's, clients', both, rows, an introduction and other architectures, notes
KINDS = ["fedavgm", "fedrep", "scaffold", "fedamp", "fedsimsup", "fedlag"]
OPERATIONS = ("open", "fsync", "replace", "unlink")


def made(name="fedrep", **fields):
    return prepared(name, **{"rounds": 3, "checkpoint_every": 1, "epochs": 1} | fields)


def in_child(body) -> int:
    """The exit status of a child process that does this; minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(count: int):
    """From now on the process kills itself before its `count`-th operation on a file."""
    left = [count]

    def instead(original):
        def operation(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return operation

    for name in OPERATIONS:
        setattr(os, name, instead(getattr(os, name)))
    Path.open = instead(Path.open)


def agrees(found, whole) -> bool:
    assert same(table(whole.progress), table(found.progress))
    assert measured(whole) == measured(found)
    return True


def continued(experiment, path):
    """What a user does: go on where there is something to go on with, else begin."""
    if running.begun(path):
        return running.run(experiment, path, resume=True)
    running.withdraw(path) if path.exists() else None
    shutil.rmtree(path, ignore_errors=True)  # a directory that was made and nothing else
    return running.run(experiment, path)


def test_a_run_killed_at_any_file_operation_goes_on_with_the_same_bits(tmp_path):
    whole = running.run(made())
    count, ends = 0, set()
    while 0 not in ends:
        count += 1
        path = tmp_path / str(count)

        def body(path=path, count=count):
            killed_at(count)
            running.run(made(), path)

        ends.add(in_child(body))
        if (path / "summary.json").exists():
            continue  # after the last word there is nothing to lose
        assert agrees(continued(made(), path), whole)
        shutil.rmtree(path)
    assert ends == {0, -signal.SIGKILL}
    assert count > 40  # operations on files of three checkpoints and of the results


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_every_kind_of_state_survives_two_kills(name, share, tmp_path):
    whole, counted = running.run(made(name)), [0]

    def count(original):
        def operation(*args, **kwargs):
            counted[0] += 1
            return original(*args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for operation in OPERATIONS:
            patch.setattr(os, operation, count(getattr(os, operation)))
        patch.setattr(Path, "open", count(Path.open))
        running.run(made(name), tmp_path / "counted")
    path = tmp_path / "run"
    for _ in range(2):

        def body():
            killed_at(int(counted[0] * share))
            continued(made(name), path)

        assert in_child(body) in (0, -signal.SIGKILL)
    if not (path / "summary.json").exists():
        assert agrees(continued(made(name), path), whole)
    else:
        assert json.loads((path / "summary.json").read_text())["accuracy"] == whole.summary["accuracy"]


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """A run with two checkpoints, and what it would have come to."""
    path = tmp_path_factory.mktemp("cut") / "run"
    experiment = made("fedsimsup", rounds=4)

    def cut(report):
        if report.round == 4:
            raise CutOffError

    with pytest.raises(CutOffError):
        running.run(experiment, path, cut)
    return path, experiment, running.run(experiment)


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncated(file):
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file):
    file.write_bytes(b"")


DAMAGES = [flipped, truncated, emptied, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_any_one_file_may_be_damaged(cut_off, damage, tmp_path):
    """What is said of it: the newest checkpoint's own files give way to the one before, what both share has a twin."""
    path, experiment, whole = cut_off
    names = sorted(p.name for p in (path / "checkpoint").iterdir())
    needed = json.loads((path / "checkpoint" / "3.json").read_text())["files"]
    twins = [n for n in needed if f"{n}.twin" in names]
    assert {"2-clients.parquet", "2-rounds.parquet"} <= set(twins)  # of the checkpoint before as well
    assert set(needed) - set(twins) == {"3-server-0.safetensors"}
    told = {
        "3.json": "after round 3 is broken .* goes on from the one",
        "3-server-0.safetensors": "after round 3 is broken",
    }
    told |= {name: f"{name} was damaged, and is mended from its twin" for name in twins}
    if damage is Path.unlink:
        told.pop("3.json")  # then there is no such checkpoint
    for name in names:
        place = tmp_path / name
        shutil.copytree(path, place)
        damage(place / "checkpoint" / name)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found = running.run(experiment, place, resume=True)
        said = " ".join(str(w.message) for w in heard)
        assert re.search(told[name], said) if name in told else said == ""
        assert agrees(found, whole)


def test_of_two_copies_that_are_damaged_the_first_is_named(cut_off, tmp_path):
    path, experiment, whole = cut_off
    shutil.copytree(path, tmp_path / "run")
    for name in ("3-rounds.parquet", "3-rounds.parquet.twin"):  # the newest checkpoint's own part
        flipped(tmp_path / "run" / "checkpoint" / name)
    with pytest.warns(
        UserWarning, match=r"after round 3 is broken \(3-rounds\.parquet has another checksum\)\. The run"
    ):
        assert agrees(running.run(experiment, tmp_path / "run", resume=True), whole)


def test_where_no_checkpoint_is_whole_nothing_is_done_and_nothing_removed(cut_off, tmp_path):
    path, experiment, _ = cut_off
    shutil.copytree(path, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoint").glob("*-server-0.safetensors"):
        flipped(file)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match=r"after round 3 is broken .* after round 2 is broken .* None is whole"):
        running.run(experiment, tmp_path / "run", resume=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_list_that_names_files_elsewhere_is_broken(cut_off, tmp_path):
    path, experiment, whole = cut_off
    shutil.copytree(path, tmp_path / "run")
    file = tmp_path / "run" / "checkpoint" / "3.json"
    listed = json.loads(file.read_text())
    listed.pop("sha256")
    listed["files"]["../run.toml"] = next(iter(listed["files"].values()))
    file.write_text(json.dumps({**listed, "sha256": checkpoint._signed(listed)}))
    with pytest.warns(UserWarning, match=r"names '../run.toml'"):
        assert agrees(running.run(experiment, tmp_path / "run", resume=True), whole)


def test_another_run_does_not_go_on_from_it(cut_off, tmp_path):
    path, _, _ = cut_off
    for other in (made("fedsimsup", rounds=4, lr=0.2), made("fedsimsup", rounds=4, federation=None, seed=4), made()):
        shutil.copytree(path, tmp_path / "run")
        with pytest.raises(UsageError, match="holds another run than the one to go on with"):
            running.run(other, tmp_path / "run", resume=True)
        shutil.rmtree(tmp_path / "run")


def test_workers_may_go_on_with_what_one_process_began(cut_off, tmp_path):
    path, _, whole = cut_off
    shutil.copytree(path, tmp_path / "run")
    found = running.run(made("fedsimsup", rounds=4, backend="workers", workers=2), tmp_path / "run", resume=True)
    assert agrees(found, whole)
    assert found.summary["made_with"][0]["torch"] == torch.__version__
    assert len(found.summary["made_with"]) == 1  # the same everywhere


def test_what_it_was_made_with_is_written_down_where_that_changed(cut_off, tmp_path, monkeypatch):
    path, experiment, _ = cut_off
    shutil.copytree(path, tmp_path / "run")
    monkeypatch.setattr(platform, "python_version", lambda: "99.0")
    found = running.run(experiment, tmp_path / "run", resume=True)
    assert [(e["from_round"], e["python"] == "99.0") for e in found.summary["made_with"]] == [(0, False), (3, True)]


# what is written


def test_only_private_states_that_changed_are_written_again(tmp_path):
    """Eight clients, two a round: each checkpoint adds their two states, not eight."""
    lists = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3]]
    experiment = made("fedrep", ratio=lists, rounds=6)
    seen = []

    def look(report):
        files = {
            p.name: json.loads(p.read_text())["files"] for p in (tmp_path / "run" / "checkpoint").glob("[0-9]*.json")
        }
        seen.append(files)

    running.run(experiment, tmp_path / "run", look)
    for r in (1, 2, 3, 4, 5):
        private = {k: v["entries"] for k, v in seen[r][f"{r - 1}.json"].items() if "private" in k} if r > 1 else {}
        assert private == {f"{k}-private-0.safetensors": 2 for k in range(1, r)}


def test_what_is_overwritten_does_not_pile_up(tmp_path):
    sizes = []

    def look(report):
        folder = tmp_path / "run" / "checkpoint"
        sizes.append(sum(p.stat().st_size for p in folder.glob("*-private-*")) if folder.exists() else 0)

    running.run(made("fedrep", ratio=1.0, rounds=12, evaluate_every=12), tmp_path / "run", look)
    assert max(sizes) <= 4 * sizes[2]  # two checkpoints, each at most twice what there is


def test_files_are_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST", 3)
    whole = running.run(made("fedamp"))

    def cut(report):
        if report.round == 3:
            raise CutOffError

    with pytest.raises(CutOffError):
        running.run(made("fedamp"), tmp_path / "run", cut)
    assert len(list((tmp_path / "run" / "checkpoint").glob("2-rows-*"))) > 2
    assert agrees(running.run(made("fedamp"), tmp_path / "run", resume=True), whole)


def test_none_is_written_where_none_is_wanted(tmp_path):
    seen = []
    running.run(made(checkpoint_every=0), tmp_path / "run", lambda _: seen.extend((tmp_path / "run").glob("check*")))
    assert not seen


# a disk that refuses


def refused(body) -> None:
    """In the child: exits with 0 if the sentence is there."""
    try:
        body()
    except UsageError as error:
        os._exit(
            0 if "could not be written" in str(error) and "Mend that, and go on with --resume" in str(error) else 3
        )
    os._exit(4)


def test_a_full_disk_costs_nothing_that_was_written(tmp_path):
    """A limit of the process, for files: what is larger than the first checkpoint's largest does not fit."""
    whole, path = running.run(made(rounds=4)), tmp_path / "run"

    def fills(report):
        if report.round == 3:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    assert in_child(lambda: refused(lambda: running.run(made(rounds=4), path, fills))) == 0
    assert [p.stem for p in checkpoint.Checkpoints(path / "checkpoint", {}).listed()] == ["2", "1"]
    assert agrees(running.run(made(rounds=4), path, resume=True), whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user than root a directory is simply made read-only below")
def test_a_directory_that_may_not_be_written_to_costs_nothing_as_root(tmp_path):
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    _read_only(tmp_path, lambda: os.seteuid(65534))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_to_costs_nothing(tmp_path):
    _read_only(tmp_path, lambda: None)


def _read_only(tmp_path, become):
    whole, path = running.run(made(rounds=4)), tmp_path / "run"

    def locks(report):
        if report.round == 3:
            (path / "checkpoint").chmod(0o555)

    def body():
        become()
        running.run(made(rounds=4), path, locks)

    assert in_child(lambda: refused(body)) == 0
    (path / "checkpoint").chmod(0o755)
    assert agrees(running.run(made(rounds=4), path, resume=True), whole)


# being asked to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_effect_after_the_round_with_a_checkpoint(tmp_path, number, capfd):
    whole, heard = running.run(made(rounds=5, checkpoint_every=100)), []

    def asks(report):
        heard.append(report.round)
        if report.round == 2:
            signal.raise_signal(number)

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    experiment = made(rounds=5, checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        running.run(experiment, tmp_path / "run", asks)
    assert heard == [0, 1, 2]
    assert "Stopping after this round" in capfd.readouterr().err
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert agrees(running.run(experiment, tmp_path / "run", resume=True), whole)


def test_the_second_signal_stops_at_once(tmp_path):
    def asks(report):
        if report.round == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        running.run(made(rounds=5), tmp_path / "run", asks)
    assert [p.stem for p in checkpoint.Checkpoints(tmp_path / "run" / "checkpoint", {}).listed()] == ["1"]


def test_a_run_in_its_last_round_finishes_and_then_stops(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        running.run(made(), tmp_path / "run", lambda r: signal.raise_signal(signal.SIGINT) if r.round == 3 else None)
    assert (tmp_path / "run" / "summary.json").exists()


# what is refused


def test_there_must_be_something_to_go_on_with(tmp_path):
    with pytest.raises(UsageError, match=r"found no run\.toml there"):
        running.run(made(), tmp_path, resume=True)
    running.run(made(), tmp_path / "run")
    with pytest.raises(UsageError, match="holds a finished run; there is nothing to go on with"):
        running.run(made(), tmp_path / "run", resume=True)


def test_a_run_that_was_cut_off_is_not_overwritten(cut_off):
    path, experiment, _ = cut_off
    with pytest.raises(UsageError, match="holds a run that was cut off: 'idiolect run --resume"):
        running.run(experiment, path)


def test_no_warning_where_nothing_is_broken(cut_off, tmp_path):
    path, experiment, whole = cut_off
    shutil.copytree(path, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert agrees(running.run(experiment, tmp_path / "run", resume=True), whole)


# files that say anything, with the right checksums


def signed(folder, change, name="3.json"):
    """The newest list with something changed in it, signed anew."""
    listed = json.loads((folder / name).read_text())
    listed.pop("sha256")
    changed = change(listed)
    listed = listed if changed is None else changed
    (folder / name).write_text(json.dumps({**listed, "sha256": checkpoint._signed(listed)}))


def of(home, change):
    """Changes a file of this home, and says in the list what it now is."""

    def changed(listed, folder):
        name = next(n for n in sorted(listed["files"]) if n.startswith(f"3-{home}"))
        content = change((folder / name).read_bytes())
        (folder / name).write_bytes(content)
        listed["files"][name] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    return changed


def outlined(change):
    """Changes what a file of tensors says of its clients."""

    def changed(content):
        held = load_tensors(content)
        size = int.from_bytes(content[:8], "little")
        outline = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["outline"])
        return save_tensors(held, {"outline": json.dumps(change(outline))})

    return changed


LISTS = {
    "no files": lambda listed, _: listed.pop("files"),
    "a number of files": lambda listed, _: listed.update(files=3),
    "no format": lambda listed, _: listed.pop("format"),
    "no number": lambda listed, _: listed.update(round=None),
    "another round": lambda listed, _: listed.update(round=10**30),
    "odd sizes": lambda listed, _: [entry.update(bytes="many") for entry in listed["files"].values()],
    "vast sizes": lambda listed, _: [entry.update(bytes=10**30) for entry in listed["files"].values()],
    "an odd name": lambda listed, _: listed["files"].update({"x": listed["files"]["3-server-0.safetensors"]}),
    "a name with a null": lambda listed, _: listed["files"].update({"3-server\0": {"bytes": 1, "sha256": ""}}),
    "its folder": lambda listed, _: listed["files"].update({"..": {"bytes": 1, "sha256": ""}}),
    "no seconds": lambda listed, _: listed.pop("seconds"),
    "odd history": lambda listed, _: listed.update(history=[3]),
    "no server": lambda listed, _: listed["files"].pop("3-server-0.safetensors"),
    "no metrics": lambda listed, _: [listed["files"].pop(n) for n in list(listed["files"]) if "rounds" in n],
    "tensors that are none": of("server", lambda content: b"{}" + content),
    "tensors without an outline": of("server", lambda content: save_tensors(load_tensors(content))),
    "an outline of odd things": of("private", outlined(lambda outline: [3, "x"])),
    "a client that is none": of("private", outlined(lambda outline: [[10**30, 1, shape] for _, _, shape in outline])),
    "a client before the first": of("private", outlined(lambda outline: [["-1", 1, shape] for _, _, shape in outline])),
    "states without a slot": of("private", outlined(lambda outline: [[i, visits, {}] for i, visits, _ in outline])),
    "visits beyond all": of("private", outlined(lambda outline: [[i, 10**30, shape] for i, _, shape in outline])),
    "a table that is none": of("clients", lambda content: content[4:]),
}


@pytest.mark.parametrize("case", LISTS)
def test_odd_content_with_the_right_checksums_is_refused_for_the_checkpoint_before(cut_off, case, tmp_path):
    path, experiment, whole = cut_off
    shutil.copytree(path, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint"
    signed(folder, lambda listed: LISTS[case](listed, folder) and None)
    with pytest.warns(UserWarning, match=r"after round 3 is broken \("):
        assert agrees(running.run(experiment, tmp_path / "run", resume=True), whole)


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b"[" * 100_000, b"9" * 5000, b"\xff", b'{"sha256": {}}'])
def test_a_list_that_is_none_is_broken(cut_off, context, content, tmp_path):
    path, _, _ = cut_off
    shutil.copytree(path / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "3.json").write_bytes(content)
    assert restored(context, tmp_path / "checkpoint")[0] == 2


@pytest.fixture(scope="module")
def context(cut_off):
    return cut_off[1].context()


def restored(context, folder):
    """The round that is brought back, and what is said of others."""
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(8))
    about = json.loads((folder / "2.json").read_text())["about"]
    _, broken = checkpoint.Checkpoints(folder, about).load(progress)
    return progress.round, broken


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_costs_one_checkpoint_at_most(cut_off, context, data, tmp_path):
    """Cut off, overwritten in places or made of anything; what the list says then agrees with it, or not."""
    path, _, _ = cut_off
    folder = tmp_path / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path / "checkpoint", folder)
    newest = json.loads((folder / "3.json").read_text())["files"]
    own = [name for name in sorted(newest) if name.startswith("3-")]  # the others are the checkpoint's before, too
    name = data.draw(st.sampled_from([*own, "3.json"]), "file")
    content = (folder / name).read_bytes()
    at = data.draw(st.integers(0, len(content)), "place")
    made = [content[:at], content[:at] + data.draw(st.binary(max_size=9)) + content[at + 1 :], data.draw(st.binary())]
    (folder / name).write_bytes(made[data.draw(st.integers(0, 2), "damage")])
    if name != "3.json" and data.draw(st.booleans(), "signed"):
        signed(folder, lambda listed: of(name[2:].partition(".")[0], lambda content: content)(listed, folder) or None)
    assert restored(context, folder)[0] in (2, 3)


def test_files_that_are_elsewhere_or_never_end_are_not_opened(cut_off, context, tmp_path):
    path, _, _ = cut_off
    for number, make in enumerate((lambda f: f.symlink_to(path / "checkpoint" / f.name), os.mkfifo, Path.mkdir)):
        folder = tmp_path / str(number)
        shutil.copytree(path / "checkpoint", folder)
        (folder / "3-server-0.safetensors").unlink()
        make(folder / "3-server-0.safetensors")
        round, (sentence,) = restored(context, folder)
        assert round == 2
        assert "3-server-0.safetensors is no file" in sentence
