"""FedLAG: its reference, the inner method and Local as its limits, the counting of conflicts, what is sent and kept."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect import catalogue
from idiolect.data.federated import split_hash
from idiolect.engine.wire import nbytes
from idiolect.errors import UsageError
from idiolect.method import Method, State, Up
from idiolect.methods.apfl import APFL
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedexp import FedEXP
from idiolect.methods.fedper import FedPer
from idiolect.methods.fedprox import FedProx
from idiolect.methods.local import Local
from idiolect.tree import Tree
from idiolect.wrap.fedlag import FedLAG, most
from idiolect.wrap.fedlag import opposed as by_products
from reference import fedlag as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
DEEP = {"hidden": (6, 5, 4)}
PLAIN = {"momentum": 0.0}  # what SCAFFOLD asks for
REFUSED = {  # and why
    "local": "local has no such model",
    "fedamp": "fedamp has no such model",
    "fedcac": "fedcac has no such model",
    "fedfomo": "fedfomo has no such model",
    "fedproto": "fedproto has no such model",
    "fedsimsup": "fedsimsup has no such model",
    "ifca": "ifca has no such model",
    "cfl": "cfl has no such model",
    "fedem": "fedem has no such model",
    "pfedhn": "pfedhn has no such model",
    "fedaf": "methods that average their clients' models; fedaf does not",
}
INNER = [name for name in catalogue.names() if name not in (*REFUSED, "fedlag")]


def deep(method, images=False, **fields):
    return experiment(method, images=images, **({} if images else {"network_options": DEEP}), **fields)


def lag(inner=None, **hyper):
    """Personal layers from the second round on."""
    return FedLAG(inner or FedAvg(), **{"top_k": 2, "warmup": 1, "threshold": -0.05, **hyper})


def history(found, slot):
    return torch.stack([n[slot].flat() for n in found.notes])  # [rounds, L]


def opposed(h, xi):
    return by_products(h @ h.T, xi)


def same(a, b):
    return a.equals(b) if isinstance(a, Tree) else torch.equal(a, b)


# the reference

VARIANTS = [
    {},
    {"weights": "samples"},
    {"warmup": 0},
    {"warmup": 3, "threshold": -0.3},
    {"scores": "warmup", "warmup": 2},
    {"scores": "warmup", "warmup": 2, "weights": "samples", "top_k": 1},
    {"skip_norm": True, "threshold": 0.0},
    {"top_k": 100, "threshold": 0.0},
]


@IMAGES
@pytest.mark.parametrize("hyper", VARIANTS, ids=str)
def test_engine_equals_reference(hyper, images):
    check(lag(**hyper), images)


@IMAGES
def test_engine_equals_reference_around_fedprox(images):
    check(lag(FedProx(mu=0.3)), images)


def test_engine_equals_reference_where_norm_layers_are_personal():
    """A high rate sets the clients against each other in layers of every kind."""
    found = check(lag(top_k=4, threshold=0.0), True, lr=1.0, momentum=0.0, rounds=5)
    personal = dict(zip(found.server["personal"], history(found, "personal").any(0).tolist(), strict=True))
    assert any(on for layer, on in personal.items() if layer in found.context.net.norms)
    assert any(on for layer, on in personal.items() if layer.endswith("conv"))


def check(method, images, **fields):
    found = run(deep(method, images, **fields))
    expected = reference.run(
        world(found.run), inner=method.inner.name, k=method.top_k, xi=method.threshold, warmup=method.warmup,
        scores=method.scores, weights=method.weights, skip_norm=method.skip_norm, mu=getattr(method.inner, "mu", 0.0),
    )  # fmt: skip
    agree(found, expected)
    assert torch.equal(history(found, "conflicts"), expected.extra["conflicts"])
    layers, chosen = expected.extra["layers"], expected.extra["personal"]
    assert list(found.server["conflicts"]) == layers
    assert history(found, "personal").tolist() == [[layer in on for layer in layers] for on in chosen]
    assert history(found, "personal").any()
    return found


# the methods that it becomes


@IMAGES
@pytest.mark.parametrize("inner", INNER)
def test_no_layer_at_all_is_the_inner_method_to_the_bit(inner, images):
    inner = catalogue.build(inner)
    fields = {"rounds": 2, **PLAIN}
    found, plain = (run(deep(m, images, **fields)) for m in (FedLAG(inner, top_k=0, warmup=0), inner))
    assert all(same(found.server[slot], plain.server[slot]) for slot in plain.server)
    for i in EVERYONE:
        assert found.personal(i).equals(plain.personal(i))
        assert all(same(value, found.private(i)[slot]) for slot, value in plain.private(i).items())
    for a, b in zip(found.rounds, plain.rounds, strict=True):
        assert {k: v for k, v in a.items() if "seconds" not in k} == {k: v for k, v in b.items() if "seconds" not in k}
    assert not history(found, "personal").any()


@IMAGES
def test_the_warm_up_is_the_inner_method_to_the_bit(images):
    found, plain = (run(deep(m, images)) for m in (lag(warmup=5), FedAvg()))
    assert found.server["model"].equals(plain.server["model"])
    assert history(found, "conflicts").any()


def test_every_layer_personal_is_local():
    """Eight clients who disagree in every layer and round."""
    fields = {"ratio": 1.0, "momentum": 0.0}
    found, local = (run(deep(m, **fields)) for m in (lag(top_k=100, threshold=0.0), Local()))
    assert (history(found, "conflicts") > 0).all()
    assert all(found.personal(i).equals(local.personal(i)) for i in EVERYONE)
    assert all(r["bytes_down"] == 0 for r in found.rounds[2:])


def test_after_the_warm_up_every_client_goes_on_alone():
    """As it was before, with the mean of all in every round of it."""
    fields = {"ratio": 1.0, "momentum": 0.0, "rounds": 6}
    method = Watched(FedAvg(), top_k=100, threshold=0.0, warmup=3)
    method.seen.clear()
    found = run(deep(method, **fields))
    assert (history(found, "conflicts")[2:] > 0).all()
    start, end = ({(r, i): w[k] for r, i, *w in method.seen} for k in (1, 2))
    for i in EVERYONE:
        assert all(start[r, i].equals(start[r, 0]) for r in (0, 1, 2))
        assert all(start[r, i].equals(end[r - 1, i]) for r in (3, 4, 5))
    assert [r["bytes_down"] > 0 for r in found.rounds[1:]] == [True] * 3 + [False] * 3


def test_iid_data_have_no_personal_layer_at_threshold_minus_one():
    fed = federation(sizes=(12, 12, 12, 12))
    rows = torch.randperm(64, generator=torch.Generator().manual_seed(0)).reshape(4, 16).numpy()
    parts = [(r[:12], r[:0], r[12:]) for r in rows]
    train, validation, test = zip(*parts, strict=True)
    iid = dataclasses.replace(
        fed, train=train, validation=validation, test=test, split_hash=split_hash(*zip(*parts, strict=True))
    )
    found, plain = (run(deep(m, federation=iid, ratio=1.0)) for m in (lag(threshold=-1.0, weights="samples"), FedAvg()))
    assert not history(found, "personal").any()
    assert found.server["model"].equals(plain.server["model"])


# conflicts


def loops(h, xi):
    count = 0
    for u in range(len(h)):
        for v in range(u + 1, len(h)):
            length = math.sqrt(sum(float(a) ** 2 for a in h[u])) * math.sqrt(sum(float(b) ** 2 for b in h[v]))
            count += length > 0 and sum(float(a * b) for a, b in zip(h[u], h[v], strict=True)) / length < xi
    return count


@pytest.mark.parametrize("xi", [0.0, -0.1, -0.5, -1.0])
def test_conflicts_against_loops(xi):
    draw = torch.Generator().manual_seed(0)
    for clients in (1, 2, 3, 8):
        for size in (1, 2, 30):
            h = torch.randn(clients, size, generator=draw, dtype=torch.float64)
            h[::3] = 0  # some did not move
            assert int(opposed(h, xi)) == (0 if xi == -1 else loops(h, xi))


def test_conflicts_know_neither_scale_nor_order_and_are_bounded():
    draw = torch.Generator().manual_seed(1)
    h = torch.randn(9, 12, generator=draw, dtype=torch.float64)
    scale = 10 ** (6 * torch.rand(9, 1, generator=draw, dtype=torch.float64) - 3)
    counts = [int(opposed(h, xi)) for xi in (0.0, -0.2, -0.4)]
    assert 9 * 8 / 2 > counts[0] > counts[1] > counts[2] > 0
    for xi, count in zip((0.0, -0.2, -0.4), counts, strict=True):
        assert int(opposed(h * scale, xi)) == count
        assert int(opposed(h[torch.randperm(9, generator=draw)], xi)) == count
    circle = torch.tensor([[math.cos(a), math.sin(a)] for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)])
    assert int(opposed(circle, -0.4)) == 3  # all of K (K - 1) / 2
    assert int(opposed(circle, -0.6)) == 0


def test_updates_of_zero_and_of_one_client_conflict_with_nobody():
    assert int(opposed(torch.zeros(5, 3), 0.0)) == 0
    assert int(opposed(torch.randn(1, 3), 0.0)) == 0
    assert int(opposed(torch.tensor([[1.0], [0.0], [-1.0]]), 0.0)) == 1
    assert int(opposed(torch.tensor([[0.1, 0.7], [-0.3, -2.1]]), -1.0)) == 0  # rounding falls below no -1


def test_cosines_come_from_one_product_for_a_tensor_of_a_layer():
    """Never from a loop over pairs: 40 clients, two layers with a bias each."""
    draw = torch.Generator().manual_seed(2)
    shapes = {"a.weight": (5, 7), "a.bias": (5,), "b.weight": (3, 5), "b.bias": (3,)}
    ended, started = (Tree({k: torch.randn(40, *v, generator=draw) for k, v in shapes.items()}) for _ in range(2))
    with Products() as products:
        counts = lag(threshold=-0.2).conflicts(ended, started, ["a", "b"])
    assert products.shapes == [((40, n), (n, 40)) for n in (35, 5, 15, 3)]
    for layer in "ab":
        h = torch.cat([(ended - started)[f"{layer}.{k}"].flatten(1) for k in ("weight", "bias")], 1)
        assert int(counts[layer]) == loops(h.double(), -0.2)


class Products(TorchDispatchMode):
    """Remembers what was multiplied."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket._qualified_op_name in ("aten::mm", "aten::bmm", "aten::dot", "aten::mv"):
            self.shapes.append(tuple(tuple(a.shape) for a in args[:2]))
        return func(*args, **(kwargs or {}))


def test_the_highest_scores_above_zero_and_the_earlier_of_equals():
    scores = Tree({k: torch.tensor(v) for k, v in {"a": 3, "b": 0, "c": 5, "d": 3, "e": 3}.items()})

    def chosen(k):
        return [layer for layer, flag in most(scores, k).items() if flag]

    assert chosen(0) == []
    assert chosen(1) == ["c"]
    assert chosen(3) == ["a", "c", "d"]
    assert chosen(9) == ["a", "c", "d", "e"]


def test_a_layer_is_a_module_and_its_statistics_have_no_angle():
    """Moving averages alone never make a conflict."""
    found = run(deep(lag(), images=True, lr=0.0, rounds=2))
    assert not history(found, "conflicts").any()
    norms = [k for k in found.server["conflicts"] if k in found.context.net.norms]
    assert norms == [f"body.block{j}.norm" for j in (1, 2, 3)]
    skipping = run(deep(lag(skip_norm=True), images=True, rounds=1))
    assert list(skipping.server["personal"]) == ["body.block1.conv", "body.block2.conv", "body.block3.conv", "head"]


def test_warm_up_scores_choose_once():
    found = run(deep(lag(scores="warmup", warmup=2), rounds=5))
    conflicts, personal = history(found, "conflicts"), history(found, "personal")
    assert not personal[0].any()
    assert personal[1].sum() == 2
    assert all(torch.equal(p, personal[1]) for p in personal[2:])
    total = Tree(zip(found.server["scores"], conflicts[:2].sum(0), strict=True))
    assert found.server["scores"].equals(total)
    assert torch.stack(list(most(total, 2).values())).equal(personal[1])


@IMAGES
def test_the_file_of_notes_has_conflicts_by_round_and_layer_and_the_layers_names(images, tmp_path):
    found = run(deep(lag(FedEXP()), images), out=tmp_path / "out")
    with safe_open(tmp_path / "out" / "notes.safetensors", "pt") as file:
        assert set(file.keys()) == {"conflicts", "personal", "step"}
        for slot in ("conflicts", "personal"):
            assert json.loads(file.metadata()[slot]) == list(found.context.net.layers)
            assert file.get_tensor(slot).shape == (4, len(found.context.net.layers))
            assert file.get_tensor(slot).equal(history(found, slot))
        assert file.get_tensor("step").shape == (4,)
    assert history(found, "conflicts").any()


# what is sent, and what is kept


@IMAGES
def test_personal_layers_are_not_sent_to_those_who_have_them(images):
    fields = {"ratio": [[0, 1, 2, 4], [0, 2, 5], [1, 2, 5, 7]]}
    found = run(deep(lag(), images, rounds=3, **fields))
    layers = list(found.context.net.layers.values())
    whole = found.context.net.weights.nbytes
    visited = set()
    before = history(found, "personal").new_zeros(len(layers))
    for r, row in enumerate(found.rounds[1:]):
        kept = sum(layer.nbytes for layer, on in zip(layers, before, strict=True) if on)
        assert row["bytes_down"] == sum(whole - (i in visited) * kept for i in row["participants"])
        assert row["bytes_up"] == whole * len(row["participants"])
        visited |= set(row["participants"])
        before = history(found, "personal")[r]
    assert before.any()


@IMAGES
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_a_client_keeps_what_it_last_returned_and_the_server_knows_it(drop, images):
    found = run(deep(lag(threshold=0.0), images, drop=drop, lr=1.0 if images else 0.1, momentum=0.0, seed=1))
    personal = [layer for layer, on in found.server["personal"].items() if on]
    assert personal
    names = [k for k in found.server["model"] if k.rpartition(".")[0] in personal]
    others = found.server["model"].drop(names)
    for i in EVERYONE:
        row, own, now = found.progress.rows[i], found.private(i)["returned"], found.personal(i)
        visited = found.progress.store.visits[i] > 0
        assert bool(row["uploaded"]) == visited
        assert now.pick(others).equals(others)
        assert now.pick(names).equals((own if visited else found.server["model"]).pick(names))
        if visited:
            assert row["upload"].equals(own.pick(row["upload"]))
    assert not drop or any(r["dropped"] for r in found.rounds)


def test_uniform_and_sample_weights():
    """The server's model after one round without warm-up is the mean of eq. 4, or the inner method's."""
    found = {w: run(deep(lag(weights=w, warmup=0), rounds=1)) for w in ("uniform", "samples")}
    ids = found["uniform"].run.participants(0)
    for w, f in found.items():
        share = {i: 1 / len(ids) if w == "uniform" else SIZES[i] / sum(SIZES[j] for j in ids) for i in ids}
        mean = f.server["model"].map(lambda v: torch.zeros_like(v))
        for i in ids:
            mean = mean + f.private(i)["returned"] * share[i]
        assert moved(mean, f.server["model"]) < 1e-12


def test_a_round_with_one_participant_has_no_conflict():
    found = run(deep(lag(), ratio=[[0, 1, 2], [4], [0, 4]], rounds=3))
    assert history(found, "conflicts")[1].sum() == 0
    assert not history(found, "personal")[1].any()


def test_rounds_without_participants():
    run(deep(lag(), ratio="bernoulli:0.2", rounds=8))


def test_clients_keep_their_own_buffers_through_personal_norm_layers():
    """Where a run lets clients keep their statistics, those of a personal layer go on moving with the client."""
    hyper = {"top_k": 4, "threshold": 0.0}
    found = run(deep(lag(**hyper), True, buffers="local", lr=1.0, momentum=0.0, rounds=6))
    net, on = found.context.net, history(found, "personal").any(0).tolist()
    assert any(p and k in net.norms for k, p in zip(found.server["personal"], on, strict=True))
    for i in EVERYONE:
        if found.progress.store.visits[i]:
            own = found.private(i)["returned"].pick([k for k in net.weights if k in net.buffers])
            assert found.private(i)["own buffers"].equals(own)
            assert found.personal(i).pick(own).equals(own)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    check(lag(threshold=0.0), False, sizes=sizes)
    found = run(deep(lag(threshold=0.0), True, sizes=sizes))
    assert all(bool(v.isfinite().all()) for i in range(len(sizes)) for v in found.personal(i).values())


def test_a_batch_of_one_sample():
    check(lag(threshold=0.0), False, batch_size=1)


def test_a_class_that_nobody_has():
    fed = federation()
    data = dataclasses.replace(fed.dataset, y=fed.dataset.y.clamp(max=1))
    check(lag(threshold=0.0), False, federation=dataclasses.replace(fed, dataset=data))


# where it runs


def test_workers_give_the_bits_of_the_serial_backend():
    method = lag(threshold=0.0)
    serial, workers = (run(deep(method, True, backend=b, workers=w)) for b, w in (("serial", None), ("workers", 2)))
    assert all(same(serial.server[slot], workers.server[slot]) for slot in serial.server)
    assert all(serial.personal(i).equals(workers.personal(i)) for i in EVERYONE)
    for k in ("bytes_up", "bytes_down"):
        assert [r[k] for r in serial.rounds] == [r[k] for r in workers.rounds]


def test_stacked_clients_agree_with_the_serial_backend():
    serial, stacked = (run(deep(lag(), backend=b, dtype="float32")) for b in ("serial", "stacked"))
    assert torch.equal(history(serial, "conflicts"), history(stacked, "conflicts"))
    assert moved(serial.server["model"], stacked.server["model"]) < 1e-5
    assert max(moved(serial.personal(i), stacked.personal(i)) for i in EVERYONE) < 1e-5


def test_an_evaluation_keeps_nothing():
    often, once = (run(deep(lag(), evaluate_every=n)) for n in (1, 4))
    assert all(same(often.server[slot], once.server[slot]) for slot in often.server)


# what it wraps


@dataclasses.dataclass(frozen=True)
class Watched(FedLAG):
    """Keeps what every client received, started from and returned."""

    seen: ClassVar[list[tuple[int, int, Tree, Tree, Tree]]] = []

    def local(self, me, down, mine):
        up, new = super().local(me, down, mine)
        start = self.filled(me, down, mine)["model"].clone()  # what clients keep is written over
        self.seen.append((me.round, me.id, down["model"], start, up.mean["model"].clone()))
        return up, new


@pytest.mark.parametrize("inner", INNER)
def test_around_every_method_the_rounds_are_the_paper_s(inner):
    """Conflicts by loops over pairs, the layers that follow from them, and where clients take them from."""
    inner = catalogue.build(inner)
    method = Watched(inner, top_k=2, warmup=1, threshold=-0.05)
    method.seen.clear()
    found, plain = (run(deep(m, rounds=3, ratio=0.8, **PLAIN)) for m in (method, inner))
    layers, initial = list(found.server["conflicts"]), found.context.state.server["model"]
    personal, last = [], {}
    for r in range(3):
        clients = {i: rest for round, i, *rest in method.seen if round == r}
        for i, (received, start, _) in clients.items():
            own = [k for k in initial if k.rpartition(".")[0] in personal and i in last]
            assert set(received) == set(initial) - set(own)
            assert start.pick(own).equals(last.get(i, start).pick(own))
            assert start.drop(own).equals(received)
        conflicts = []
        for layer in layers:
            names = [k for k in initial if k.rpartition(".")[0] == layer]
            moves = [(end - start).pick(names).flat() for _, start, end in clients.values()]
            conflicts.append(loops(torch.stack(moves), method.threshold))
        assert history(found, "conflicts")[r].tolist() == conflicts
        best = sorted((-c, k) for k, c in enumerate(conflicts) if c > 0)[:2]
        personal = [layers[k] for _, k in best]
        assert history(found, "personal")[r].tolist() == [layer in personal for layer in layers]
        last |= {i: end for i, (*_, end) in clients.items()}
    assert history(found, "personal").any()
    assert moved(found.server["model"], plain.server["model"]) > 1e-5
    assert max(moved(found.personal(i), plain.personal(i)) for i in EVERYONE) > 1e-4


@pytest.mark.parametrize("inner", REFUSED)
def test_methods_without_one_averaged_model_are_refused(inner):
    with pytest.raises(UsageError, match=REFUSED[inner]):
        run(deep(FedLAG(catalogue.build(inner))))


def test_a_wrapped_method_keeps_its_slots():
    """APFL's own model is not FedLAG's; and FedLAG around itself has no second place to count."""
    found = run(deep(lag(APFL(adaptive=False))))
    assert set(found.private(0)) == {"own", "alpha", "returned"}
    with pytest.raises(UsageError, match="FedLAG has a slot returned of its own"):
        run(deep(FedLAG(lag())))


@dataclasses.dataclass(frozen=True)
class Silent(Method):
    """Sends its model as rows."""

    def init(self, net):
        return State(server={"model": net.weights})

    def local(self, me, down, mine):
        return Up(rows={"own": down["model"]}), mine

    def server(self, server, rows, up, run):
        return server, rows


def test_clients_that_send_no_model_to_average_are_refused():
    with pytest.raises(UsageError, match="methods that average"):
        run(deep(FedLAG(Silent())))


def test_only_the_shared_part_has_layers():
    found = run(deep(lag(FedPer())))
    assert list(found.server["conflicts"]) == [k for k in found.context.net.layers if k != "head"]


def test_inside_another_wrapper():
    found = run(deep(catalogue.build("fedavg+fedlag+finetune", {"top_k": 2, "warmup": 1, "threshold": -0.05})))
    plain = run(deep(lag()))
    assert found.server["model"].equals(plain.server["model"])
    assert history(found, "conflicts").equal(history(plain, "conflicts"))


@pytest.mark.parametrize(
    ("hyper", "says"),
    [
        ({"scores": "all"}, "round, warmup"),
        ({"weights": "equal"}, "uniform, samples"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"threshold": 0.2}, "-1 <= threshold <= 0"),
        ({"warmup": -1}, "warmup >= 0"),
        ({"scores": "warmup", "warmup": 0}, "set warmup above 0"),
    ],
)
def test_hyper_parameters_are_checked(hyper, says):
    with pytest.raises(UsageError, match=says):
        FedLAG(FedAvg(), **hyper)


def test_templates_take_no_more_than_the_shared_model():
    context = deep(lag(), images=True).context()
    assert nbytes(context.state.client) == context.net.weights.nbytes
    assert nbytes(context.state.rows) == context.net.trainable.nbytes + 1


def test_defaults_are_the_paper_s():
    assert FedLAG(FedAvg()) == FedLAG(
        FedAvg(), top_k=5, threshold=-0.1, warmup=30, scores="round", weights="uniform", skip_norm=False
    )
    assert catalogue.build("fedlag").inner == FedAvg()
