"""The references of FedProto, FedPAC, FedCAC, FedDBE, GPFL, FedCP, pFedFDA, FedAS and FedDyn against the others
and closed forms."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.nn import functional as F

from . import fedas, fedavg, fedcac, fedcp, feddbe, feddyn, fedpac, fedper, fedproto, fedrep, gpfl, local, pfedfda
from .test_self import SIZES, apart, close, ever, generator, multiplied, one_step, permuted, plain, quadratics, same
from .test_self import toy as bare
from .world import average, fresh, initial, part, samples, train, write


def linear(name, inputs, outputs):
    """As PyTorch draws them, but of the name and the shape alone."""
    g = generator(9, inputs, outputs, *name.encode())
    bound = 1 / math.sqrt(inputs)
    return [
        (2 * torch.rand(*shape, generator=g, dtype=torch.float64) - 1) * bound
        for shape in ((outputs, inputs), (outputs,))
    ]


def draw(purpose, r, i):
    return np.random.default_rng([len(purpose), r, i])


toy = functools.partial(bare, linear=linear, draw=draw)


METHODS = {
    "fedproto": fedproto.run,
    "fedproto head": functools.partial(fedproto.run, predict="head", aggregate="plain"),
    "fedpac": fedpac.run,
    "fedcac": functools.partial(fedcac.run, beta=6),
    "feddbe": functools.partial(feddbe.run, kappa=2.0),
    "feddbe momentum": functools.partial(feddbe.run, kappa=2.0, mean_momentum=0.3),
    "gpfl": gpfl.run,
    "gpfl stale": functools.partial(gpfl.run, condition="stale"),
    "fedcp": functools.partial(fedcp.run, lam=0.5),
    "fedcp quiet": functools.partial(fedcp.run, lam=0.5, noise=False),
    "pfedfda": functools.partial(pfedfda.run, grid=4),
    "pfedfda identity": functools.partial(pfedfda.run, grid=4, jitter="identity", single_beta=True),
    "fedas": fedas.run,
    "fedas sample": functools.partial(fedas.run, fisher="sample", align_epochs=2),
    "feddyn": functools.partial(feddyn.run, alpha=0.3),
}
TABLE = {"gce"} | {f"cov.{v}.{n}" for v in ("gamma", "beta") for n in ("weight", "bias", "scale", "shift")}
POLICY = {"global.weight", "global.bias"} | {f"policy.{n}" for n in ("weight", "bias", "scale", "shift")}
BESIDE = {  # entries beside the network's, of the server and of the clients
    "fedproto": (set(), {"prototype", "held"}),
    "feddbe": (set(), {"bias"}),
    "feddbe momentum": (set(), {"bias"}),
    "gpfl": (TABLE, TABLE | {"condition"}),
    "gpfl stale": (TABLE, TABLE | {"condition"}),
    "fedcp": (POLICY, POLICY),
    "fedcp quiet": (POLICY, POLICY),
}


def model(w):
    """The entries of the network."""
    return {name: tensor for name, tensor in w.items() if name.startswith(("body.", "head."))}


def gradient_of(world, w, loss):
    """The gradient of a loss of the module at w, in train mode."""
    module = fresh(world)
    write(module, w)
    loss(module).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


# --- all methods


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_results_are_whole_finite_repeatable_and_unshared(name, norm):
    world = toy(norm=norm)
    one, two = METHODS[name](world), METHODS[name](world)
    at_server, at_client = BESIDE.get(name, (set(), set()))
    network = initial(world).keys()
    body = {entry for entry in network if entry.startswith("body.")}
    whole = name.split()[0] in ("fedcac", "feddbe", "feddyn")
    assert one.server.keys() == (set() if name.startswith("fedproto") else (network if whole else body) | at_server)
    assert same(one.server, two.server)
    assert len(one.clients) == world.clients
    for u, v in zip(one.clients, two.clients, strict=True):
        assert same(u, v)
        assert u.keys() == network | at_client
        assert all(tensor.dtype == torch.float64 and tensor.isfinite().all() for tensor in u.values())
    addresses = [tensor.data_ptr() for state in [one.server, *one.clients] for tensor in state.values()]
    assert len(addresses) == len(set(addresses))
    assert apart(model(one.clients[min(ever(world))]), initial(world)) > 0.05
    for i, scores in enumerate(one.extra.get("logits", [])):
        assert scores.shape == (SIZES[i], world.classes)


@pytest.mark.parametrize("name", METHODS)
def test_without_rounds_bodies_are_the_initial_one(name):
    world = toy(rounds=0)
    for w in METHODS[name](world).clients:
        assert same(part(w, "body."), part(initial(world), "body."))
        if not name.startswith("pfedfda"):
            assert same(part(w, "head."), part(initial(world), "head."))


@pytest.mark.parametrize("name", METHODS)
def test_numbers_of_the_clients_do_not_matter(name):
    """Client i is called 7 - i: whatever is listed by participants is listed in another order."""
    world = toy(rounds=3)
    last = world.clients - 1
    turned = dataclasses.replace(
        world,
        participants=lambda r: sorted(last - i for i in world.participants(r)),
        data=lambda i: world.data(last - i),
        batches=lambda i, *rest, **more: world.batches(last - i, *rest, **more),
        draw=lambda purpose, r, i: world.draw(purpose, r, last - i),
    )
    u, v = METHODS[name](world), METHODS[name](turned)
    assert close(u.server, v.server, 1e-9)
    assert all(close(u.clients[i], v.clients[last - i], 1e-9) for i in range(world.clients))


@pytest.mark.parametrize("name", METHODS)
def test_lr_follows_the_round(name):
    constant, decayed = toy(lr=lambda r: 0.1), toy(lr=lambda r: 0.1 if r < 2 else 0.02)
    u, v = (METHODS[name](dataclasses.replace(w, rounds=2)) for w in (constant, decayed))
    assert all(same(a, b) for a, b in zip(u.clients, v.clients, strict=True))
    u, v = METHODS[name](constant), METHODS[name](decayed)
    assert not all(close(model(a), model(b), 1e-3) for a, b in zip(u.clients, v.clients, strict=True))


# --- FedProto


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("predict", ["head", "prototype"])
def test_fedproto_without_lam_is_local_and_with_it_is_not(norm, predict):
    world = toy(norm=norm)
    alone = local.run(world).clients
    result = fedproto.run(world, lam=0.0, predict=predict)
    assert all(same(model(u), v) for u, v in zip(result.clients, alone, strict=True))
    pulled = fedproto.run(world, predict=predict).clients
    assert any(apart(model(u), v) > 1e-2 for u, v in zip(pulled, alone, strict=True))


def test_fedproto_knows_nothing_in_the_first_round():
    world = toy(rounds=1)
    alone = local.run(world).clients
    assert all(same(model(u), v) for u, v in zip(fedproto.run(world, lam=9.0).clients, alone, strict=True))


def test_fedproto_prototypes_are_means_of_the_pooled_samples():
    world = toy(lr=lambda r: 0.0, rounds=1)
    result = fedproto.run(world)
    xs, ys = zip(*(samples(world, i) for i in world.participants(0)), strict=True)
    y = torch.cat(ys)
    z = fedproto.features(world, initial(world), torch.cat(xs))
    assert result.extra["known"].tolist() == [bool((y == c).any()) for c in range(3)]
    for c in y.unique():
        assert torch.allclose(result.extra["prototype"][c], z[y == c].mean(0))
    assert not torch.allclose(result.extra["prototype"], fedproto.run(world, aggregate="plain").extra["prototype"])


def test_fedproto_table_by_hand():
    before, known = torch.tensor([[7.0], [8.0], [9.0]]).double(), torch.tensor([True, False, True])
    sums = [torch.tensor([[6.0], [0.0], [0.0]]).double(), torch.tensor([[10.0], [3.0], [0.0]]).double()]
    counts = [torch.tensor([3.0, 0.0, 0.0]).double(), torch.tensor([1.0, 1.0, 0.0]).double()]
    pooled, now = fedproto.prototypes(before, known, sums, counts)
    assert pooled.flatten().tolist() == [4.0, 3.0, 9.0]  # class 1 is one client's; nobody holds class 2
    assert now.tolist() == [True, True, True]
    even, _ = fedproto.prototypes(before, known, sums, counts, "plain")
    assert even.flatten().tolist() == [6.0, 3.0, 9.0]
    assert before.flatten().tolist() == [7.0, 8.0, 9.0]
    assert known.tolist() == [True, False, True]


def test_fedproto_distance_is_mse_to_features_themselves_where_nothing_is_known():
    g = generator(1)
    z, table = torch.randn(6, 4, generator=g).double(), torch.randn(3, 4, generator=g).double()
    y, known = torch.tensor([0, 1, 2, 1, 0, 2]), torch.tensor([True, False, True])
    target = torch.where(known[y][:, None], table[y], z)
    assert torch.allclose(fedproto.distance(z, y, table, known), F.mse_loss(z, target))
    assert float(fedproto.distance(z, y, table, known & False)) == 0


def test_fedproto_step_by_autograd():
    world = plain(rounds=2, sampled=8, **one_step)
    first = fedproto.run(dataclasses.replace(world, rounds=1), lam=0.7)
    second = fedproto.run(world, lam=0.7)
    table = first.extra["prototype"]
    for i in range(world.clients):
        x, y = (t[[0, 1, 2]] for t in samples(world, i))
        w = model(first.clients[i])

        def loss(m, x=x, y=y):
            z = m.body(x)
            return F.cross_entropy(m.head(z), y) + 0.7 * F.mse_loss(z, table[y])

        g = gradient_of(world, w, loss)
        assert close(model(second.clients[i]), {name: w[name] - world.lr(1) * g[name] for name in w})


def test_fedproto_predicts_the_nearest_of_its_own_classes():
    world = toy()
    result = fedproto.run(world)
    for i, w in enumerate(result.clients):
        x, y = samples(world, i)
        held = sorted(set(y.tolist()) & set(result.extra["known"].nonzero().flatten().tolist()))
        distances = torch.cdist(fedproto.features(world, w, x), w["prototype"][held])
        assert result.extra["logits"][i].argmax(1).tolist() == [held[k] for k in distances.argmin(1).tolist()]
    unknown = fedproto.run(toy(rounds=0))
    module = fresh(world)
    assert torch.allclose(unknown.extra["logits"][1], module(samples(world, 1)[0]))


# --- FedPAC


def alone(i, H, v):
    return torch.eye(len(v)).double()[i]


@pytest.mark.parametrize("norm", [False, True])
def test_fedpac_with_own_heads_and_without_alignment_is_fedrep(norm):
    world = toy(norm=norm)
    u = fedpac.run(world, lam=0.0, head_lr=None, mix=alone)
    v = fedrep.run(world, head_epochs=1)
    assert same(u.server, v.server)
    assert all(same(a, b) for a, b in zip(u.clients, v.clients, strict=True))
    assert apart(fedpac.run(world, head_lr=None, mix=alone).server, v.server) > 1e-2
    w = fedpac.run(world, lam=0.0, head_lr=None)
    assert apart(w.clients[min(ever(world))], v.clients[min(ever(world))]) > 1e-2
    assert apart(fedpac.run(world, lam=0.0, head_lr=0.1, mix=alone).server, v.server) > 1e-3


def test_fedpac_does_not_align_before_anything_is_known():
    world = toy(rounds=1)
    assert same(fedpac.run(world, lam=0.0).server, fedpac.run(world, lam=7.0).server)


def test_fedpac_aligns_to_its_own_mean_where_a_centroid_is_missing():
    world = toy()
    g = generator(2)
    centroid, own, z = (torch.randn(n, 5, generator=g).double() for n in (3, 3, 6))
    y, known, scores = torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([True, False, True]), torch.zeros(6, 3)
    target = torch.stack([own[1] if label == 1 else centroid[label] for label in y.tolist()])
    found = fedpac.aligned(world, 0.4, centroid, known, own).loss((scores, z), y)
    assert float(found) == pytest.approx(math.log(3) + 0.4 * float(F.mse_loss(z, target)))


def test_fedpac_weights_in_closed_form():
    v = [0.3, 0.1, 0.6, 0.2]
    H = [torch.ones(3, 5).double()] * 4
    inverse = torch.tensor([1 / (x + fedpac.RIDGE) for x in v], dtype=torch.float64)
    for i in range(4):  # no difference between clients: by the inverse variances
        assert torch.allclose(fedpac.simplex_minimum(fedpac.quadratic(i, H, v)), inverse / inverse.sum())
    one, two = torch.randn(3, 5).double() / 9, torch.randn(3, 5).double() / 9
    delta = float(((one - two) ** 2).sum())
    a = fedpac.simplex_minimum(fedpac.quadratic(0, [one, two], [0.3, 0.1]))
    assert float(a[0]) == pytest.approx((0.1 + delta) / (0.3 + 0.1 + delta), rel=1e-6)
    assert fedpac.simplex_minimum(fedpac.quadratic(0, [one], [0.2])).tolist() == [1.0]
    assert torch.allclose(fedpac.simplex_minimum(fedpac.quadratic(0, H, [0.0] * 4)), torch.full((4,), 0.25).double())


def test_fedpac_weights_satisfy_the_optimality_conditions():
    for seed in range(20):
        g = generator(3, seed)
        m = 2 + seed % 5
        H = [torch.randn(2, 3, generator=g).double() for _ in range(m)]
        v = (torch.rand(m, generator=g) * 2).tolist()
        for i in range(m):
            Q = fedpac.quadratic(i, H, v)
            a = fedpac.simplex_minimum(Q)
            slope = Q @ a
            assert float(a.sum()) == pytest.approx(1)
            assert float(a.min()) >= 0
            assert torch.allclose(slope[a > 0], a @ Q @ a)
            assert (slope >= a @ Q @ a - 1e-9).all()
            for j in range(m):  # the formula, entry by entry
                expected = [((H[i] - H[j]) * (H[i] - H[k])).sum() + (v[j] + 1e-8) * (j == k) for k in range(m)]
                assert torch.allclose(Q[j], torch.stack(expected))


def test_fedpac_drops_small_weights():
    a = torch.tensor([0.5, 0.4995, 0.0005], dtype=torch.float64)
    assert fedpac.trimmed(a).tolist() == pytest.approx([0.5 / 0.9995, 0.4995 / 0.9995, 0.0])


def test_fedpac_variance_is_that_of_the_mean():
    """H is the mean of the samples' onehot(y) z'; v that mean's variance."""
    world = toy(norm=True)
    w = initial(world)
    for i in range(world.clients):
        x, y = samples(world, i)
        products = F.one_hot(y, 3).double()[:, :, None] * fedproto.features(world, w, x)[:, None]
        means, H, v = fedpac.statistics(world, w, i)
        assert torch.allclose(H, products.mean(0))
        assert v == pytest.approx(float(((products - H) ** 2).sum()) / len(y) ** 2)
        for c in y.unique():
            assert torch.allclose(means[c] * (y == c).double().mean(), H[c])


def test_fedpac_heads_keep_their_order_and_stay_through_absences():
    world = toy(rounds=1)
    kept = fedpac.run(world, lam=0.0, mix=alone).extra["heads"]
    ids = world.participants(0)
    mixed = fedpac.run(world, lam=0.0)
    alpha = mixed.extra["alpha"]
    assert alpha.max() < 0.999
    for a, i in enumerate(ids):
        expected = {n: sum(alpha[a, b] * kept[j][n] for b, j in enumerate(ids)) for n in kept[i]}
        assert close(mixed.extra["heads"][i], expected)
    for i in set(range(world.clients)) - set(ids):
        assert same(part(mixed.clients[i], "head."), part(initial(world), "head."))


# --- FedCAC


@pytest.mark.parametrize("norm", [False, True])
def test_fedcac_without_critical_parameters_is_fedavg(norm):
    world = toy(norm=norm)
    expected = fedavg.run(world).server
    result = fedcac.run(world, tau=0.0)
    assert same(result.server, expected)
    assert all(same(w, expected) for w in result.clients)
    other = fedcac.run(world)
    assert apart(other.server, expected) > 1e-3
    assert apart(other.clients[min(ever(world))], other.server) > 1e-2


def test_fedcac_all_critical_and_no_partners_is_local(monkeypatch):
    monkeypatch.setattr(fedcac, "threshold", lambda *_: math.inf)
    world = toy(sampled=8)  # whoever is away first starts from the global model
    u, v = fedcac.run(world, tau=1.0), local.run(world)
    assert all(close(a, b) for a, b in zip(u.clients, v.clients, strict=True))


def test_fedcac_of_equal_clients_is_fedavg():
    world = multiplied(toy(sizes=(9,), sampled=1))
    result = fedcac.run(world)
    assert result.extra["overlap"].tolist() == [[1.0] * 3] * 3
    assert close(result.server, fedavg.run(world).server)
    assert all(close(w, result.server) for w in result.clients)


def test_fedcac_of_one_participant_keeps_its_own_critical_parameters():
    world = toy(sampled=1, rounds=1)
    (i,) = world.participants(0)
    assert close(fedcac.run(world).clients[i], train(world, initial(world), i, 0))


def test_fedcac_masks_by_hand():
    def masks(after, before, tau):
        after, before = ({"w": torch.tensor(v, dtype=torch.float64)} for v in (after, before))
        return fedcac.critical(before, after, ["w"], tau)["w"].int().tolist()

    before, after = [1.0, 1.0, 2.0, -1.0, 3.0], [1.5, 1.0, 1.0, -3.0, 3.1]  # s: .75, 0, 1, 6, .31
    assert masks(after, before, 0.4) == [0, 0, 1, 1, 0]
    assert masks(after, before, 0.79) == [1, 0, 1, 1, 0]  # int(3.95)
    assert masks(after, before, 1.0) == [1, 0, 1, 1, 1]  # never what did not move
    assert masks(after, before, 0.1) == [0, 0, 0, 0, 0]
    assert masks([2.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0], 0.5) == [1, 1, 1, 0]  # ties


def test_fedcac_overlap_and_threshold_by_hand():
    one, two, none = (
        {"a": torch.tensor(a).bool(), "b": torch.tensor(b).bool()}
        for a, b in (([1, 1, 0], [1]), ([1, 0, 0], [1]), ([0, 0, 0], [0]))
    )
    assert fedcac.overlap(one, one) == 1.0
    assert fedcac.overlap(one, two) == pytest.approx(1 - 1 / 6)
    assert fedcac.overlap(two, one) == pytest.approx(1 - 1 / 4)
    assert fedcac.overlap(none, one) == 0.0
    O = torch.tensor([[1, 0.2, 0.4], [0.6, 1, 0.8], [0.0, 0.4, 1]], dtype=torch.float64)  # noqa: E741
    assert fedcac.threshold(O, 0, 4) == pytest.approx(0.4 + 0.25 * 0.4)
    assert fedcac.threshold(O, 3, 4) == pytest.approx(0.8)
    assert fedcac.threshold(O, 5, 4) == pytest.approx(1.0)
    assert fedcac.threshold(torch.ones(1, 1), 0, 4) == math.inf


def test_fedcac_combines_the_partners_after_round_0_too():
    world = toy(rounds=1, norm=True)
    ids = world.participants(0)
    models = {i: train(world, initial(world), i, 0) for i in ids}
    result = fedcac.run(world, tau=0.5, beta=2)
    overlap, masks = result.extra["overlap"], result.extra["mask"]
    pairs = overlap[~torch.eye(5).bool()]
    bar = pairs.mean() + 0.5 * (pairs.max() - pairs.mean())
    counts = []
    for a, i in enumerate(ids):
        partners = [models[j] for b, j in enumerate(ids) if b == a or overlap[a, b] >= bar]
        counts.append(len(partners))
        mean = average(partners, [1.0] * len(partners))
        expected = {n: torch.where(masks[i][n], mean[n], v) if n in masks[i] else v for n, v in result.server.items()}
        assert close(result.clients[i], expected)
    assert len(set(counts)) > 1
    assert all(same(result.clients[i], result.server) for i in range(world.clients) if i not in ids)


# --- FedDBE


@pytest.mark.parametrize("norm", [False, True])
def test_feddbe_without_either_part_is_fedavg(norm):
    world = toy(norm=norm)
    expected = fedavg.run(world).server
    result = feddbe.run(world, kappa=0.0, personal_bias=False)
    assert same(result.server, expected)
    assert all(same(model(w), expected) and not w["bias"].any() for w in result.clients)
    assert apart(feddbe.run(world, kappa=0.0).server, expected) > 1e-3
    assert apart(feddbe.run(world, kappa=2.0, personal_bias=False).server, expected) > 1e-3


def test_feddbe_first_phase_is_of_all_clients_and_thrown_away():
    asked = []
    world = toy()

    def recorded(i, r, order, epoch, share=1.0):
        asked.append((i, r, order))
        return world.batches(i, r, order, epoch, share=share)

    feddbe.run(dataclasses.replace(world, batches=recorded))
    assert {entry for entry in asked if entry[2] == 10} == {(i, 0, 10) for i in range(world.clients)}
    assert {order for *_, order in asked} == {0, 10}
    assert same(feddbe.run(dataclasses.replace(world, rounds=0)).server, initial(world))


def test_feddbe_common_mean_is_that_of_all_samples_in_full_batches():
    world = toy(lr=lambda r: 0.0, batches=lambda i, *_: [torch.arange(SIZES[i])])
    z = torch.cat([fedproto.features(world, initial(world), samples(world, i)[0]) for i in range(world.clients)])
    assert torch.allclose(feddbe.run(world).extra["mean"], z.mean(0))


def test_feddbe_common_mean_is_of_running_means_through_the_first_training():
    world, total = toy(rounds=0), 0.0
    for i in range(world.clients):
        module, x, y = fresh(world), *samples(world, i)
        steps, m = (
            torch.optim.SGD(module.parameters(), world.lr(0), world.momentum, weight_decay=world.weight_decay),
            0.0,
        )
        for epoch in range(world.epochs):
            for batch in world.batches(i, 0, 10, epoch):
                z = module.body(x[batch])
                m = 0.7 * m + 0.3 * z.mean(0).detach()
                steps.zero_grad()
                world.loss(module.head(z), y[batch]).backward()
                steps.step()
        total = total + SIZES[i] * m
    assert torch.allclose(feddbe.run(world, mean_momentum=0.3).extra["mean"], total / sum(SIZES))


def test_feddbe_bias_can_be_moved_into_the_head():
    world = toy()
    w = feddbe.run(world, kappa=1.0).clients[min(ever(world))]
    assert w["bias"].norm() > 0.01
    x, v = samples(world, 1)[0], torch.arange(5).double()
    shifted = {**w, "bias": w["bias"] + v, "head.bias": w["head.bias"] - w["head.weight"] @ v}
    assert torch.allclose(feddbe.logits(world, w, x), feddbe.logits(world, shifted, x))
    zero = {**w, "bias": torch.zeros(5).double()}
    module = fresh(world)
    write(module, model(w))
    assert torch.allclose(feddbe.logits(world, zero, x), module(x))


def test_feddbe_step_by_autograd():
    world = plain(rounds=1, sampled=8, **one_step)
    result, w = feddbe.run(world, kappa=3.0), initial(world)
    zbar, bodies = result.extra["mean"], []
    for i in range(world.clients):
        x, y = (t[[0, 1, 2]] for t in samples(world, i))

        def loss(m, x=x, y=y):
            z = m.body(x)
            return F.cross_entropy(m.head(z), y) + 3.0 * (0.5 * (z.mean(0) - zbar) ** 2).mean()

        g = gradient_of(world, w, loss)
        bodies.append({name: w[name] - world.lr(0) * g[name] for name in w})
        residual = (fresh(world)(x).softmax(1) - F.one_hot(y, 3)).detach().mean(0)
        assert torch.allclose(result.clients[i]["bias"], -world.lr(0) * residual @ w["head.weight"])
    assert close(result.server, average(bodies, list(SIZES)))


def test_feddbe_mean_moves_from_zero_and_only_the_batch_has_a_gradient():
    zbar = torch.tensor([1.0, 2.0]).double()
    loss = feddbe.debiased(toy(), 4.0, 0.25, True, zbar).loss
    y, scores = torch.tensor([0, 1]), torch.zeros(2, 3).double()
    m = torch.zeros(2).double()
    for batch in ([[2.0, 0.0], [4.0, 2.0]], [[1.0, 1.0], [3.0, -1.0]]):
        z = torch.tensor(batch).double().requires_grad_()
        m = 0.75 * m + 0.25 * z.detach().mean(0)
        found = loss((scores, z), y)
        assert float(found) == pytest.approx(math.log(3) + 4.0 * float((0.5 * (m - zbar) ** 2).mean()))
        found.backward()
        assert torch.allclose(z.grad, (4.0 / 2 * (m - zbar) * 0.25 / 2).expand(2, 2))


def test_feddbe_draws_the_means_of_features_together():
    world = toy(sampled=8)
    spread = []
    for kappa in (0.0, 10.0):
        result = feddbe.run(world, kappa=kappa)
        means = [fedproto.features(world, w, samples(world, i)[0]).mean(0) for i, w in enumerate(result.clients)]
        spread.append(sum(float((m - result.extra["mean"]).norm()) for m in means))
    assert spread[1] < 0.7 * spread[0]


# --- GPFL


@pytest.mark.parametrize("norm", [False, True])
def test_gpfl_with_an_open_valve_and_no_guide_is_fedper(norm):
    world = toy(norm=norm)
    expected = fedper.run(world)
    result = gpfl.run(world, valve=lambda w, f, v: f, guide=0.0)
    assert same(part(result.server, "body."), expected.server)
    assert all(same(model(u), v) for u, v in zip(result.clients, expected.clients, strict=True))
    guided = gpfl.run(world, valve=lambda w, f, v: f)
    assert apart(part(guided.server, "body."), expected.server) > 1e-2


def test_gpfl_conditions_by_hand():
    table = torch.randn(3, 4).double()
    g, q = gpfl.means(table, torch.tensor([0, 1, 2, 2, 1, 0]))
    assert torch.allclose(g, q)
    assert torch.allclose(g, table.mean(0))
    assert torch.allclose(gpfl.means(table, torch.tensor([1, 1, 1, 0]))[1], 0.75 * table[1] + 0.25 * table[0])


def test_gpfl_conditions_are_of_the_received_table_or_of_the_own_one():
    world = toy()
    fresh_q, stale = gpfl.run(world), gpfl.run(world, condition="stale")
    for i in range(world.clients):
        q = gpfl.means(fresh_q.server["gce"], samples(world, i)[1])[1]
        assert torch.allclose(fresh_q.clients[i]["condition"], q)
        assert bool(stale.clients[i]["condition"].any()) == (i in ever(world))
    assert not same(fresh_q.server, stale.server)
    one = toy(sizes=(9,), sampled=1)  # alone, its own table is the received one
    u, v = (gpfl.run(dataclasses.replace(one, rounds=1), condition=c) for c in ("received", "stale"))
    assert not torch.allclose(u.server["gce"], v.server["gce"])
    assert torch.equal(v.clients[0]["condition"], gpfl.means(v.server["gce"], samples(one, 0)[1])[1])


def test_gpfl_valve_and_angle_are_torchs():
    world = toy()
    w = {**gpfl.tables(world)}
    w["cov.gamma.scale"], w["cov.beta.shift"] = torch.linspace(0.5, 2, 5).double(), torch.linspace(-1, 1, 5).double()
    f, v = torch.randn(6, 5).double(), torch.randn(5).double()

    def layer(name):
        a = F.relu(F.linear(v, w[f"cov.{name}.weight"], w[f"cov.{name}.bias"]))
        return F.layer_norm(a, (5,), w[f"cov.{name}.scale"], w[f"cov.{name}.shift"])

    assert torch.allclose(gpfl.conditional(w, f, v), F.relu((layer("gamma") + 1) * f + layer("beta")))
    y = torch.tensor([0, 1, 2, 0, 1, 1])
    cosines = F.cosine_similarity(f[:, None], w["gce"][None], dim=2)
    assert torch.allclose(gpfl.angle(f, w["gce"], y), F.cross_entropy(cosines, y))
    assert float(gpfl.angle(f, w["gce"][:1], torch.zeros(6, dtype=torch.long))) == pytest.approx(0)


def test_gpfl_step_by_autograd():
    world = toy(rounds=1, sizes=(9,), sampled=1, momentum=0.0, weight_decay=0.0, **one_step)
    result = gpfl.run(world, lam=0.3, mu=0.5)
    before = {**initial(world), **gpfl.tables(world)}
    w = {name: value.clone().requires_grad_() for name, value in before.items()}
    x, y = (t[[0, 1, 2]] for t in samples(world, 0))
    g, q = gpfl.means(before["gce"], samples(world, 0)[1])
    f = torch.func.functional_call(
        fresh(world).body, {n.removeprefix("body."): t for n, t in w.items() if n.startswith("body.")}, (x,)
    )
    f_P, f_G = gpfl.conditional(w, f, q), gpfl.conditional(w, f, g)
    scores = F.linear(F.normalize(f_G), F.normalize(w["gce"]))
    loss = F.cross_entropy(F.linear(f_P, w["head.weight"], w["head.bias"]), y) + F.cross_entropy(scores, y)
    (loss + 0.3 * (f_G - before["gce"][y]).square().sum().sqrt()).backward()
    for name, value in before.items():
        step = w[name].grad + (0.5 * value if name in TABLE else 0.0)
        found = result.server[name] if name in result.server else result.clients[0][name]
        assert torch.allclose(found, value - world.lr(0) * step)


def test_gpfl_table_begins_normal():
    world = dataclasses.replace(toy(), classes=4000)
    table = gpfl.tables(world)["gce"]
    assert abs(float(table.mean())) < 0.03
    assert float((table**2).mean()) == pytest.approx(1, abs=0.05)
    assert float((table**4).mean()) == pytest.approx(3, abs=0.3)


# --- FedCP


@pytest.mark.parametrize("norm", [False, True])
def test_fedcp_with_everything_personal_is_fedper(norm):
    world = toy(norm=norm)
    expected = fedper.run(world)
    result = fedcp.run(world, lam=0.0, noise=False, split=lambda f: (1.0, 0.0))
    assert same(part(result.server, "body."), expected.server)
    assert all(same(model(u), v) for u, v in zip(result.clients, expected.clients, strict=True))
    for settings in ({"lam": 0.0, "noise": False}, {"lam": 5.0, "noise": False, "split": lambda f: (1.0, 0.0)}):
        assert apart(part(fedcp.run(world, **settings).server, "body."), expected.server) > 1e-3


def test_fedcp_policy_is_torchs():
    world = toy()
    w = fedcp.initial_policy(world)
    w["policy.scale"], w["policy.shift"] = torch.linspace(0.5, 2, 10).double(), torch.linspace(-1, 1, 10).double()
    f, k = torch.randn(6, 5).double(), fedcp.context(initial(world)["head.weight"])
    assert float(k.norm()) == pytest.approx(1)
    assert torch.allclose(k * initial(world)["head.weight"].sum(0).norm(), initial(world)["head.weight"].sum(0))
    o = F.linear(f * k, w["policy.weight"], w["policy.bias"])
    o = F.relu(F.layer_norm(o, (10,), w["policy.scale"], w["policy.shift"])).view(6, 2, 5)
    noise = fedcp.drawn(world, 1, 2)(6, 5)
    for added in (0.0, noise):
        r, s = fedcp.policy(w, f, k, added)
        assert torch.allclose(torch.stack([r, s], 1), (o + added).softmax(1))
        assert torch.allclose(r + s, torch.ones(6, 5).double())


def test_fedcp_noise_is_gumbels_and_of_round_and_client():
    world = toy()
    noise = fedcp.drawn(world, 0, 1)(4000, 5)
    assert noise.shape == (4000, 2, 5)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    step = fedcp.drawn(world, 0, 1)
    assert torch.equal(step(4000, 5), noise)
    assert not torch.equal(step(4000, 5), noise)
    assert not torch.equal(fedcp.drawn(world, 1, 1)(4000, 5), noise)
    loud, quiet = fedcp.run(world), fedcp.run(world, noise=False)
    assert apart(loud.server, quiet.server) > 1e-3


def test_fedcp_discrepancy():
    f, g = torch.randn(6, 5).double() * 3, torch.randn(6, 5).double() + 1
    assert float(fedcp.discrepancy(f, f)) == pytest.approx(0)
    assert float(fedcp.discrepancy(f, g)) == pytest.approx(float(fedcp.discrepancy(g, f)))
    assert float(fedcp.discrepancy(f, g)) > 0
    one = sum(2 - 2 * math.exp(-float(((f[0] - g[0]) ** 2).sum()) / (2 * a)) for a in (10, 15, 20, 50))
    assert float(fedcp.discrepancy(f[:1], g[:1])) == pytest.approx(one)


def test_fedcp_sends_the_mean_of_both_heads_and_keeps_its_own():
    world = toy(sizes=(9,), sampled=1, rounds=1)
    result, first = fedcp.run(world), initial(world)
    for name in ("weight", "bias"):
        own = result.clients[0][f"head.{name}"]
        assert torch.allclose(result.server[f"global.{name}"], (own + first[f"head.{name}"]) / 2)
        assert not torch.allclose(own, first[f"head.{name}"], atol=1e-3)


def test_fedcp_step_by_autograd():
    world = toy(rounds=1, sizes=(9,), sampled=1, momentum=0.0, weight_decay=0.0, norm=True, **one_step)
    result = fedcp.run(world, lam=0.4)
    before = {**initial(world), **fedcp.initial_policy(world)}
    module = fresh(world)
    x, y = (t[[0, 1, 2]] for t in samples(world, 0))
    policy = {name: before[name].clone().requires_grad_() for name in POLICY if name.startswith("policy.")}
    f = module.body(x)
    with torch.no_grad():
        frozen = fresh(world).eval().body(x)
    r, s = fedcp.policy(policy, f, fedcp.context(before["head.weight"]), fedcp.drawn(world, 0, 0)(3, 5))
    logits = module.head(r * f) + F.linear(s * f, before["global.weight"], before["global.bias"])
    (F.cross_entropy(logits, y) + 0.4 * fedcp.discrepancy(f, frozen)).backward()
    for name, p in [*module.named_parameters(), *policy.items()]:
        found = result.clients[0][name]
        assert torch.allclose(found, before[name] - world.lr(0) * p.grad), name


# --- pFedFDA


def gaussians(C=3, d=4, n=30, seed=0):
    g = generator(4, seed)
    A = torch.randn(d, d, generator=g).double()
    mu, pi = torch.randn(C, d, generator=g).double(), torch.rand(C, generator=g).double()
    y = torch.arange(n) % C
    Z = torch.randn(n, d, generator=g).double() + mu[y]
    return mu, A @ A.T + torch.eye(d).double(), pi / pi.sum(), Z, y


def test_pfedfda_logits_are_gaussian_log_densities_up_to_a_constant():
    mu, S, pi, Z, _ = gaussians()
    weight, bias = pfedfda.lda(mu, S, pi, 0.2)
    shrunk = 0.8 * S + 0.2 * S.trace() / 4 * torch.eye(4).double()
    densities = torch.stack([MultivariateNormal(m, shrunk).log_prob(Z) for m in mu], 1) + pi.log()
    assert torch.allclose((Z @ weight.T + bias).log_softmax(1), densities.log_softmax(1))


def test_pfedfda_with_equal_classes_is_the_nearest_mean():
    mu, _, _, Z, _ = gaussians()
    weight, bias = pfedfda.lda(mu, torch.eye(4).double(), torch.ones(3).double() / 3, 1e-4)
    assert torch.equal((Z @ weight.T + bias).argmax(1), torch.cdist(Z, mu).argmin(1))


def test_pfedfda_does_not_see_the_basis():
    mu, S, pi, Z, y = gaussians()
    R = torch.linalg.qr(torch.randn(4, 4).double())[0]
    found = []
    for Zt, mu_t, S_t in ((Z, mu, S), (Z @ R, mu @ R, R.T @ S @ R)):
        m, C = pfedfda.statistics(Zt, y, mu_t, 2, "identity")
        b = pfedfda.chosen(Zt, y, mu_t, S_t, pi, 6, 2, 1e-4, "identity", False)
        weight, bias = pfedfda.lda(b[0] * m + (1 - b[0]) * mu_t, b[1] * C + (1 - b[1]) * S_t, pi, 1e-4)
        found.append((b, Zt @ weight.T + bias))
    assert found[0][0] == found[1][0]
    assert torch.allclose(found[0][1], found[1][1])


def test_pfedfda_statistics():
    mu, _, _, Z, y = gaussians()
    y = torch.where(y == 2, 1, y)
    y[0] = 2  # one sample of class 2
    m, S = pfedfda.statistics(Z, y, mu, 2, "official")
    assert torch.equal(m[2], mu[2])
    assert torch.allclose(m[1], Z[y == 1].mean(0))
    centred = Z - m[y]
    assert torch.allclose(S, centred.T @ centred / 29 + 1e-4 + torch.eye(4).double())
    identity = pfedfda.statistics(Z, y, mu, 2, "identity")[1]
    assert torch.allclose(identity, centred.T @ centred / 29 + 1e-4 * torch.eye(4).double())
    few = pfedfda.statistics(Z[:2], y[:2], mu, 2, "identity")[1]  # fewer samples than dimensions
    assert torch.linalg.eigvalsh(few).min() > 0.9e-4
    assert pfedfda.priors(torch.tensor([0, 0, 2]), 3).tolist() == pytest.approx(
        [(share + 1e-4) / 1.0003 for share in (2 / 3, 0, 1 / 3)]
    )


def test_pfedfda_folds_are_even_in_each_class():
    y = torch.tensor([0, 1, 0, 2, 0, 1, 0, 0])
    assert [sorted(half) for half in pfedfda.folds(y, 4)] == [[0, 1, 4, 7], [2, 5, 6]]  # class 2 is left out
    mu, S, pi, Z, _ = gaussians()
    assert pfedfda.chosen(Z[:3], torch.tensor([0, 1, 2]), mu, S, pi, 11, 2, 1e-4, "official", False) == (0.0, 0.0)


@pytest.mark.parametrize("single", [False, True])
def test_pfedfda_interpolation_is_the_best_of_the_grid(single):
    for seed in range(3):
        mu, S, pi, Z, y = gaussians(seed=seed)
        mu_g = mu + 0.5
        b = pfedfda.chosen(Z, y, mu_g, S, pi, 5, 2, 1e-4, "identity", single)
        halves = pfedfda.folds(y, 3)
        best = []
        for b_m in (0, 0.25, 0.5, 0.75, 1):
            for b_S in (0, 0.25, 0.5, 0.75, 1):
                total = 0.0
                for fitted, held in (halves, halves[::-1]):
                    m, C = pfedfda.statistics(Z[fitted], y[fitted], mu_g, 2, "identity")
                    m, C = b_m * m + (1 - b_m) * mu_g, b_S * C + (1 - b_S) * S
                    C = (1 - 1e-4) * C + 1e-4 * C.trace() / 4 * torch.eye(4).double()
                    scores = torch.stack([MultivariateNormal(row, C).log_prob(Z[held]) for row in m], 1) + pi.log()
                    total += float(F.cross_entropy(scores, y[held]))
                if not single or b_m == b_S:
                    best.append((total, (b_m, b_S)))
        assert b == min(best)[1]


def test_pfedfda_takes_the_least_of_equal_points():
    """Where local and global statistics are the same, all points are as good."""
    Z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]).double()
    y = torch.tensor([0, 0, 1, 1])
    mu = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).double()
    S = pfedfda.JITTER * torch.eye(2).double()
    pi = torch.ones(2).double() / 2
    assert pfedfda.chosen(Z, y, mu, S, pi, 11, 1, 1e-4, "identity", False) == (0.0, 0.0)


def test_pfedfda_forced_to_the_global_statistics_never_moves_them():
    world = toy()
    at_first = pfedfda.run(dataclasses.replace(world, rounds=0), force=(0.0, 0.0))
    result = pfedfda.run(world, force=(0.0, 0.0))
    assert torch.allclose(result.extra["mean"], at_first.extra["mean"])
    assert torch.allclose(result.extra["covariance"], torch.eye(5).double())
    assert (at_first.extra["mean"] >= 0).all()
    assert (at_first.extra["mean"] < 1).all()
    free = pfedfda.run(world, grid=4)
    assert len(set(free.extra["beta"])) > 1
    assert not torch.allclose(free.extra["mean"], at_first.extra["mean"], atol=0.05)


def test_pfedfda_forced_to_its_own_statistics_has_their_head():
    world = toy(norm=True)
    result = pfedfda.run(world, force=(1.0, 1.0))
    for i, w in enumerate(result.clients):
        x, y = samples(world, i)
        Z = fedproto.features(world, w, x)
        m, S = pfedfda.statistics(Z, y, result.extra["mean"], 2, "official")
        S = (1 - 1e-4) * S + 1e-4 * S.trace() / 5 * torch.eye(5).double()
        scores = torch.stack([MultivariateNormal(row, S).log_prob(Z) for row in m], 1) + pfedfda.priors(y, 3).log()
        found = Z @ w["head.weight"].T + w["head.bias"]
        assert torch.allclose(found.log_softmax(1), scores.log_softmax(1))


def test_pfedfda_trains_the_body_under_the_received_head():
    world = plain(rounds=1, sizes=(9,), sampled=1, linear=linear, **one_step)
    result, w = pfedfda.run(world), initial(world)
    d = 5
    mu = (math.sqrt(d) * linear("mean", d, 3)[0] + 1) / 2
    weight, bias = pfedfda.lda(mu, torch.eye(d).double(), pfedfda.priors(samples(world, 0)[1], 3), 1e-4)
    x, y = (t[[0, 1, 2]] for t in samples(world, 0))
    g = gradient_of(world, w, lambda m: F.cross_entropy(F.linear(m.body(x), weight, bias), y))
    assert close(result.server, {name: w[name] - world.lr(0) * g[name] for name in part(w, "body.")})


# --- FedAS


@pytest.mark.parametrize("norm", [False, True])
def test_fedas_without_alignment_and_with_even_weights_is_fedper(norm):
    world = toy(norm=norm, sizes=(9,) * 8)
    expected = fedper.run(world)
    result = fedas.run(world, align_epochs=0, weigh=lambda T: 1.0)
    assert same(result.server, expected.server)
    for i, w in enumerate(result.clients):
        assert same(part(w, "head."), part(expected.clients[i], "head."))
    assert apart(fedas.run(world, align_epochs=0).server, expected.server) > 1e-3
    assert apart(fedas.run(world, weigh=lambda T: 1.0).server, expected.server) > 1e-3


def test_fedas_weights_are_shares():
    world = toy()
    expected = fedas.run(world).server
    assert same(fedas.run(world, weigh=lambda T: 4 * T).server, expected)
    assert close(fedas.run(world, weigh=lambda T: 0.3 * T).server, expected)
    by_size = fedas.run(world, weigh=lambda T: 0.0).server
    assert same(fedas.run(world, weigh=lambda T: math.nan).server, by_size)
    assert apart(by_size, expected) > 1e-3
    assert fedas.weights(world, [2.0, 1.0], [3, 4]) == [2.0, 1.0]


def test_fedas_alignment_leaves_the_received_body_and_brings_it_nearer():
    world = toy(norm=True)
    body, own = part(initial(world), "body."), train(world, initial(world), 1, 0, epochs=20)
    before = {name: tensor.clone() for name, tensor in body.items()}
    aligned = fedas.align(world, body, own, 1, 0, 0.3, 10)
    assert same(body, before)
    assert same(part(aligned, "head."), part(own, "head."))
    x, y = samples(world, 1)
    z = fedproto.features(world, own, x)
    target = torch.stack([z[y == c].mean(0) for c in range(3)])
    distances = [float((fedproto.features(world, w, x) - target[y]).square().mean()) for w in (initial(world), aligned)]
    assert distances[1] < 0.5 * distances[0]


def test_fedas_alignment_by_hand():
    z, target = torch.randn(6, 4).double(), torch.randn(3, 4).double()
    y = torch.tensor([0, 2, 2, 2, 0, 2])
    expected = F.mse_loss(z[[0, 4]], target[[0, 0]]) + F.mse_loss(z[[1, 2, 3, 5]], target[[2, 2, 2, 2]])
    assert torch.allclose(fedas.alignment(z, y, target), expected)


def test_fedas_alignment_is_plain_sgd_towards_the_old_features():
    world = toy(norm=True)  # with momentum and weight decay, which alignment has not
    w = train(world, initial(world), 1, 0, epochs=5)
    x, y = samples(world, 1)
    z = fedproto.features(world, w, x)
    target = torch.stack([z[y == c].mean(0) for c in range(3)])
    module = fresh(world)
    sgd = torch.optim.SGD(module.body.parameters(), 0.05)
    for epoch in range(2):
        for batch in world.batches(1, 3, 9, epoch):
            sgd.zero_grad()
            out, labels = module.body(x[batch]), y[batch]
            sum(F.mse_loss(out[labels == c], target[c].expand_as(out[labels == c])) for c in labels.unique()).backward()
            sgd.step()
    found = fedas.align(world, part(initial(world), "body."), w, 1, 3, 0.05, 2)
    for name, tensor in [*module.body.named_parameters(), *module.body.named_buffers()]:
        assert torch.allclose(found[f"body.{name}"], tensor)


def test_fedas_information():
    world = toy(norm=True)
    w = train(world, initial(world), 2, 0)
    module = fresh(world).eval()
    write(module, w)
    x, y = samples(world, 2)
    squares = []
    for k in range(len(y)):
        g = torch.autograd.grad(F.cross_entropy(module(x[[k]]), y[[k]]), list(module.parameters()))
        squares.append(sum(float((v**2).sum()) for v in g))
    assert fedas.information(world, w, 2, 0, "sample") == pytest.approx(sum(squares) / len(squares))
    singles = dataclasses.replace(world, batches=lambda i, r, o, e, share=1.0: list(torch.arange(len(y))[:, None]))
    assert fedas.information(singles, w, 2, 0, "batch") == pytest.approx(sum(squares))
    quad = quadratics((4.0, 1.0), (1.0, -1.0), start=3.0)
    assert fedas.information(quad, initial(quad), 0, 0, "batch") == pytest.approx((4 * 2) ** 2)


def test_fedas_keeps_models_of_its_own():
    asked = []
    world = toy(rounds=2)

    def recorded(i, r, order, epoch, share=1.0):
        asked.append((i, r, order))
        return world.batches(i, r, order, epoch, share=share)

    result = fedas.run(dataclasses.replace(world, batches=recorded))
    assert set(asked) == {(i, r, order) for r in (0, 1) for i in world.participants(r) for order in (9, 0, 10)}
    for i in range(world.clients):
        if i not in ever(world):
            assert same(result.clients[i], initial(world))
        else:
            assert apart(part(result.clients[i], "body."), result.server) > 1e-3


# --- FedDyn


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sampled", [8, 5, 1])
def test_feddyn_server_state_is_the_mean_of_the_clients(norm, sampled):
    extra = feddyn.run(toy(norm=norm, sampled=sampled), alpha=0.3).extra
    assert close(extra["h"], average(extra["g"], [1.0] * 8))
    assert apart(extra["h"], {name: 0 * v for name, v in extra["h"].items()}) > 1e-3


def test_feddyn_first_round_of_one_step():
    world = toy(rounds=1, **one_step)
    ids, w = world.participants(0), initial(world)
    models = [train(world, w, i, 0) for i in ids]
    mean = average(models, [1.0] * 5)
    expected = {name: mean[name] + 5 / 8 * (mean[name] - w[name]) for name in w}
    for alpha in (0.01, 2.0):
        assert close(feddyn.run(world, alpha=alpha).server, expected)


def test_feddyn_without_alpha_adds_up_the_moves():
    """As alpha falls, training is plain, and -h / alpha stays the sum of all moves over the number of clients."""
    world = toy()
    w = initial(world)
    moved = {name: torch.zeros_like(v) for name, v in w.items()}
    for r in range(world.rounds):
        models = [train(world, w, i, r) for i in world.participants(r)]
        for name in w:
            moved[name] = moved[name] + sum(v[name] - w[name] for v in models) / 8
        w = {name: v + moved[name] for name, v in average(models, [1.0] * 5).items()}
    assert close(feddyn.run(world, alpha=1e-10).server, w, 1e-7)
    assert apart(feddyn.run(world, alpha=0.3).server, w) > 0.05


def test_feddyn_finds_the_minimum_of_the_mean_and_fedavg_does_not():
    a, b = (4.0, 1.0), (1.0, -1.0)
    best = (4 * 1 - 1) / 5
    world = quadratics(a, b, steps=200, rounds=80)
    result = feddyn.run(world, alpha=2.0)
    assert float(result.server["head.weight"]) == pytest.approx(best, abs=1e-6)
    assert abs(float(fedavg.run(world).server["head.weight"]) - best) > 0.3
    for i in range(2):  # g is the gradient there
        assert float(result.extra["g"][i]["head.weight"]) == pytest.approx(a[i] * (best - b[i]), abs=1e-5)


def test_feddyn_by_hand_on_quadratics_with_partial_participation():
    a, b, alpha = (4.0, 1.0, 2.0, 3.0), (1.0, -1.0, 3.0, 0.0), 0.7
    chosen = ([0, 1], [1, 2], [2], [0, 1])
    world = quadratics(a, b, start=0.5, steps=3, rounds=4, participants=lambda r: chosen[r])
    w, h, g = 0.5, 0.0, [0.0] * 4
    for ids in chosen:
        ends = []
        for i in ids:
            v = w
            for _ in range(3):
                v -= 0.05 * (a[i] * (v - b[i]) - g[i] + alpha * (v - w))
            g[i] -= alpha * (v - w)
            ends.append(v)
        h -= alpha * sum(v - w for v in ends) / 4
        w = sum(ends) / len(ends) - h / alpha
    result = feddyn.run(world, alpha=alpha)
    assert float(result.server["head.weight"]) == pytest.approx(w, abs=1e-12)
    assert [float(v["head.weight"]) for v in result.extra["g"]] == pytest.approx(g, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_feddyn_leaves_buffers_to_the_plain_mean(alpha):
    world = toy(norm=True, rounds=1, **one_step)
    means = [train(world, initial(world), i, 0)["body.1.running_mean"] for i in world.participants(0)]
    assert torch.allclose(feddyn.run(world, alpha=alpha).server["body.1.running_mean"], sum(means) / 5)


def test_the_toy_world_is_the_one_of_the_other_references():
    assert toy().clients == len(SIZES)
    assert [len(b) for b in permuted(SIZES, 4, 1, 0, 0, 0)] == [4, 4, 4, 5]
