"""Samples that are fetched client by client: the same bits as when all are laid out, and no rows but a client's own."""

import dataclasses

import numpy as np
import pytest
import torch

from harness import experiment, federation, run
from idiolect.data.stored import Stored
from idiolect.engine import work
from idiolect.engine.loop import evaluate, one_round
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.method import Rows
from idiolect.running import one_thread

STATISTICS = (0.3,), (0.2,)


@pytest.fixture(params=["tensor", "pixels", "file of pixels", "file of floats"])
def kept(request, tmp_path):
    """A federation of images, kept in one of these ways."""
    fed = federation(images=True)
    pixels = np.random.default_rng(0).integers(0, 256, (len(fed.dataset), 8, 8, 1), dtype=np.uint8)
    scaled = Stored(pixels, *STATISTICS)
    np.save(tmp_path / "x.npy", scaled[:].numpy() if request.param == "file of floats" else pixels)
    x = {
        "tensor": lambda: scaled[:],
        "pixels": lambda: scaled,
        "file of pixels": lambda: Stored(tmp_path / "x.npy", *STATISTICS),
        "file of floats": lambda: Stored(tmp_path / "x.npy"),
    }[request.param]()
    return dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, x=x))


def found(kept, **fields):
    fields = {"network": "convnet3", "network_options": {}, "rounds": 2, "evaluate_every": 2, **fields}
    result = run(experiment("fedrep", federation=kept, **fields))
    weights = [result.personal(i) for i in range(kept.clients)]
    return [dict(row, seconds_train=0, seconds_evaluate=0) for row in result.rounds], result.clients, weights


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_bits_either_way(kept, dtype, monkeypatch):
    rounds, clients, weights = found(kept, dtype=dtype)
    monkeypatch.setattr(work, "RESIDENT", 0)
    for fields in ({}, {"backend": "workers", "workers": 2}):
        again = found(kept, dtype=dtype, **fields)
        assert again[:2] == (rounds, clients)
        assert all(a.equals(b) for a, b in zip(again[2], weights, strict=True))


def test_a_client_s_part_is_laid_out_as_ever(kept, monkeypatch):
    resident = work.Shards.of(kept, torch.float64)
    monkeypatch.setattr(work, "RESIDENT", 0)
    fetched = work.Shards.of(kept, torch.float64)
    assert all(isinstance(x, work.Fetched) for x in fetched.x.values())
    for split in work.SPLITS:
        for i in range(kept.clients):
            for a, b in zip(resident.part(split, i), fetched.part(split, i), strict=True):
                assert torch.equal(a, b)
                assert a.dtype == b.dtype
                assert a.stride() == b.stride()


def test_the_limit_is_of_all_clients_samples_together(monkeypatch):
    fed = federation(images=True)
    size = sum(len(part.rows) for part in (fed.train, fed.validation, fed.test)) * 64 * 8
    for limit, kind in ((size, torch.Tensor), (size - 1, work.Fetched)):
        monkeypatch.setattr(work, "RESIDENT", limit)
        assert all(isinstance(x, kind) for x in work.Shards.of(fed, torch.float64).x.values())


@pytest.fixture
def watched(monkeypatch):
    """The rows that were read."""
    seen = []
    original = Stored.__getitem__
    monkeypatch.setattr(Stored, "__getitem__", lambda self, rows: seen.extend(rows.tolist()) or original(self, rows))
    return seen


def test_a_round_reads_the_rows_of_its_cohort_alone(tmp_path, monkeypatch, watched):
    monkeypatch.setattr(work, "RESIDENT", 0)
    fed = federation((2,) * 200)
    np.save(tmp_path / "x.npy", fed.dataset.x.numpy())
    fed = dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, x=Stored(tmp_path / "x.npy")))
    run_ = experiment("ditto", federation=fed, ratio=((3, 77, 150),), rounds=2, evaluate_every=2)
    context = run_.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(200))
    assert not watched
    with one_thread():
        done = one_round(run_, context, Serial(context), progress)
        assert sorted(watched) == sorted(np.concatenate([fed.train[i] for i in (3, 77, 150)]).tolist())
        watched.clear()
        evaluate(run_, context, Serial(context), progress, done)
    assert sorted(watched) == sorted(fed.test.rows.tolist())  # nobody trains: training samples are not needed
