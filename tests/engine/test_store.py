"""The store: the template until a client's first write, then its own record, in memory or in a file."""

import errno

import numpy as np
import pytest
import torch

from harness import experiment, federation
from idiolect.engine.loop import one_round
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.engine.store import Store
from idiolect.engine.work import Shards
from idiolect.errors import UsageError
from idiolect.method import Rows
from idiolect.running import one_thread
from idiolect.tree import Tree

TEMPLATE = {"model": Tree({"w": torch.full((2, 2), 0.5)}), "count": torch.zeros((), dtype=torch.int64)}


def record(number):
    return {"model": Tree({"w": torch.full((2, 2), float(number))}), "count": torch.tensor(number)}


def same(a, b):
    return a["model"].equals(b["model"]) and torch.equal(a["count"], b["count"])


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    file = tmp_path / "store.bin" if request.param == "file" else None
    return Store([TEMPLATE], np.zeros(5, dtype=np.int16), file)


def test_a_client_has_the_template_until_it_is_written(store):
    assert all(same(store.read(i), TEMPLATE) for i in range(5))
    store.write(3, record(7))
    assert same(store.read(3), record(7))
    assert all(same(store.read(i), TEMPLATE) for i in (0, 1, 2, 4))
    assert store.visits.tolist() == [0, 0, 0, 1, 0]


def test_writes_are_counted_and_replace(store):
    for number in (1, 2, 3):
        store.write(0, record(number))
    assert same(store.read(0), record(3))
    assert store.visits[0] == 3


def test_the_template_is_never_written_to(store):
    for i in range(5):
        store.write(i, record(i + 1))
    assert same(TEMPLATE, {"model": Tree({"w": torch.full((2, 2), 0.5)}), "count": torch.tensor(0)})


def test_what_was_written_may_change_afterwards(store):
    mine = record(4)
    store.write(1, mine)
    mine["model"]["w"].fill_(9)
    assert same(store.read(1), record(4))


def test_slots_may_come_in_any_order_and_from_each_other(store):
    store.write(2, {"count": torch.tensor(6), "model": record(6)["model"]})
    assert same(store.read(2), record(6))
    mine = store.read(2)
    store.write(2, {"count": mine["count"] + 1, "model": mine["model"]})
    assert same(store.read(2), {**record(6), "count": torch.tensor(7)})


def test_a_file_holds_the_records_and_costs_what_was_written(tmp_path):
    file = tmp_path / "store.bin"
    store = Store([TEMPLATE], np.zeros(200_000, dtype=np.int16), file)
    assert file.stat().st_size >= 200_000 * 24
    store.write(150_000, record(5))
    assert file.stat().st_blocks * 512 < 1 << 20  # sparse
    again = Store([TEMPLATE], np.zeros(200_000, dtype=np.int16), file)
    assert same(again.record_of(150_000), record(5))


@pytest.mark.parametrize("short", [False, True])
def test_a_full_disk_is_told_and_the_old_state_stays(tmp_path, monkeypatch, short):
    store = Store([TEMPLATE], np.zeros(5, dtype=np.int16), tmp_path / "store.bin")
    store.write(1, record(7))

    def full(*_):
        if not short:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 3

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(UsageError, match=r"cannot be written to .*store.bin' \(No space left on device\)"):
        store.write(1, record(8))
    assert same(store.read(1), record(7))
    assert store.visits.tolist() == [0, 1, 0, 0, 0]


def test_a_round_looks_at_its_cohort_alone(monkeypatch):
    """Whatever the number of clients."""
    run_ = experiment("ditto", federation=federation((2,) * 200), ratio=((3, 77, 150),), rounds=1)
    context = run_.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(200))
    asked = []
    for kind, name in ((Shards, "part"), (Shards, "size"), (Store, "read"), (Store, "write")):
        original = getattr(kind, name)

        def watched(self, *args, original=original, at=0 if kind is Store else 1):
            asked.append(args[at])
            return original(self, *args)

        monkeypatch.setattr(kind, name, watched)
    with one_thread():
        done = one_round(run_, context, Serial(context), progress)
    assert done.participants == (3, 77, 150)
    assert set(asked) == {3, 77, 150}


def test_another_process_attaches_itself(store):
    other = Store.attached(store.kinds, store.drawn, store.records)
    store.write(1, record(8))
    assert same(other.record_of(1), record(8))


def test_kinds_of_clients_have_records_of_their_own_shape():
    kinds = [{"w": torch.zeros(2)}, {"w": torch.zeros(3, 3), "b": torch.ones(1)}]
    store = Store(kinds, np.array([0, 1, 1, 0], dtype=np.int16))
    assert store.read(1)["w"].shape == (3, 3)
    store.write(0, {"w": torch.ones(2)})
    store.write(1, {"w": torch.full((3, 3), 2.0), "b": torch.full((1,), 3.0)})
    assert torch.equal(store.read(0)["w"], torch.ones(2))
    assert torch.equal(store.read(1)["w"], torch.full((3, 3), 2.0))
    assert torch.equal(store.read(2)["b"], torch.ones(1))


def test_no_private_state_is_no_memory():
    store = Store([{}], np.zeros(1000, dtype=np.int16))
    store.write(7, {})
    assert store.read(7) == {}
    assert store.visits[7] == 1
