"""Run files: every run is read again as it was written, and every other text is refused in a sentence."""

from __future__ import annotations

import dataclasses
import datetime
import warnings

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from idiolect.errors import UsageError
from idiolect.experiment import Run

quick = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
share = st.floats(0, 0.9)
FIELDS = {
    "method": st.sampled_from(["fedavg", "fedrep", "ditto", "fedprox", "fedala"]),
    "data": st.sampled_from(["digits", "toy2d", "./a folder/with 'quotes'", "ü.csv"]),
    "data_options": st.dictionaries(st.text(min_size=1), st.integers(-(2**63), 2**63 - 1) | st.text() | st.booleans(), max_size=2),
    "split": st.sampled_from(["iid", "dirichlet:0.1", "dirichlet:0.5,minimum=3", "pathological:2", "given", "clusters:3"]),
    "clients": st.integers(12, 500),
    "rounds": st.integers(0, 10**9),
    "ratio": st.floats(1e-3, 1) | st.sampled_from(["0.5..1", "bernoulli:0.1"]) | st.just([[0, 1], [4]]),
    "epochs": st.integers(1, 99),
    "batch_size": st.integers(1, 10**6),
    "lr": st.floats(0, allow_infinity=False),
    "momentum": st.floats(0.001, 0.99),
    "weight_decay": st.floats(0, 1e6),
    "nesterov": st.just(False),
    "clip": st.floats(1e-300, 1e300),
    "schedule": st.sampled_from(["constant", "exponential", "step", "cosine"]),
    "decay": st.floats(0.01, 1),
    "every": st.integers(1, 1000),
    "augment": st.sampled_from(["none", "crop:4", "flip", "crop:2,flip"]),
    "network": st.sampled_from(["mlp", "lenet5", "convnet3"]),
    "network_options": st.dictionaries(st.sampled_from(["hidden", "width"]), st.lists(st.integers(1, 9))),
    "buffers": st.sampled_from(["average", "local", "drop"]),
    "seed": st.integers(0, 2**62),
    "test": st.floats(0.01, 0.9),
    "validation": st.floats(0, 0.09),
    "test_from": st.sampled_from(["auto", "merged", "official"]),
    "shift": st.sampled_from(["none", "rotation:4", "noise:0.5", "colour:0.5"]),
    "held_out": st.sampled_from([0.0, 0.1, 2.0]),
    **dict.fromkeys(("drop", "absent", "slow", "late", "leave"), share),
    "on_bad_reply": st.sampled_from(["drop", "stop", "accept"]),
    "attack": st.sampled_from(["none", "sign:0.2", "labels:0.5"]),
    "evaluate_every": st.integers(1, 99),
    "evaluate_clients": st.integers(1, 3),
    "checkpoint_every": st.integers(0, 99),
    "backend": st.sampled_from(["workers", "serial", "stacked"]),
    "workers": st.integers(1, 64),
    "dtype": st.sampled_from(["float32", "float64"]),
}  # fmt: skip


@quick
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_a_run_is_read_again_as_it_was_written(fields):
    run = Run(**{"method": "fedavg", **fields})
    text = run.to_toml()
    again = Run.from_toml(text)
    assert again == run
    assert again.to_toml() == text
    assert again.identity == run.identity
    assert again.made(text)


def test_every_field_is_tried():
    alone = {
        "optimizer",
        "reduce",
        "secure",
        "steps",
        "autocast",
        "device",
        "time_limit",
    }  # with others, or with what is here
    assert set(FIELDS) | alone == {f.name for f in dataclasses.fields(Run)}


# what is no run file


ODD = [
    True, -1, 0, 1, 10**400, 2**63, 1e308, float("inf"), float("nan"), "", "a", "\0", "\0.parquet", "x:\0", "1:2",
    "dirichlet:nan", "dirichlet:1e999", "sign:nan", "trimmed:nan", "krum:-1", "krum:999999999999999999999", "nan..nan",
    "crop:99999999999999999999999", "rotation:nan", "bernoulli:nan", "cpu:99999999999999999999", "meta", [], [1], [[1]],
    [[]], ["a"], ["01"], [[1.5]], [[10**30]], {"a": 1}, {"a": {"b": [1]}}, {"name": 3}, {"name": "fedprox", "mu": 10**400},
    datetime.date(2020, 1, 1), datetime.time(1),
]  # fmt: skip


def run_or_refused(make):
    """The run if there is one; what it says is then a run, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said, run = "", None
        try:
            run = make()
        except UsageError as error:
            said = str(error)
        assert len(said.splitlines()) <= 1
        assert run is None or Run.from_toml(run.to_toml()).to_toml() == run.to_toml()


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Run)])
def test_odd_values_are_refused_or_taken_and_nothing_else(name):
    for value in ODD:
        run_or_refused(lambda value=value: Run.from_table({"method": "fedavg", name: value}))


scalars = st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.sampled_from(ODD[9:26])
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3))


@quick
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Run)]), values, max_size=3))
def test_tables_of_anything_are_refused_or_taken(table):
    run_or_refused(lambda: Run.from_table({"method": "fedavg"} | table))


VALID = tomli_w.dumps({"method": {"name": "fedrep", "head_epochs": 2}, "rounds": 3, "ratio": [[0, 1]], "lr": 0.5})


@quick
@given(st.text(max_size=60) | st.tuples(st.integers(0, len(VALID)), st.text(max_size=6), st.integers(0, 5)))
def test_texts_are_refused_or_taken(made):
    if not isinstance(made, str):
        at, new, cut = made
        made = VALID[:at] + new + VALID[at + cut :]
    run_or_refused(lambda: Run.from_toml(made))


@pytest.mark.parametrize(
    "text", ["rounds = " + "9" * 5000, "a = " + "[" * 5000, "method = 1\nmethod = 2", "\ud800 = 1"]
)
def test_texts_that_overwhelm_the_reader_are_refused(text):
    with pytest.raises(UsageError, match="is not TOML"):
        Run.from_toml(text)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"lr": 10**400}, "lr must be a finite number"),
        ({"clients": float("nan")}, "clients must be a whole number"),
        ({"device": 3}, "device must be a device of PyTorch"),
        ({"data_options": [1]}, "data_options must be options by their names"),
        ({"ratio": [[0, 1.5]]}, "ratio must be"),
        ({"ratio": ["01"]}, "ratio must be"),
        ({"method": {"name": 3}}, r"The name of the run file's \[method\] must be a word; found 3"),
        ({"method": {"name": "fedprox", "mu": 10**400}}, "mu must be a number"),
    ],
)
def test_odd_values_are_named(table, sentence):
    with pytest.raises(UsageError, match=sentence):
        Run.from_table({"method": "fedavg"} | table)
