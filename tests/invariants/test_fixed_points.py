"""Fixed points on quadratics, where every answer is known in closed form: F_i(w) = a_i / 2 (w - b_i)^2."""

import pytest

import checks
from checks import A, B, named, on_quadratics, points
from idiolect import catalogue
from idiolect.data.sources import quadratics

LR, STEPS = 0.05, 10
THREE = {"a": (4.0, 1.0, 2.0), "b": (1.0, -1.0, 3.0)}


def shared(result):
    return float(result.server["model"]["head.weight"])


def test_fedavg_stops_at_0_38():
    result = on_quadratics(named("fedavg"))
    assert shared(result) == pytest.approx(0.3797, abs=1e-4)
    assert shared(result) == pytest.approx(quadratics.answers(A, B, LR, STEPS).fedavg, abs=1e-12)
    assert points(result) == [shared(result)] * 2


def test_fedavg_of_one_step_finds_the_optimum():
    assert shared(on_quadratics(named("fedavg"), rounds=200, steps=1)) == pytest.approx(0.6, abs=1e-9)


@pytest.mark.parametrize("problem", [{}, THREE], ids=["two", "three"])
def test_scaffold_finds_the_optimum(problem):
    result = on_quadratics(named("scaffold"), rounds=80, **problem)
    a, b = problem.get("a", A), problem.get("b", B)
    assert shared(result) == pytest.approx(quadratics.answers(a, b).global_optimum, abs=1e-6)
    assert abs(shared(on_quadratics(named("fedavg"), **problem)) - shared(result)) > 0.02
    checks.scaffold_finds_the_optimum(catalogue.find("scaffold"))


def test_local_finds_each_client_s_optimum():
    assert points(on_quadratics(named("local"))) == pytest.approx(B, abs=1e-9)


@pytest.mark.parametrize("mu", [0.0, 0.5, 4.0])
def test_fedprox_stops_where_the_pulled_steps_balance(mu):
    """A local phase moves w by s_i (b_i - w), s_i = (1 - q_i) a_i / (a_i + mu), q_i = (1 - lr (a_i + mu))^steps."""
    s = [(1 - (1 - LR * (a + mu)) ** STEPS) * a / (a + mu) for a in A]
    expected = sum(x * b for x, b in zip(s, B, strict=True)) / sum(s)
    assert shared(on_quadratics(named("fedprox", mu=mu), rounds=100)) == pytest.approx(expected, abs=1e-9)
    assert (abs(expected - 0.3797) < 1e-4) == (mu == 0.0)


def test_fedprox_with_a_large_mu_nears_the_optimum():
    """It makes a long phase short: mu = 15 with lr = 0.05 leaves little drift."""
    far = [abs(shared(on_quadratics(named("fedprox", mu=mu), rounds=120)) - 0.6) for mu in (0.0, 4.0, 15.0)]
    assert far[0] > far[1] > far[2]


@pytest.mark.parametrize("lam", [0.0, 0.3, 3.0])
def test_ditto_s_private_models_stop_between_their_own_optimum_and_the_shared_model(lam):
    result = on_quadratics(named("ditto", lam=lam), rounds=80)
    w = shared(result)
    assert w == pytest.approx(0.3797, abs=1e-4)
    expected = [(a * b + lam * w) / (a + lam) for a, b in zip(A, B, strict=True)]
    assert points(result) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("hyper", [{"sigma": 4.0}, {"sigma": 4.0, "lam": 3.0}, {"sigma": 4.0, "alpha": 2.0}], ids=str)
def test_fedamp_stops_where_data_and_neighbours_balance(hyper):
    """F_i'(w_i) + lam / alpha * xi (w_i - w_j) = 0: the clients end closer to each other than alone."""
    import math

    lam, alpha, sigma = hyper.get("lam", 1.0), hyper.get("alpha", 1.0), hyper["sigma"]
    one, two = points(on_quadratics(named("fedamp", **hyper), rounds=80))
    xi = min(alpha / sigma, 1 / 2) * math.exp(-((one - two) ** 2) / sigma)
    for a, b, w, other in ((A[0], B[0], one, two), (A[1], B[1], two, one)):
        assert a * (w - b) + lam / alpha * xi * (w - other) == pytest.approx(0, abs=1e-8)
    assert abs(one - two) < 1.95


def test_fedper_of_a_network_that_is_all_head_is_local():
    assert points(on_quadratics(named("fedper"))) == pytest.approx(B, abs=1e-9)
    assert points(on_quadratics(named("fedrep"))) == pytest.approx(B, abs=1e-9)


def test_fedala_s_clients_take_what_suits_them():
    """The mixture is held at the end that lowers the client's own loss: each stays at its optimum's side of the mean."""
    result = on_quadratics(named("fedala", share=1.0), rounds=60)
    one, two = points(result)
    assert one == pytest.approx(B[0], abs=0.1)
    assert two == pytest.approx(B[1], abs=0.1)


@pytest.mark.parametrize("epochs", [1, 3, 200])
def test_finetune_goes_on_from_the_shared_model(epochs):
    result = on_quadratics(named("finetune", epochs=epochs))
    w = shared(result)
    expected = [b + (1 - LR * a) ** epochs * (w - b) for a, b in zip(A, B, strict=True)]
    assert points(result) == pytest.approx(expected, abs=1e-9)
