"""The references of FedEM, CFL and pFedHN against the others, plain torch and closed forms."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from . import cfl, fedavg, fedem, pfedhn
from .test_self import SIZES, apart, close, ever, generator, multiplied, one_step, same, with_torch
from .test_self import toy as bare
from .test_self_b import draw, linear
from .world import average, fresh, initial, samples, train, trainable, write

EIGHT = list(range(8))


def toy(**changes):
    world = bare(**{"linear": linear, "draw": draw, **changes})

    def another(purpose):
        g = generator(12, *purpose.encode())
        names = trainable(world)
        return {
            name: 0.5 * torch.randn(*w.shape, generator=g, dtype=torch.float64) if name in names else w
            for name, w in initial(world).items()
        }

    return dataclasses.replace(world, another=another)


def everybody(**changes):
    return toy(participants=lambda r: EIGHT, **changes)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The worlds are far too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ALWAYS = {"eps1": math.inf, "eps2": 0.0}
METHODS = {
    "fedem": fedem.run,
    "fedem two": functools.partial(fedem.run, components=2),
    "cfl": cfl.run,
    "cfl split": functools.partial(cfl.run, **ALWAYS),
    "pfedhn": functools.partial(pfedhn.run, hidden=6, server_lr=0.03),
    "pfedhn two": functools.partial(pfedhn.run, hidden=5, layers=2, embedding=4, server_lr=0.1),
}


def names_of(name, world):
    network = set(initial(world))
    if not name.startswith("fedem"):
        return network
    others = {f"component{m}.{entry}" for m in range(1, 2 if "two" in name else 3) for entry in network}
    return network | others | {"pi"}


# --- all methods


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_results_are_whole_finite_repeatable_and_unshared(name, norm):
    world = toy(norm=norm)
    one, two = METHODS[name](world), METHODS[name](world)
    assert one.server == {}
    assert len(one.clients) == world.clients
    for u, v in zip(one.clients, two.clients, strict=True):
        assert same(u, v)
        assert u.keys() == names_of(name, world)
        assert all(tensor.dtype == torch.float64 and tensor.isfinite().all() for tensor in u.values())
    addresses = [tensor.data_ptr() for state in one.clients for tensor in state.values()]
    assert len(addresses) == len(set(addresses))
    i = min(ever(world))
    assert apart(one.clients[i], METHODS[name](dataclasses.replace(world, rounds=0)).clients[i]) > 0.05


@pytest.mark.parametrize("name", METHODS)
def test_numbers_of_the_clients_do_not_matter(name):
    """Client i is called 7 - i: whatever is listed by participants is listed in another order."""
    world = toy()
    last = world.clients - 1
    turned = dataclasses.replace(
        world,
        participants=lambda r: sorted(last - i for i in world.participants(r)),
        data=lambda i: world.data(last - i),
        batches=lambda i, *rest, **more: world.batches(last - i, *rest, **more),
        draw=lambda purpose, r, i: world.draw(purpose, r, last - i),
    )
    u, v = METHODS[name](world), METHODS[name](turned)
    assert all(close(u.clients[i], v.clients[last - i], 1e-9) for i in range(world.clients))


@pytest.mark.parametrize("name", METHODS)
def test_lr_follows_the_round(name):
    constant, decayed = toy(lr=lambda r: 0.1), toy(lr=lambda r: 0.1 if r < 2 else 0.02)
    u, v = (METHODS[name](dataclasses.replace(w, rounds=2)) for w in (constant, decayed))
    assert all(same(a, b) for a, b in zip(u.clients, v.clients, strict=True))
    u, v = METHODS[name](constant), METHODS[name](decayed)
    assert not all(close(a, b, 1e-3) for a, b in zip(u.clients, v.clients, strict=True))


# --- FedEM


@pytest.mark.parametrize("norm", [False, True])
def test_fedem_of_one_component_is_fedavg_and_of_more_is_not(norm):
    world = toy(norm=norm)
    expected = fedavg.run(world).server
    one, three = fedem.run(world, components=1), fedem.run(world)
    assert close(one.extra["models"][0], expected)
    assert one.extra["pi"] == [[1.0]] * 8
    assert apart(three.extra["models"][0], expected) > 1e-2
    for i in EIGHT:
        module = fresh(world)
        write(module, expected)
        assert torch.allclose(one.extra["probabilities"][i], module.eval()(samples(world, i)[0]).softmax(1))


def test_fedem_of_equal_components_does_not_tell_them_apart():
    """All responsibilities are 1/M: every component takes steps of 1/M of the gradient (without decay of weights)."""
    world = toy(rounds=1, epochs=1, weight_decay=0.0, another=None)
    world = dataclasses.replace(
        world, another=lambda purpose: initial(world), batches=lambda i, r, order, *rest: [torch.arange(SIZES[i])]
    )
    result = fedem.run(world, components=4)
    assert np.allclose(result.extra["pi"], 0.25)
    slow = dataclasses.replace(world, lr=lambda r: world.lr(r) / 4)
    for w in result.extra["models"]:
        assert close(w, fedavg.run(slow).server)


def test_fedem_responsibilities_by_hand():
    losses = [[0.1, 2.0, 1e4], [1.0, 0.5, 1e4 + 1]]
    pi = [0.7, 0.3]
    q = fedem.responsibilities(pi, losses)
    for k in (0, 1):
        parts = [p * math.exp(-of[k]) for p, of in zip(pi, losses, strict=True)]
        assert q[k] == pytest.approx([p / sum(parts) for p in parts])
    assert q[2] == pytest.approx([0.7 / (0.7 + 0.3 / math.e), 0.3 / math.e / (0.7 + 0.3 / math.e)])
    assert fedem.responsibilities([1.0, 0.0], [[5.0], [0.0]]) == [[1.0, 0.0]]


def test_fedem_weights_are_the_shares_of_the_samples_under_the_received_components():
    world = toy(rounds=1)
    models = [initial(world), world.another("component 1"), world.another("component 2")]
    result = fedem.run(world)
    for i in EIGHT:
        if i not in world.participants(0):
            assert result.extra["pi"][i] == [1 / 3] * 3
            continue
        x, y = samples(world, i)
        scores = []
        for w in models:
            module = fresh(world)
            write(module, w)
            scores.append(-F.cross_entropy(module.eval()(x), y, reduction="none"))
        q = torch.stack(scores).softmax(0)
        assert torch.allclose(torch.tensor(result.extra["pi"][i], dtype=torch.float64), q.mean(1))
        assert torch.allclose(torch.tensor(result.extra["q"][0][i], dtype=torch.float64).T, q)


def test_fedem_does_not_lower_the_likelihood_with_em_steps_alone():
    """Without training, the rounds are EM for the mixture's weights: the likelihood of each client's labels rises."""
    values = []
    for rounds in range(5):
        world = everybody(lr=lambda r: 0.0, rounds=rounds)
        result = fedem.run(world)
        found = []
        for i in EIGHT:
            y = samples(world, i)[1]
            found.append(float(result.extra["probabilities"][i][torch.arange(len(y)), y].log().sum()))
        values.append(found)
    for before, after in itertools.pairwise(values):
        assert all(b >= a - 1e-12 for a, b in zip(before, after, strict=True))
    assert sum(values[-1]) > sum(values[0]) + 0.1


@pytest.mark.parametrize("norm", [False, True])
def test_fedem_step_by_autograd(norm):
    world = toy(norm=norm, rounds=1, momentum=0.0, **one_step)
    result = fedem.run(world)
    starts = [initial(world), world.another("component 1"), world.another("component 2")]
    ids = world.participants(0)
    for m, start in enumerate(starts):
        ends = []
        for i in ids:
            x, y = (t[[0, 1, 2]] for t in samples(world, i))
            q = torch.tensor(result.extra["q"][0][i], dtype=torch.float64)[:3, m]
            module = fresh(world)
            write(module, start)
            (q * F.cross_entropy(module.train()(x), y, reduction="none")).mean().backward()
            ends.append(
                {n: p.detach() - world.lr(0) * (p.grad + 0.01 * p.detach()) for n, p in module.named_parameters()}
            )
            ends[-1] |= {n: b.clone() for n, b in module.named_buffers()}
        assert close(result.extra["models"][m], average(ends, [SIZES[i] for i in ids]))


def test_fedem_answers_are_probabilities():
    world = toy()
    result = fedem.run(world)
    for i in EIGHT:
        assert torch.allclose(result.extra["probabilities"][i].sum(1), torch.ones(SIZES[i]).double())
        assert sum(result.extra["pi"][i]) == pytest.approx(1)


# --- CFL


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "never", [{"eps1": 0.0}, {"eps1": math.inf, "eps2": math.inf}, {**ALWAYS, "gamma": 1.0}], ids=str
)
def test_cfl_that_never_splits_is_fedavg_and_that_does_is_not(norm, never):
    world = everybody(norm=norm)
    expected = fedavg.run(world).server
    result = cfl.run(world, **never)
    assert result.extra["cluster"] == [[0] * 8] * 4
    assert all(close(w, expected) for w in result.clients)
    split = cfl.run(world, **ALWAYS)
    assert max(apart(w, expected) for w in split.clients) > 1e-2


def test_cfl_that_always_splits_ends_in_single_clients_and_is_local_then():
    world = everybody(rounds=12)
    result = cfl.run(world, **ALWAYS)
    history = result.extra["cluster"]
    assert sorted(history[-1]) == EIGHT
    counts = [max(of) + 1 for of in history]
    assert counts == sorted(counts)
    alone = next(r for r, of in enumerate(history) if sorted(of) == EIGHT)
    assert alone < 10
    early = cfl.run(dataclasses.replace(world, rounds=alone + 1), **ALWAYS)
    for i in EIGHT:
        w = early.clients[i]
        for r in range(alone + 1, 12):
            w = train(world, w, i, r)
        assert close(result.clients[i], w)


def test_cfl_splits_only_nest_and_keep_numbers_by_the_lowest_client():
    world = everybody(rounds=8)
    history = [[0] * 8, *cfl.run(world, **ALWAYS).extra["cluster"]]
    for before, after in itertools.pairwise(history):
        for c in set(after):
            assert len({before[i] for i in EIGHT if after[i] == c}) == 1
        for c in set(before):
            members = [i for i in EIGHT if before[i] == c]
            assert after[members[0]] == c
            assert len({after[i] for i in members}) <= 2
        fresh_ones = [after[i] for i in EIGHT if after[i] > max(before)]
        assert set(fresh_ones) == set(range(max(before) + 1, max(after) + 1))


@pytest.mark.parametrize("seed", range(10))
def test_cfl_parts_are_the_best_of_all(seed):
    g = generator(20, seed)
    count = 2 + seed % 6
    updates = [
        {"a": torch.randn(2, generator=g).double(), "b": torch.randn(1, 2, generator=g).double()} for _ in range(count)
    ]
    first, second, cross = cfl.bipartition(updates)
    assert 0 in first
    assert sorted(first + second) == list(range(count))
    flat = torch.stack([torch.cat([u["a"], u["b"].flatten()]) for u in updates])
    alike = F.normalize(flat) @ F.normalize(flat).T

    def worst(one):
        other = [k for k in range(count) if k not in one]
        return float(alike[list(one)][:, other].max())

    ways = [(0, *more) for k in range(count - 1) for more in itertools.combinations(range(1, count), k)]
    best = min(ways, key=worst)
    assert cross == pytest.approx(worst(best))
    assert tuple(first) == best


def test_cfl_finds_opposed_clients():
    one, two = torch.tensor([1.0, 0.1]).double(), torch.tensor([-1.0, 0.2]).double()
    updates = [{"w": (one if i in (0, 2, 5) else two) * (i + 1)} for i in range(6)]
    first, second, cross = cfl.bipartition(updates)
    assert (first, second) == ([0, 2, 5], [1, 3, 4])
    assert cross == pytest.approx(float(F.cosine_similarity(one, two, dim=0)))


def test_cfl_criterion_by_hand():
    a, b = ({"w": torch.tensor(v).double()} for v in ([3.0, 4.0], [-3.0, 0.0]))
    assert cfl.mean([a, b], [1, 3])["w"].tolist() == [-1.5, 1.0]  # of norm 1.80
    assert cfl.wants_split([a, b], [1, 3], eps1=1.81, eps2=4.9)
    assert not cfl.wants_split([a, b], [1, 3], eps1=1.80, eps2=4.9)
    assert not cfl.wants_split([a, b], [1, 3], eps1=1.81, eps2=5.0)
    assert not cfl.wants_split([a, b], [1, 1], eps1=1.81, eps2=4.9)  # its norm is 2


def test_cfl_waits_until_all_are_known_and_then_uses_old_updates():
    turns = [[0, 1, 2], [0, 3, 4], [5, 6], [0, 7]]
    world = toy(participants=lambda r: turns[r])
    result = cfl.run(world, **ALWAYS)
    assert result.extra["cluster"][:3] == [[0] * 8] * 3
    cluster = result.extra["cluster"][3]
    assert max(cluster) == 1
    w, delta = initial(world), {}
    for r, ids in enumerate(turns):
        ends = {i: with_torch(world, w, i, r, 0, world.epochs) for i in ids}
        delta |= {i: {n: ends[i][n] - w[n] for n in w} for i in ids}
        w = average(list(ends.values()), [SIZES[i] for i in ids])
    first, second, _ = cfl.bipartition([delta[i] for i in EIGHT])
    assert [i for i in EIGHT if cluster[i] == 0] == first
    assert [i for i in EIGHT if cluster[i] == 1] == second
    assert all(close(u, w) for u in result.clients)  # both parts begin where the whole is


def test_cfl_equal_clients_are_never_split():
    """Their updates have cosine 1, and their mean is as long as they are."""
    world = multiplied(toy())
    result = cfl.run(world, eps1=1e9, eps2=1.0, gamma=1e-6)
    assert result.extra["cluster"] == [[0] * 3] * 4


# --- pFedHN


def hyper(phi, layers):
    """The hypernetwork's hidden layers as a module of torch."""
    stack = []
    for k in range(1, layers + 1):
        layer = nn.Linear(*reversed(phi[f"hyper{k}.weight"].shape)).double()
        layer.load_state_dict({"weight": phi[f"hyper{k}.weight"], "bias": phi[f"hyper{k}.bias"]})
        stack += [layer, nn.ReLU()]
    return nn.Sequential(*stack)


@pytest.mark.parametrize("layers", [1, 3])
def test_pfedhn_is_autograd_and_torch_s_sgd(layers):
    world = toy(norm=True)
    hidden = 7
    result = pfedhn.run(world, hidden=hidden, layers=layers, server_lr=0.05)
    shapes = {name: initial(world)[name].shape for name in trainable(world)}
    phi = pfedhn.layers_of(world, 3, hidden, layers, shapes)
    body = hyper(phi, layers)
    outs = {}
    for name, shape in shapes.items():
        outs[name] = nn.Linear(hidden, shape.numel()).double()
        outs[name].load_state_dict({"weight": phi[f"out:{name}.weight"], "bias": phi[f"out:{name}.bias"]})
    v = [torch.tensor(draw("embedding", 0, i).standard_normal(3)).requires_grad_() for i in EIGHT]
    weights = [*body.parameters(), *(p for out in outs.values() for p in out.parameters())]
    sgd = torch.optim.SGD(weights, 0.05, momentum=0.9, weight_decay=1e-3)
    buffers = {name: w for name, w in initial(world).items() if name not in shapes}

    def made(i):
        z = body(v[i])
        return {name: out(z).reshape(shapes[name]) for name, out in outs.items()}

    for r in range(world.rounds):
        ids = world.participants(r)
        loss, ends = 0.0, []
        for i in ids:
            theta = made(i)
            start = {name: w.detach() for name, w in theta.items()}
            ends.append(train(world, {**start, **buffers}, i, r))
            loss = loss - sum(((ends[-1][name] - start[name]) * w).sum() for name, w in theta.items())
        sgd.zero_grad()
        loss.backward()
        for p in weights:
            p.grad /= len(ids)
        sgd.step()
        for i in ids:
            torch.optim.SGD([v[i]], 0.05, weight_decay=1e-3).step()
            v[i].grad = None
        buffers = {name: average(ends, [1.0] * len(ids))[name] for name in buffers}
    for i in EIGHT:
        expected = {**{name: w.detach() for name, w in made(i).items()}, **buffers}
        assert close(result.clients[i], expected, 1e-10)


def test_pfedhn_without_a_server_s_step_stays_where_it_was():
    world = toy(norm=True)
    still, start = (pfedhn.run(w, hidden=6, server_lr=0.0) for w in (world, dataclasses.replace(world, rounds=0)))
    for u, v in zip(still.clients, start.clients, strict=True):
        assert all(torch.equal(u[name], v[name]) for name in trainable(world))


def test_pfedhn_vectors_of_the_absent_stay_and_weights_move_for_all():
    world = toy(participants=lambda r: [1, 4])
    result = pfedhn.run(world, hidden=6)
    start = pfedhn.run(dataclasses.replace(world, rounds=0), hidden=6)
    for i in EIGHT:
        assert torch.equal(result.extra["embedding"][i], start.extra["embedding"][i]) == (i not in (1, 4))
        assert apart(result.clients[i], start.clients[i]) > 1e-3


def test_pfedhn_pulls_what_it_makes_towards_what_was_trained():
    """A small step: <theta' - theta, Delta> grows, for a client alone."""
    world = toy(participants=lambda r: [2], rounds=1)
    result = pfedhn.run(world, hidden=6, server_lr=1e-4, server_weight_decay=0.0)
    start = pfedhn.run(dataclasses.replace(world, rounds=0), hidden=6).clients[2]
    delta = {name: w - start[name] for name, w in train(world, start, 2, 0).items()}
    assert sum(float(((result.clients[2][name] - start[name]) * d).sum()) for name, d in delta.items()) > 1e-5


def test_pfedhn_of_equal_vectors_and_data_is_the_same_for_all():
    world = dataclasses.replace(multiplied(toy()), draw=lambda purpose, r, i: draw(purpose, r, 0))
    result = pfedhn.run(world, hidden=6)
    assert all(same(w, result.clients[0]) for w in result.clients)
    one = pfedhn.run(dataclasses.replace(world, participants=lambda r: [0]), hidden=6)
    assert close(result.extra["hyper"], one.extra["hyper"])  # a mean over participants, no sum


def test_pfedhn_with_an_output_layer_of_biases_alone_is_fedavg_of_equal_clients_in_one_step():
    """Of layers whose weights are 0 the first step moves the biases by server_lr times the mean update."""

    def only_biases(name, inputs, outputs):
        weight, bias = linear(name, inputs, outputs)
        return weight * 0, bias

    world = toy(linear=only_biases, rounds=1)
    settings = {"hidden": 6, "server_weight_decay": 0.0}
    start = pfedhn.run(dataclasses.replace(world, rounds=0), **settings)
    ids = world.participants(0)
    w = start.clients[0]
    assert all(same(w, other) for other in start.clients)
    mean = average([train(world, w, i, 0) for i in ids], [1.0] * len(ids))
    result = pfedhn.run(world, **settings, server_lr=0.5)
    for name in trainable(world):
        expected = start.extra["hyper"][f"out:{name}.bias"] + 0.5 * (mean[name] - w[name]).flatten()
        assert torch.allclose(result.extra["hyper"][f"out:{name}.bias"], expected, rtol=1e-12, atol=1e-12)


def test_pfedhn_width_follows_the_clients():
    assert pfedhn.run(toy(rounds=0)).extra["embedding"][0].shape == (3,)
    assert pfedhn.run(toy(rounds=0), embedding=5).extra["hyper"]["hyper1.weight"].shape == (100, 5)
