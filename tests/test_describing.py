"""What is said of the methods: capabilities by their definitions, what a secure run refuses, and the page of it all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness import experiment
from idiolect import Run, catalogue, run
from idiolect.cli import main
from idiolect.describing import capabilities, in_words, markdown, needs, page
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.errors import UsageError
from idiolect.method import Method, Rows, State, Up
from idiolect.methods.fedaf import FedAF
from idiolect.methods.fedavg import FedAvg
from idiolect.rehearsing import facts
from idiolect.wrap.fedlag import FedLAG

KEYS = {
    "keeps_state", "sends", "partial_participation", "equal_architectures", "extra_passes", "evaluated_model",
    "secure_aggregation", "wrapped_by_fedlag", "new_clients",
}  # fmt: skip
STATE, ROW, DATA, TRAINING = "private state", "row at the server", "own data", "training"

# state, sends, equal networks, extra (gradient, without), through, FedLAG, new clients
DEFINED = {
    "local": (True, "nothing", False, (0, 0), [STATE], False, False),
    "fedavg": (False, "sums", True, (0, 0), [], True, True),
    "fedprox": (False, "sums", True, (0, 0), [], True, True),
    "scaffold": (True, "sums", True, (0, 0), [], True, True),
    "fedper": (True, "sums", True, (0, 0), [STATE], True, True),
    "fedrep": (True, "sums", True, (10, 1), [STATE], True, True),  # E_h = 10; the features under a frozen body
    "ditto": (True, "sums", True, (1, 0), [STATE], True, False),
    "pfedme": (True, "sums", True, (4, 0), [STATE], True, False),  # K = 5 gradients of each batch
    "lgfedavg": (True, "sums", False, (0, 0), [STATE], True, True),
    "fedproto": (True, "sums", False, (0, 1), [STATE, DATA], False, True),
    "fedala": (True, "sums", True, (0.8, 0), [STATE, TRAINING], True, True),  # one epoch of 80 %, once it has begun
    "fedamp": (True, "individuals", True, (0, 0), [STATE], False, False),
    "fedfomo": (True, "individuals", True, (-0.2, 0.6), [STATE], False, False),  # trains on 80 %; three losses of 20 %
    "fedcac": (False, "individuals", True, (0, 0), [ROW], False, True),
    "ifca": (False, "individuals", True, (0, 4), [DATA], False, True),  # the loss of each of four models
    "knnper": (False, "sums", True, (0, 0), [DATA], True, True),
    "fedsimsup": (True, "individuals", True, (1, 2), [STATE, ROW], False, True),
    "fedaf": (True, "individuals", True, (-1, 3), [], False, True),  # the images it trains are no samples of its own
    "finetune": (False, "sums", True, (0, 0), [TRAINING], True, True),
    "fedlag": (True, "individuals", True, (0, 0), [STATE, ROW], False, True),
}


@pytest.mark.parametrize("name", DEFINED)
def test_capabilities_are_those_of_the_definition(name):
    state, sends, equal, (gradient, without), through, wrapped, served = DEFINED[name]
    can = capabilities(name)
    assert can["keeps_state"] == state
    assert can["sends"] == sends
    assert can["secure_aggregation"] == (sends != "individuals")
    assert can["equal_architectures"] == equal
    assert (can["extra_passes"]["gradient"], can["extra_passes"]["without_gradient"]) == (gradient, without)
    assert can["evaluated_model"] == {"model": "personal" if through else "shared", "through": through}
    assert can["wrapped_by_fedlag"] == wrapped
    assert can["new_clients"] == served


@pytest.mark.parametrize("name", catalogue.names())
def test_every_method_has_every_capability(name):
    can = capabilities(name)
    assert can.keys() == KEYS
    assert can["partial_participation"] is True  # the contract asks it of each
    assert len(in_words(can)) == len(KEYS)
    assert all(label in page(name) for label in in_words(can))
    assert ("individual replies at the server" in needs(name)) == (can["sends"] == "individuals")


def test_samples_that_are_not_the_clients_are_counted_apart():
    assert capabilities("fedaf")["extra_passes"]["other_samples"] == 1000 * 10 * 50  # iterations, classes, images
    assert capabilities("fedavg")["extra_passes"]["other_samples"] == 0


@pytest.mark.parametrize(("name", "gradient", "without"), [("finetune", 5, 0), ("knnper", 0, 1), ("ifca", 0, 4)])
def test_passes_before_a_prediction(name, gradient, without):
    extra = capabilities(name)["extra_passes"]
    assert (extra["prediction_gradient"], extra["prediction_without_gradient"]) == (gradient, without)


def test_the_settings_are_what_is_looked_at():
    """Without what sends individuals FedAIMS sends none, and FedLAG that never chooses a layer shares all of them."""
    assert facts(catalogue.build("fedaims")).rows_of
    assert not facts(catalogue.build("fedaims", {"supervision": "all"})).rows_of
    assert facts(catalogue.build("fedavg+fedlag", {"top_k": 0})).through == ()


# methods that nobody knows


class Whole(Method):
    """FedAvg that takes everyone or nobody."""

    def init(self, net):
        return State(server={"model": net.weights})

    def local(self, me, down, mine):
        return Up(mean={"model": me.train(down["model"])}), mine

    def check(self, run):
        if run.ratio != 1:
            raise UsageError("Whole takes everyone.")


class Broken(Whole):
    def server(self, server, rows, up, run):
        return {"model": up.mean["model"].map(lambda v: v / 0)}, rows

    def check(self, run):
        pass


class Late(Whole):
    """Sums at first, individuals in the second round."""

    def local(self, me, down, mine):
        w = me.train(down["model"])
        return Up(mean={"model": w}, rows={"late": w} if me.round == 1 else {}), mine

    def check(self, run):
        pass


def test_partial_participation_is_seen():
    assert facts(FedAvg()).partial
    assert not facts(Whole()).partial  # it refuses
    assert not facts(Broken()).partial  # its numbers are not finite


# secure runs


@pytest.mark.parametrize("name", [*catalogue.names(), "fedper+finetune", "fedavg+fedlag+finetune", "fedamp+finetune"])
def test_a_secure_run_refuses_exactly_those_that_send_individuals(name):
    if capabilities(name)["sends"] == "individuals":
        with pytest.raises(UsageError, match=r"secure aggregation hides"):
            Run(method=name, secure=True)
        return
    assert Run(method=name, secure=True).secure


@pytest.mark.parametrize(
    ("name", "slots"),
    [("fedfomo", "model, gains"), ("feddbe", "mean, size"), ("fedaf", "images, held"), ("fedlag", "layers, buffers")],
)
def test_the_refusal_names_the_slots_and_a_way_out(name, slots):
    with pytest.raises(UsageError) as error:
        Run(method=name, secure=True)
    assert str(error.value) == (
        f"{catalogue.build(name).name} sends what its server has to see client by client (rows: {slots}), which secure "
        "aggregation hides: it shows sums alone. Use a method that sends only sums, such as fedavg "
        "('idiolect methods --json' tells), or secure=false."
    )


def test_a_secure_run_is_the_run():
    one, two = (run(experiment("fedper", secure=secure)) for secure in (False, True))
    assert one.server["model"].equals(two.server["model"])
    assert "secure = true" in two.run.to_toml()
    assert Run.from_toml('secure = true\n[method]\nname = "fedavg"\n').secure


def test_what_a_rehearsal_does_not_show_the_run_refuses():
    experiment_ = experiment(Late(), secure=True)  # nobody takes part in a rehearsal's round 1
    context = experiment_.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(experiment_.clients))
    with pytest.raises(UsageError, match=r"Late|late"):
        loop(experiment_, context, Serial(context), progress, lambda report: None)
    assert progress.round == 1


def test_secure_is_true_or_false():
    with pytest.raises(UsageError, match=r"secure must be true or false; found 'yes'"):
        Run(method="fedavg", secure="yes")


# combinations that make no sense


@pytest.mark.parametrize("name", ["scaffold", "pfedme", "perfedavg", "scaffold+finetune", "scaffold+fedlag"])
@pytest.mark.parametrize("fields", [{"momentum": 0.9}, {"optimizer": "adam"}, {"clip": 1.0}])
def test_a_derivation_of_plain_sgd_refuses_another(name, fields):
    with pytest.raises(UsageError, match=r"Set momentum=0, no clip, optimizer sgd\."):
        Run(method=name, **fields)


@pytest.mark.parametrize("variant", ["fo", "hf", "exact"])
def test_no_kind_of_perfedavg_takes_momentum(variant):
    with pytest.raises(UsageError, match="found momentum"):
        Run(method=catalogue.build("perfedavg", {"variant": variant}), momentum=0.9)


@pytest.mark.parametrize("name", catalogue.names())
def test_fedlag_around_what_it_cannot_wrap_is_refused_before_anything_is_written(name, tmp_path):
    if capabilities(name)["wrapped_by_fedlag"] or name == "fedlag":
        return
    out = tmp_path / "run"
    with pytest.raises(UsageError, match="FedLAG wraps methods"):
        run(experiment(f"{name}+fedlag", momentum=0.0, network="convnet3", images=True), out)
    assert not out.exists()


def test_a_wrapper_that_finds_nothing_to_wrap_is_refused_when_the_run_is_made():
    with pytest.raises(UsageError, match="FedLAG wraps methods that average their clients' models; fedaf does not"):
        Run(method=FedLAG(FedAF()))


def test_a_method_that_does_not_fit_the_rehearsals_network_is_not_refused_for_it():
    deep = catalogue.build("lgfedavg+finetune", {"layers": 12})
    assert Run(method=deep, network="resnet18", secure=True)
    with pytest.raises(UsageError):
        facts(deep)


# the command line


def printed(*args: str) -> str:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_what_the_command_prints():
    written = Path(__file__).parents[1] / "docs" / "methods" / "capabilities.md"
    assert written.read_text() == printed("methods", "--markdown") == markdown()


def test_json_has_the_capabilities():
    found = {one["name"]: one["capabilities"] for one in json.loads(printed("methods", "--json"))}
    assert found == {name: capabilities(name) for name in catalogue.names()}


def test_a_page_says_it_in_words():
    lines = [" ".join(line.split()) for line in printed("show", "fedfomo").splitlines()]
    assert "secure aggregation no" in lines
    assert "the server gets individuals" in lines
    assert "predicts with a model personal: private state" in lines


def test_the_option_is_there():
    result = CliRunner().invoke(main, ["run", "fedfomo", "--secure"])
    assert result.exit_code == 2
    assert "which secure aggregation hides" in result.output
