"""FedAIMS: its reference, FedPer as its limit, its losses and their gradients, Algorithm 2, the bytes of its tables."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils._python_dispatch import TorchDispatchMode

from harness import CLASSES, SIZES, agree, experiment, federation, moved, run, world
from idiolect import catalogue
from idiolect.data import Dataset, Federation
from idiolect.data.federated import split_hash
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Facts, Rows
from idiolect.methods.fedaims import FedAIMS, nearness, supervised
from idiolect.methods.fedper import FedPer
from idiolect.nets import Network, build
from idiolect.task import Batch, Net, Task
from idiolect.tree import Tree
from reference import fedaims as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
DEEP = {"hidden": (6, 5, 4)}  # three blocks, of different widths


def deep(method, images=False, **fields):
    return experiment(method, images=images, **({} if images else {"network_options": DEEP}), **fields)


# the reference

VARIANTS = [
    {},
    {"mu": 0.0},
    {"mu": 0.3, "alignment": "sum", "hidden": 7},
    {"auxiliary": "prototype"},
    {"auxiliary": "none", "mu": 2.0},
    {"supervision": "all"},
    {"supervision": "all", "auxiliary": "prototype", "alignment": "sum", "mu": 0.1},
    {"supervision": "none"},
    {"similarity_every": 2},
    {"similarity_every": 3},
]


@IMAGES
@pytest.mark.parametrize("hyper", VARIANTS, ids=str)
def test_engine_equals_reference(hyper, images):
    found = run(deep(FedAIMS(**hyper), images))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    torch.testing.assert_close(found.server["prototype"], expected.extra["prototypes"], rtol=0, atol=1e-10)
    assert found.server["known"].tolist() == expected.extra["known"]
    for i, kept in enumerate(expected.extra["private"]):
        own = found.private(i)
        assert moved(own["model"] | own["extra"], Tree(kept)) < 1e-10
    if found.progress.rows.template:  # the blocks of everybody's last round
        last = {i: blocks[i][0] for blocks in expected.extra["blocks"] for i in blocks}
        assert {i: int(found.progress.rows[i]["block"]) for i in last} == last


@pytest.mark.parametrize("hyper", [{}, {"auxiliary": "prototype", "similarity_every": 2}], ids=str)
def test_engine_equals_reference_over_many_rounds(hyper):
    """Long enough for the choice of blocks to follow the similarities in most rounds."""
    fields = {"network_options": {"hidden": (6, 5, 4, 4)}, "rounds": 12, "ratio": 0.9}
    found = run(experiment(FedAIMS(**hyper), **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    assert len({str(blocks) for blocks in expected.extra["blocks"]}) > 4


# the methods that it becomes


@IMAGES
def test_without_supervision_and_prototypes_it_is_fedper_to_the_bit(images):
    found, fedper = (run(deep(m, images)) for m in (FedAIMS(supervision="none", mu=0.0), FedPer()))
    assert found.server["model"].equals(fedper.server["model"])
    assert all(found.personal(i).equals(fedper.personal(i)) for i in EVERYONE)


def test_it_does_something():
    plain, drawn, one, full = (
        run(deep(FedAIMS(**hyper))).server["model"]
        for hyper in ({"supervision": "none", "mu": 0.0}, {"supervision": "none"}, {}, {"supervision": "all"})
    )
    assert min(moved(a, b) for a, b in ((plain, drawn), (drawn, one), (one, full))) > 1e-3


def test_two_blocks_put_everyone_on_the_first_as_full_supervision_does():
    options = {"network_options": {"hidden": (6, 5)}}
    one, full = (run(experiment(FedAIMS(supervision=s), **options)) for s in ("one", "all"))
    assert all(int(one.progress.rows[i]["block"]) == 1 for i in one.progress.rows)
    assert one.server["model"].equals(full.server["model"])
    assert all(one.personal(i).equals(full.personal(i)) for i in EVERYONE)


# the losses


def small(conv: bool = False):
    """A task, weights with every block's parts, a batch and prototypes; class 2 has none yet."""
    if conv:
        blocks = OrderedDict(
            a=nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh()), b=nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh()),
            c=nn.Conv2d(3, 2, 2), pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(),
        )  # fmt: skip
        net = Net(Network(nn.Sequential(blocks), nn.Linear(2, 4)), (1, 5, 5), 4, 0, torch.float64)
    else:
        net = Net(build("mlp", (3,), 4, hidden=(4, 3, 2)), (3,), 4, 0, torch.float64)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(7, *net.shape, generator=draw, dtype=torch.float64)
    prototype = torch.randn(4, net.features, generator=draw, dtype=torch.float64)
    known = torch.tensor([True, True, False, True])
    return Task(net), Batch(x, torch.tensor([0, 2, 1, 3, 0, 2, 1])), prototype, known


def weights(method, task):
    state = method.init(task.net)
    return state.server["model"] | state.client["model"] | state.client["extra"]


@pytest.mark.parametrize("conv", [False, True], ids=["mlp", "conv"])
@pytest.mark.parametrize(
    ("hyper", "blocks"),
    [
        ({"mu": 0.7}, (1,)),
        ({"mu": 0.7}, (2,)),
        ({"mu": 0.7, "alignment": "sum", "auxiliary": "none"}, (2,)),
        ({"auxiliary": "prototype"}, (1,)),
        ({"supervision": "all", "auxiliary": "prototype", "alignment": "sum"}, (1, 2)),
        ({"supervision": "all"}, (1, 2)),
        ({"supervision": "none"}, ()),
    ],
    ids=str,
)
def test_gradients_against_finite_differences(hyper, blocks, conv):
    method = FedAIMS(hidden=3, **hyper)
    task, batch, prototype, known = small(conv)
    w = weights(method, task)

    def loss(*values):
        return method.objective(task, Tree(zip(w, values, strict=True)), batch, blocks, prototype, known)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def test_the_objective_is_the_paper_s():
    """Eqs. 6 to 8 and 12 for the second of three blocks, sample by sample."""
    method = FedAIMS(mu=0.7, hidden=3)
    task, batch, prototype, known = small(conv=True)
    w = weights(method, task)
    net = task.net.module
    z2 = net.body.b(net.body.a(batch.x))
    z, z2 = net.body(batch.x), z2.mean((2, 3))

    def adapter(c):
        inner = torch.relu(w["adapter.2.in.weight"] @ c + w["adapter.2.in.bias"])
        return w["adapter.2.out.weight"] @ inner + w["adapter.2.out.bias"]

    main = task_ = torch.zeros((), dtype=torch.float64)
    for k, (feature, middle) in zip(batch.y, zip(z, z2, strict=True), strict=True):
        main = main + cross_entropy(net.head(feature), k)
        task_ = task_ + cross_entropy(w["auxiliary.2.weight"] @ middle + w["auxiliary.2.bias"], k)
        if known[k]:
            main = main + 0.7 * ((prototype[k] - feature) ** 2).mean()
            task_ = task_ + 0.7 * ((adapter(prototype[k]) - middle) ** 2).mean()
    expected = (main / 3 + 2 * task_ / 3) / 7
    torch.testing.assert_close(method.objective(task, w, batch, (2,), prototype, known), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("auxiliary", ["linear", "prototype"])
def test_padding_changes_neither_the_loss_nor_its_gradient(auxiliary):
    method = FedAIMS(hidden=3, auxiliary=auxiliary)
    task, batch, prototype, known = small()
    w = weights(method, task).map(lambda v: v.requires_grad_())
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 0])
    mask = torch.tensor([1.0] * 7 + [0.0] * 2, dtype=torch.float64)
    padded = Batch(batch.x[rows], batch.y[rows], mask)
    found = [method.objective(task, w, b, (1,), prototype, known) for b in (batch, padded)]
    grads = [torch.autograd.grad(v, list(w.values()), allow_unused=True, materialize_grads=True) for v in found]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads, strict=True))


def test_prototype_scores_before_anything_is_known():
    z = torch.randn(3, 2, requires_grad=True)
    batch = Batch(z, torch.tensor([0, 1, 1]))
    value = nearness(torch.zeros(4, 2), z, batch, torch.zeros(4, dtype=torch.bool))
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == 0
    assert not grad.any()


def test_prototypes_are_constants_and_drawn_to_by_block_and_adapter():
    method = FedAIMS(hidden=3, auxiliary="none")
    task, batch, prototype, known = small()
    w = weights(method, task).map(lambda v: v.requires_grad_())
    value = method.auxiliary_task(task, w, batch, 1, task.blocks(w, batch.x)[0], prototype, known)
    grads = dict(zip(w, torch.autograd.grad(value, list(w.values()), allow_unused=True), strict=True))
    reached = {k for k, g in grads.items() if g is not None and g.any()}
    assert reached == {k for k in w if k.startswith(("adapter.1.", "body.hidden1."))}


def test_a_step_runs_the_body_once():
    body = nn.Sequential(nn.Flatten(), Counting(6, 5), nn.Sequential(nn.Linear(5, 4), nn.ReLU()))
    made = experiment(FedAIMS(), network=Network(body, nn.Linear(4, 3)), network_options={})
    context = made.context()
    down = {**context.state.server, "block": torch.tensor(1, dtype=torch.uint8)}
    Counting.calls = 0
    context.do(Job("local", 1, 0, 0, down, context.state.client))
    assert Counting.calls == 1 + 2 * 2  # the prototypes; 9 samples in 2 batches, 2 epochs


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x)


# prototypes


def test_global_prototypes_by_hand():
    """Class means of the received body's features, weighted by n_i over those who hold the class."""
    found = run(deep(FedAIMS(), images=True, rounds=1))
    task, shards = found.context.task, found.context.shards
    ids = found.run.participants(0)
    sums, held = torch.zeros(CLASSES, 64, dtype=torch.float64), torch.zeros(CLASSES, dtype=torch.float64)
    for i in ids:
        x, y = shards.part("train", i)
        z = task.features(task.net.body, x)
        for k in y.unique():
            sums[k] += SIZES[i] * z[y == k].mean(0)
            held[k] += SIZES[i]
    torch.testing.assert_close(found.server["prototype"], sums / held[:, None], rtol=0, atol=1e-12)


def test_a_class_that_nobody_has_never_gets_a_prototype():
    fed = federation()
    data = dataclasses.replace(fed.dataset, y=fed.dataset.y.clamp(max=1))
    for auxiliary in ("linear", "prototype"):
        made = dataclasses.replace(fed, dataset=data)
        found = run(deep(FedAIMS(auxiliary=auxiliary), federation=made))
        assert found.server["known"].tolist() == [True, True, False]
        assert not found.server["prototype"][2].any()
        agree(found, reference.run(world(found.run), auxiliary=auxiliary))


def test_a_class_that_none_of_the_participants_holds_keeps_its_prototype():
    """Client 3 has class 1 alone."""
    before, after = (run(deep(FedAIMS(), ratio=[[0, 1, 2, 5], [3]], rounds=r)).server for r in (1, 2))
    assert before["known"].all()
    for k in range(CLASSES):
        assert torch.equal(before["prototype"][k], after["prototype"][k]) == (k != 1)


@IMAGES
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, images):
    for hyper in ({}, {"auxiliary": "prototype", "supervision": "all"}):
        found = run(deep(FedAIMS(**hyper), images, sizes=sizes))
        assert all(bool(v.isfinite().all()) for i in range(len(sizes)) for v in found.personal(i).values())
        if not images:
            agree(found, reference.run(world(found.run), **hyper))


# Algorithm 2


def brute(similarity, groups):
    """Algorithm 2 with every group tried for every client."""
    members = [[] for _ in range(groups)]
    for i in range(len(similarity)):
        best = None
        for g in range(groups):
            grown = [len(m) + (h == g) for h, m in enumerate(members)]
            balanced = max(grown) - min(grown) <= 1
            delta = sum(similarity[i][j] for j in members[g]) / len(members[g]) if members[g] else 0.0
            if balanced and (best is None or delta < best[0]):
                best = (delta, g)
        members[best[1]].append(i)
    order = sorted(range(groups), key=lambda g: (len(members[g]), g))
    return [next(b for b, g in enumerate(order, 1) if i in members[g]) for i in range(len(similarity))]


def test_algorithm_2_against_brute_force():
    draw = np.random.default_rng(0)
    for clients in range(1, 13):
        for groups in range(1, 6):
            cosines = draw.uniform(-1, 1, size=(clients, clients))
            cosines = (cosines + cosines.T) / 2
            cosines[draw.random(cosines.shape) < 0.2] = 0  # pairs never seen
            found = supervised(torch.tensor(cosines), groups)
            assert found == brute(cosines.tolist(), groups)
            sizes = [found.count(b) for b in range(1, groups + 1)]
            assert sizes == sorted(sizes)  # larger groups are deeper
            assert sizes[-1] - sizes[0] <= 1


def test_groups_of_many_clients_are_within_one_and_the_larger_deeper():
    draw = np.random.default_rng(1)
    for clients, groups in ((50, 3), (20, 7), (100, 3), (31, 4)):
        h = draw.normal(size=(clients, 6))
        h /= np.linalg.norm(h, axis=1, keepdims=True)
        found = supervised(torch.tensor(h @ h.T), groups)
        assert found == brute((h @ h.T).tolist(), groups)
        small, larger = divmod(clients, groups)
        assert [found.count(b) for b in range(1, groups + 1)] == [small] * (groups - larger) + [small + 1] * larger


def test_all_similarities_come_from_one_product():
    method, net = FedAIMS(), Net(build("mlp", (6,), 3, **DEEP), (6,), 3, 0, torch.float64)
    state, ids, draw = method.init(net), (1, 3, 4, 6, 8), torch.Generator().manual_seed(0)
    size = len(state.rows["compared"])
    bodies = normalize(torch.randn(5, size, generator=draw, dtype=torch.float64))
    rows = Rows(state.rows).with_(ids, compared=bodies)
    with Products() as products:
        planned = method.plan(state.server, rows, Facts(0, 9, ids, (1.0,) * 5, 0.1, 4, 0))[1]
    assert products.shapes == [((5, size), (size, 5))]
    expected = brute((bodies @ bodies.T).tolist(), 2)
    assert [int(planned[i]["block"]) for i in ids] == expected


class Products(TorchDispatchMode):
    """Remembers what was multiplied."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket._qualified_op_name in ("aten::mm", "aten::bmm", "aten::dot", "aten::mv"):
            self.shapes.append(tuple(tuple(a.shape) for a in args[:2]))
        return func(*args, **(kwargs or {}))


def test_unknown_clients_are_dealt_out_in_turn():
    assert supervised(torch.zeros(7, 7), 3) == [3, 1, 2, 3, 1, 2, 3]  # the first group is the larger one


def test_similar_clients_are_kept_apart():
    """Two pairs of twins and two groups: each pair is split."""
    twins = torch.tensor([[1.0, 0.9, 0, 0], [0.9, 1, 0, 0], [0, 0, 1, 0.9], [0, 0, 0.9, 1]])
    found = supervised(twins, 2)
    assert found[0] != found[1]
    assert found[2] != found[3]


def test_similarities_are_of_the_last_uploads_as_of_the_last_refresh():
    def bodies(rounds):
        found = run(deep(FedAIMS(similarity_every=2), rounds=rounds, ratio=[[0, 1, 2], [1, 2, 3], [0, 1, 3]]))
        return found.progress.rows

    one, two, three = map(bodies, (1, 2, 3))
    assert not any(one[i]["compared"].any() for i in range(4))
    assert all(torch.equal(two[i]["compared"], two[i]["last"]) for i in range(4))
    assert torch.equal(two[0]["last"], one[0]["last"])  # 0 was away in the second round
    assert all(torch.equal(three[i]["compared"], two[i]["compared"]) for i in range(4))
    assert not torch.equal(three[0]["last"], two[0]["last"])
    assert float(three[3]["last"].norm()) == pytest.approx(1)


def test_blocks_are_planned_for_those_who_take_part():
    method = FedAIMS()
    net = Net(build("mlp", (6,), 3, **DEEP), (6,), 3, 0, torch.float64)
    state = method.init(net)
    rows = Rows(state.rows)
    known = Facts(0, 9, (2, 5, 7), (1.0, 1.0, 1.0), 0.1, 4, 0)
    server, planned = method.plan(state.server, rows, known)
    assert {i: int(planned[i]["block"]) for i in planned} == {2: 2, 5: 1, 7: 2}
    assert server is state.server
    assert not rows.written


@pytest.mark.parametrize("fields", [{"drop": 0.4}, {"ratio": "bernoulli:0.2", "rounds": 8}], ids=str)
def test_lost_replies_and_empty_rounds(fields):
    found = run(deep(FedAIMS(), **fields))
    visited = {i for i in EVERYONE if found.progress.store.visits[i]}
    assert {i for i in found.progress.rows if found.progress.rows[i]["last"].any()} == visited
    assert any(r["dropped"] or not r["participants"] for r in found.rounds[1:])


# the tables of the paper

TABLES = [  # network, sample, classes; MB of the model, of FedPer's and of FedAIMS's round (table 6); adapters
    ("convnet3", (1, 28, 28), 47, 77_935, "0.30", "0.57", "0.59", 16_640, "0.06"),
    ("convnet4", (3, 32, 32), 10, 448_650, "1.71", "3.41", "3.42", 49_728, "0.19"),
    ("resnet18", (3, 32, 32), 100, 11_220_132, "42.80", "85.21", "85.60", 127_616, "0.49"),
    ("resnet18", (3, 64, 64), 200, 11_271_432, "43.00", "85.21", "85.99", 127_616, "0.49"),
]


def mebi(size):
    return f"{size / 2**20:.2f}"


NETWORKS = pytest.mark.parametrize("row", TABLES, ids=["EMNIST", "CIFAR-10", "CIFAR-100", "TinyImageNet"])


def one_round(method, network, shape, classes, **fields):
    """A round of one client with four samples, on the network as the paper has it."""
    n = 4
    data = Dataset("pictures", torch.randn(2 * n, *shape), torch.arange(2 * n) % classes, classes, network)
    parts = [(np.arange(k, k + n), np.arange(0), np.arange(k, k + n)) for k in (0, n)]
    fed = Federation(data, *zip(*parts, strict=True), split_hash(*zip(*parts, strict=True)), "pictures")
    base = {"network": network, "dtype": "float32", "rounds": 1, "epochs": 1, "ratio": ((0,),), "evaluate_every": 9}
    return run(experiment(method, federation=fed, **{**base, **fields}))


def sent(found):
    return sum(row["bytes_down"] + row["bytes_up"] for row in found.rounds)


@NETWORKS
def test_table_6_bytes_of_a_round(row):
    """As the engine counts them; the paper has no running statistics in them."""
    network, shape, classes, size, model, fedper, fedaims, *_ = row
    found, per = (one_round(m, network, shape, classes, buffers="drop") for m in (FedAIMS(), FedPer()))
    net = found.context.net
    assert (net.trainable.size, mebi(4 * size)) == (size, model)
    assert (mebi(sent(found)), mebi(sent(per))) == (fedaims, fedper)
    body, d = net.trainable.drop(net.head).size, net.features
    assert sent(per) == 2 * 4 * body
    assert sent(found) == 2 * 4 * (body + classes * d) + 4 * classes + classes + 1  # classes held, known; the block
    if network != "resnet18":
        averaged = one_round(FedAIMS(), network, shape, classes)
        statistics = averaged.context.net.body.size - body
        assert statistics > 0
        assert sent(averaged) == sent(found) + 2 * 4 * statistics


@pytest.mark.parametrize("row", TABLES[:2], ids=["EMNIST", "CIFAR-10"])
def test_table_6_bytes_of_the_other_methods(row):
    network, shape, classes, _, _, part, whole, *_ = row
    heads = "0.02" if classes == 47 else "0.01"
    expected = {"local": "0.00", "lgfedavg": heads} | dict.fromkeys(("fedrep", "fedbabu"), part)
    expected |= dict.fromkeys(("fedavg", "fedprox", "moon", "ditto", "fedrod", "fedala"), whole)
    found = {k: one_round(catalogue.build(k), network, shape, classes, buffers="drop") for k in expected}
    assert {k: mebi(sent(f)) for k, f in found.items()} == expected


@NETWORKS
def test_table_8_storage_of_the_adapters(row):
    """What a client holds beside its head after a round."""
    network, shape, classes, *_, adapters, storage = row
    found = one_round(FedAIMS(), network, shape, classes)
    kept, widths, d = found.private(0)["extra"], found.context.net.widths[:-1], found.context.net.features
    sigma, auxiliary = (kept.pick(k for k in kept if k.startswith(part)) for part in ("adapter", "auxiliary"))
    assert (sigma.size, mebi(sigma.nbytes)) == (adapters, storage)
    for j, width in enumerate(widths, 1):
        assert sigma[f"adapter.{j}.in.weight"].shape == (64, d)
        assert sigma[f"adapter.{j}.out.weight"].shape == (width, 64)
    assert auxiliary.size == sum((width + 1) * classes for width in widths)
    assert kept.size == sigma.size + auxiliary.size


def test_table_8_communication_that_the_adapters_save():
    """Prototypes of the blocks below the last, both ways, over 300 rounds. For ResNet-18 the paper's numbers count the
    channels of all four stages, the last included."""
    saved = []
    for name, shape, classes, *_ in TABLES:
        widths = Net(build(name, shape, classes), shape, classes, 0, torch.float32).widths
        counted = widths if name == "resnet18" else widths[:-1]
        saved.append(mebi(300 * 2 * 4 * classes * sum(counted)))
    assert saved == ["13.77", "8.79", "219.73", "439.45"]


@IMAGES
def test_bytes_and_passes_of_a_run(images):
    found, fedper = (run(deep(m, images)) for m in (FedAIMS(), FedPer()))
    d = found.context.net.features
    for a, b in zip(found.rounds[1:], fedper.rounds[1:], strict=True):
        k = len(a["participants"])
        assert a["bytes_down"] - b["bytes_down"] == k * (8 * CLASSES * d + CLASSES + 1)
        assert a["bytes_up"] - b["bytes_up"] == k * (8 * CLASSES * d + 8 * CLASSES)
        assert a["gradient_passes"] == b["gradient_passes"]


# where it runs


def test_workers_give_the_bits_of_the_serial_backend():
    serial, workers = (run(deep(FedAIMS(), True, backend=b, workers=w)) for b, w in (("serial", None), ("workers", 2)))
    assert serial.server["model"].equals(workers.server["model"])
    assert torch.equal(serial.server["prototype"], workers.server["prototype"])
    assert all(serial.personal(i).equals(workers.personal(i)) for i in EVERYONE)
    assert all(serial.private(i)["extra"].equals(workers.private(i)["extra"]) for i in EVERYONE)
    assert [r["bytes_up"] for r in serial.rounds] == [r["bytes_up"] for r in workers.rounds]


@pytest.mark.parametrize("hyper", [{}, {"supervision": "all", "auxiliary": "prototype"}], ids=str)
def test_stacked_clients_agree_with_the_serial_backend(hyper):
    serial, stacked = (run(deep(FedAIMS(**hyper), backend=b, dtype="float32")) for b in ("serial", "stacked"))
    assert moved(serial.server["model"], stacked.server["model"]) < 1e-5
    assert max(moved(serial.personal(i), stacked.personal(i)) for i in EVERYONE) < 1e-5
    assert max(moved(serial.private(i)["extra"], stacked.private(i)["extra"]) for i in EVERYONE) < 1e-5


# refusals


@pytest.mark.parametrize(
    ("hyper", "says"),
    [
        ({"supervision": "some"}, "one, all, none"),
        ({"alignment": "l1"}, "mse, sum"),
        ({"auxiliary": "mlp"}, "linear, prototype, none"),
        ({"mu": -1.0}, "mu >= 0"),
        ({"similarity_every": 0}, "similarity_every >= 1"),
        ({"hidden": 0}, "hidden >= 1"),
    ],
)
def test_hyper_parameters_are_checked(hyper, says):
    with pytest.raises(UsageError, match=says):
        FedAIMS(**hyper)


def test_a_network_of_one_block_has_none_to_supervise():
    with pytest.raises(UsageError, match="has 1 in all"):
        run(experiment(FedAIMS()))
    found = run(experiment(FedAIMS(supervision="none")))
    agree(found, reference.run(world(found.run), supervision="none"))


def test_repr_and_name():
    method = catalogue.build("fedaims", {"mu": "0.5", "supervision": "all"})
    assert method == FedAIMS(mu=0.5, supervision="all")
    assert eval(repr(method)) == method


def test_defaults_are_the_paper_s():
    assert FedAIMS() == FedAIMS(
        mu=1.0, supervision="one", alignment="mse", auxiliary="linear", similarity_every=1, hidden=64
    )
