"""Clients whose processes are killed, crash, hang or get no memory: run again, given up the second time, and reported.
Nobody else's numbers change, and no process is left, whatever ends first."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import odd
import pytest
import torch
from pools import begin, carried_out, nobody_left, same

from harness import SIZES, experiment, run
from idiolect.engine.failing import Parcel, out_of_memory
from idiolect.engine.faults import Faults
from idiolect.engine.loop import loop
from idiolect.engine.work import Job, Reply
from idiolect.errors import ClientError, UsageError
from idiolect.report import tables
from idiolect.running import backend, one_thread

KILLED = "its process was killed, as the system does when memory runs out"
WORDS = {
    "kill": KILLED,
    "crash": "its process ended with SIGSEGV",
    "exit": "its process ended with exit code 7",
    "hog": "out of memory",
    "list": "out of memory",
}
proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "told").mkdir()
    return str(tmp_path / "told")


class Losing(Faults):
    """The replies of certain clients are lost in every round."""

    clients = frozenset()

    def lost(self, round, client):
        return client in self.clients


def losing(run_, *clients):
    faults = Losing(run_.seed, run_.rounds)
    object.__setattr__(faults, "clients", frozenset(clients))
    vars(run_)["faults"] = faults
    return run_


def followed(run_, count, **how):
    """The state in the end, and what all rounds reported."""
    reports = []
    return carried_out(run_, count, watch=lambda report, pool: reports.append(report), **how), reports


def failed(reports):
    return [r.failed for r in reports]


# given up the second time


@pytest.mark.parametrize(
    ("count", "parcel", "how"), [(1, None, "kill"), (2, 3, "crash"), (4, 1, "exit"), (2, 8, "hog")]
)
def test_a_client_that_always_fails_is_as_one_whose_reply_is_lost(folder, count, parcel, how):
    lost = carried_out(losing(experiment(odd.Shared()), 2), count=0)
    found, reports = followed(experiment(odd.Failing(folder=folder, clients=(2,), how=how)), count, parcel=parcel)
    assert same(lost, found)
    assert found.store.visits[2] == 0
    there = [2 in r.participants for r in reports]
    assert sum(there) > 1
    assert failed(reports) == [{2: WORDS[how]} if took_part else {} for took_part in there]
    assert len(list(Path(folder).iterdir())) == 2 * sum(there)
    assert not any(2 in r.trained for r in reports)
    assert all(2 in r.received for r in reports)  # it is scored as ever


@pytest.mark.parametrize("how", ["kill", "hog"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_clients_that_fail_once_are_run_again_with_the_same_bits(folder, count, how):
    """Several at once, so that several workers are replaced at once."""
    plain = carried_out(experiment(odd.Shared()), count=0)
    method = odd.Failing(folder=folder, clients=(0, 4, 5), how=how, times=1)
    found, reports = followed(experiment(method), count, parcel=2)
    assert same(plain, found)
    assert not any(failed(reports))
    assert {int(f.name.split("-")[0]) for f in Path(folder).iterdir()} == {0, 4, 5}


def test_all_of_a_round_may_fail(folder):
    run_ = experiment(odd.Failing(folder=folder, clients=tuple(range(8))), rounds=2, ratio=1.0)
    found, reports = followed(run_, count=3)
    assert found.server["model"].equals(run_.context().state.server["model"])
    assert failed(reports) == [{}, *[dict.fromkeys(range(8), KILLED)] * 2]


def test_a_client_that_takes_too_long_is_ended_with_its_worker(tmp_path):
    """One always, and another once, at the same time."""
    fields = {"rounds": 1, "ratio": [[0, 2, 3, 5]], "backend": "workers", "time_limit": 4.0}
    lost = carried_out(losing(experiment(odd.Shared(), **fields), 2), count=0)
    method = odd.FailingTwice(folder=str(tmp_path), clients=(2,), once=(0,), how="hang")
    found, reports = followed(experiment(method, **fields), count=2, parcel=1)
    assert same(lost, found)
    assert failed(reports) == [{}, {2: "took longer than 4 s"}]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["0-0-0", "2-0-0", "2-0-1"]


def test_who_fails_when_asked_has_no_part_in_the_round(folder):
    lost = carried_out(losing(experiment(odd.Asked()), 2), count=0)
    found, reports = followed(experiment(odd.Asked(folder=folder, clients=(2,), where="ask")), count=2)
    assert same(lost, found)
    there = [r for r in reports if 2 in r.participants]
    assert len(list(Path(folder).iterdir())) == 2 * len(there) > 0
    assert all(r.failed == {2: KILLED} for r in there)


@pytest.mark.parametrize("how", ["kill", "list"])
def test_a_client_that_cannot_introduce_itself_ends_the_run(folder, how):
    with pytest.raises(ClientError, match=rf"greeting\.hello: client 3 failed twice \({WORDS[how]}\), and the method"):
        carried_out(experiment(odd.Greeting(folder=folder, clients=(3,), how=how, where="hello")), count=2)
    once = odd.Greeting(folder=folder, clients=(4,), how=how, where="hello", times=1)
    assert same(carried_out(experiment(odd.Greeting()), count=0), carried_out(experiment(once), count=2))


def test_who_fails_in_its_evaluation_has_no_score(folder):
    """Not even the one from before."""
    fields = {"ratio": [[0, 2, 5]], "rounds": 2, "backend": "workers", "workers": 2}
    plain = run(experiment(odd.Shared(), **fields))
    found = run(experiment(odd.Unpredictable(folder=folder, clients=(2,)), **fields), out=Path(folder).parent / "run")
    assert same(plain.progress, found.progress)
    assert [r["unscored"] for r in found.rounds] == [[], [f"2: {KILLED}"], [f"2: {KILLED}"]]
    scored = {(r["round"], r["client"]) for r in found.clients if r["moment"] == "received"}
    assert scored == {(r, i) for r in range(3) for i in range(8)} - {(1, 2), (2, 2)}
    mine = lambda result: [(r["round"], r["client"], r["correct"]) for r in result.clients if r["client"] != 2]
    assert mine(plain) == mine(found)
    index = json.loads((found.path / "models" / "index.json").read_text())
    assert [i for i, file in index.items() if file is None] == ["2"]
    assert not (found.path / "models" / "client-00002.safetensors").exists()
    assert found.summary["without_model"] == {"2": KILLED}
    assert found.summary["replies"]["unscored_of"] == {"2": 2}


# memory


@pytest.mark.parametrize("how", ["hog", "list"])
@pytest.mark.parametrize("where", ["serial", "workers", "stacked"])
def test_memory_that_is_not_there_is_no_mistake(folder, where, how):
    """The same in this process as in workers."""
    method = odd.Failing(folder=folder, clients=(2, 5), how=how)
    found = run(experiment(method, backend=where, workers=2 if where == "workers" else None))
    lost = run(losing(experiment(odd.Shared(), backend="serial" if where == "workers" else where), 2, 5))
    if where == "stacked":  # other stacks: other roundings
        a, b = (r.server["model"].flat() for r in (found, lost))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        assert found.progress.store.visits.tolist() == lost.progress.store.visits.tolist()
    else:
        assert same(lost.progress, found.progress)
    listed = [[f"{i}: out of memory" for i in (2, 5) if i in r["participants"]] for r in found.rounds]
    assert [r["failed"] for r in found.rounds] == listed
    assert found.summary["replies"]["failed"] == sum(map(len, listed)) > 0


def test_memory_that_is_there_the_second_time_changes_nothing(folder):
    plain = run(experiment(odd.Shared()))
    found = run(experiment(odd.Failing(folder=folder, clients=(0, 2, 5), how="list", times=1)))
    assert same(plain.progress, found.progress)
    assert list(Path(folder).iterdir())
    assert found.summary["replies"]["failed"] == 0


def made_by(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def wrapped():
    try:
        np.empty(1 << 58)
    except MemoryError as error:
        raise ClientError("fedavg, client 3") from error


def handled():
    try:
        [0] * (1 << 60)
    except MemoryError:
        raise ZeroDivisionError  # noqa: B904


def reported():
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("call", [lambda: [0] * (1 << 60), lambda: torch.empty(1 << 58), wrapped, reported])
def test_what_tells_that_there_was_no_memory(call):
    assert out_of_memory(made_by(call))


@pytest.mark.parametrize("call", [lambda: torch.ones(2) @ torch.ones(3), lambda: open("/none"), handled])  # noqa: SIM115
def test_what_does_not(call):
    assert not out_of_memory(made_by(call))


# stacks: several clients are under way together


def stack(method, **fields):
    return experiment(method, **{"steps": "stacked", "ratio": 1.0, "rounds": 1, "workers": 1} | fields)


@pytest.mark.parametrize(("how", "where"), [("kill", "workers"), ("list", "serial")])
@pytest.mark.parametrize("times", [1, 2])
def test_a_stack_that_fails_is_run_again_together_and_then_apart(folder, how, where, times):
    plain = run(stack(odd.FailingTogether(times=0)))
    found = run(stack(odd.FailingTogether(folder=folder, how=how, times=times), backend=where))
    assert len(list(Path(folder).iterdir())) == times
    assert found.summary["replies"]["failed"] == 0
    if times == 1:
        assert same(plain.progress, found.progress)
    else:
        a, b = (r.server["model"].flat() for r in (found, plain))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        assert found.progress.store.visits.tolist() == [1] * 8


def test_of_a_stack_only_who_fails_alone_is_given_up(folder):
    found = run(stack(odd.Failing(folder=folder, clients=(2,)), backend="workers"))
    assert [r["failed"] for r in found.rounds] == [[], [f"2: {KILLED}"]]
    assert found.progress.store.visits.tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    together = run(losing(stack(odd.Shared()), 2))
    a, b = (r.server["model"].flat() for r in (found, together))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("times", [1, 2])
def test_scores_of_several_in_one_batch_are_laid_to_nobody(folder, times):
    """34 clients are scored two at a time."""
    fields = {"sizes": (3,) * 34, "rounds": 0, "backend": "workers", "workers": 1}
    method = odd.FailingTogether(folder=folder, times=times, where="logits")
    plain, found = (run(experiment(m, **fields)) for m in (odd.Shared(), method))
    assert len(list(Path(folder).iterdir())) == times
    assert found.summary["replies"]["unscored"] == 0
    assert [(r["client"], r["correct"]) for r in plain.clients] == [(r["client"], r["correct"]) for r in found.clients]
    if times == 1:
        assert plain.clients == found.clients


def jobs(*clients):
    return [Job("local", i, 0, 0, {}, {}) for i in clients]


def clients(jobs):
    return [job.client for job in jobs]


def test_a_parcel_is_done_together_then_apart_then_not_at_all():
    parcel = Parcel(jobs(4, 1, 7))
    parcel.blame(None, "no")
    assert [clients(group) for group in parcel.groups] == [[4, 1, 7]]
    parcel.blame(None, "no")
    assert [clients(group) for group in parcel.groups] == [[4], [1], [7]]
    parcel.blame(1, "once")
    assert clients(parcel.left) == [4, 1, 7]
    parcel.blame(1, "twice")
    assert clients(parcel.left) == [4, 7]
    found = parcel.answered([Reply(4, None, None), Reply(7, None, None)])
    assert [(r.client, r.failed) for r in found] == [(4, ""), (1, "twice"), (7, "")]
    parcel.blame(None, "no")
    parcel.blame(None, "not even apart")
    assert not parcel.left
    assert [(r.client, r.failed) for r in parcel.answered([])] == [
        (4, "not even apart"),
        (1, "twice"),
        (7, "not even apart"),
    ]


# workers that never begin, and the process that starts them


def test_workers_that_cannot_begin_end_the_run():
    context, progress, pool = begin(run_ := experiment(odd.Unborn()))
    with pytest.raises(ClientError, match=r"A worker ended 3 times before it began with a client \(exit code 3\)\."):
        loop(run_, context, pool, progress, lambda report: None)
    assert nobody_left(pool)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pids):
    """Whether these processes are over, or will be; a test that waits in vain fails in the end."""
    for _ in range(600):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.1)
    return False


@proc
@pytest.mark.parametrize("moment", ["between rounds", "while clients train"])
def test_the_server_that_workers_are_forks_of_may_die(folder, moment):
    """Its workers live on, and nobody would hear of their end: they are replaced."""
    plain = carried_out(experiment(odd.Shared()), count=0)
    pids, server = set(), lambda: forkserver._forkserver._forkserver_pid

    def kill(report, pool):
        pids.update(w.process.pid for w in pool._workers)
        if moment == "between rounds" and report.round == 1:
            os.kill(server(), signal.SIGKILL)

    method = odd.Shared() if moment == "between rounds" else odd.Orphaning(folder=folder, starter=ensured(), client=0)
    context, progress, pool = begin(run_ := experiment(method))
    with one_thread():
        loop(run_, context, pool, progress, lambda report: kill(report, pool))
    pool.close()
    assert same(plain, progress)
    assert moment == "between rounds" or Path(folder, "orphan").exists()
    assert len(pids) == 4
    assert gone(pids)


def ensured():
    begin(experiment(odd.Shared()))[2].close()
    return forkserver._forkserver._forkserver_pid


# nobody and nothing is left

SCRIPT = """
import json, os, sys, threading, time
from multiprocessing import forkserver
from pathlib import Path
import odd
from harness import experiment, run
from idiolect.engine import workers

if __name__ == "__main__":
    folder, how = sys.argv[1:]
    made = []
    start = workers._Worker._start
    def started(worker):
        start(worker)
        made.append(worker.process.pid)
    workers._Worker._start = started
    method = odd.Failing(folder=folder, clients=(0, 4), how=how, times=1)
    def tell():
        while not (len(list(Path(folder).iterdir())) >= 2 and len(made) >= 2):
            time.sleep(0.01)
        server = forkserver._forkserver._forkserver_pid
        print(json.dumps([server, *made]), flush=True)
    if how == "hang":
        threading.Thread(target=tell, daemon=True).start()
    run(experiment(method, backend="workers", workers=2, ratio=1.0))
    server = forkserver._forkserver._forkserver_pid
    children = [s.read_text().rpartition(")")[2].split() for s in Path("/proc").glob("[0-9]*/stat") if s.exists()]
    print(json.dumps([server, *made]))
    print(json.dumps([f[0] for f in children if int(f[1]) == server or (int(f[1]) == os.getpid() and f[0] == "Z")]))
"""


def script(tmp_path, folder, how):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(file), folder, how], stdout=subprocess.PIPE, text=True, env=env)


def shared_memory(pids):
    return [f.name for f in Path("/dev/shm").glob("*") if any(str(pid) in f.name for pid in pids)]


@proc
def test_a_killed_parent_leaves_neither_processes_nor_shared_memory(tmp_path, folder):
    """Both of its workers are at clients that never finish."""
    parent = script(tmp_path, folder, "hang")
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 3
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    assert gone(pids)
    assert not shared_memory([*pids, parent.pid])


@proc
def test_after_a_run_with_killed_workers_there_are_no_zombies(tmp_path, folder):
    parent = script(tmp_path, folder, "kill")
    said, _ = parent.communicate(timeout=300)
    pids, left = map(json.loads, said.splitlines())
    assert parent.returncode == 0
    assert len(pids) > 3  # some were replaced
    assert left == []
    assert gone(pids)
    assert not shared_memory([*pids, parent.pid])


# what the user is told


def test_a_time_limit_needs_processes():
    for where in ("serial", "stacked"):
        with pytest.raises(UsageError, match=f"time_limit needs processes .* backend={where} .* Use backend=workers"):
            experiment("fedavg", backend=where, time_limit=5)
    for none in (0, -1.0):
        with pytest.raises(UsageError, match="time_limit must be a number > 0, or none"):
            experiment("fedavg", backend="workers", time_limit=none)
    run_ = experiment("fedavg", backend="workers", workers=1, time_limit=7)
    context = run_.context()
    pool = backend(run_, context, context.store(8))
    assert pool.limit == 7.0
    pool.close()


def test_the_summary_names_who_failed_and_how_often(folder):
    found = run(experiment(odd.Failing(folder=folder, clients=(2, 5), how="list"), ratio=1.0, rounds=3))
    replies = found.summary["replies"]
    assert (replies["participants"], replies["failed"]) == (24, 6)
    assert replies["failed_of"] == {"2": 3, "5": 3}
    assert tables.lacking(found.summary) == [
        "6 of 24 replies never came, as the client failed twice: client 2 (3 times), client 5 (3 times)."
    ]
    assert tables.lacking(run(experiment("fedavg", rounds=1)).summary) == []


def test_many_names_are_cut_short():
    none = {f"{of}{more}": {} if more else 0 for of in ("refused", "failed", "unscored") for more in ("", "_of")}
    replies = {**none, "participants": 90, "refused": 13, "refused_of": {str(i): 1 for i in range(13)}}
    (sentence,) = tables.lacking({"replies": replies})
    assert sentence.startswith("13 of 90 replies had NaN or inf in them and were refused: client 0, client 1,")
    assert sentence.endswith("client 9 and 3 more.")


assert len(SIZES) == 8  # as the tests above take for granted
