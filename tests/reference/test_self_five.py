"""The references of FedAIMS, FedLAG, FedSimSup, FedAH and FedPAM against the others and closed forms."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize

from . import fedah, fedaims, fedavg, fedlag, fedpam, fedper, fedprox, fedrep, fedsimsup, local
from .test_self import apart, close, ever, generator, plain, same, toy
from .world import World, average, initial, part, samples, size, train

EIGHT = list(range(8))


def linear(name, inputs, outputs):
    """Initial weights that depend on the name and the shape alone."""
    g = generator(8, inputs, outputs, *name.encode())
    return [torch.randn(*shape, generator=g, dtype=torch.float64) / 3 for shape in ((outputs, inputs), (outputs,))]


def small():
    """A supervisor for the toy world."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3)).double()


def everybody(world: World) -> World:
    return dataclasses.replace(world, participants=lambda r: list(range(world.clients)))


METHODS = {
    "fedaims": functools.partial(fedaims.run, hidden=5),
    "fedaims all": functools.partial(fedaims.run, hidden=5, supervision="all", auxiliary="prototype"),
    "fedlag": functools.partial(fedlag.run, k=2, xi=0.5, warmup=1),
    "fedsimsup": functools.partial(fedsimsup.run, supervisor=small),
    "fedsimsup serial": functools.partial(fedsimsup.run, structure="serial", C=0.5),
    "fedah": fedah.run,
    "fedpam": fedpam.run,
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_results_are_whole_finite_and_repeatable(name, norm):
    world = toy(norm=norm, linear=linear)
    one, two = METHODS[name](world), METHODS[name](world)
    network = initial(world).keys()
    expected = {
        "fedsimsup": {f"theta.{n}" for n in network} | {f"supervisor.{n}" for n in small().state_dict()},
        "fedsimsup serial": {("theta." if "body" in n else "supervisor.") + n for n in network},
        "fedpam": network | {"adjust"},
    }.get(name, network)
    assert same(one.server, two.server)
    assert one.server.keys() <= network
    assert len(one.clients) == world.clients
    for u, v in zip(one.clients, two.clients, strict=True):
        assert same(u, v)
        assert u.keys() == expected
        assert all(tensor.dtype == torch.float64 and tensor.isfinite().all() for tensor in u.values())
    moved, still = (
        one.clients[min(ever(world))],
        METHODS[name](dataclasses.replace(world, rounds=0)).clients[0],
    )
    assert apart(moved, still) > 0.05


# --- FedAIMS


@pytest.mark.parametrize("norm", [False, True])
def test_fedaims_without_supervision_and_alignment_is_fedper(norm):
    world = toy(norm=norm, linear=linear)
    result, reference = fedaims.run(world, supervision="none", mu=0.0), fedper.run(world)
    assert same(result.server, reference.server)
    assert all(same(u, v) for u, v in zip(result.clients, reference.clients, strict=True))


@pytest.mark.parametrize("auxiliary", ["linear", "prototype", "none"])
def test_fedaims_of_two_blocks_has_one_to_supervise(auxiliary):
    world = toy(linear=linear)  # two linear layers in the body
    one = fedaims.run(world, auxiliary=auxiliary)
    full = fedaims.run(world, auxiliary=auxiliary, supervision="all")
    assert close(one.server, full.server)
    assert all(set(blocks.values()) == {1} for blocks in _single(one))
    assert apart(one.server, fedaims.run(world, supervision="none").server) > 1e-2


def _single(result):
    return [{i: j for i, (j,) in blocks.items()} for blocks in result.extra["blocks"]]


def test_fedaims_weights_its_main_task_by_one_over_m():
    world = plain(norm=True, linear=linear)  # three blocks
    result = fedaims.run(world, mu=0.0, auxiliary="none")
    slower = dataclasses.replace(world, lr=lambda r: world.lr(r) / 3)
    assert close(result.server, fedper.run(slower).server)


def test_fedaims_alignment_sums_to_the_dimension_times_the_mean():
    g = generator(20)
    z, targets = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((7, 5), (3, 5)))
    y = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    mean = fedaims.distance(z, targets, y, [True] * 3, "mse")
    assert float(mean) == pytest.approx(float(mse_loss(z, targets[y])))
    assert float(fedaims.distance(z, targets, y, [True] * 3, "sum")) == pytest.approx(5 * float(mean))
    partly = fedaims.distance(z, targets, y, [True, False, True], "mse")
    seen = y != 1
    assert float(partly) == pytest.approx(float(((z - targets[y])[seen] ** 2).sum()) / (7 * 5))
    assert float(fedaims.distance(z, targets, y, [False] * 3, "sum")) == 0


def test_fedaims_prototype_classifier_is_a_softmax_over_known_classes():
    g = generator(21)
    z, targets = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((6, 4), (3, 4)))
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    logits = -(torch.cdist(z, targets) ** 2)
    found = fedaims.prototype_loss(z, targets, y, [True] * 3)
    assert float(found) == pytest.approx(float(cross_entropy(logits, y)))
    seen = y != 1
    expected = cross_entropy(logits[seen][:, [0, 2]], y[seen] // 2, reduction="sum") / 6
    assert float(fedaims.prototype_loss(z, targets, y, [True, False, True])) == pytest.approx(float(expected))
    assert float(fedaims.prototype_loss(z, targets, y, [False] * 3)) == 0


@pytest.mark.parametrize("auxiliary", ["linear", "prototype", "none"])
@pytest.mark.parametrize("supervision", ["one", "all"])
def test_fedaims_objective_in_matrices(supervision, auxiliary):
    """Phi and its gradients with respect to the block features, the adapted prototypes and the logits."""
    g = generator(22)
    shapes = {"logits": (6, 3), "z1": (6, 4), "z2": (6, 5), "z3": (6, 2), "t1": (3, 4), "t2": (3, 5)}
    values = {name: torch.randn(*shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    a1, a2, prototypes = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((6, 3), (6, 3), (3, 2)))
    y, known, mu = torch.tensor([0, 1, 2, 2, 1, 0]), [True, False, True], 0.7
    mask = torch.tensor([float(known[k]) for k in y])[:, None]
    blocks = [2] if supervision == "one" else [1, 2]

    def expected(v):
        aligned = ((v["z3"] - prototypes[y]) ** 2 * mask).mean()
        total = (cross_entropy(v["logits"], y) + mu * aligned) / 3
        for j in blocks:
            z, t = v[f"z{j}"], v[f"t{j}"]
            task = mu * ((z - t[y]) ** 2 * mask).mean()
            if auxiliary == "linear":
                task = task + cross_entropy((a1, a2)[j - 1], y)
            if auxiliary == "prototype":
                logits = -((z[:, None] - t[None]) ** 2).sum(2)
                logits = logits.masked_fill(~torch.tensor(known), -math.inf)
                task = task - (logits.log_softmax(1)[mask[:, 0] > 0, y[mask[:, 0] > 0]]).sum() / 6
            total = total + task * (2 / 3 if supervision == "one" else 1 / 3)
        return total

    def found(v):
        targets, logits = {j: v[f"t{j}"] for j in blocks}, {j: (a1, a2)[j - 1] for j in blocks}
        outputs = (v["logits"], [v["z1"], v["z2"], v["z3"]], targets, logits)
        return fedaims.objective(toy(), outputs, y, prototypes, known, 3, mu, "mse", auxiliary)

    results = []
    for phi in (expected, found):
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        value = phi(leaves)
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        results.append([value.detach(), *gradients])
    assert all(torch.allclose(u, v) for u, v in zip(*results, strict=True))


def test_fedaims_trains_the_parts_of_the_chosen_block_only():
    world = plain(norm=True, linear=linear, rounds=2, sampled=3)
    result = fedaims.run(world)
    supervised = {i: set() for i in range(world.clients)}
    for blocks in result.extra["blocks"]:
        for i, chosen in blocks.items():
            supervised[i] |= set(chosen)
    untouched = fedaims.run(dataclasses.replace(world, rounds=0)).extra["private"][0]
    assert {len(chosen) for chosen in supervised.values()} >= {0, 1}
    second = result.extra["blocks"][1]
    for i in range(world.clients):
        for j in (1, 2):
            was, now = (
                {k: v for k, v in private.items() if f".{j}." in k and "head" not in k}
                for private in (untouched, result.extra["private"][i])
            )
            assert len(was) == 6
            if j not in supervised[i]:
                assert same(was, now)
            elif j in second.get(i, []):
                assert all(not torch.equal(was[name], now[name]) for name in was if name.endswith("weight"))


def test_fedaims_decays_an_adapter_that_has_no_gradient():
    world = toy(rounds=1, momentum=0.0, linear=linear, epochs=1)
    i = world.participants(0)[0]
    steps = len(world.batches(i, 0, 0, 0))
    was = fedaims.run(dataclasses.replace(world, rounds=0)).extra["private"][i]
    now = fedaims.run(world).extra["private"][i]
    factor = (1 - world.lr(0) * world.weight_decay) ** steps
    assert torch.allclose(now["adapter.1.in.weight"], factor * was["adapter.1.in.weight"])


def test_fedaims_prototypes_by_hand():
    old = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], dtype=torch.float64)
    local_means = [{0: torch.tensor([4.0, 0.0])}, {0: torch.tensor([0.0, 4.0]), 2: torch.tensor([8.0, 8.0])}]
    new, known = fedaims.merge(old, [False, True, False], local_means, [3, 1])
    assert new.tolist() == [[3.0, 1.0], [2.0, 2.0], [8.0, 8.0]]
    assert known == [True, True, True]


@pytest.mark.parametrize("norm", [False, True])
def test_fedaims_prototypes_are_of_the_received_body_in_eval_mode(norm):
    world = toy(norm=norm, linear=linear, rounds=1)
    result = fedaims.run(world)
    ids = world.participants(0)
    module = world.module().eval()
    totals, counted = torch.zeros(3, 5, dtype=torch.float64), [0.0] * 3
    for i in ids:
        x, y = samples(world, i)
        z = module.body(x)
        for k in set(y.tolist()):
            totals[k] += size(world, i) * z[y == k].mean(0).detach()
            counted[k] += size(world, i)
    for k in range(3):
        assert result.extra["known"][k] == (counted[k] > 0)
        if counted[k]:
            assert torch.allclose(result.extra["prototypes"][k], totals[k] / counted[k])


def test_fedaims_supervised_network_by_hand():
    world = toy(linear=linear)
    prototypes = torch.randn(3, 5, generator=generator(25), dtype=torch.float64)
    network = fedaims.Supervised(world, [6, 5], [1], 4, True, prototypes)
    x = samples(world, 1)[0]
    logits, features, targets, auxiliary = network(x)
    (v, a), (u, b) = linear("adapter.1.in", 5, 4), linear("adapter.1.out", 4, 6)
    assert torch.allclose(targets[1], (prototypes @ v.T + a).clamp(min=0) @ u.T + b)
    w, c = linear("auxiliary.1", 6, 3)
    assert torch.allclose(auxiliary[1], features[0] @ w.T + c)
    assert torch.equal(features[0], world.module().body[0](x))
    assert torch.equal(logits, world.module()(x))
    names = {
        f"{name}.{kind}" for name in ("adapter.1.in", "adapter.1.out", "auxiliary.1") for kind in ("weight", "bias")
    }
    assert {name for name in network.state_dict() if not name.startswith(("body.", "head."))} == names


def test_fedaims_features_are_means_over_positions():
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    x = torch.randn(5, 1, 8, 8, generator=generator(23))
    top, features = fedaims.through(body, x)
    assert torch.equal(top, body(x))
    assert [feature.shape[1] for feature in features] == [3, 2, 4]
    assert torch.allclose(features[0], body[0](x).mean((2, 3)), atol=1e-6)
    assert torch.equal(features[2], top)
    pooled = nn.Sequential(body[0], nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert torch.equal(fedaims.through(pooled, x)[1][-1], pooled(x))  # what the head sees, not block m's mean


def test_fedaims_blocks_by_hand():
    unknown = [[0.0] * 9 for _ in range(9)]
    # nothing is known: groups [0, 5], [2, 7], [3] in turn, and the smallest gets block 1
    assert fedaims.assign_blocks([0, 2, 3, 5, 7], unknown, 3) == {3: 1, 0: 2, 5: 2, 2: 3, 7: 3}
    s = [[1.0, 0.9, 0.9, 0.1], [0.9, 1.0, 0.2, 0.8], [0.9, 0.2, 1.0, 0.3], [0.1, 0.8, 0.3, 1.0]]
    # 2 joins 1 (0.2), not 0 (0.9); 3 must join the smaller group, that of 0
    assert fedaims.assign_blocks([0, 1, 2, 3], s, 2) == {0: 1, 3: 1, 1: 2, 2: 2}
    assert fedaims.assign_blocks([0, 1, 2], s, 2) == {0: 1, 1: 2, 2: 2}
    assert fedaims.assign_blocks([3, 1], s, 1) == {3: 1, 1: 1}
    assert fedaims.assign_blocks([4], unknown, 3) == {4: 3}
    # negative cosines pull clients together: an empty group counts 0 but is smaller, so it goes first
    assert fedaims.assign_blocks([0, 1], [[1.0, -1.0], [-1.0, 1.0]], 2) == {0: 1, 1: 2}


def test_fedaims_groups_are_even_and_the_larger_ones_deeper():
    for count, groups in itertools.product(range(1, 12), (1, 2, 3, 4)):
        g = generator(24, count, groups)
        vectors = torch.randn(12, 3, generator=g, dtype=torch.float64)
        similarity = fedaims.cosines(dict(enumerate(vectors)), 12)
        blocks = fedaims.assign_blocks(list(range(count)), similarity, groups)
        assert sorted(blocks) == list(range(count))
        sizes = [list(blocks.values()).count(j) for j in range(1, groups + 1)]
        assert sizes == sorted(sizes)
        assert max(sizes) - min(sizes) <= 1


def test_fedaims_similarities_are_of_the_last_uploads_at_the_last_refresh():
    world = toy(norm=True, linear=linear, rounds=3, sampled=3)
    every, second = fedaims.run(world), fedaims.run(world, similarity_every=2)
    unknown = [[0.0] * world.clients for _ in range(world.clients)]
    ids = [world.participants(r) for r in range(3)]
    for result in (every, second):
        assert _single(result)[0] == fedaims.assign_blocks(ids[0], unknown, 2)
    after = [fedaims.run(dataclasses.replace(world, rounds=n)).extra["similarity"] for n in (1, 2)]
    assert _single(every)[1] == fedaims.assign_blocks(ids[1], after[0], 2)
    assert _single(every)[2] == fedaims.assign_blocks(ids[2], after[1], 2)
    assert _single(second)[1] == fedaims.assign_blocks(ids[1], unknown, 2)
    rare = [
        fedaims.run(dataclasses.replace(world, rounds=n), similarity_every=2).extra["similarity"] for n in (1, 2, 3)
    ]
    assert rare[0] == unknown
    assert rare[1] == rare[2] != unknown
    for i, j in itertools.product(range(world.clients), repeat=2):
        met = {i, j} <= set(ids[0]) | set(ids[1])
        assert (after[1][i][j] != 0) == met
        assert after[1][i][j] == after[1][j][i] <= 1 + 1e-12


# --- FedLAG


@pytest.mark.parametrize("norm", [False, True])
def test_fedlag_without_layers_is_the_inner_method(norm):
    world = toy(norm=norm)
    result = fedlag.run(world, k=0, xi=1.0, warmup=1)
    assert same(result.server, fedavg.run(world).server)
    assert all(same(u, v) for u, v in zip(result.clients, fedavg.run(world).clients, strict=True))
    prox = fedlag.run(world, inner="fedprox", mu=0.3, k=0, xi=1.0, warmup=0)
    assert same(prox.server, fedprox.run(world, mu=0.3).server)
    assert result.extra["conflicts"].sum() > 0
    assert result.extra["personal"] == [[]] * 4
    assert same(fedlag.run(world, xi=1.0, warmup=4).server, fedavg.run(world).server)
    assert same(fedlag.run(world, xi=-1.0, warmup=0).server, fedavg.run(world).server)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scores", ["round", "warmup"])
def test_fedlag_with_conflicts_everywhere_is_local_after_the_warmup(scores, norm):
    world = everybody(toy(norm=norm))
    result = fedlag.run(world, k=99, xi=1.0, warmup=2, scores=scores)
    before = fedavg.run(dataclasses.replace(world, rounds=1)).server
    models = [train(world, before, i, 1) for i in range(world.clients)]
    for r in (2, 3):
        models = [train(world, models[i], i, r) for i in range(world.clients)]
    assert all(same(u, v) for u, v in zip(result.clients, models, strict=True))
    pairs = world.clients * (world.clients - 1) // 2
    assert result.extra["conflicts"].unique().tolist() == [pairs]
    assert [len(chosen) for chosen in result.extra["personal"]] == [0] + [len(result.extra["layers"])] * 3
    assert close(result.server, average(models, [size(world, i) for i in range(world.clients)]))


def test_fedlag_counts_the_updates_from_where_each_client_started():
    world = everybody(toy())
    result = fedlag.run(world, k=99, xi=0.3, warmup=1, scores="warmup")
    assert result.extra["personal"][-1] == result.extra["layers"]
    starts = [initial(world)] * world.clients
    for r in range(world.rounds):
        ends = [train(world, starts[i], i, r) for i in range(world.clients)]
        for n, layer in enumerate(result.extra["layers"]):
            names = (f"{layer}.weight", f"{layer}.bias")
            updates = [torch.cat([(v[k] - u[k]).flatten() for k in names]) for u, v in zip(starts, ends, strict=True)]
            pairs = [float(cosine_similarity(u, v, dim=0)) for u, v in itertools.combinations(updates, 2)]
            assert int(result.extra["conflicts"][r, n]) == sum(cosine < 0.3 for cosine in pairs)
        starts = ends


def test_fedlag_without_warmup_is_local_from_the_start():
    world = everybody(toy(norm=True))
    result = fedlag.run(world, k=99, xi=1.0, warmup=0)
    assert all(same(u, v) for u, v in zip(result.clients, local.run(world).clients, strict=True))


@pytest.mark.parametrize("inner", ["fedavg", "fedprox"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_fedlag_keeps_a_layer_through_absences(weights, inner):
    """One layer, found in the warm-up, stays with the clients; who never took part takes the server's."""
    world = toy(norm=True, rounds=6, sampled=3)
    result = fedlag.run(world, inner=inner, mu=0.3, k=1, xi=0.5, warmup=2, scores="warmup", weights=weights)
    (layer,) = result.extra["personal"][-1]
    own = [name for name in initial(world) if name.startswith(layer + ".")]
    server, last = initial(world), {}
    for r in range(6):
        ends, p = [], []
        for i in world.participants(r):
            start = dict(server)
            if r >= 2 and i in last:
                start.update({name: last[i][name] for name in own})
            pull = None if inner == "fedavg" else (lambda name, w, start=start: 0.3 * (w - start[name]))
            last[i] = train(world, start, i, r, correct=pull)
            ends.append(last[i])
            p.append(1 if weights == "uniform" and r >= 2 else size(world, i))
        server = average(ends, p)
    assert close(result.server, server)
    for i in range(world.clients):
        expected = {**server, **{name: last[i][name] for name in own if i in last}}
        assert close(result.clients[i], expected)
    gaps = [(b - a) for i in EIGHT for a, b in itertools.pairwise([r for r in range(6) if i in world.participants(r)])]
    assert max(gaps) > 1
    assert len(ever(world)) >= 6
    assert apart(server, fedavg.run(world).server) > 1e-2


def test_fedlag_chooses_each_round_from_its_own_scores():
    world = toy(norm=True, rounds=5)
    result = fedlag.run(world, k=2, xi=0.0, warmup=2)
    layers, counts, personal = (result.extra[name] for name in ("layers", "conflicts", "personal"))
    assert layers == ["body.0", "body.1", "body.3", "head"]
    assert counts.shape == (5, 4)
    assert personal[0] == []
    for r in range(1, 5):
        assert personal[r] == fedlag.top_layers(layers, counts[r].tolist(), 2) != []
    summed = fedlag.run(world, k=2, xi=0.0, warmup=2, scores="warmup").extra
    assert summed["personal"][0] == []
    assert summed["personal"][1:] == [fedlag.top_layers(layers, summed["conflicts"][:2].sum(0).tolist(), 2)] * 4
    without = fedlag.run(world, k=9, xi=1.0, warmup=0, skip_norm=True).extra
    assert without["layers"] == without["personal"][0] == ["body.0", "body.3", "head"]


def test_fedlag_weights_matter_only_where_sizes_differ():
    world = toy(sizes=(6,) * 5, sampled=3)
    one, two = (fedlag.run(world, k=1, xi=0.5, warmup=1, weights=w) for w in ("samples", "uniform"))
    assert close(one.server, two.server)
    one, two = (fedlag.run(toy(), k=1, xi=0.5, warmup=1, weights=w) for w in ("samples", "uniform"))
    assert apart(one.server, two.server) > 1e-2


def test_fedlag_conflicts_by_hand():
    v = [torch.tensor(p, dtype=torch.float64) for p in ([1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [-1.0, 1.0], [0.0, 0.0])]
    assert fedlag.count_conflicts(v, -0.1) == 2  # (0, 2) at 180 degrees and (0, 3) at 135
    assert fedlag.count_conflicts(v, -0.8) == 1
    assert fedlag.count_conflicts(v, 0.0) == 2
    assert fedlag.count_conflicts(v, 1e-9) == 4
    assert fedlag.count_conflicts([v[0], v[0]], 1.0) == 0
    assert fedlag.count_conflicts([v[0], v[2]], -1.0) == 0
    assert fedlag.count_conflicts(v, 1.0) == 6  # all pairs without the zero
    assert fedlag.count_conflicts(v[:1], 1.0) == fedlag.count_conflicts([], 1.0) == 0


def test_fedlag_layers_are_whole_modules_and_no_more():
    names = ("body.1.weight", "body.1.bias", "body.1.norm.weight", "body.10.weight", "body.1.running_mean")
    update = {name: torch.full((2,), float(n)) for n, name in enumerate(names)}
    assert fedlag.flat(update, "body.1").tolist() == [0, 0, 1, 1, 4, 4]
    assert fedlag.flat(update, "body.1.norm").tolist() == [2, 2]
    server = {name: torch.zeros(2) for name in names}
    mixed = fedlag.assemble(server, update, ["body.1"])
    assert {name for name in names if mixed[name].any()} == {"body.1.bias", "body.1.running_mean"}


def test_fedlag_conflicts_count_pairs_and_ignore_order_and_scale():
    updates = list(torch.randn(9, 4, generator=generator(30), dtype=torch.float64))
    for xi in (-0.5, -0.1, 0.3):
        count = fedlag.count_conflicts(updates, xi)
        unit = normalize(torch.stack(updates), dim=1)
        assert count == int((torch.triu(unit @ unit.T < xi, diagonal=1)).sum())
        assert 0 < count < 36
        assert fedlag.count_conflicts(updates[::-1], xi) == count
        assert fedlag.count_conflicts([(n + 1) ** 3 * u for n, u in enumerate(updates)], xi) == count
    assert fedlag.count_conflicts(updates, 1.0) == 36


def test_fedlag_top_layers_prefers_the_earlier_and_wants_conflicts():
    layers = ["a", "b", "c", "d"]
    assert fedlag.top_layers(layers, [1, 3, 1, 0], 2) == ["a", "b"]
    assert fedlag.top_layers(layers, [1, 3, 5, 0], 2) == ["b", "c"]
    assert fedlag.top_layers(layers, [1, 3, 1, 0], 9) == ["a", "b", "c"]
    assert fedlag.top_layers(layers, [0, 0, 0, 0], 2) == fedlag.top_layers(layers, [1, 1, 1, 1], 0) == []


# --- FedSimSup


def test_fedsimsup_never_mixes_under_full_participation():
    world = everybody(toy(norm=True))
    result = fedsimsup.run(world, supervisor=small, tau_s=2)
    others = dataclasses.replace(world, participants=lambda r: [3])
    alone = fedsimsup.run(others, supervisor=small, tau_s=2)
    assert same(result.clients[3], alone.clients[3])
    different = fedsimsup.run(world, supervisor=small, tau_s=2, C=0.001, similarity=False)
    assert all(same(u, v) for u, v in zip(result.clients, different.clients, strict=True))


def test_fedsimsup_with_a_silent_supervisor_is_local():
    def silent():
        network = small()
        nn.init.zeros_(network[2].weight)
        nn.init.zeros_(network[2].bias)
        return network

    world = everybody(toy())
    result = fedsimsup.run(world, supervisor=silent, tau_s=0, tau_theta=world.epochs)
    moved = dataclasses.replace(world, batches=lambda i, r, order, epoch: world.batches(i, r, 1, epoch))
    for found, expected in zip(result.extra["theta"], local.run(moved).clients, strict=True):
        assert close({name.removeprefix("theta."): tensor for name, tensor in found.items()}, expected)


def test_fedsimsup_trains_the_supervisor_first_and_each_under_the_other():
    world = toy(norm=False, rounds=1)
    i = world.participants(0)[0]
    result = fedsimsup.run(world, supervisor=small, tau_s=2, tau_theta=3)
    theta, s = world.module(), small()
    x, y = samples(world, i)
    for order, epochs, trained in ((0, 2, s), (1, 3, theta)):
        sgd = torch.optim.SGD(trained.parameters(), world.lr(0), world.momentum, weight_decay=world.weight_decay)
        for epoch in range(epochs):
            for batch in world.batches(i, 0, order, epoch):
                sgd.zero_grad()
                cross_entropy(theta(x[batch]) + s(x[batch]), y[batch]).backward()
                sgd.step()
    found = result.clients[i]
    assert close(part(found, "theta."), {f"theta.{n}": p.detach() for n, p in theta.named_parameters()})
    assert close(part(found, "supervisor."), {f"supervisor.{n}": p.detach() for n, p in s.named_parameters()})


def test_fedsimsup_serial_of_one_client_is_fedrep():
    world = toy(sizes=(9,), sampled=1, norm=True)
    result = fedsimsup.run(world, structure="serial", tau_s=3, tau_theta=2)
    expected = fedrep.run(world, head_epochs=3, body_epochs=2).clients[0]
    assert same({n.split(".", 1)[1]: tensor for n, tensor in result.clients[0].items()}, expected)


@pytest.mark.parametrize("similarity", [False, True])
@pytest.mark.parametrize("C", [40, 0.7])
def test_fedsimsup_mixing_in_matrices(C, similarity):
    """theta after two rounds, from theta after one: rows of a matrix times the uploads."""
    world, gamma, T = toy(norm=True), 0.4, 10
    settings = {"supervisor": small, "C": C, "gamma": gamma, "T": T, "similarity": similarity}
    one, two = (fedsimsup.run(dataclasses.replace(world, rounds=n), **settings).extra["theta"] for n in (1, 2))
    ids = world.participants(1)
    sizes = torch.tensor([size(world, i) for i in EIGHT], dtype=torch.float64)
    counts = torch.stack([torch.bincount(samples(world, i)[1], minlength=3).double() for i in EIGHT])
    s = normalize(counts, dim=1) @ normalize(counts, dim=1).T if similarity else torch.ones(8, 8).double()
    rows = s[:, ids] / s[:, ids].sum(1, keepdim=True)
    M = sizes[ids].sum()
    beta = 1.0 if C * T**gamma > 2 else (C * T**gamma / 2) ** 2
    a = beta * M / (M + len(ids) * sizes)
    assert (beta < 1) == (C == 0.7)
    for name in one[0]:
        uploads = torch.stack([two[j][name].flatten() for j in ids])
        mean = rows @ uploads
        for i in set(EIGHT) - set(ids):
            expected = (1 - a[i]) * one[i][name].flatten() + a[i] * mean[i]
            assert torch.allclose(two[i][name].flatten(), expected, rtol=1e-12, atol=1e-12)


def test_fedsimsup_beta_is_one_up_to_its_bound_and_continuous_there():
    bound = 40 * 1000 ** (3 / 7)
    assert 1 < bound < 1000
    values = [fedsimsup.beta(t, 40, 1000, 3 / 7) for t in range(1, 1001)]
    assert all(value == 1 for t, value in enumerate(values, 1) if t < bound)
    assert all(value <= 1 for value in values)
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx((bound / 1000) ** 2)
    assert fedsimsup.beta(bound, 40, 1000, 3 / 7) == 1  # the second branch, at its start
    assert fedsimsup.beta(bound * (1 + 1e-9), 40, 1000, 3 / 7) == pytest.approx(1, abs=1e-8)


def test_fedsimsup_pieces_by_hand():
    assert fedsimsup.lam(10, [5, 15]) == pytest.approx(20 / 40)
    assert fedsimsup.lam(7, [7, 7, 7]) == 0.5
    assert fedsimsup.label_proportions(torch.tensor([2, 0, 2, 2]), 4) == [0.25, 0, 0.75, 0]
    assert fedsimsup.cosine([0.5, 0.5], [0.5, 0.5]) == pytest.approx(1)
    assert fedsimsup.cosine([1.0, 0.0], [0.0, 1.0]) == 0
    theta = {"w": torch.tensor([1.0, 2.0])}
    uploads = {4: {"w": torch.tensor([3.0, 0.0])}, 7: {"w": torch.tensor([7.0, 4.0])}}
    assert same(fedsimsup.mix(theta, uploads, {4: 0.0, 7: 0.0}, 0.5), theta)
    assert fedsimsup.mix(theta, uploads, {4: 0.6, 7: 0.2}, 0.5)["w"].tolist() == pytest.approx([2.5, 1.5])
    assert same(fedsimsup.mix(theta, uploads, {4: 1.0, 7: 0.0}, 1.0), uploads[4])


def test_fedsimsup_equal_proportions_need_no_similarity():
    world = toy(sizes=(6,) * 5, sampled=2)
    alike = dataclasses.replace(world, data=lambda i: (world.data(i)[0], torch.tensor([0, 1, 2, 0, 1, 2])))
    one, two = (fedsimsup.run(alike, supervisor=small, similarity=s) for s in (True, False))
    assert all(close(u, v) for u, v in zip(one.clients, two.clients, strict=True))
    one, two = (fedsimsup.run(world, supervisor=small, similarity=s) for s in (True, False))
    assert max(apart(u, v) for u, v in zip(one.clients, two.clients, strict=True)) > 1e-3


def test_fedsimsup_supervisors_may_differ():
    world = toy()

    def other():
        return nn.Linear(4, 3).double()

    result = fedsimsup.run(world, supervisor=[small, other] * 4)
    assert "supervisor.2.bias" in result.clients[0]
    assert "supervisor.2.bias" not in result.clients[1]


# --- FedAH


@pytest.mark.parametrize("norm", [False, True])
def test_fedah_with_weights_held_at_zero_is_fedrep(norm):
    world = toy(norm=norm)
    result = fedah.run(world, head_epochs=2, weight_lr=0.0, start=0.0)
    reference = fedrep.run(world, head_epochs=2)
    assert same(part(result.server, "body."), reference.server)
    assert all(same(u, v) for u, v in zip(result.clients, reference.clients, strict=True))


@pytest.mark.parametrize("norm", [False, True])
def test_fedah_with_weights_held_at_one_and_no_head_phase_trains_the_body(norm):
    world = toy(norm=norm)
    result = fedah.run(world, head_epochs=0)
    server = initial(world)
    for r in range(world.rounds):
        ids = world.participants(r)
        ends = [train(world, server, i, r, only="body.", order=1) for i in ids]
        server = average(ends, [size(world, i) for i in ids])
    assert close(result.server, server)
    assert all(same(u, result.server) for u in result.clients)


def test_fedah_step_is_the_gradient_of_the_aggregated_head():
    world = toy()
    received, other = fedavg.run(world).server, local.run(world).clients[1]
    h, own = part(received, "head."), part(other, "head.")
    W = {name: torch.full_like(tensor, 0.6) for name, tensor in h.items()}
    x, y = samples(world, 1)
    leaves = {name: w.clone().requires_grad_() for name, w in W.items()}
    blended = {**received, **{name: own[name] + (h[name] - own[name]) * leaves[name] for name in h}}
    cross_entropy(torch.func.functional_call(world.module(), blended, (x,)), y).backward()
    gradient = fedah.head_gradient(world, {**received, **fedah.aggregated(h, own, W)}, x, y)
    for name in h:
        expected = (W[name] - 2.0 * leaves[name].grad).clamp(0, 1).detach()
        found = fedah.weight_step(W[name], gradient[name], h[name], own[name], 2.0)
        assert torch.allclose(found, expected)
        assert not torch.allclose(found, W[name], atol=1e-3)
    one, two, three = (torch.tensor(v) for v in ([0.5, 0.5, 0.5], [1.0, -1.0, 0.1], [3.0, 3.0, 2.0]))
    assert fedah.weight_step(one, two, three, torch.ones(3), 1.0).tolist() == pytest.approx([0.0, 1.0, 0.4])


def test_fedah_weights_stay_in_the_unit_interval_and_move_after_round_zero():
    world = toy()
    first = fedah.run(dataclasses.replace(world, rounds=1)).extra["W"]
    assert all(bool((w == 1).all()) for mix in first for w in mix.values())  # h = h_i: no gradient
    last = fedah.run(world, weight_lr=20.0).extra["W"]
    values = torch.cat([w.flatten() for mix in last for w in mix.values()])
    assert values.min() >= 0
    assert values.max() <= 1
    assert ((values > 0) & (values < 1)).any()
    absent = set(EIGHT) - ever(world)
    assert all(bool((w == 1).all()) for i in absent for w in last[i].values())


def test_fedah_first_participation_begins_from_the_initial_head():
    """A client that is new in round 1 mixes the initial head with the received one."""
    world = toy(rounds=2)
    new = next(i for i in world.participants(1) if i not in world.participants(0))
    result = fedah.run(world, weight_lr=None, head_epochs=2)
    server = fedah.run(dataclasses.replace(world, rounds=1), head_epochs=2).server
    h, own = part(server, "head."), part(initial(world), "head.")
    W = {name: torch.ones_like(tensor) for name, tensor in h.items()}
    x, y = samples(world, new)
    for epoch in range(2):
        for batch in world.batches(new, 1, 9, epoch):
            leaves = {name: (own[name] + (h[name] - own[name]) * W[name]).requires_grad_() for name in h}
            cross_entropy(
                torch.func.functional_call(world.module(), {**server, **leaves}, (x[batch],)), y[batch]
            ).backward()
            W = {n: (W[n] - world.lr(1) * leaves[n].grad * (h[n] - own[n])).clamp(0, 1) for n in W}
    assert close(result.extra["W"][new], W)
    assert any(bool((w < 1).any()) for w in W.values())
    mixed = {**server, **{name: own[name] + (h[name] - own[name]) * W[name] for name in h}}
    head = train(world, mixed, new, 1, only="head.", order=0, epochs=2)
    assert close(result.extra["heads"][new], part(head, "head."))


def test_fedah_learns_anew_at_evaluation_and_keeps_nothing_of_it():
    world, asked = toy(norm=True), []

    def recorded(i, r, order, epoch, share=1.0):
        asked.append((i, r, order))
        return world.batches(i, r, order, epoch, share=share)

    result = fedah.run(dataclasses.replace(world, batches=recorded))
    at_evaluation = {(i, order) for i, r, order in asked if r == world.rounds}
    assert at_evaluation == {(i, 9) for i in EIGHT}
    assert {order for _, r, order in asked if r < world.rounds} == {0, 1, 9}
    for i, found in enumerate(result.clients):
        assert same(part(found, "body."), part(result.server, "body."))
        kept = fedah.aggregated(part(result.server, "head."), result.extra["heads"][i], result.extra["W"][i])
        assert i not in ever(world) or not same(part(found, "head."), kept)


# --- FedPAM


@pytest.mark.parametrize("norm", [False, True])
def test_fedpam_without_contrast_weight_is_fedavg(norm):
    world = toy(norm=norm)
    held, free = fedpam.run(world, lam=0.0, pam=False), fedpam.run(world, lam=0.0)
    reference = fedavg.run(world).server
    assert same(held.server, reference)
    assert same(free.server, reference)
    assert all(torch.equal(P, torch.eye(5, dtype=torch.float64)) for P in held.extra["P"])
    assert all(same(part(w, "body."), part(reference, "body.")) for w in held.clients)
    undecayed = fedpam.run(plain(), lam=0.0)
    assert all(torch.equal(P, torch.eye(5, dtype=torch.float64)) for P in undecayed.extra["P"])
    z, w = samples(world, 1)[0][:, :1].expand(-1, 5), reference["head.weight"]
    assert torch.allclose(fedpam.adjusted_logits(z, w, held.extra["P"][0]), z @ w.T)


def matrices(z, anchors, y, tau):
    """PCL without a loop."""
    z, anchors = normalize(z, dim=1, eps=1e-8), normalize(anchors, dim=1, eps=1e-8)
    pairs = (z @ z.T / tau).masked_fill(y[:, None] == y, -math.inf)
    return cross_entropy(torch.cat([z @ anchors.T / tau, pairs], 1), y)


@pytest.mark.parametrize("labels", [[0, 1, 2, 2, 1, 0], [1, 1, 1, 1, 1, 1]])
def test_fedpam_contrast_in_matrices(labels):
    g = generator(40)
    z, anchors = (torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in ((6, 4), (3, 4)))
    y = torch.tensor(labels)
    for tau in (0.5, 0.07, 1e-3):
        results = []
        for loss in (fedpam.contrastive, matrices):
            value = loss(z, anchors, y, tau)
            results.append([value, *torch.autograd.grad(value, [z, anchors])])
        assert all(torch.allclose(u, v) for u, v in zip(*results, strict=True))
        shuffled = torch.tensor([3, 1, 5, 0, 2, 4])
        assert torch.allclose(fedpam.contrastive(z[shuffled], anchors, y[shuffled], tau), results[0][0])
        assert torch.allclose(fedpam.contrastive(3 * z, anchors, y, tau), results[0][0])


def test_fedpam_contrast_by_hand():
    z = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    anchors = torch.tensor([[1.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    e = math.exp(1 / 0.5)
    found = fedpam.contrastive(z, anchors, torch.tensor([0, 1]), 0.5)
    assert float(found) == pytest.approx(-math.log(e / (e + 1 + 1)))
    one_class = fedpam.contrastive(z, anchors, torch.tensor([0, 0]), 0.5)
    assert float(one_class) == pytest.approx(-(math.log(e / (e + 1)) + math.log(1 / (e + 1))) / 2)


def test_fedpam_a_zero_feature_is_finite():
    z = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    anchors = torch.eye(3, dtype=torch.float64, requires_grad=True)
    value = fedpam.contrastive(z, anchors, torch.tensor([0, 1]), 0.5)
    gradients = torch.autograd.grad(value, [z, anchors])
    assert float(value.detach()) == pytest.approx(math.log(4))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("contrast", [False, True])
@pytest.mark.parametrize("pam", [False, True])
def test_fedpam_trains_everything_under_one_sgd(pam, contrast):
    world = toy(rounds=1)
    result = fedpam.run(world, lam=2.0, tau=0.3, pam=pam, contrast=contrast)
    uploads = []
    for i in world.participants(0):
        module, P = world.module(), torch.eye(5, dtype=torch.float64, requires_grad=pam)
        parameters = [*module.parameters()] + ([P] if pam else [])
        sgd = torch.optim.SGD(parameters, world.lr(0), world.momentum, weight_decay=world.weight_decay)
        x, y = samples(world, i)
        for epoch in range(world.epochs):
            for batch in world.batches(i, 0, 0, epoch):
                sgd.zero_grad()
                z = module.body(x[batch])
                loss = cross_entropy(module.head(z), y[batch])
                if contrast:
                    loss = loss + 2.0 * matrices(z, module.head.weight @ P, y[batch], 0.3)
                else:
                    loss = loss + cross_entropy(z @ (module.head.weight @ P).T, y[batch])
                loss.backward()
                sgd.step()
        uploads.append({name: p.detach() for name, p in module.named_parameters()})
        assert torch.allclose(result.extra["P"][i], P.detach(), rtol=1e-10)
        assert (apart({"": P.detach()}, {"": torch.eye(5)}) > 1e-2) == pam
    expected = average(uploads, [size(world, i) for i in world.participants(0)])
    assert close(result.server, expected, 1e-10)


def test_fedpam_keeps_its_matrix_where_it_is():
    world = toy()
    one, two = fedpam.run(dataclasses.replace(world, rounds=3)), fedpam.run(world)
    for i in EIGHT:
        kept = torch.equal(one.extra["P"][i], two.extra["P"][i])
        assert kept == (i not in world.participants(3))
        assert torch.equal(two.clients[i]["adjust"], two.extra["P"][i])
        assert same({k: v for k, v in two.clients[i].items() if k != "adjust"}, two.server)


def test_fedpam_cosine_logits_have_the_cosines():
    g = generator(41)
    z, w, P = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((4, 5), (3, 5), (5, 5)))
    expected = cosine_similarity(z[:, None], (w @ P)[None], dim=2)
    assert torch.allclose(fedpam.cosine_logits(z, w, P), expected)
