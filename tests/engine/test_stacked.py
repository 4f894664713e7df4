"""Stacked clients: the same numbers as one after another, and a sentence for what cannot be stacked."""

import threading
from dataclasses import dataclass

import odd
import pytest
import torch
from torch import nn

from harness import experiment, federation, moved, run
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.stacked import Stacked
from idiolect.errors import ClientError, UsageError
from idiolect.method import Method, Rows, State, Up
from idiolect.nets import Network


def close(one, two, tolerance=1e-12, clients=8):
    return all(moved(one.personal(i), two.personal(i)) < tolerance for i in range(clients))


@dataclass(frozen=True)
class Everything(Method):
    """Every argument that `train` has."""

    def init(self, net):
        mean = torch.zeros(net.features, dtype=net.dtype)
        return State(server={"model": net.weights}, client={"mix": net.head.ones(), "mean": mean})

    def half(self, task, w, batch, scale):
        return scale * task.loss(w, batch)

    def steer(self, g, w, anchor, strength):
        return g + strength * (w - anchor)

    def carrying(self, task, w, batch):
        z = task.features(w, batch.x)
        mean = 0.5 * w["mean"] + 0.5 * torch.stack([batch.mean(column) for column in z.unbind(1)])
        return task.criterion(task.head(w, z), batch) + mean.square().sum(), {"mean": mean.detach()}

    def local(self, me, down, mine):
        w = me.train(down["model"], loss=self.half, given=(torch.tensor(0.5),), steps=3)
        w = me.train(w, correct=self.steer, given=(down["model"], torch.tensor(0.3)), lr=0.05, order=5)
        w = me.train(w, only=me.task.net.head, project=lambda v: v.clamp(-0.5, 0.5), epochs=3, share=0.7)
        w = me.train(w, only=me.task.net.body)
        w = me.train(w | {"mean": mine["mean"]}, only=w, loss=self.carrying, carried=["mean"])
        return Up(mean={"model": w.drop(["mean"])}), {**mine, "mean": w["mean"]}


CASES = {
    "plain": {},
    "momentum, Nesterov, decay": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
    "Adam": {"optimizer": "adam", "momentum": 0.0},
    "clipping": {"clip": 0.05},
    "one sample, and less than a batch": {"sizes": (1, 2, 3, 4, 5, 9, 1, 8)},
    "all alike": {"sizes": (8,) * 8},
}


@pytest.mark.parametrize("case", CASES)
def test_stacked_is_serial(case):
    fields = {"ratio": 1.0, "rounds": 3, "momentum": 0.0} | CASES[case]
    method = Everything()
    one, two = run(experiment(method, **fields)), run(experiment(method, backend="stacked", **fields))
    assert close(one, two)
    for i in range(8):
        assert float((one.private(i)["mean"] - two.private(i)["mean"]).abs().max()) < 1e-12
        assert one.private(i)["mean"].any()
    for a, b in zip(one.clients, two.clients, strict=True):
        assert a | {"loss": 0} == b | {"loss": 0}
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)
    assert [r["gradient_passes"] for r in one.rounds] == [r["gradient_passes"] for r in two.rounds]


@dataclass(frozen=True)
class Beside(Method):
    """Constants of each sample in some clients' phases: none, one or two of them, of several widths."""

    def init(self, net):
        return State(server={"model": net.weights})

    def loss(self, task, w, batch):
        told = () if batch.beside is None else batch.beside if isinstance(batch.beside, tuple) else (batch.beside,)
        return task.loss(w, batch) * (1 + sum(batch.mean(v.sum(1)) for v in told))

    def local(self, me, down, mine):
        z = me.features(down["model"])
        beside = [None, z, (z, z + 1), z[:, :2]][me.id % 4]
        return Up(mean={"model": me.train(down["model"], loss=self.loss, beside=beside)}), mine


def test_phases_with_and_without_constants_of_samples_are_not_confused():
    one, two = (run(experiment(Beside(), ratio=1.0, rounds=2, backend=b)) for b in ("serial", "stacked"))
    assert close(one, two)


def test_images_without_norm_layers_are_stacked():
    flat = Network(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()), nn.Linear(4, 3)
    )
    fields = {"images": True, "network": flat, "rounds": 2}
    assert close(run(experiment("fedrep", **fields)), run(experiment("fedrep", backend="stacked", **fields)))


@pytest.mark.parametrize("together", [1, 3, 100])
def test_any_number_together(together):
    run_ = experiment("fedala", rounds=2, ratio=1.0)
    context = run_.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(8))
    with torch.random.fork_rng(devices=[]):
        loop(run_, context, Stacked(context, together), progress, lambda report: None)
    plain = run(run_)
    assert moved(progress.server["model"], plain.server["model"]) < 1e-12


def dropout():
    return Network(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"images": True},
            "The stacked backend cannot run BatchNorm (layer body.block1.norm): a padded batch has other statistics than "
            "a client's own. Use the serial or workers backend, or a network with group normalisation.",
        ),
        (
            {"network": dropout()},
            "The stacked backend cannot run dropout (layer body.2): stacked clients would draw other numbers. Use the "
            "serial or workers backend.",
        ),
    ],
    ids=["BatchNorm", "dropout"],
)
def test_what_cannot_be_stacked_is_refused_with_a_sentence(fields, sentence, tmp_path):
    with pytest.raises(UsageError) as error:
        run(experiment("fedavg", backend="stacked", **fields), out=tmp_path / "run")
    assert str(error.value) == sentence
    run(experiment("fedavg", rounds=1, **fields))  # runs elsewhere


@dataclass(frozen=True)
class Branching(Method):
    """Its loss looks at a number, or fails."""

    fails: bool = False

    def init(self, net):
        return State(server={"model": net.weights})

    def loss(self, task, w, batch):
        if self.fails:
            raise ZeroDivisionError("of all things")
        value = task.loss(w, batch)
        return value * 2 if value.item() > 1 else value

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"], loss=self.loss)}), mine


def test_what_trains_alone_and_not_together_is_refused_with_a_sentence():
    with pytest.raises(UsageError) as error:
        run(experiment(Branching(), backend="stacked"))
    start, _, reason = str(error.value).partition(" (")
    assert start == "The stacked backend cannot run branching: its clients train alone but not together"
    assert ".item()" in reason
    assert reason.endswith("). Use the serial or workers backend.")
    run(experiment(Branching(), rounds=1))


def test_a_mistake_in_a_loss_is_told_as_elsewhere():
    for backend in ("serial", "stacked"):
        with pytest.raises(ClientError) as error:
            run(experiment(Branching(fails=True), backend=backend))
        assert "branching, client 0, round 0 (local): ZeroDivisionError: of all things" in str(error.value)


def test_after_an_error_no_thread_is_left():
    with pytest.raises(ClientError):
        run(experiment(odd.Raising(client=2), ratio=1.0, backend="stacked"))
    theirs = [t for t in threading.enumerate() if "_client" in t.name]
    for thread in theirs:
        thread.join(timeout=60)
    assert not any(t.is_alive() for t in theirs)


def test_one_client_alone_needs_no_stack():
    fed = federation((6,))
    run_ = {"federation": fed, "ratio": 1.0, "rounds": 2}
    one, two = run(experiment("fedavg", **run_)), run(experiment("fedavg", backend="stacked", **run_))
    assert one.personal(0).equals(two.personal(0))
