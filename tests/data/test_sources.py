"""The data sets that need no download."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss, softplus

import idiolect.errors
from idiolect.data import federate, load, names
from idiolect.data.sources.quadratics import answers
from idiolect.errors import UsageError
from idiolect.nets import build


def test_all_sources_load_and_fit_their_network():
    assert names() == ["digits", "quadratics", "synthetic", "toy2d"]
    for name in names():
        data = load(name)
        assert data.name == name
        net = build(data.network, data.shape, data.classes)
        assert net(data.x[:2]).shape == (2, data.classes)


def test_an_unknown_name_comes_with_the_nearest():
    with pytest.raises(UsageError, match=r"Unknown data set 'digit'. Did you mean digits?"):
        load("digit")


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="found nothing there"):
        load(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"at '\./digits', found nothing there"):
        load("./digits")


def test_unknown_options_are_refused():
    with pytest.raises(UsageError, match="'digits' has no options, found 'size'"):
        load("digits", size=3)
    with pytest.raises(UsageError, match=r"Unknown option of data set 'synthetic' 'client'. Did you mean clients"):
        load("synthetic", client=3)


def test_the_package_itself_imports_no_library_that_only_one_source_needs():
    code = (
        "import sys, types; sys.modules['idiolect'] = bare = types.ModuleType('idiolect');"
        "bare.__path__ = [sys.argv[1]];"  # the folder alone, without what idiolect/__init__.py imports
        "import idiolect.data; print(*{'sklearn', 'pyarrow', 'PIL'} & set(sys.modules))"
    )
    package = str(Path(idiolect.errors.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_digits():
    from sklearn.datasets import load_digits

    data, known = load("digits"), load_digits()
    assert torch.equal(data.x[:, 0] * 16, torch.tensor(known.images, dtype=torch.float32))
    assert torch.equal(data.y, torch.tensor(known.target))
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.classes == 10
    assert data.network == "convnet3"
    assert data.x.min() == 0
    assert data.x.max() == 1
    assert np.bincount(data.strata).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_quadratics_hold_the_losses_that_they_promise():
    a, b = (4.0, 0.5, 2.0), (1.0, -1.0, 3.0)
    data = load("quadratics", a=a, b=b)
    assert data.group is not None
    assert data.group.tolist() == [0, 1, 2]
    for w in (-2.0, 0.0, 0.7):
        for i in range(3):
            half = mse_loss(data.x[i] * w, data.y[i], reduction="sum") / 2
            assert half.item() == pytest.approx(a[i] / 2 * (w - b[i]) ** 2, rel=1e-6)


def fedavg_on(data, lr, steps, rounds):
    """FedAvg over the rows of a data set as clients, with the network itself and torch's own optimiser."""
    net = build(data.network, data.shape, data.classes).double()
    assert net.head.weight.item() == 0
    assert net.head.bias is None
    for _ in range(rounds):
        received, sent = net.head.weight.detach().clone(), []
        for x, y in zip(data.x.double(), data.y.double(), strict=True):
            net.head.weight.data.copy_(received)
            optimiser = torch.optim.SGD(net.parameters(), lr=lr)
            for _ in range(steps):
                optimiser.zero_grad()
                (((net(x[None]) - y) ** 2).sum() / 2).backward()
                optimiser.step()
            sent.append(net.head.weight.detach().clone())
        net.head.weight.data.copy_(torch.stack(sent).mean(0))
    return net.head.weight.item()


def test_the_answers_of_the_default_quadratics():
    exact = answers()
    assert exact.global_optimum == pytest.approx(0.6)
    assert exact.local_optima == (1.0, -1.0)
    assert exact.fedavg == pytest.approx(0.379757, abs=1e-6)
    data = load("quadratics")
    assert fedavg_on(data, lr=0.05, steps=10, rounds=60) == pytest.approx(exact.fedavg, abs=1e-7)
    assert fedavg_on(data, lr=0.05, steps=1, rounds=400) == pytest.approx(0.6, abs=1e-7)


def test_the_answers_of_other_quadratics():
    a, b = (4.0, 1.0, 0.25), (1.0, -1.0, 5.0)
    exact = answers(a, b, lr=0.1, steps=7)
    got = fedavg_on(load("quadratics", a=a, b=b), lr=0.1, steps=7, rounds=80)
    assert got == pytest.approx(exact.fedavg, abs=1e-6)
    assert exact.global_optimum == pytest.approx((4 - 1 + 1.25) / 5.25)
    assert answers(a, b, lr=0.1, steps=1).fedavg == pytest.approx(exact.global_optimum)


def test_quadratics_refuse_what_is_no_convex_quadratic():
    for a, b in (((1.0, 0.0), (1.0, 1.0)), ((1.0,), (1.0, 2.0)), ((), ())):
        with pytest.raises(UsageError, match="as many curvatures a > 0 as optima b"):
            load("quadratics", a=a, b=b)


def test_quadratics_federate_by_their_clients():
    data = load("quadratics")
    federation = federate(data, "given", 2, seed=0, test=0.0)
    assert [rows.tolist() for rows in federation.train] == [[0], [1]]
    assert [len(rows) for rows in federation.test] == [0, 0]
    with pytest.raises(UsageError, match=r"Expected class labels for split 'dirichlet:0.1'"):
        federate(data, "dirichlet:0.1", 2, seed=0)


def test_synthetic_clients_have_all_classes_and_their_own_shift():
    data = load("synthetic", clients=5, rows=200, classes=4, features=6, shift=2.0)
    assert data.x.shape == (1000, 6)
    assert data.classes == 4
    assert data.group is not None
    for client in range(5):
        assert np.bincount(data.strata[data.group == client]).tolist() == [50] * 4
    means = torch.stack([data.x[data.group == client].mean(0) for client in range(5)])
    alike = load("synthetic", clients=5, rows=200, classes=4, features=6, shift=0.0)
    same = torch.stack([alike.x[alike.group == client].mean(0) for client in range(5)])
    assert means.std(0).mean() > 5 * same.std(0).mean()
    assert torch.equal(load("synthetic").x, load("synthetic").x)
    assert not torch.equal(load("synthetic").x, load("synthetic", seed=1).x)
    with pytest.raises(UsageError, match="of at least 1"):
        load("synthetic", clients=0)


def logistic(x, y):
    """The minimiser (w1, w2, b) of the logistic loss with a little weight decay, by Newton's method."""
    inputs = torch.cat([x.double(), torch.ones(len(x), 1)], 1)
    sign = 2.0 * y - 1

    def loss(w):
        return softplus(-sign * (inputs @ w)).mean() + 1e-4 * w @ w

    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(50):
        gradient = torch.autograd.functional.jacobian(loss, w)
        w = w - torch.linalg.solve(torch.autograd.functional.hessian(loss, w), gradient)
    return w


def test_toy2d_has_the_global_and_the_local_boundaries_of_the_paper():
    data = load("toy2d")
    assert len(data) == 800
    assert data.group is not None
    assert data.classes == 2
    above = data.x[:, 1] > 0
    assert ((above == data.y.bool()).float().mean()).item() == pytest.approx(0.8)  # a fifth is noise
    for domain, (boundary, side) in enumerate(zip((-6, -2, 2, 6), (-1, -1, 1, 1), strict=True)):
        own = data.group == domain
        assert torch.equal(((data.x[own, 0] - boundary) * side > 0).long(), data.y[own])
    w1, w2, b = logistic(data.x, data.y).tolist()
    assert w2 > 0.1
    assert abs(w1) < 1e-6
    assert abs(b) < 1e-6


def test_toy2d_clients_pull_against_each_other_and_iid_clients_do_not():
    data = load("toy2d", rows=1000)

    def conflicts(split):
        """The cosine of the first step of client 1 and 3, and of 2 and 4, from w = 0."""
        steps = []
        for rows in federate(data, split, 4, seed=0, test=0.0).train:
            inputs = torch.cat([data.x[rows], torch.ones(len(rows), 1)], 1)
            steps.append(((2.0 * data.y[rows] - 1)[:, None] * inputs).mean(0) / 2)
        return [torch.cosine_similarity(steps[i], steps[i + 2], dim=0).item() for i in (0, 1)]

    assert max(conflicts("given")) < 0 < 0.5 < min(conflicts("iid"))


def test_toy2d_refuses_noise_that_would_swap_the_classes():
    with pytest.raises(UsageError, match=r"noise from 0 to less than 0.5"):
        load("toy2d", noise=0.5)
