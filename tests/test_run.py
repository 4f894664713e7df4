"""`Run` and `run`: what is refused, what a run leaves behind, and that the files say what the result says."""

import dataclasses
import json
import os
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from harness import CLASSES, experiment, federation
from idiolect import Run, run, running
from idiolect.data import from_arrays, load
from idiolect.data.shift import Noise
from idiolect.errors import UsageError
from idiolect.method import Method, State, Up

LABELS = np.tile([0, 1, 2], 10)
SAMPLES = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)


def quick(method="fedavg", **fields):
    """A run on given arrays, in this process."""
    base = {
        "data": from_arrays(SAMPLES, LABELS),
        "split": "iid",
        "clients": 4,
        "rounds": 2,
        "backend": "serial",
        "lr": 0.1,
    }
    return Run(method=method, **(base | fields))


# what is refused


def with_nan():
    x = SAMPLES.copy()
    x[7, 2] = np.nan
    return from_arrays(x, LABELS)


REFUSED = {
    "unknown method": (lambda: quick("fedavgg"), "Unknown method 'fedavgg'. Did you mean fedavg"),
    "a method of no known kind": (lambda: quick(5), "method must be a method or its name; found 5."),
    "a wrapper in front": (lambda: quick("fedavg+fedper"), "'fedper' wraps nothing and cannot follow a '+'"),
    "a part twice": (lambda: quick("fedavg+finetune+finetune"), "'fedavg+finetune+finetune' holds the same part twice."),
    "unknown field of a method": (
        lambda: Run.from_toml('[method]\nname = "fedprox"\nmuu = 0.1\n'),
        "Unknown hyper-parameter of fedprox 'muu'. Did you mean mu?",
    ),
    "a word for a number": (
        lambda: Run.from_toml('[method]\nname = "fedprox"\nmu = "much"\n'),
        "fedprox.mu must be a number; found 'much'.",
    ),
    "a fraction for a whole number": (
        lambda: Run.from_toml('[method]\nname = "fedrep"\nhead_epochs = 1.5\n'),
        "fedrep.head_epochs must be a whole number; found '1.5'.",
    ),
    "a field of a method that has none": (
        lambda: Run.from_toml('[method]\nname = "fedavg"\nmu = 1\n'),
        "fedavg has no hyper-parameters; 'mu' cannot be set.",
    ),
    "unknown field of a run": (
        lambda: Run.from_toml('rouns = 3\n[method]\nname = "fedavg"\n'),
        "Unknown field of a run 'rouns'. Did you mean rounds?",
    ),
    "no method": (lambda: Run.from_toml("rounds = 3\n"), "A run needs a method."),
    "no TOML": (lambda: Run.from_toml("rounds = = 3"), "The run file is not TOML"),
    "a run file of given objects": (
        lambda: Run.from_toml(quick().to_toml()),
        "The run was made with data as an object (<given: arrays",
    ),
    "ratio 0": (lambda: quick(ratio=0), "ratio must be a ratio in (0, 1] such as 0.1, 'bernoulli:0.1'"),
    "lists of others": (lambda: quick(ratio=[[0, 7]]), "Lists of participants name clients 0 to 3"),
    "more clients than samples": (
        lambda: quick(clients=31),
        "Expected at least one row per client, found 30 rows for 31 clients; ask for 30 clients or fewer.",
    ),
    "a NaN in the data": (
        lambda: quick(data=with_nan()),
        "arrays: expected finite numbers in x, found NaN or inf in 1 rows, the first is row 7; drop or repair those rows.",
    ),
    "labels that are not integers": (
        lambda: quick(data=from_arrays(SAMPLES, LABELS + 0.5)),
        "arrays: expected integer labels, found 0.5 among them; pass class numbers.",
    ),
    "labels that are words": (
        lambda: quick(data=from_arrays(SAMPLES, np.array(["a", "b", "c"] * 10))),
        "arrays: expected integer labels, found <U1; number the classes from 0",
    ),
    "unknown data": (lambda: quick(data="digitz"), "Unknown data set 'digitz'. Did you mean digits?"),
    "unknown split": (lambda: quick(split="dirichlett:0.1"), "Unknown split 'dirichlett'. Did you mean dirichlet?"),
    "unknown network": (lambda: quick(network="mlpp"), "Unknown network 'mlpp'. Did you mean mlp?"),
    "a network for images": (lambda: quick(network="convnet3"), "convnet3 needs images"),
    "an unknown option of the network": (
        lambda: quick(network="mlp", network_options={"hiden": (5,)}),
        "mlp has no option 'hiden'. Did you mean hidden?",
    ),
    "an unknown shift": (lambda: quick(shift="rotatoin:4"), "Unknown shift 'rotatoin'. Did you mean rotation?"),
    "a shift of vectors that is for images": (
        lambda: quick(shift="colour:0.5"), "Expected images for shift 'colour:0.5', found samples of shape [4] in 'arrays'",
    ),
    "everybody held out": (lambda: quick(held_out=4), "held_out must leave a client to train; found 4 of 4 clients."),
    "a share held out that leaves nobody": (lambda: quick(held_out=0.99), "held_out must leave a client to train"),
    "half a client held out": (lambda: quick(held_out=1.5), "held_out must be a share in [0, 1) or a whole number"),
    "a negative number held out": (lambda: quick(held_out=-1), "held_out must be a share in [0, 1) or a whole number"),
    "participants that are held out": (lambda: quick(held_out=1, ratio=[[0, 3]]), "Lists of participants name clients 0 to 2"),
    "held out twice": (
        lambda: experiment("fedavg", federation=federation().holding_out(2, 0), held_out=1),
        "The federation given holds clients out already; leave held_out at 0.",
    ),
    "shifted twice": (
        lambda: experiment("fedavg", federation=federation().shifted(Noise(), 0), shift="noise:0.1"),
        "The federation given shifts its samples already; leave shift at none.",
    ),
    "a federation of other clients": (
        lambda: experiment("fedavg", clients=9),
        "clients must be the 8 of the federation given; found 9.",
    ),
    "a federation of other data": (
        lambda: quick(split=federation(), clients=8),
        "The federation given divides 'small', data is 'arrays'; give the same.",
    ),
    "SCAFFOLD with momentum": (lambda: quick("scaffold", momentum=0.9), "SCAFFOLD reads the mean gradient off the distance"),
    "SCAFFOLD with Adam": (lambda: quick("scaffold", optimizer="adam"), "which holds for plain SGD alone; found adam."),
    "SCAFFOLD with clipping": (lambda: quick("scaffold", clip=1.0), "which holds for plain SGD alone; found clipping."),
    "SCAFFOLD at rest": (lambda: quick("scaffold", lr=0.0), "SCAFFOLD divides the distance moved by the learning rate"),
    "a bad part of FineTune": (
        lambda: Run.from_toml('[method]\nname = "finetune"\npart = "body"\n'),
        "FineTune.part must be 'all' or 'head'; found 'body'.",
    ),
    "too many last layers": (
        lambda: quick(dataclasses.replace(quick("fedala").method, layers=7)),
        "The network has 2 layers; the last 7 were asked for.",
    ),
    "no clients": (lambda: quick(clients=0), "clients must be a whole number >= 1; found 0."),
    "half a client": (lambda: quick(clients=2.5), "clients must be a whole number >= 1; found 2.5."),
    "negative rounds": (lambda: quick(rounds=-1), "rounds must be a whole number >= 0; found -1."),
    "no epochs": (lambda: quick(epochs=0), "epochs must be a whole number >= 1; found 0."),
    "true for a number": (lambda: quick(batch_size=True), "batch_size must be a whole number >= 1; found True."),
    "negative lr": (lambda: quick(lr=-0.1), "lr must be a number >= 0; found -0.1."),
    "lr is nan": (lambda: quick(lr=float("nan")), "lr must be a finite number; found nan."),
    "no lr": (lambda: quick(lr=None), "lr must be a finite number; found None."),
    "momentum 1": (lambda: quick(momentum=1.0), "momentum must be a number in [0, 1); found 1.0."),
    "momentum of Adam": (lambda: quick(optimizer="adam", momentum=0.9), "momentum is SGD's; adam has its own."),
    "Nesterov without momentum": (lambda: quick(nesterov=True), "nesterov must be off, or a momentum above 0; found True."),
    "negative decay": (lambda: quick(weight_decay=-1), "weight_decay must be a number >= 0; found -1.0."),
    "clip 0": (lambda: quick(clip=0), "clip must be a number > 0, or none; found 0.0."),
    "everything dropped": (lambda: quick(drop=1.0), "drop must be a probability in [0, 1); found 1.0."),
    "unknown schedule": (lambda: quick(schedule="linear"), "schedule must be one of constant, exponential, step, cosine"),
    "unknown optimiser": (lambda: quick(optimizer="lion"), "optimizer must be one of sgd, adam, adamw; found 'lion'."),
    "unknown backend": (lambda: quick(backend="gpu"), "backend must be one of workers, serial, stacked; found 'gpu'."),
    "unknown buffers": (lambda: quick(buffers="mean"), "buffers must be one of average, local, drop; found 'mean'."),
    "unknown dtype": (lambda: quick(dtype="float16"), "dtype must be one of float32, float64; found 'float16'."),
    "no workers": (lambda: quick(workers=0), "workers must be a whole number >= 1; found 0."),
    "all rows to test on": (lambda: quick(test=1.0), "Expected shares of at least 0 for test and validation"),
    "no official test rows": (lambda: quick(test_from="official"), "Expected an official test set for test_from='official'"),
    "a negative seed": (lambda: quick(seed=-1), "seed must be a whole number >= 0; found -1."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_refused_with_one_sentence_and_nothing_is_written(case, tmp_path):
    make, sentence = REFUSED[case]
    with pytest.raises(UsageError) as error:
        run(make(), out=tmp_path / "runs" / "one")
    text = str(error.value)
    assert sentence in text
    assert "\n" not in text
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_never_overwritten(tmp_path):
    run(quick(), out=tmp_path / "one")
    before = {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}
    with pytest.raises(
        UsageError, match=r"holds a finished run, which is never overwritten; choose another directory\."
    ):
        run(quick("fedper"), out=tmp_path / "one")
    assert before == {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}


def test_other_files_are_not_overwritten_either(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(UsageError, match=r"exists and is not an empty directory; choose another, or remove it\."):
            run(quick(), out=path)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    run(quick(), out=tmp_path / "empty")
    assert (tmp_path / "empty" / "summary.json").exists()


def test_a_run_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        quick().rounds = 3


# what a run leaves


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Six rounds with 2 of 4 clients, some replies lost, evaluated every second round; a validation set."""
    path = tmp_path_factory.mktemp("runs") / "fedper"
    settings = {"rounds": 6, "ratio": 0.5, "drop": 0.3, "evaluate_every": 2, "validation": 0.2, "seed": 1}
    return run(quick("fedper", **settings), out=path), path


def test_the_directory_holds_what_the_issue_asks_for(finished):
    _, path = finished
    names = {p.name for p in path.iterdir()}
    assert {"run.toml", "rounds.parquet", "clients.parquet", "summary.json", "models"} <= names
    assert not [p for p in path.rglob("*") if p.suffix == ".part"]


def test_the_summary_holds_what_the_issue_asks_for(finished):
    result, path = finished
    summary = json.loads((path / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result.summary))
    assert (summary["method"], summary["rounds"], summary["clients"], summary["seed"]) == ("fedper", 6, 4, 1)
    assert summary["split_hash"] == result.run.federation.split_hash
    for moment in ("received", "trained"):
        for average in ("plain", "weighted"):
            found = summary["accuracy"][moment][average]
            assert set(found) == {"last", "best", "last10"}
            assert all(0 <= v <= 1 for v in found.values())
            assert found["best"] >= max(found["last"], found["last10"])
    assert summary["bytes"]["down"] > 0
    assert summary["bytes"]["up"] > 0
    assert summary["gradient_passes"] == pytest.approx(1.0)
    seconds = summary["seconds"]
    assert seconds["total"] >= seconds["train"] + seconds["evaluate"] > 0


def test_the_summary_follows_from_the_rows(finished):
    result, path = finished
    summary = result.summary
    rounds = pq.read_table(path / "rounds.parquet").to_pylist()
    assert [r["round"] for r in rounds] == list(range(7))
    known = [r["received_plain"] for r in rounds if r["received_plain"] is not None]
    assert [r["round"] for r in rounds if r["received_plain"] is not None] == [0, 2, 4, 6]
    assert summary["accuracy"]["received"]["plain"]["last"] == known[-1]
    assert summary["accuracy"]["received"]["plain"]["best"] == max(known)
    assert summary["accuracy"]["received"]["plain"]["last10"] == pytest.approx(sum(known) / len(known))
    assert summary["bytes"]["up"] == sum(r["bytes_up"] for r in rounds)


def test_rounds_and_clients_agree(finished):
    result, path = finished
    rounds = pq.read_table(path / "rounds.parquet").to_pylist()
    clients = pq.read_table(path / "clients.parquet").to_pylist()
    assert rounds == result.rounds
    assert clients == result.clients
    assert set(clients[0]) == {"round", "client", "moment", "split", "correct", "total", "loss"}
    sizes = {s: [len(p) for p in getattr(result.run.federation, s)] for s in ("test", "validation")}
    assert all(c["total"] == sizes[c["split"]][c["client"]] for c in clients)
    for row in rounds:
        assert set(row["dropped"]) <= set(row["participants"])
        assert row["participants"] == result.run.participants(row["round"] - 1) or row["round"] == 0
        for moment in ("received", "trained"):
            own = [c for c in clients if (c["round"], c["moment"], c["split"]) == (row["round"], moment, "test")]
            if row[f"{moment}_plain"] is None:
                assert not own
                continue
            assert row[f"{moment}_plain"] == pytest.approx(sum(c["correct"] / c["total"] for c in own) / len(own))
            total = sum(c["total"] for c in own)
            assert row[f"{moment}_weighted"] == pytest.approx(sum(c["correct"] for c in own) / total)
            assert row[f"{moment}_loss"] == pytest.approx(sum(c["loss"] for c in own) / total)
            expected = range(4) if moment == "received" else set(row["participants"]) - set(row["dropped"])
            assert {c["client"] for c in own} == set(expected)
    assert any(r["dropped"] for r in rounds)


def test_scores_are_those_of_the_saved_models(finished):
    result, path = finished
    task = result.context.task
    last = {c["client"]: c for c in result.clients if (c["round"], c["moment"], c["split"]) == (6, "received", "test")}
    index = json.loads((path / "models" / "index.json").read_text())
    for i in range(4):
        w = load_file(path / "models" / index[str(i)])
        assert result.personal(i).equals(type(result.personal(i))(w))
        x, y = result.context.shards.part("test", i)
        logits = task.logits(result.personal(i), x)
        assert int((logits.argmax(1) == y).sum()) == last[i]["correct"]
        assert float(task.losses(logits, y).sum()) == pytest.approx(last[i]["loss"], rel=1e-5)
    shared = load_file(path / "models" / "shared.safetensors")
    assert type(result.server["model"])(shared).equals(result.server["model"])


def test_clients_with_the_shared_model_have_no_file_of_their_own(tmp_path):
    result = run(quick(), out=tmp_path / "run")
    index = json.loads((tmp_path / "run" / "models" / "index.json").read_text())
    assert index == {str(i): "shared.safetensors" for i in range(4)}
    assert sorted(p.name for p in (tmp_path / "run" / "models").iterdir()) == [
        "index.json", "server.safetensors", "shared.safetensors",
    ]  # fmt: skip
    saved = load_file(tmp_path / "run" / "models" / "shared.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in result.server["model"].items())


@dataclass(frozen=True)
class TwoNames(Method):
    """Two slots of the server that are one tensor at first."""

    def init(self, net):
        return State(server={"model": net.weights, "anchor": net.weights})

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"])}), mine


@pytest.mark.parametrize("rounds", [0, 1])
def test_slots_that_share_memory_can_be_saved(rounds, tmp_path):
    run(quick(TwoNames(), rounds=rounds), out=tmp_path / "run")
    saved = load_file(tmp_path / "run" / "models" / "server.safetensors")
    assert {k.split("/")[0] for k in saved} == {"model", "anchor"}


def test_models_need_not_be_saved(tmp_path):
    run(quick(), out=tmp_path / "run", models=False)
    assert not (tmp_path / "run" / "models").exists()


def test_a_run_file_runs_again_as_it_is(tmp_path):
    """Twice from TOML: the same results to the bit, but for the seconds."""
    text = '\n'.join(
        [
            'data = "synthetic"', 'split = "given"', "clients = 4", "rounds = 2", 'ratio = "0.5..1"', 'backend = "serial"',
            'schedule = "cosine"', 'optimizer = "adamw"', "lr = 0.01", 'buffers = "local"', "clip = 1.0", "seed = 3",
            "[network_options]", "hidden = [7]", "[method]", 'name = "fedrep+finetune"', "head_epochs = 1", "[method.finetune]", "epochs = 1",
        ]
    )  # fmt: skip
    first = run(Run.from_toml(text), out=tmp_path / "one")
    again = run(Run.from_toml((tmp_path / "one" / "run.toml").read_text()), out=tmp_path / "two")
    assert (tmp_path / "one" / "run.toml").read_text() == (tmp_path / "two" / "run.toml").read_text()
    assert first.clients == again.clients
    assert (tmp_path / "one" / "clients.parquet").read_bytes() == (tmp_path / "two" / "clients.parquet").read_bytes()
    assert first.summary["method"] == "fedrep+finetune"
    assert first.run.method.inner.head_epochs == 1
    assert first.run.method.epochs == 1


OTHER = {
    "method": "fedprox", "data": "synthetic", "data_options": {"clients": 7}, "split": "pathological:2", "clients": 7, "rounds": 3, "ratio": ((0, 2), (1,)),
    "epochs": 4, "batch_size": 5, "lr": 0.3, "momentum": 0.5, "weight_decay": 0.01, "nesterov": True, "optimizer": "adamw", "clip": 0.5, "schedule": "step",
    "decay": 0.5, "every": 7, "network": "mlp", "network_options": {"hidden": [3, 4]}, "buffers": "drop", "seed": 8, "test": 0.1, "validation": 0.2,
    "test_from": "official", "shift": "noise:0.5", "held_out": 2.0, "drop": 0.3, "evaluate_every": 2, "checkpoint_every": 5, "backend": "stacked", "steps": "compiled", "workers": 3, "dtype": "float64", "device": "meta", "secure": True,
    "augment": "crop:4,flip", "evaluate_clients": 3, "absent": 0.1, "slow": 0.2, "late": 0.3, "leave": 0.4, "on_bad_reply": "accept",
    "reduce": "trimmed:0.2", "attack": "sign:0.2,2", "autocast": "bfloat16", "time_limit": 30.0,
}  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Run)])
def test_every_field_survives_a_run_file(field, monkeypatch):
    monkeypatch.setattr("idiolect.precision.supported", lambda device: True)  # whatever the processor
    need = {"nesterov": {"momentum": 0.9}}.get(field, {})
    made = Run(**({"method": "fedavg", "clients": 7} | need | {field: OTHER[field]}))
    assert getattr(made, field) != next(f.default for f in dataclasses.fields(Run) if f.name == field)
    again = Run.from_toml(made.to_toml())
    assert again.to_toml() == made.to_toml()
    assert dataclasses.replace(again, ratio=made.ratio) == made  # lists for tuples
    assert again.sampler == made.sampler


def test_a_run_of_objects_runs_again_when_they_are_given(tmp_path):
    made = quick(seed=2)
    again = Run.from_toml(made.to_toml(), data=made.data)
    assert again == made
    assert run(again).clients == run(made).clients


def test_no_rounds_are_an_evaluation(tmp_path):
    result = run(quick(rounds=0, schedule="cosine"), out=tmp_path / "run")
    assert [r["round"] for r in result.rounds] == [0]
    assert result.summary["gradient_passes"] == 0
    assert result.summary["accuracy"]["trained"]["plain"] == {"last": None, "best": None, "last10": None}
    assert result.personal(0).equals(result.context.net.weights)
    assert pq.read_table(tmp_path / "run" / "rounds.parquet").num_rows == 1


def test_a_run_that_nobody_joins_ends_as_it_began(tmp_path):
    found = run(quick(ratio="bernoulli:0.000001", rounds=3), out=tmp_path / "run")
    assert found.server["model"].equals(found.context.net.weights)
    rounds = pq.read_table(tmp_path / "run" / "rounds.parquet").to_pylist()
    assert [r["participants"] for r in rounds] == [[]] * 4
    assert found.summary["bytes"] == {"down": 0, "up": 0}


def test_squared_losses_have_no_accuracy_to_speak_of_and_can_be_saved(tmp_path):
    data = load("quadratics")
    result = run(
        Run(method="fedavg", data=data, split="given", clients=2, rounds=1, test=0.0, backend="serial"),
        out=tmp_path / "q",
    )
    assert json.loads((tmp_path / "q" / "summary.json").read_text())["accuracy"]["received"]["plain"]["last"] is None
    assert len(result.clients) == 0


def test_a_watch_hears_every_round():
    heard = []
    run(quick(rounds=3), watch=lambda report: heard.append(report.round))
    assert heard == [0, 1, 2, 3]


def test_a_run_that_fails_leaves_nothing(tmp_path):
    def watch(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(quick(), out=tmp_path / "deep" / "run", watch=watch)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["serial", "workers", "stacked"])
def test_the_default_data_set_is_learnt(backend):
    """Digits over four alike clients, with an MLP: from chance to something in three rounds."""
    result = run(
        Run(
            method="fedavg", split="iid", clients=4, rounds=3, epochs=2, lr=0.1, network="mlp", backend=backend, workers=2,
            evaluate_every=3,
        )
    )  # fmt: skip
    assert result.summary["accuracy"]["received"]["plain"]["last"] > 0.6
    assert result.rounds[0]["received_plain"] < 0.3


@pytest.mark.parametrize(
    ("network", "shape"), [(None, (3, 20, 17)), ("lenet5", (2, 19, 23)), ("mlp", (5,)), (None, (9,))]
)
def test_channels_sizes_and_classes_come_from_the_data(network, shape):
    x = np.random.default_rng(0).normal(size=(40, *shape)).astype(np.float32)
    found = run(quick(data=from_arrays(x, np.arange(40) % 5), network=network, rounds=1))
    w, first = found.context.net.weights, next(iter(found.context.net.layers.values()))
    assert w["head.weight"].shape[0] == 5
    assert next(v for k, v in first.items() if k.endswith("weight")).shape[1] == shape[0]
    assert found.summary["network_parameters"] == found.context.net.trainable.size


def test_images_too_small_for_the_network_are_refused_with_the_sizes_that_work():
    data = from_arrays(np.zeros((30, 1, 12, 15), np.float32), LABELS)
    with pytest.raises(UsageError, match=r"lenet5 needs images of at least 16x16 .* found 12x15\. .* convnet3"):
        run(quick(data=data, network="lenet5"))


def test_by_default_there_is_a_worker_for_each_core():
    assert (Run(method="fedavg").backend, Run(method="fedavg").workers) == ("workers", None)
    made = quick(backend="workers")
    context = made.context()
    pool = running.backend(made, context, context.store(made.clients))
    try:
        assert len(pool._workers) == len(os.sched_getaffinity(0))
    finally:
        pool.close()


def test_the_initial_model_is_of_the_seed_and_of_nothing_else():
    torch.manual_seed(1)
    one = quick().context().net.weights
    torch.manual_seed(2)
    two = quick("scaffold", rounds=5, clients=2).context().net.weights
    assert one.equals(two)
    assert not one.equals(quick(seed=1).context().net.weights)


def test_the_split_is_of_the_seed_and_of_no_method():
    hashes = {quick(m).federation.split_hash for m in ("fedavg", "fedper", "scaffold")}
    assert len(hashes) == 1
    assert quick(seed=1).federation.split_hash not in hashes
    assert quick().dataset.classes == CLASSES
