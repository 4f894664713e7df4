"""Other ways to take steps than the loop: the same numbers up to rounding, the same bits for any number of workers, and
what chose them stands in the run's files."""

import json
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from harness import experiment, moved, run
from idiolect import Run
from idiolect.engine import stepping
from idiolect.engine.compiled import Compiled
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.experiment import STEPS
from idiolect.method import Method, State, Up

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def close(one, two, tolerance=1e-10):
    return all(moved(one.personal(i), two.personal(i)) < tolerance for i in range(8))


@compiler
@pytest.mark.parametrize("method", ["fedrep", "moon", "scaffold"])
def test_compiled_steps_give_the_loop_s_numbers(method):
    fields = {"rounds": 3} | ({"momentum": 0.0} if method == "scaffold" else {})
    one, two = (run(experiment(method, steps=steps, **fields)) for steps in ("loop", "compiled"))
    assert close(one, two)
    known = two.context.trainer.known
    assert [f for f in known.values() if f is not None]
    assert two.summary["steps"] == "compiled"
    assert [r["gradient_passes"] for r in one.rounds] == [r["gradient_passes"] for r in two.rounds]


@compiler
def test_compiled_steps_are_one_function_for_all_clients_and_rounds():
    found = run(experiment("fedavg", steps="compiled"))
    assert len(found.context.trainer.known) == 1


@compiler
@pytest.mark.parametrize("steps", ["compiled", "stacked"])
def test_the_same_bits_for_any_number_of_workers(steps, monkeypatch):
    monkeypatch.setattr("idiolect.engine.work.STACK", 3)
    fields = {"steps": steps, "ratio": 1.0, "rounds": 2}
    one = run(experiment("fedper", **fields))
    other = run(experiment("fedper", backend="workers", workers=2, **fields))
    assert all(other.personal(i).equals(one.personal(i)) for i in range(8))
    assert close(one, run(experiment("fedper", **fields | {"steps": "loop"})))


@dataclass(frozen=True)
class Odd(Method):
    """A loss of which a trace would be another function, or none."""

    kind: str

    def init(self, net):
        return State(server={"model": net.weights})

    def loss(self, task, w, batch, *given):
        value = task.loss(w, batch)
        if self.kind == "looks at a number":
            return value * 2 if value.item() > 1 else value
        if self.kind == "draws by torch":
            return value * (1 + torch.rand(()))
        return value * (1 + given[0]())

    def local(self, me, down, mine):
        draw = me.draw("odd")
        given = (draw.random,) if self.kind == "draws by itself" else ()
        loss = (
            self.loss
            if self.kind != "closes over things"
            else lambda task, w, batch: draw.random() * task.loss(w, batch)
        )
        return Up(mean={"model": me.train(down["model"], loss=loss, given=given)}), mine


@pytest.mark.parametrize("kind", ["looks at a number", "draws by torch", "draws by itself", "closes over things"])
def test_what_a_trace_would_change_is_stepped_through_as_it_is(kind):
    one, two = (run(experiment(Odd(kind), steps=steps, rounds=2)) for steps in ("loop", "compiled"))
    assert one.personal(0).equals(two.personal(0))
    assert not [f for f in two.context.trainer.known.values() if f is not None]


def test_one_process_compiles_no_more_than_so_many_kinds(monkeypatch):
    monkeypatch.setattr("idiolect.engine.compiled.KINDS", 0)
    context = experiment("fedavg").context()
    me = context.client(Job("local", 0, 0, 0, {}, {}))
    plain = me.train(context.net.weights, order=0)
    me._trainer = Compiled(4)
    assert me.train(context.net.weights, order=0).equals(plain)
    assert not me._trainer.known


@pytest.mark.parametrize("steps", ["compiled", "stacked"])
def test_what_needs_the_loop_is_refused(steps, tmp_path):
    with pytest.raises(UsageError, match="BatchNorm"):
        run(experiment("fedavg", images=True, steps=steps), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="backend=stacked stacks all clients' steps in one process; found steps"):
        experiment("fedavg", backend="stacked", steps=steps)


def test_without_a_compiler_a_sentence_says_so(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no g++\nand more")

    monkeypatch.setattr("torch._inductor.compile", fails)
    with pytest.raises(UsageError) as error:
        run(experiment("fedavg", steps="compiled"))
    assert str(error.value) == (
        "steps=compiled needs PyTorch's compiler and a C++ compiler that it can use; it failed with RuntimeError: no g++. "
        "Use steps=loop."
    )


# which is the fastest


@pytest.fixture
def measured(monkeypatch):
    """Times as told, in place of a measurement."""

    def tell(**times):
        monkeypatch.setattr(stepping, "_measured", {})
        monkeypatch.setattr(stepping, "_measure", lambda context: times)

    return tell


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"loop": 1.0, "compiled": 0.5, "stacked": 0.6}, "compiled"),
        ({"loop": 1.0, "compiled": 0.8, "stacked": 0.2}, "stacked"),
        ({"loop": 1.0, "compiled": 0.95, "stacked": 2.0}, "loop"),  # not clearly faster
        ({"loop": 1.0}, "loop"),
    ],
)
def test_the_fastest_is_taken_where_it_is_clearly_faster(measured, times, best):
    measured(**times)
    assert stepping.fastest(experiment("fedavg").context()) == (best, times)


def test_what_was_chosen_stands_in_the_run_s_files_and_runs_again(measured, tmp_path):
    measured(loop=1.0, stacked=0.1)
    data = {"data": "synthetic", "split": "given", "clients": 4, "rounds": 2, "backend": "serial"}
    made = Run(method="fedavg", steps="auto", **data)
    first = run(made, out=tmp_path / "one")
    text = (tmp_path / "one" / "run.toml").read_text()
    assert 'steps = "stacked"' in text
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert (summary["steps"], summary["steps_measured"]) == ("stacked", {"loop": 1.0, "stacked": 0.1})
    again = run(Run.from_toml(text))
    assert again.run.steps == "stacked"
    assert "steps_measured" not in again.summary
    assert all(again.personal(i).equals(first.personal(i)) for i in range(4))
    assert made.made(text)
    assert Run(method="fedavg", steps="stacked", **data).made(text)
    assert not Run(method="fedavg", **data).made(text)
    assert not Run(method="fedavg", steps="auto", **data | {"rounds": 3}).made(text)


def test_a_measurement_is_of_every_way_that_the_network_can_take(monkeypatch):
    monkeypatch.setattr(stepping, "BUDGET", 0.0)
    monkeypatch.setattr(stepping, "BUSY", np.inf)
    ways = stepping._measure(experiment("fedavg", momentum=0.0).context())
    assert set(ways) <= set(STEPS)
    assert {"loop", "stacked"} <= set(ways)
    assert min(ways.values()) > 0
    assert set(stepping._measure(experiment("fedavg", images=True).context())) == {"loop"}
    monkeypatch.setattr(stepping, "BUSY", 0.0)  # a network that is busy with itself
    assert set(stepping._measure(experiment("fedavg").context())) == {"loop"}


def test_one_measurement_serves_all_methods(monkeypatch):
    asked = []
    monkeypatch.setattr(stepping, "_measured", {})
    monkeypatch.setattr(stepping, "_measure", lambda context: asked.append(context) or {"loop": 1.0})
    for method in ("fedavg", "fedrep", "fedavg"):
        stepping.fastest(experiment(method).context())
    assert len(asked) == 1
    stepping.fastest(experiment("fedavg", batch_size=5).context())
    assert len(asked) == 2
