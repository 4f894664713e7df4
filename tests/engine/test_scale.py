"""What a run of very many clients must not pay for: the clients that do not take part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness import experiment, federation, moved
from idiolect import Run, compare, run, running
from idiolect.data import from_arrays
from idiolect.errors import ClientError, UsageError
from idiolect.method import Method, Rows, State, Up, Written


def few(method="fedper", **fields):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    base = {"data": from_arrays(x, np.arange(60) % 3), "split": "iid", "clients": 10, "rounds": 3, "ratio": 0.3}
    return Run(method=method, **(base | {"backend": "serial", "lr": 0.1} | fields))


# rows that the server keeps


def test_rows_are_values_whatever_is_written():
    draw = np.random.default_rng(0)
    rows, known = Rows({"a": 0, "b": 0}), {}
    history = []
    for _ in range(20):
        ids = draw.choice(1000, 30, replace=False).tolist()
        values = draw.integers(1, 100, 30).tolist()
        history.append((rows, dict(known)))
        rows = rows.with_(ids, a=values)
        known |= dict(zip(ids, values, strict=True))
        assert {i: row["a"] for i, row in rows.written.items()} == known
        assert list(rows) == sorted(known)
        assert len(rows.written) == len(known)
    for earlier, then in history:
        assert {i: row["a"] for i, row in earlier.written.items()} == then
    absent = next(i for i in range(1000) if i not in known)
    assert rows[absent] is rows.template
    assert absent not in rows.written
    assert rows.with_([absent], b=[5])[absent] == {"a": 0, "b": 5}


def test_writing_rows_copies_no_more_than_the_clients_beside():
    everybody = Rows({"a": 0}, Written({i: {"a": i} for i in range(100_000)}))
    after = everybody.with_([5, 70_000], a=[1, 2])
    same = [a is b for a, b in zip(everybody.written._shelves.values(), after.written._shelves.values(), strict=True)]
    assert same.count(False) == 2
    assert (after[5], after[70_000], after[6]) == ({"a": 1}, {"a": 2}, {"a": 6})


# private states in a file


@pytest.fixture
def in_a_file(monkeypatch, tmp_path):
    """Where the states of any run go, however small they are."""
    monkeypatch.setattr(running, "IN_MEMORY", 0)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(running.tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.mark.parametrize("backend", ["serial", "workers"])
def test_states_in_a_file_are_the_same_and_the_file_is_gone(in_a_file, backend, tmp_path, monkeypatch):
    seen = []

    def watch(report):
        seen.append([p.stat().st_size for p in (*in_a_file.glob("*/states*"), *tmp_path.glob("run/states*"))])

    fields = {"backend": backend, "workers": 2 if backend == "workers" else None}
    for out in (None, tmp_path / "run"):
        found = run(few(**fields), out=out, watch=watch)
        expected = found.context.record * 10
        assert seen == [[expected]] * 4
        seen.clear()
        assert not list(in_a_file.glob("idiolect-*"))
        assert found.progress.store.file is not None
    monkeypatch.setattr(running, "IN_MEMORY", 1 << 30)
    known = run(few())
    assert known.progress.store.file is None
    for i in range(10):
        assert found.personal(i).equals(known.personal(i))  # what has no name any more can still be read
        assert found.private(i)["model"].equals(known.private(i)["model"])
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "run.toml", "rounds.parquet", "clients.parquet", "summary.json", "models",
    }  # fmt: skip


@dataclass(frozen=True)
class Failing(Method):
    def init(self, net):
        return State(server={"model": net.weights}, client={"own": net.weights})

    def local(self, me, down, mine):
        if me.round == 1:
            raise ArithmeticError("in the middle")
        return Up(mean={"model": down["model"]}), mine


def test_a_run_that_fails_leaves_no_file(in_a_file, tmp_path):
    for out in (None, tmp_path / "run"):
        with pytest.raises(ClientError, match="in the middle"):
            run(few(Failing()), out=out)
        assert not list(in_a_file.glob("idiolect-*"))
    assert not (tmp_path / "run").exists()


def test_what_a_killed_run_left_is_cleared_away(tmp_path):
    for name in ("run.toml", "states.part"):
        (tmp_path / name).write_text("")
    (tmp_path / "mine").write_text("")
    running.withdraw(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_states_for_which_the_disk_has_no_room_are_refused(in_a_file, monkeypatch):
    monkeypatch.setattr(running.shutil, "disk_usage", lambda _: running.shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(
        UsageError, match=r"The private states of 9 clients take up to .* GB free; choose another place"
    ):
        run(few())
    assert not list(in_a_file.glob("idiolect-*"))


@pytest.mark.parametrize(
    ("ratio", "rounds", "most"),
    [
        (0.1, 3, 30),
        (1.0, 3, 100),
        ("bernoulli:0.1", 2, 20),
        ("0.1..0.3", 2, 60),
        ([[1, 2], [2, 3], [4]], 2, 3),
        (0.001, 5, 5),
    ],
)
def test_how_many_clients_a_run_can_come_to(ratio, rounds, most):
    assert few(ratio=ratio, clients=100, split="iid", rounds=rounds).sampler.most(100, rounds) == most


def test_the_store_of_a_million_costs_what_is_written(tmp_path):
    context = few().context()
    store = context.store(1_000_000, tmp_path / "states")
    for i in range(0, 1_000_000, 10_000):
        store.write(i, store.template(i))
    assert (tmp_path / "states").stat().st_size == 1_000_000 * context.record
    assert (tmp_path / "states").stat().st_blocks * 512 <= 100 * 2 * 4096 + 65536


# who is scored


def test_a_run_scores_as_many_as_it_is_asked_to_and_always_the_same(tmp_path):
    some, everybody = run(few(evaluate_clients=4), out=tmp_path / "run"), run(few())
    received = {(r["round"], r["client"]) for r in some.clients if r["moment"] == "received"}
    chosen = {i for _, i in received}
    assert len(chosen) == 4
    assert received == {(r, i) for r in range(4) for i in chosen}
    assert chosen == set(some.run.evaluated) != set(few(evaluate_clients=4, seed=1).evaluated)
    assert set(everybody.run.evaluated) == set(range(10))
    same = [r for r in everybody.clients if r["moment"] == "trained" or r["client"] in chosen]
    assert some.clients == same  # who is scored changes nothing else
    assert (
        "received: after download, before local training, 4 of 10 clients, drawn once from the seed;"
        in some.summary["evaluation"]
    )
    assert "before local training, all clients;" in everybody.summary["evaluation"]
    assert pq.read_table(tmp_path / "run" / "clients.parquet").num_rows == len(some.clients)
    assert (
        Run.from_toml((tmp_path / "run" / "run.toml").read_text(), data=some.run.data).evaluated == some.run.evaluated
    )


@pytest.mark.parametrize("count", [0, 11, -1, 2.5, True, "all"])
def test_no_more_clients_are_scored_than_there_are(count):
    with pytest.raises(UsageError, match=r"evaluate_clients must be .* found"):
        few(evaluate_clients=count)


def test_a_comparison_says_whom_it_scored():
    fields = {name: getattr(few(), name) for name in ("data", "split", "clients", "rounds", "ratio", "backend")}
    found = compare(["local", "fedavg"], **fields, evaluate_clients=4)
    assert "4 of 10 clients, drawn once from the seed, plain mean over clients" in str(found)
    assert found.summary["evaluation"]["received"].endswith("4 of 10 clients, drawn once from the seed")
    assert "all 10 clients, plain mean" in str(compare(["local"], **fields))


def test_an_evaluation_asks_for_the_clients_it_scores_alone(monkeypatch):
    asked = []
    run_ = experiment("fedper", federation=federation((2,) * 50), ratio=((0, 1),), rounds=1, evaluate_clients=3)
    original = Run.context

    def context(self):
        found = original(self)
        do, received = found.do, found.received
        found.do = lambda job: asked.append((job.kind, job.client)) or do(job)
        found.received = lambda jobs: received(asked.append((job.kind, job.client)) or job for job in jobs)
        return found

    monkeypatch.setattr(Run, "context", context)
    run(run_)
    assert {i for kind, i in asked if kind == "received"} == set(run_.evaluated)
    assert len(asked) == 3 + 2 + 3


def test_a_file_of_states_is_no_different_for_the_method(in_a_file, monkeypatch):
    one = run(experiment("ditto", rounds=2))
    monkeypatch.setattr(running, "IN_MEMORY", 1 << 30)
    two = run(experiment("ditto", rounds=2))
    assert max(moved(one.personal(i), two.personal(i)) for i in range(8)) == 0
    assert isinstance(one.progress.store.file, Path)
