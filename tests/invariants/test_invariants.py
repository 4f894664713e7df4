"""Invariants: what holds after every round, whoever took part."""

import pytest

import checks
from checks import found, history, named
from harness import SIZES, experiment, federation
from idiolect import catalogue
from idiolect.engine.wire import nbytes

ALA, AMP, SCAFFOLD = (catalogue.find(n) for n in ("fedala", "fedamp", "scaffold"))
ATTENTIONS = [{}, {"sigma": 3.0}, {"alpha": 50.0}, {"attention": "cosine"}, {"attention": "cosine", "self_weight": 0.4}]
attentions = pytest.mark.parametrize("hyper", ATTENTIONS, ids=str)


@pytest.mark.parametrize(
    "fields",
    [{"ratio": 1.0}, {}, {"ratio": "bernoulli:0.3"}, {"drop": 0.4}, {"images": True, "rounds": 2}],
    ids=["everybody", "5 of 8", "Bernoulli", "lost replies", "BatchNorm"],
)
def test_c_is_the_mean_of_all_ci(fields):
    checks.c_is_the_mean_of_all_ci(SCAFFOLD, **fields)


def test_ci_is_the_mean_gradient_along_the_way():
    checks.ci_is_the_mean_gradient_along_the_way(SCAFFOLD)


def test_norm_buffers_have_no_control_variate():
    result = found(named("scaffold"), images=True, momentum=0.0, rounds=1)
    buffers = result.context.net.buffers
    assert buffers
    assert not buffers & set(result.server["c"])
    assert buffers < set(result.server["model"])


@attentions
def test_rows_of_xi_sum_to_1(hyper):
    checks.rows_of_xi_sum_to_1(AMP, **hyper)


@attentions
def test_clouds_are_the_mixed_uploads(hyper):
    checks.clouds_are_the_mixed_uploads(AMP, **hyper)


@attentions
def test_equal_models_are_their_own_cloud(hyper):
    checks.equal_models_are_their_own_cloud(AMP, **hyper)


def test_xi_is_the_paper_s():
    checks.xi_is_the_paper_s(AMP)


def test_pulls_are_the_gradients_of_their_terms():
    checks.the_pull_is_the_gradient_of_its_term(catalogue.find("fedprox"), 0.7, mu=0.7)
    checks.the_pull_is_the_gradient_of_its_term(catalogue.find("ditto"), 0.7, lam=0.7)
    checks.the_pull_is_the_gradient_of_its_term(AMP, 0.7 / 2.0, (1.0,), lam=0.7, alpha=2.0)
    checks.the_pull_is_the_gradient_of_its_term(AMP, 0.0, (0.0,), lam=0.7)


def test_mixing_weights_stay_between_0_and_1():
    _, _, states = history(ALA(mix_lr=50.0, layers=2), rounds=3)
    for state in states:
        for i in range(8):
            for v in state.store.read(i)["mix"].values():
                assert float(v.min()) >= 0
                assert float(v.max()) <= 1


SENT = {  # models down and up per participant and round; B: the body's share (baselines, section D)
    "local": (0, 0), "fedavg": (1, 1), "fedprox": (1, 1), "fedper": ("B", "B"), "fedrep": ("B", "B"), "ditto": (1, 1),
    "scaffold": (2, 2), "fedala": (1, 1), "finetune": (1, 1), "fedamp": (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_bytes_are_the_fact_sheet_s(name):
    result = found(named(name), momentum=0.0)
    net = result.context.net
    sigma = {0: 0, 1: net.weights.nbytes, 2: 2 * net.weights.nbytes, "B": net.body.nbytes}
    flag = 8 if name == "fedamp" else 0  # whether there is a cloud model yet
    down, up = SENT[name]
    for row in result.rounds[1:]:
        assert len(row["participants"]) == 5
        assert row["bytes_down"] == 5 * (sigma[down] + flag)
        assert row["bytes_up"] == 5 * sigma[up]
    assert result.summary["bytes"]["down"] == sum(r["bytes_down"] for r in result.rounds)


@pytest.mark.parametrize("name", catalogue.names())
def test_what_is_down_is_declared(name):
    """Nothing comes down but entries of the server's and the client's row."""
    context = experiment(named(name), momentum=0.0, network_options={"hidden": (6, 5)}).context()
    down = context.method.down(context.state.server, context.state.rows)
    assert nbytes(down) <= nbytes([context.state.server, context.state.rows])


PASSES = {
    "local": 2, "fedavg": 2, "fedprox": 2, "fedper": 2, "fedrep": 10 + 2, "ditto": 4, "scaffold": 2, "fedamp": 2, "finetune": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_passes_are_the_fact_sheet_s(name):
    result = found(named(name), momentum=0.0)
    assert [r["gradient_passes"] for r in result.rounds[1:]] == pytest.approx([PASSES[name]] * 4)
    assert result.summary["gradient_passes"] == pytest.approx(PASSES[name])


def test_lr_is_a_function_of_the_global_round_for_everyone():
    """A client that comes late is not behind."""
    from dataclasses import dataclass

    from idiolect.method import Method, State, Up

    seen = []

    @dataclass(frozen=True)
    class Watched(Method):
        def init(self, net):
            return State(server={"model": net.weights})

        def local(self, me, down, mine):
            seen.append((me.round, me.lr))
            return Up(mean={"model": down["model"]}), mine

    found(Watched(), rounds=6, ratio=[[0], [0, 5], [1, 7]])
    assert seen == [(r, pytest.approx(0.1 * 0.9**r)) for r in (0, 1, 1, 2, 2, 3, 4, 4, 5, 5)]


def test_clients_in_the_harness_are_what_the_tests_need():
    """One class, unequal sizes, smaller than a batch, a last batch of one."""
    fed = federation()
    sizes = [len(rows) for rows in fed.train]
    assert tuple(sizes) == SIZES
    assert min(sizes) < 4
    assert {n % 4 for n in sizes} == {0, 1, 3}
    labels = [set(fed.dataset.y[rows].tolist()) for rows in fed.train]
    assert labels[3] == {1}
    assert set().union(*labels) == {0, 1, 2}
