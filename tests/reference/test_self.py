"""The references checked against each other, against plain torch optimisers and against closed forms."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import pytest
import torch
from torch import nn

from . import ditto, fedala, fedamp, fedavg, fedper, fedprox, fedrep, finetune, local, scaffold
from .world import World, average, fresh, initial, part, read, samples, size, trainable, write

SIZES = (3, 17, 8, 5, 12, 4, 9, 14)
METHODS = {
    "local": local.run,
    "fedavg": fedavg.run,
    "fedprox": fedprox.run,
    "fedper": fedper.run,
    "fedrep": functools.partial(fedrep.run, head_epochs=2),
    "ditto": ditto.run,
    "scaffold": scaffold.run,
    "fedala": functools.partial(fedala.run, first_epochs=2),
    "fedamp": fedamp.run,
    "heurfedamp": functools.partial(fedamp.run, attention="cosine"),
    "finetune": functools.partial(finetune.run, epochs=2),
}


@pytest.fixture(autouse=True)
def one_thread():
    """More threads only wait for each other on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- worlds


def generator(*key: int) -> torch.Generator:
    seed = 7
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(seed)


def permuted(sizes, batch, i, r, order, epoch, share=1.0):
    """Batches of a seeded permutation; a last batch of one sample joins the batch before it."""
    n = sizes[i]
    kept = torch.randperm(n, generator=generator(1, i, r, order))[: math.ceil(share * n)]
    shuffled = kept[torch.randperm(len(kept), generator=generator(2, i, r, order, epoch))]
    batches = list(shuffled.split(batch))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def multiplied(world: World) -> World:
    """Three clients like the first one of a world, all of them in every round."""
    return dataclasses.replace(
        world,
        clients=3,
        participants=lambda r: [0, 1, 2],
        data=lambda i: world.data(0),
        batches=lambda i, *rest, **share: world.batches(0, *rest, **share),
    )


class Network(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(self.body(x))


def toy(*, norm=False, sizes=SIZES, sampled=5, seed=0, **changes) -> World:
    """Eight clients of 3 to 17 samples and three kinds of labelling, five per round, four rounds."""
    n = len(sizes)
    data = []
    for i, count in enumerate(sizes):
        g = generator(3, seed, i)
        x = torch.randn(count, 4, generator=g, dtype=torch.float64) + 0.3 * i
        teacher = torch.randn(4, 3, generator=generator(4, i % 3), dtype=torch.float64)
        data.append((x, ((x - x.mean(0)) @ teacher).argmax(1)))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        body = [
            nn.Linear(4, 6),
            *([nn.BatchNorm1d(6)] if norm else []),
            nn.Tanh(),
            nn.Linear(6, 5),
            nn.Tanh(),
        ]
        network = Network(nn.Sequential(*body), nn.Linear(5, 3)).double()

    def participants(r):
        return sorted(torch.randperm(n, generator=generator(6, r))[:sampled].tolist())

    settings = {
        "clients": n,
        "rounds": 4,
        "classes": 3,
        "participants": participants,
        "data": lambda i: data[i],
        "batches": functools.partial(permuted, sizes, 4),
        "module": lambda: copy.deepcopy(network),
        "lr": lambda r: 0.2 * 0.8**r,
        "epochs": 2,
        "momentum": 0.5,
        "weight_decay": 0.01,
    }
    return World(**{**settings, **changes})


def plain(**changes) -> World:
    """The toy world with plain SGD, for SCAFFOLD and for closed forms."""
    return toy(**{"momentum": 0.0, "weight_decay": 0.0, **changes})


def scalar(start: float) -> nn.Module:
    """One parameter, the output for an input of one."""
    head = nn.Linear(1, 1, bias=False)
    nn.init.constant_(head.weight, start)
    return Network(nn.Sequential(), head)


def quadratics(a=(4.0, 1.0), b=(1.0, -1.0), *, start=0.0, steps=10, rounds=60, **changes) -> World:
    """Client i's loss is a_i / 2 (w - b_i)^2, of its one sample; every step is an epoch."""
    settings = {
        "clients": len(a),
        "rounds": rounds,
        "classes": 1,
        "participants": lambda r: list(range(len(a))),
        "data": lambda i: (torch.ones(1, 1), torch.tensor([[a[i], b[i]]])),
        "batches": lambda i, r, order, epoch, share=1.0: [torch.tensor([0])],
        "module": lambda: scalar(start),
        "lr": lambda r: 0.05,
        "epochs": steps,
        "loss": lambda outputs, y: (y[:, 0] / 2 * (outputs[:, 0] - y[:, 1]) ** 2).mean(),
    }
    return World(**{**settings, **changes})


# --- comparisons


def same(u, v) -> bool:
    return u.keys() == v.keys() and all(torch.equal(u[name], v[name]) for name in u)


def close(u, v, tolerance=1e-12) -> bool:
    return u.keys() == v.keys() and all(torch.allclose(u[name], v[name], rtol=tolerance, atol=tolerance) for name in u)


def apart(u, v) -> float:
    return math.sqrt(sum(float(((u[name] - v[name]) ** 2).sum()) for name in u))


def ever(world) -> set[int]:
    return {i for r in range(world.rounds) for i in world.participants(r)}


def gradient(world, w, i, batch):
    """The gradient of one batch at w, in train mode."""
    module = fresh(world)
    write(module, w)
    x, y = samples(world, i)
    world.loss(module(x[batch]), y[batch]).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def with_torch(world, start, i, r, order, epochs, only=""):
    """The state that torch.optim.SGD reaches in one phase; what is frozen is in eval mode."""
    module = fresh(world)
    write(module, start)
    module.body.train(only != "head.")
    trained = [p for name, p in module.named_parameters() if name.startswith(only)]
    sgd = torch.optim.SGD(trained, world.lr(r), momentum=world.momentum, weight_decay=world.weight_decay)
    x, y = samples(world, i)
    for epoch in range(epochs):
        for batch in world.batches(i, r, order, epoch):
            sgd.zero_grad()
            world.loss(module(x[batch]), y[batch]).backward()
            sgd.step()
    return read(module)


one_step = {"batches": lambda i, r, order, epoch, share=1.0: [torch.tensor([0, 1, 2])], "epochs": 1}


# --- all methods


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_states_are_whole_finite_repeatable_and_unshared(name, norm):
    world = plain(norm=norm) if name == "scaffold" else toy(norm=norm)
    one, two = METHODS[name](world), METHODS[name](world)
    names = initial(world).keys()
    assert not any("num_batches_tracked" in entry for entry in names)
    assert len(one.clients) == world.clients
    assert same(one.server, two.server)
    assert one.server.keys() <= names
    for u, v in zip(one.clients, two.clients, strict=True):
        assert same(u, v)
        assert u.keys() == names
        assert all(tensor.dtype == torch.float64 and tensor.isfinite().all() for tensor in u.values())
    addresses = [tensor.data_ptr() for state in [one.server, *one.clients] for tensor in state.values()]
    assert len(addresses) == len(set(addresses))
    moved = one.clients[min(ever(world))]
    assert apart(moved, initial(world)) > 0.05


@pytest.mark.parametrize("name", METHODS)
def test_no_rounds_leave_the_initial_model(name):
    if name == "finetune":
        pytest.skip("fine-tunes even then")
    world = plain(rounds=0)
    assert all(same(w, initial(world)) for w in METHODS[name](world).clients)


@pytest.mark.parametrize("name", METHODS)
def test_lr_follows_the_round(name):
    constant, decayed = plain(lr=lambda r: 0.1), plain(lr=lambda r: 0.1 if r < 2 else 0.02)
    u, v = (METHODS[name](dataclasses.replace(w, rounds=2)) for w in (constant, decayed))
    if name != "finetune":  # which trains once more, in round 2
        assert all(same(a, b) for a, b in zip(u.clients, v.clients, strict=True))
    u, v = METHODS[name](constant), METHODS[name](decayed)
    assert not all(close(a, b, 1e-3) for a, b in zip(u.clients, v.clients, strict=True))


# --- FedAvg and Local


def test_fedavg_with_one_client_is_centralised():
    world = toy(sizes=(17,), sampled=1)
    w = initial(world)
    for r in range(world.rounds):  # momentum starts anew in every round
        w = with_torch(world, w, 0, r, 0, world.epochs)
    result = fedavg.run(world)
    assert close(result.server, w)
    assert close(result.clients[0], w)


@pytest.mark.parametrize("norm", [False, True])
def test_fedavg_is_the_mean_by_samples_of_what_torch_trains(norm):
    world = toy(norm=norm)
    w = initial(world)
    for r in range(world.rounds):
        ids = world.participants(r)
        total = sum(SIZES[i] for i in ids)
        ends = [with_torch(world, w, i, r, 0, world.epochs) for i in ids]
        w = {name: sum(SIZES[i] * end[name] for i, end in zip(ids, ends, strict=True)) / total for name in w}
    result = fedavg.run(world)
    assert close(result.server, w)
    assert all(same(result.server, client) for client in result.clients)


def test_fedavg_of_equal_clients_is_one_client():
    one = toy(sizes=(9,), sampled=1)
    assert close(fedavg.run(one).server, fedavg.run(multiplied(one)).server)


def test_buffers_are_averaged_with_the_weights_of_the_parameters():
    """After one step of one batch the running mean is 0.9 * 0 + 0.1 * batch mean, at every client."""
    world = toy(norm=True, rounds=1, **one_step)
    w0 = initial(world)
    ids = world.participants(0)
    expected = 0.0
    for i in ids:
        x = samples(world, i)[0][[0, 1, 2]]
        activation = x @ w0["body.0.weight"].T + w0["body.0.bias"]
        expected = expected + SIZES[i] / sum(SIZES[j] for j in ids) * 0.1 * activation.mean(0)
    for run in (fedavg.run, fedper.run, fedprox.run, ditto.run, fedala.run):
        assert torch.allclose(run(world).server["body.1.running_mean"], expected)


def test_local_is_torch_alone_and_knows_nobody_else():
    world = toy()
    result = local.run(world)
    for i in range(world.clients):
        w = initial(world)
        for r in range(world.rounds):
            if i in world.participants(r):
                w = with_torch(world, w, i, r, 0, world.epochs)
        assert close(result.clients[i], w)
    others = toy(seed=1)
    changed = dataclasses.replace(world, data=lambda i: world.data(i) if i == 1 else others.data(i))
    assert same(result.clients[1], local.run(changed).clients[1])
    assert not same(result.clients[2], local.run(changed).clients[2])
    assert result.server == {}


def test_local_leaves_who_never_trains():
    world = toy(participants=lambda r: [0, 3])
    assert all(same(local.run(world).clients[i], initial(world)) for i in (1, 2, 4, 5, 6, 7))


# --- FedProx


@pytest.mark.parametrize("norm", [False, True])
def test_fedprox_without_mu_is_fedavg_and_with_it_is_not(norm):
    world = toy(norm=norm)
    reference = fedavg.run(world).server
    assert same(fedprox.run(world, mu=0.0).server, reference)
    assert apart(fedprox.run(world, mu=0.5).server, reference) > 1e-2
    assert apart(fedprox.run(world).server, reference) > 1e-4


def test_fedprox_of_one_step_is_fedavg_whatever_mu():
    world = toy(**one_step)
    assert same(fedprox.run(world, mu=3.0).server, fedavg.run(world).server)


def test_fedprox_with_lr_times_mu_one_lands_a_step_from_the_received_model():
    world = plain(sizes=(12,), sampled=1, rounds=1, lr=lambda r: 0.1)
    w0 = initial(world)
    w = w0
    for epoch in range(world.epochs):
        for batch in world.batches(0, 0, 0, epoch):
            g = gradient(world, w, 0, batch)
            w = {name: w0[name] - 0.1 * g[name] for name in w}
    assert close(fedprox.run(world, mu=10.0).server, w)


def test_fedprox_fixed_point_of_a_quadratic():
    """Many steps minimise a/2 (w - b)^2 + mu/2 (w - w0)^2: w = (a b + mu w0) / (a + mu)."""
    world = quadratics((4.0,), (1.0,), start=-2.0, steps=400, rounds=1)
    assert float(fedprox.run(world, mu=2.0).server["head.weight"]) == pytest.approx((4 - 2 * 2) / 6, abs=1e-9)


# --- FedPer and FedRep


def test_fedper_lies_between_fedavg_and_local():
    world = toy(norm=True)
    nothing, everything = fedper.run(world, private=()), fedper.run(world, private=("body.", "head."))
    assert same(nothing.server, fedavg.run(world).server)
    assert all(same(nothing.server, client) for client in nothing.clients)
    assert all(same(u, v) for u, v in zip(everything.clients, local.run(world).clients, strict=True))
    assert everything.server == {}


def test_fedper_shares_the_body_and_keeps_the_head():
    world = toy(rounds=2, sampled=3)
    result = fedper.run(world)
    body, heads = part(initial(world), "body."), [part(initial(world), "head.") for _ in SIZES]
    for r in range(2):
        ids = world.participants(r)
        ends = {i: with_torch(world, {**body, **heads[i]}, i, r, 0, world.epochs) for i in ids}
        for i in ids:
            heads[i] = part(ends[i], "head.")
        total = sum(SIZES[i] for i in ids)
        body = {name: sum(SIZES[i] / total * ends[i][name] for i in ids) for name in body}
    assert close(result.server, body)
    assert all(close(w, {**body, **heads[i]}) for i, w in enumerate(result.clients))
    absent = set(range(8)) - ever(world)
    h0 = part(initial(world), "head.")
    assert absent
    assert all(same(part(result.clients[i], "head."), h0) for i in absent)


@pytest.mark.parametrize("norm", [False, True])
def test_fedrep_is_two_phases_of_torch(norm):
    world = toy(norm=norm, rounds=2, sampled=3)
    result = fedrep.run(world, head_epochs=3)
    body, heads = part(initial(world), "body."), [part(initial(world), "head.") for _ in SIZES]
    for r in range(2):
        ids = world.participants(r)
        ends = {}
        for i in ids:
            w = with_torch(world, {**body, **heads[i]}, i, r, 0, 3, only="head.")
            assert same(part(w, "body."), body)
            ends[i] = with_torch(world, w, i, r, 1, world.epochs, only="body.")
            heads[i] = part(ends[i], "head.")
        total = sum(SIZES[i] for i in ids)
        body = {name: sum(SIZES[i] / total * ends[i][name] for i in ids) for name in body}
    assert close(result.server, body)
    assert all(close(w, {**body, **heads[i]}) for i, w in enumerate(result.clients))


def test_fedrep_without_a_phase_leaves_that_part_alone():
    world = toy(norm=True)
    w0 = initial(world)
    heads_fixed = fedrep.run(world, head_epochs=0)
    assert all(same(part(w, "head."), part(w0, "head.")) for w in heads_fixed.clients)
    assert apart(heads_fixed.server, part(w0, "body.")) > 0.05
    probe = fedrep.run(world, head_epochs=2, body_epochs=0)
    assert close(probe.server, part(w0, "body."))  # and its running statistics: it was in eval mode
    assert all(apart(part(probe.clients[i], "head."), part(w0, "head.")) > 0.05 for i in ever(world))


def test_fedrep_is_not_fedper():
    world = toy()
    assert apart(fedrep.run(world, head_epochs=2).server, fedper.run(world).server) > 1e-2


# --- Ditto


@pytest.mark.parametrize("norm", [False, True])
def test_ditto_without_lam_is_local_beside_fedavg(norm):
    world = toy(norm=norm)
    result = ditto.run(world, lam=0.0)
    assert same(result.server, fedavg.run(world).server)
    assert all(same(u, v) for u, v in zip(result.clients, local.run(world).clients, strict=True))


def test_ditto_pulls_towards_the_server_which_never_notices():
    world = plain(lr=lambda r: 0.05, epochs=4, rounds=6)
    loose, tight = ditto.run(world, lam=0.1), ditto.run(world, lam=10.0)
    assert same(loose.server, tight.server)
    last = world.participants(world.rounds - 1)
    received = fedavg.run(dataclasses.replace(world, rounds=world.rounds - 1)).server
    assert all(apart(tight.clients[i], received) < 0.5 * apart(loose.clients[i], received) for i in last)


def test_ditto_with_lr_times_lam_one_lands_a_step_from_the_received_model():
    world = plain(lr=lambda r: 0.5, rounds=3, sizes=(4, 6, 3), sampled=2)
    result = ditto.run(world, lam=2.0, personal_epochs=3)
    personal = [initial(world) for _ in range(3)]
    for r in range(3):
        received = fedavg.run(dataclasses.replace(world, rounds=r)).server
        for i in world.participants(r):
            for epoch in range(3):
                for batch in world.batches(i, r, 0, epoch):
                    g = gradient(world, personal[i], i, batch)
                    personal[i] = {name: received[name] - 0.5 * g[name] for name in g}
    assert all(close(u, v) for u, v in zip(result.clients, personal, strict=True))


def test_ditto_fixed_point_of_a_quadratic():
    """The personal model of many steps is (a b + lam w^t) / (a + lam), w^t the model received."""
    world = quadratics(steps=10, rounds=30)
    result = ditto.run(world, lam=3.0, personal_epochs=15)
    w = float(result.server["head.weight"])  # FedAvg's fixed point: received and sent are one
    for a, b, client in zip((4, 1), (1, -1), result.clients, strict=True):
        assert float(client["head.weight"]) == pytest.approx((a * b + 3 * w) / (a + 3), abs=1e-9)


# --- SCAFFOLD


def test_scaffold_finds_the_optimum_where_fedavg_does_not():
    world = quadratics()
    assert float(fedavg.run(world).server["head.weight"]) == pytest.approx(0.3797, abs=1e-4)
    result = scaffold.run(world)
    assert float(result.server["head.weight"]) == pytest.approx(0.6, abs=1e-6)
    for a, b, ci in zip((4, 1), (1, -1), result.extra["ci"], strict=True):  # c_i is F_i's gradient there
        assert float(ci["head.weight"]) == pytest.approx(a * (0.6 - b), abs=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sampled", [8, 5])
def test_scaffold_keeps_c_the_mean_of_all_ci(sampled, norm):
    """With everybody and with a sample alike, because c moves by the sum over S divided by all N."""
    world = plain(sampled=sampled, norm=norm, weight_decay=0.01)
    for rounds in range(1, 5):
        extra = scaffold.run(dataclasses.replace(world, rounds=rounds)).extra
        assert close(extra["c"], average(extra["ci"], [1] * 8))
        assert extra["c"].keys() == set(trainable(world))
        assert max(float(tensor.abs().max()) for tensor in extra["c"].values()) > 1e-2


def test_scaffold_begins_as_the_uniform_fedavg_and_then_leaves_it():
    world = plain(weight_decay=0.01, norm=True)
    uniform = dataclasses.replace(world, data=lambda i: _repeated(world, i))
    first, later = dataclasses.replace(world, rounds=1), dataclasses.replace(uniform, rounds=1)
    assert close(scaffold.run(first).server, fedavg.run(later).server)
    assert not close(fedavg.run(first).server, fedavg.run(later).server, 1e-3)
    assert apart(scaffold.run(world).server, fedavg.run(uniform).server) > 1e-2


def _repeated(world, i):
    """Client i's data, padded to 17 rows that no batch asks for: the same training, equal sizes."""
    x, y = world.data(i)
    return x[torch.arange(17) % len(x)], y[torch.arange(17) % len(y)]


def test_scaffold_of_one_client_and_of_equal_clients_is_fedavg():
    one = plain(sizes=(9,), sampled=1)
    assert close(scaffold.run(one).server, fedavg.run(one).server)
    assert close(scaffold.run(multiplied(one)).server, fedavg.run(one).server)


def test_scaffold_by_hand_with_partial_participation_and_a_falling_lr():
    a, b, chosen = (4.0, 1.0, 2.0), (1.0, -1.0, 3.0), ([0, 1], [1, 2], [0, 2], [0, 1])
    world = quadratics(a, b, start=0.5, steps=3, rounds=4, participants=lambda r: chosen[r], lr=lambda r: 0.1 / (r + 1))
    x, c, ci = 0.5, 0.0, [0.0, 0.0, 0.0]
    for r in range(4):
        lr, ends, change = 0.1 / (r + 1), [], 0.0
        for i in chosen[r]:
            y, used = x, []
            for _ in range(3):
                used.append(a[i] * (y - b[i]))
                y -= lr * (used[-1] - ci[i] + c)
            change += sum(used) / 3 - ci[i]  # option II's c_i+ is the mean of the gradients used
            ci[i] = sum(used) / 3
            ends.append(y)
        x, c = x + 1.5 * (sum(ends) / 2 - x), c + change / 3
    result = scaffold.run(world, server_lr=1.5)
    assert float(result.server["head.weight"]) == pytest.approx(x, abs=1e-12)
    assert float(result.extra["c"]["head.weight"]) == pytest.approx(c, abs=1e-12)
    assert [float(entry["head.weight"]) for entry in result.extra["ci"]] == pytest.approx(ci, abs=1e-12)


def test_scaffold_averages_buffers_plainly():
    world = plain(norm=True, rounds=1)
    one, two = scaffold.run(world).server, scaffold.run(world, server_lr=2.0).server
    w0 = initial(world)
    for name in w0:
        step = 1.0 if "running" in name else 2.0
        assert torch.allclose(two[name] - w0[name], step * (one[name] - w0[name]))


def test_scaffold_refuses_momentum():
    with pytest.raises(ValueError, match="momentum"):
        scaffold.run(toy())


# --- FedALA


@pytest.mark.parametrize("norm", [False, True])
def test_fedala_held_at_ones_is_fedavg(norm):
    world = toy(norm=norm)
    result = fedala.run(world, mix_lr=0.0, layers=2, first_epochs=2)
    assert close(result.server, fedavg.run(world).server)
    assert all(close(w, result.server) for w in result.clients)


def test_fedala_held_at_zero_is_fedper():
    world = toy(norm=True)
    result, reference = fedala.run(world, mix_lr=0.0, start=0.0), fedper.run(world)
    assert close(part(result.server, "body."), reference.server)
    assert all(close(u, v) for u, v in zip(result.clients, reference.clients, strict=True))


def test_fedala_without_layers_is_fedavg():
    world = toy()
    assert same(fedala.run(world, layers=0).server, fedavg.run(world).server)


def test_fedala_mixes_the_last_layers_only_and_between_own_and_received():
    world = toy(norm=True)
    names = {1: {"head.weight", "head.bias"}}
    names[2] = names[1] | {"body.3.weight", "body.3.bias"}
    names[3] = names[2] | {"body.1.weight", "body.1.bias"}
    for layers, expected in names.items():
        result = fedala.run(world, layers=layers, first_epochs=2)
        mixed = [set(mix) for mix in result.extra["mix"]]
        assert all(found == expected for found in mixed)
        for i, w in enumerate(result.clients):
            changed = {name for name in w if not torch.equal(w[name], result.server[name])}
            assert changed <= expected
            assert all(bool(((a >= 0) & (a <= 1)).all()) for a in result.extra["mix"][i].values())
        assert any(not torch.equal(w["head.weight"], result.server["head.weight"]) for w in result.clients)
    assert apart(fedala.run(world).server, fedavg.run(world).server) > 1e-3


@pytest.mark.parametrize("norm", [False, True])
def test_fedala_learns_by_the_gradient_of_the_blend_in_eval_mode(norm):
    world = toy(norm=norm)
    own, received = local.run(world).clients[1], fedavg.run(world).server
    names = fedala.last_layers(world.module(), 3)
    mix = {name: torch.full_like(own[name], 0.5) for name in names}
    batch = world.batches(1, 1, 9, 0, share=0.8)[0]
    once = dataclasses.replace(world, batches=lambda *_, share=1.0: [batch])
    found = fedala.learn(once, 1, 1, received, own, mix, mix_lr=0.1, share=0.8, epochs=1)

    leaves = {name: a.clone().requires_grad_() for name, a in mix.items()}
    blended = {**received, **{n: own[n] + (received[n] - own[n]) * leaves[n] for n in names}}
    x, y = samples(world, 1)
    outputs = torch.func.functional_call(fresh(world).eval(), blended, (x[batch],))
    world.loss(outputs, y[batch]).backward()
    assert close(found, {name: (a - 0.1 * leaves[name].grad).clamp(0, 1).detach() for name, a in mix.items()})
    assert apart(found, mix) > 1e-4


def test_fedala_by_hand_on_quadratics():
    """Who mixes for the first time mixes longer, nobody mixes in round 0, and evaluation leaves no trace."""
    a, b = (4.0, 1.0, 2.0), (1.0, -1.0, 3.0)
    chosen = ([0, 1], [1, 2], [0, 1], [1, 2])
    world = quadratics(a, b, start=0.5, steps=2, rounds=4, participants=lambda r: chosen[r])
    w, own, mix, before = 0.5, [0.5] * 3, [1.0] * 3, [False] * 3

    def prepare(i, r):
        if r == 0:
            return w, mix[i]
        m = mix[i]
        for _ in range(1 if before[i] else 4):
            blended = own[i] + (w - own[i]) * m
            m = min(1.0, max(0.0, m - 0.3 * a[i] * (blended - b[i]) * (w - own[i])))
        return own[i] + (w - own[i]) * m, m

    seen = []
    for r in range(4):
        ends = []
        for i in chosen[r]:
            v, mix[i] = prepare(i, r)
            seen.append(mix[i])
            for _ in range(2):
                v -= 0.05 * a[i] * (v - b[i])
            own[i] = v
            before[i] = before[i] or r > 0
            ends.append(v)
        w = sum(ends) / 2
    assert any(0 < m < 1 for m in seen)
    result = fedala.run(world, mix_lr=0.3, first_epochs=4)
    assert float(result.server["head.weight"]) == pytest.approx(w, abs=1e-12)
    expected = [prepare(i, 4)[0] for i in range(3)]
    assert [float(v["head.weight"]) for v in result.clients] == pytest.approx(expected, abs=1e-12)
    assert [float(m["head.weight"]) for m in result.extra["mix"]] == pytest.approx(mix, abs=1e-12)


def test_fedala_asks_for_its_own_batches():
    asked = []
    world = toy()

    def recorded(i, r, order, epoch, share=1.0):
        asked.append((r, order, epoch, share))
        return world.batches(i, r, order, epoch, share=share)

    fedala.run(dataclasses.replace(world, batches=recorded), share=0.7, first_epochs=3)
    mixing = {entry for entry in asked if entry[1] == 9}
    assert {share for *_, share in mixing} == {0.7}
    assert {epoch for _, _, epoch, _ in mixing} == {0, 1, 2}
    assert {r for r, *_ in mixing} == {1, 2, 3, 4}
    assert all(order == 0 and share == 1.0 for _, order, _, share in set(asked) - mixing)


# --- FedAMP


@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_fedamp_without_lam_is_local(attention):
    world = toy(norm=True)
    result = fedamp.run(world, lam=0.0, attention=attention)
    assert all(same(u, v) for u, v in zip(result.clients, local.run(world).clients, strict=True))
    assert result.server == {}


@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_fedamp_pulls_to_its_cloud(attention):
    world = plain(sampled=8, lr=lambda r: 0.05)
    weak = fedamp.run(world, lam=0.01, attention=attention)
    strong = fedamp.run(world, lam=4.0, attention=attention)
    before = fedamp.run(dataclasses.replace(world, rounds=3), lam=4.0, attention=attention).extra["clouds"]
    alone = local.run(world).clients
    for i in range(world.clients):
        there = {name: strong.clients[i][name] for name in before[i]}
        assert apart(there, before[i]) < 0.7 * apart(alone[i], before[i])
    spread = [sum(apart(u, v) for u in found.clients for v in found.clients) for found in (weak, strong)]
    assert spread[1] < 0.7 * spread[0]


@pytest.mark.parametrize("settings", [{}, {"sigma": 5.0, "alpha": 0.3}, {"attention": "cosine"}])
def test_fedamp_rows_are_a_mixture(settings):
    for sampled in (8, 5, 1):
        xi = fedamp.run(toy(sampled=sampled, rounds=2), **settings).extra["xi"]
        assert torch.allclose(xi.sum(1), torch.ones(len(xi), dtype=torch.float64))
        assert (xi >= 0).all()
        if settings.get("attention") != "cosine":
            assert torch.allclose(xi, xi.T)
        if len(xi) > 1:
            assert (xi - torch.diag(xi.diag())).max() > 0.01


def test_fedamp_attention_by_hand():
    models = [{"w": torch.tensor([v], dtype=torch.float64)} for v in (0.0, 1.0, 3.0)]  # distances 1, 9, 4
    e = math.exp
    xi = fedamp.by_distance(models, alpha=100.0, sigma=None)  # median 4; alpha / sigma is over 1/3
    expected = [[e(-1 / 4) / 3, e(-9 / 4) / 3], [e(-1 / 4) / 3, e(-1) / 3], [e(-9 / 4) / 3, e(-1) / 3]]
    assert xi[0, 1:].tolist() == pytest.approx(expected[0])
    assert [float(xi[1, 0]), float(xi[1, 2])] == pytest.approx(expected[1])
    assert xi[2, :2].tolist() == pytest.approx(expected[2])
    assert xi.diag().tolist() == pytest.approx([1 - sum(row) for row in expected])
    assert float(fedamp.by_distance(models, alpha=0.5, sigma=2.0)[0, 1]) == pytest.approx(0.25 * e(-0.5))
    equal = [models[1], models[1]]
    assert fedamp.by_distance(equal, 1.0, None).tolist() == [[0.5, 0.5], [0.5, 0.5]]  # sigma 1, d = 0
    assert fedamp.by_distance(models[:1], 1.0, None).tolist() == [[1.0]]

    plane = [{"w": torch.tensor(v, dtype=torch.float64)} for v in ([1.0, 0.0], [2.0, 0.0], [0.0, 1.0])]
    shares = [1 / 3, 2 / 3 * e(10.0) / (e(10.0) + 1), 2 / 3 / (e(10.0) + 1)]
    assert fedamp.by_cosine(plane, None, 10.0)[0].tolist() == pytest.approx(shares)
    assert fedamp.by_cosine(plane, 0.4, 10.0)[2].tolist() == pytest.approx([0.3, 0.3, 0.4])
    assert fedamp.by_cosine(plane[:1], 0.4, 10.0).tolist() == [[1.0]]


def test_fedamp_cloud_of_equal_models_is_that_model():
    one = toy(sizes=(9,), sampled=1)
    result = fedamp.run(multiplied(one))
    assert close(result.extra["clouds"][0], result.clients[0])


@pytest.mark.parametrize(("lam", "alpha"), [(1.5, 1.0), (3.0, 2.0)])
def test_fedamp_by_hand_on_quadratics_with_partial_participation(lam, alpha):
    a, b = (4.0, 1.0, 2.0, 3.0), (1.0, -1.0, 3.0, 0.0)
    chosen = ([0, 1], [1, 2], [0, 2], [0, 1])  # client 3 never uploads
    world = quadratics(a, b, start=0.5, steps=3, rounds=4, participants=lambda r: chosen[r])
    w, sent, cloud = [0.5] * 4, {}, {}
    for r in range(4):
        for i in chosen[r]:
            for _ in range(3):
                pull = lam / alpha * (w[i] - cloud[i]) if i in cloud else 0.0
                w[i] -= 0.05 * (a[i] * (w[i] - b[i]) + pull)
            sent[i] = w[i]
        pairs = sorted((sent[i] - sent[j]) ** 2 for i in sent for j in sent if i < j)
        sigma = pairs[len(pairs) // 2]  # one pair or three: the middle one
        for i in sent:
            xi = {
                j: min(alpha / sigma, 1 / len(sent)) * math.exp(-((sent[i] - sent[j]) ** 2) / sigma)
                for j in sent
                if j != i
            }
            cloud[i] = (1 - sum(xi.values())) * sent[i] + sum(xi[j] * sent[j] for j in xi)
    result = fedamp.run(world, lam=lam, alpha=alpha)
    assert [float(v["head.weight"]) for v in result.clients] == pytest.approx(w, abs=1e-12)
    assert result.extra["known"] == [0, 1, 2]
    assert w[3] == 0.5
    assert {i: float(u["head.weight"]) for i, u in result.extra["clouds"].items()} == pytest.approx(cloud)


# --- FineTune


def test_finetune_without_epochs_is_the_inner_method():
    world = toy(norm=True)
    for inner in (fedavg.run, fedper.run, ditto.run):
        tuned, bare = finetune.run(world, inner=inner, epochs=0), inner(world)
        assert same(tuned.server, bare.server)
        assert all(same(u, v) for u, v in zip(tuned.clients, bare.clients, strict=True))


@pytest.mark.parametrize(("which", "only"), [("all", ""), ("head", "head.")])
def test_finetune_is_torch_from_the_inner_model(which, only):
    world = toy()
    result, bare = finetune.run(world, inner=fedper.run, epochs=3, part=which), fedper.run(world)
    assert same(result.server, bare.server)
    for i, w in enumerate(result.clients):
        assert close(w, with_torch(world, bare.clients[i], i, world.rounds, 8, 3, only=only))


def test_finetuning_the_head_freezes_the_body_and_its_statistics():
    world = toy(norm=True)
    server = fedavg.run(world).server
    head, whole = finetune.run(world, part="head").clients, finetune.run(world).clients
    for i in range(world.clients):
        assert same(part(head[i], "body."), part(server, "body."))
        assert apart(part(head[i], "head."), part(server, "head.")) > 1e-3
        assert apart(part(whole[i], "body."), part(server, "body.")) > 1e-3
        x, y = samples(world, i)
        losses = []
        for w in (server, head[i]):
            module = fresh(world).eval()
            write(module, w)
            losses.append(world.loss(module(x), y).item())
        assert losses[1] < losses[0]


# --- the shared pieces


def test_sizes_are_those_of_the_toy_world():
    world = toy()
    assert tuple(size(world, i) for i in range(world.clients)) == SIZES
    for i, n in enumerate(SIZES):
        batches = world.batches(i, 0, 0, 0)
        assert sorted(torch.cat(batches).tolist()) == list(range(n))
        assert min(map(len, batches)) > 1
        subsets = [set(torch.cat(world.batches(i, 0, 9, e, share=0.5)).tolist()) for e in range(3)]
        assert subsets[0] == subsets[1] == subsets[2]
        assert len(subsets[0]) == math.ceil(n / 2)
