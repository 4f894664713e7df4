"""Worker processes: the same bits however many there are and whatever happens to them; errors say where; none is left."""

import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import odd
import pytest
import torch
from pools import begin, carried_out, nobody_left, same

from harness import SIZES, experiment, federation, run
from idiolect.engine import workers
from idiolect.engine.loop import loop
from idiolect.engine.turns import turns
from idiolect.errors import ClientError, ContractError, UsageError
from idiolect.running import one_thread


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def test_a_worker_killed_in_mid_round_is_replaced_and_the_bits_are_the_same(folder):
    plain = carried_out(experiment(odd.Shared()), count=0)
    found = carried_out(experiment(odd.KilledOnce(folder=folder, client=0)))
    assert Path(folder, "killed-0").exists()
    assert same(plain, found)


def test_a_worker_killed_from_outside_while_it_trains_is_replaced(folder):
    plain = carried_out(experiment(odd.Shared()), count=0)
    told = Path(folder, "pid")
    over = threading.Event()

    def killer():
        while not told.exists() and not over.wait(0.01):
            pass
        if told.exists():
            os.kill(int(told.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        found = carried_out(experiment(odd.Waiting(folder=folder, client=0)))
    finally:
        over.set()
        thread.join()
    assert told.exists()
    assert same(plain, found)


def test_idle_workers_killed_between_rounds_are_replaced():
    plain = carried_out(experiment(odd.Shared()), count=0)

    def kill(report, pool):
        for worker in pool._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()

    assert same(plain, carried_out(experiment(odd.Shared()), watch=kill))


def test_accidents_of_different_rounds_do_not_add_up(folder):
    """One worker, so that it is the first parcel of every round that is lost."""
    method = odd.KilledOnce(folder=folder, client=0, every_round=True)
    lists = [[0, 1, 2]]
    plain = carried_out(experiment(odd.Shared(), rounds=5, ratio=lists), count=0)
    found = carried_out(experiment(method, rounds=5, ratio=lists), count=1)
    assert len(list(Path(folder).iterdir())) == 5
    assert same(plain, found)


@pytest.mark.parametrize("backend", ["serial", "workers", "stacked"])
def test_a_mistake_in_local_names_method_client_and_round(backend):
    with pytest.raises(ClientError) as error:
        run(experiment(odd.Raising(client=2), ratio=1.0, backend=backend, workers=2))
    assert str(error.value).startswith("raising, client 2, round 0 (local): ZeroDivisionError: of all things")
    if backend == "workers":
        assert "a_step_down" in str(error.value)  # the trace, down to the line
        assert "odd.py" in str(error.value)
    else:
        assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("backend", ["serial", "workers", "stacked"])
def test_a_complaint_to_the_user_stays_one(backend):
    with pytest.raises(UsageError) as error:
        run(experiment(odd.Raising(client=2, kind="complaint"), ratio=1.0, backend=backend, workers=2))
    assert str(error.value) == "This method needs more samples; found 3."


@pytest.mark.parametrize("backend", ["serial", "workers", "stacked"])
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("reply", 'raising.local returned up.mean["model"] with 1 tensors, init declared 4; lacking: '),
        ("state", "raising.local returned mine with slots none, init declared count (client 2, round 0)."),
    ],
)
def test_a_broken_contract_says_who_broke_it(backend, kind, sentence):
    with pytest.raises(ContractError) as error:
        run(experiment(odd.Raising(client=2, kind=kind), ratio=1.0, backend=backend, workers=2))
    assert str(error.value).startswith(sentence)
    assert "client 2" in str(error.value)


def test_after_an_error_nobody_is_left():
    run_ = experiment(odd.Raising(client=2), ratio=1.0)
    context, progress, pool = begin(run_)
    with pytest.raises(ClientError):
        loop(run_, context, pool, progress, lambda report: None)
    assert nobody_left(pool)
    pool.close()  # a second time


def test_a_round_that_is_given_up_leaves_nobody():
    run_ = experiment(odd.Shared(), ratio=1.0)
    context, progress, pool = begin(run_)
    replies = pool.do(turns(context, progress, "local", range(8)))
    next(replies)
    replies.close()
    assert nobody_left(pool)


@pytest.mark.parametrize(("count", "parcel"), [(2, 1), (2, 3), (3, 100), (1, 2)])
def test_the_size_of_parcels_changes_no_bit(count, parcel):
    run_ = experiment("fedala", rounds=3)
    assert same(carried_out(run_, count=0), carried_out(run_, count, parcel))


@pytest.mark.parametrize("count", [0, 2])
def test_states_in_a_file_are_the_same_bits(count, tmp_path):
    run_ = experiment("fedper", rounds=3)
    assert same(carried_out(run_, count=0), carried_out(run_, count, file=tmp_path / "store.bin"))


@pytest.mark.parametrize("count", [0, 2])
def test_a_state_that_hands_on_its_own_past_is_kept_right(count):
    run_ = experiment(odd.Remembering(), ratio=1.0, rounds=3)
    history = []
    carried_out(run_, count=0, watch=lambda report, pool: None)
    context, progress, pool = begin(run_, count)

    def watch(report):
        history.append([progress.store.read(i)["last"].clone() for i in range(8)])

    with one_thread():
        loop(run_, context, pool, progress, watch)
    pool.close()
    for i in range(8):
        assert progress.store.read(i)["last"].equals(history[3][i])
        assert progress.store.read(i)["before"].equals(history[2][i])


def test_processes_are_started_safely_with_one_thread_and_the_data_once():
    context, _, pool = begin(experiment(odd.Shared()))
    try:
        assert pool._methods.get_start_method() == "forkserver"
        assert all(t.is_shared() for t in (*context.shards.x.values(), *context.shards.y.values()))
    finally:
        pool.close()
    torch.set_num_threads(2)
    try:
        run(experiment(odd.Threads(), backend="workers", workers=2))
        assert torch.get_num_threads() == 2  # and the caller has its own back
    finally:
        torch.set_num_threads(1)


def test_workers_look_at_the_caller_s_own_samples():
    """Not at a copy: what is written there after they started is what they see."""
    run_ = experiment(odd.Looking(), ratio=1.0)
    context, progress, pool = begin(run_)
    try:
        for x in context.shards.x.values():
            x.fill_(0.5)
        replies = list(pool.do(turns(context, progress, "local", range(8))))
    finally:
        pool.close()
    assert {r.client: float(r.up.rows["seen"]) for r in replies} == {i: 0.5 * 6 * n for i, n in enumerate(SIZES)}


def test_replies_that_wait_for_their_turn_are_few(monkeypatch):
    """While the first client is slow, the others stop when all slots are taken."""
    monkeypatch.setattr(workers, "SLOTS", 2)
    fed = federation((9, *[3] * 19))
    run_ = experiment(odd.Slow(client=0), federation=fed, ratio=1.0, rounds=1)
    context, progress, pool = begin(run_, count=2, parcel=1)
    sent, handed_on, most = [], [], 0
    send = workers._Worker.send

    def watched(worker, number, jobs):
        sent.append(number)
        return send(worker, number, jobs)

    monkeypatch.setattr(workers._Worker, "send", watched)
    try:
        for reply in pool.do(turns(context, progress, "local", range(20))):
            most = max(most, len(sent) - len(handed_on))
            handed_on.append(reply.client)
    finally:
        pool.close()
    assert handed_on == list(range(20))
    assert most <= 2 * 2


def test_networks_of_hundreds_of_tensors_cross_to_the_workers():
    """One file descriptor for each would be too many."""
    fields = {"network": "mlp", "network_options": {"hidden": (2,) * 150}, "rounds": 1, "epochs": 1, "ratio": ((0, 1),)}
    assert same(carried_out(experiment("fedper", **fields), count=0), carried_out(experiment("fedper", **fields)))


@pytest.mark.parametrize(("count", "ahead"), [(10, {0, 1}), (1100, {0})], ids=["small", "large"])
def test_parcels_too_large_for_a_pipe_go_to_idle_workers_alone(count, ahead, monkeypatch):
    """Else both sides might be sending, and neither would take anything in."""
    run_ = experiment(odd.Chatty(count=count), ratio=1.0)
    context, progress, pool = begin(run_, count=1, parcel=1)
    busy, send = set(), workers._Worker.send

    def watched(worker, number, jobs):
        busy.add(worker.busy)
        send(worker, number, jobs)

    monkeypatch.setattr(workers._Worker, "send", watched)
    try:
        replies = list(pool.do(turns(context, progress, "ask", range(6))))
    finally:
        pool.close()
    assert busy == ahead
    assert all(r.up.sum["many"].equals(context.state.server["many"] + 1.0) for r in replies)


def test_classes_that_workers_cannot_import_are_refused(monkeypatch):
    class Inside(odd.Shared):
        pass

    elsewhere = types.ModuleType("notebook")
    elsewhere.Cell = type("Cell", (odd.Shared,), {"__module__": "notebook", "__qualname__": "Cell"})
    monkeypatch.setitem(sys.modules, "notebook", elsewhere)
    for method in (Inside(), elsewhere.Cell()):
        run(experiment(method, rounds=1))
        with pytest.raises(
            UsageError, match=r"in no file that they can import; put it into one, or use backend='serial' \(.*\)\."
        ):
            run(experiment(method, rounds=1, backend="workers", workers=2))


def test_the_longest_clients_go_first():
    run_ = experiment(odd.Shared(), ratio=1.0)
    context, progress, pool = begin(run_, count=0)
    jobs = list(turns(context, progress, "local", [5, 3, 0, 6]))
    assert [job.client for job in jobs] == [0, 5, 6, 3]  # 17, 7, 4, 3 samples
    assert [reply.client for reply in pool.do(jobs)] == [0, 5, 6, 3]


@pytest.mark.parametrize("backend", ["serial", "workers", "stacked"])
def test_neither_global_randomness_nor_its_state_matter(backend):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = run(experiment("fedala", backend=backend, workers=2, rounds=2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    two = run(experiment("fedala", backend=backend, workers=2, rounds=2))
    assert same(one.progress, two.progress)


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    """Workers import the script; without the guard it would start workers of its own there."""
    script = tmp_path / "script.py"
    script.write_text('from idiolect import Run, run\nrun(Run(method="local", clients=3, rounds=1))\n')
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert found.returncode != 0
    assert "below 'if __name__ == \"__main__\":', or use backend=serial." in found.stderr.splitlines()[-1]
