"""Clients that never train: nothing of them reaches the others or the server, and they are evaluated apart."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness import experiment, federation, moved, run
from idiolect import Run, compare
from idiolect.data import Federation, from_arrays
from idiolect.data.federated import split_hash
from idiolect.report import tables

FEDERATION = federation()
AWAY = 3
METHODS = [
    "local", "fedavg", "fedrep", "fedbabu", "fedsimsup", "scaffold", "feddyn", "pfedhn", "cfl", "ifca", "fedfomo", "fedamp",
    "fedala", "fedpac", "fedaims", "ditto", "knnper", "fedphp", "fedavg+fedlag", "fedrep+finetune",
]  # fmt: skip


SETTINGS = {"scaffold": {"momentum": 0.0}, "fedaims": {"network_options": {"hidden": (6, 5)}}}


def without(method, **fields):
    """The run with three clients held out, and the run of the other five alone."""
    fields = {"seed": 3, **SETTINGS.get(method, {}), **fields}
    apart = run(experiment(method, federation=FEDERATION, held_out=AWAY, **fields))
    all_ = apart.run.federation
    parts = [list(getattr(all_, part))[:-AWAY] for part in ("train", "validation", "test")]
    five = Federation(all_.dataset, *parts, split_hash(*parts), "five")
    return apart, run(experiment(method, federation=five, **fields))


def comparable(rows, drop=("seconds_train", "seconds_evaluate")):
    return [{k: v for k, v in row.items() if k not in drop and not k.startswith("held_out")} for row in rows]


@pytest.mark.parametrize("method", METHODS)
def test_the_others_do_as_if_they_were_alone(method):
    apart, alone = without(method)
    assert comparable(apart.rounds) == comparable(alone.rounds)
    assert [c for c in apart.clients if c["moment"] != "held_out"] == alone.clients
    for name in ("accuracy", "loss", "bytes", "clients", "gradient_passes"):
        assert apart.summary[name] == alone.summary[name]
    for client in range(5):
        assert apart.personal(client).equals(alone.personal(client))


@pytest.mark.parametrize("method", METHODS)
def test_who_is_held_out_is_as_it_was_made(method):
    apart, _ = without(method, rounds=2)
    for client in range(5, 8):
        template, own = apart.progress.store.template(client), apart.private(client)
        assert own.keys() == template.keys()
        for slot, value in own.items():
            assert value.equals(template[slot]) if hasattr(value, "equals") else (value == template[slot]).all()
        assert client not in apart.progress.rows.written
        assert not any(client in row["participants"] for row in apart.rounds)


def test_they_predict_with_what_is_shared_and_what_is_new():
    fedavg, _ = without("fedavg")
    assert moved(fedavg.personal(7), fedavg.server["model"]) == 0
    fedrep, _ = without("fedrep")
    model, shared, new = fedrep.personal(7), fedrep.server["model"], fedrep.context.net.weights
    assert all((model[k] == (shared if k in shared else new)[k]).all() for k in model)
    assert set(shared) < set(model)


def test_their_scores_stand_apart():
    apart, _ = without("fedavg", evaluate_every=2)
    own = [c for c in apart.clients if c["moment"] == "held_out"]
    assert {c["client"] for c in own} == {5, 6, 7}
    assert {c["round"] for c in own} == {0, 2, 4}
    assert not {c["client"] for c in apart.clients if c["moment"] != "held_out"} & {5, 6, 7}
    last = [c for c in own if c["round"] == 4]
    plain = sum(c["correct"] / c["total"] for c in last) / 3
    found = apart.summary["held_out"]
    assert found["accuracy"]["plain"]["last"] == apart.rounds[-1]["held_out_plain"] == pytest.approx(plain)
    assert found["clients"] == list(apart.run.federation.held_out)
    task, model = apart.context.task, apart.server["model"]
    for c in last:
        x, y = apart.context.shards.part("test", c["client"])
        assert int((task.logits(model, x).argmax(1) == y).sum()) == c["correct"]
    assert "3 held out, plain" in tables.run(apart.summary)


@pytest.mark.parametrize("backend", ["workers", "stacked"])
def test_other_backends_agree(backend):
    fields = {"rounds": 2, "federation": FEDERATION, "held_out": AWAY}
    serial = run(experiment("fedrep", **fields))
    other = run(experiment("fedrep", **fields, backend=backend, workers=2 if backend == "workers" else None))
    for a, b in zip(serial.clients, other.clients, strict=True):
        assert comparable([a], ("loss",)) == comparable([b], ("loss",))
        assert b["loss"] == (pytest.approx(a["loss"], rel=1e-5) if backend == "stacked" else a["loss"])


def test_without_any_nothing_is_said_of_them(tmp_path):
    found = run(experiment("fedavg", rounds=1))
    assert "held_out" not in found.summary
    assert not any(k.startswith("held_out") for k in found.rounds[0])
    assert "held out" not in tables.run(found.summary)


def quick(**fields):
    data = from_arrays(np.random.default_rng(0).normal(size=(200, 4)), np.arange(200) % 3)
    return {"data": data, "split": "iid", "clients": 10, "rounds": 2, "backend": "serial", **fields}


@pytest.mark.parametrize(("held_out", "left"), [(0.0, 10), (0.2, 8), (0.01, 9), (0.25, 7), (1, 9), (4, 6)])
def test_a_share_or_a_number(held_out, left):
    made = Run(method="fedavg", held_out=held_out, **quick())
    assert made.num_clients == left
    assert made.federation.clients == 10
    assert len(made.federation.held_out) == 10 - left
    everybody = {i for r in range(5) for i in made.participants(r)}
    assert everybody == set(range(left))


def test_a_federation_may_hold_out_clients_itself():
    made = experiment("fedavg", federation=FEDERATION.holding_out(2, 0), rounds=1)
    assert made.num_clients == 6
    assert run(made).summary["held_out"]["clients"] == list(made.federation.held_out)


def test_a_comparison_has_a_column_of_them(tmp_path):
    fields = quick(held_out=0.3)
    found = compare(["local", "fedavg"], out=tmp_path / "with", **fields)
    assert (found.summary["clients"], found.summary["held_out"]) == (7, 3)
    header, rows = tables.table(found.summary)
    assert "held out" in header
    of = {row[0]: row[header.index("held out")] for row in rows}
    summary = json.loads((tmp_path / "with" / "fedavg" / "seed-0" / "summary.json").read_text())
    assert float(of["fedavg"]) == round(100 * summary["held_out"]["accuracy"]["plain"]["last"], 1)
    assert "all 7 clients that train, without the 3 held out" in str(found)
    clients = pq.read_table(tmp_path / "with" / "fedavg" / "seed-0" / "clients.parquet").to_pylist()
    assert {c["client"] for c in clients if c["moment"] == "held_out"} == {7, 8, 9}
    again = compare(["local", "fedavg"], out=tmp_path / "with", **fields)
    assert again.summary == found.summary
    header, _ = tables.table(compare(["local"], **dict(fields, held_out=0)).summary)
    assert "held out" not in header


def test_runs_survive_their_file():
    made = Run(method="fedavg", held_out=0.3, shift="noise:0.5", **quick())
    again = Run.from_toml(made.to_toml(), data=made.data)
    assert again == made
    assert again.federation.split_hash == made.federation.split_hash
