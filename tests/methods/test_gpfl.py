"""GPFL: its reference, FedPer as its limit, valve, angle and magnitude by hand, the conditions, odd clients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from checks import on_quadratics
from harness import CLASSES, SIZES, agree, experiment, federation, moved, run, world
from idiolect import Result
from idiolect.data import Federation
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedper import FedPer
from idiolect.methods.gpfl import GPFL, normal
from idiolect.tree import Tree
from reference import gpfl as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
STEP = PLAIN | {"batch_size": 32, "epochs": 1}  # one step a round
WIDTH = 5  # of the mlp's features

# the reference


def compared(hyper: dict[str, Any], **fields: Any) -> Result:
    found = run(experiment(GPFL(**hyper), **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    for i in range(found.run.clients):
        x = found.context.shards.part("train", i)[0]
        scores = GPFL().logits(found.context.task, found.personal(i), x)
        torch.testing.assert_close(scores, expected.extra["logits"][i], rtol=0, atol=1e-10)
    return found


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"condition": "stale"}, {"lam": 1.0, "mu": 0.0}, {"lam": 0.0, "mu": 1.0, "condition": "stale"}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    compared(hyper, images=images)


@pytest.mark.parametrize("condition", ["received", "stale"])
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, condition):
    compared({"condition": condition}, sizes=sizes)


def test_features_of_one_dimension_are_survived():
    """Layer normalisation makes 0 of them, whatever they are."""
    found = compared({}, network_options={"hidden": (1,)})
    assert all(v.isfinite().all() for i in EVERYONE for v in found.personal(i).values())


# FedPer as its limit, and what either part does


class Open(GPFL):
    """The valve lets features through as they are."""

    def valve(self, w, f, v):
        return f


class Unguided(GPFL):
    def guide(self, f, w, batch, old):
        return 0.0


class Neither(Unguided, Open):
    pass


def against_fedper(method: GPFL, **fields: Any) -> float:
    """How far the networks are from FedPer's."""
    found, fedper = (run(experiment(m, **fields)) for m in (method, FedPer()))
    pairs = [(found.personal(i), fedper.personal(i)) for i in EVERYONE]
    return max(moved(v, w.pick(v)) for w, v in pairs)


@IMAGES
def test_with_an_open_valve_and_no_guide_it_is_fedper_to_the_bit(images):
    found, fedper = (run(experiment(m, images=images)) for m in (Neither(), FedPer()))
    assert found.server["model"].pick(fedper.server["model"]).equals(fedper.server["model"])
    for i in EVERYONE:
        assert found.personal(i).pick(fedper.personal(i)).equals(fedper.personal(i))


@pytest.mark.parametrize("kind", [GPFL, Open, Unguided])
def test_either_part_alone_is_more_than_fedper(kind):
    assert against_fedper(kind()) > 1e-2


def test_the_larger_lam_the_nearer_are_features_to_the_embeddings_of_their_classes():
    """Down to the received ones, which with a large lam are all that counts."""
    far = []
    for lam in (0.0, 0.1, 10.0):
        found = run(experiment(GPFL(lam=lam, mu=0.0), **(PLAIN | {"ratio": 1.0, "epochs": 10, "lr": 0.02})))
        task, w = found.context.task, found.server["model"]
        x, y = found.context.shards.part("train", 0)
        f_G = GPFL().valve(w, task.features(w, x), w["gce"].mean(0))
        far.append(float((f_G - w["gce"][y]).norm()))
    assert far[0] > far[1] + 0.1 > far[2] + 0.2


# the valve


def drawn(rows: int = 6, width: int = 4) -> tuple[Tree, Tensor, Tensor, Batch]:
    """Weights beside a network, features, a condition, and labels of which class 1 is absent."""
    draw = torch.Generator().manual_seed(1)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    w = {"gce": new(CLASSES, width)}
    for name in ("cov.gamma", "cov.beta"):
        w |= {f"{name}.weight": new(width, width), f"{name}.bias": new(width)}
        w |= {f"{name}.scale": new(width), f"{name}.shift": new(width)}
    z = new(rows, width)
    return Tree(w), z, new(width), Batch(z, torch.tensor([0, 2, 2, 0, 2, 0][:rows]))


def test_the_valve_by_hand():
    w, f, v, _ = drawn()

    def normalised(name: str) -> list[float]:
        a = [
            max(0.0, sum(float(w[f"{name}.weight"][k, j] * v[j]) for j in range(4)) + float(w[f"{name}.bias"][k]))
            for k in range(4)
        ]
        mean = sum(a) / 4
        spread = math.sqrt(sum((u - mean) ** 2 for u in a) / 4 + 1e-5)
        return [(a[k] - mean) / spread * float(w[f"{name}.scale"][k]) + float(w[f"{name}.shift"][k]) for k in range(4)]

    gamma, delta = normalised("cov.gamma"), normalised("cov.beta")
    found = GPFL().valve(w, f, v)
    for b in range(len(f)):
        for k in range(4):
            expected = max(0.0, (gamma[k] + 1) * float(f[b, k]) + delta[k])
            assert float(found[b, k]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_valve_of_gamma_and_delta_0_lets_relu_features_through():
    w, f, v, _ = drawn()
    shut = w | {k: 0 * t for k, t in w.items() if k.endswith((".scale", ".shift"))}
    assert torch.equal(GPFL().valve(shut, f.relu(), v), f.relu())
    assert not torch.allclose(GPFL().valve(w, f.relu(), v), f.relu())


def test_a_condition_that_no_unit_answers_leaves_the_shift():
    """Layer normalisation of nothing but zeros is 0, and has a finite gradient."""
    w, f, v, _ = drawn()
    dead = w | {f"cov.{k}.bias": torch.full((4,), -1e3, dtype=torch.float64) for k in ("gamma", "beta")}
    expected = ((dead["cov.gamma.shift"] + 1) * f + dead["cov.beta.shift"]).relu()
    torch.testing.assert_close(GPFL().valve(dead, f, v), expected, rtol=0, atol=1e-14)
    weight = dead["cov.gamma.weight"].clone().requires_grad_()
    value = GPFL().valve(dead | {"cov.gamma.weight": weight}, f, v).sum()
    assert torch.autograd.grad(value, weight)[0].isfinite().all()


def test_the_valves_gradient_is_that_of_finite_differences():
    w, f, v, _ = drawn()
    names = [k for k in w if k.startswith("cov.")]

    def valve(f: Tensor, *values: Tensor) -> Tensor:
        return GPFL().valve(Tree(zip(names, values, strict=True)), f, v)

    assert torch.autograd.gradcheck(valve, [t.clone().requires_grad_() for t in (f, *w.pick(names).values())])


# the guide


def test_the_angle_is_a_cross_entropy_of_cosines_without_a_temperature():
    w, f, _, batch = drawn()
    total = 0.0
    for z, y in zip(f, batch.y.tolist(), strict=True):
        cosines = [float(z @ e) / math.sqrt(float(z @ z) * float(e @ e)) for e in w["gce"]]
        total -= cosines[y] - math.log(sum(map(math.exp, cosines)))
    assert float(GPFL().angle(f, w["gce"], batch)) == pytest.approx(total / len(f), rel=1e-12)


def test_of_one_class_the_angle_is_0():
    w, f, _, batch = drawn()
    one = Batch(batch.x, 0 * batch.y)
    assert float(GPFL().angle(f, w["gce"][:1], one)) == pytest.approx(0, abs=1e-15)


def test_the_magnitude_is_one_norm_of_the_batch_neither_squared_nor_averaged():
    w, f, _, batch = drawn()
    rows = [float((z - w["gce"][y]) @ (z - w["gce"][y])) for z, y in zip(f, batch.y.tolist(), strict=True)]
    assert float(GPFL().magnitude(f, w["gce"], batch)) == pytest.approx(math.sqrt(sum(rows)), rel=1e-12)


def test_at_the_embeddings_the_magnitude_has_no_gradient():
    """A square root of a sum of squares would have NaN there."""
    w, _, _, batch = drawn()
    f = w["gce"][batch.y].clone().requires_grad_()
    value = GPFL().magnitude(f, w["gce"], batch)
    assert float(value.detach()) == 0
    assert not torch.autograd.grad(value, f)[0].any()


def test_features_of_0_stay_finite():
    w, f, _, batch = drawn()
    f = (0 * f).requires_grad_()
    value = GPFL().guide(f.relu(), w, batch, w["gce"])
    assert torch.autograd.grad(value, f)[0].isfinite().all()


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_the_guides_gradient_is_that_of_finite_differences(lam):
    w, f, _, batch = drawn()
    old = w["gce"] + 0.1

    def guide(f: Tensor, table: Tensor) -> Tensor:
        return GPFL(lam=lam).guide(f, {"gce": table}, batch, old)

    assert torch.autograd.gradcheck(guide, [v.clone().requires_grad_() for v in (f, w["gce"])])


def test_the_whole_loss_s_gradient_is_that_of_finite_differences():
    method = GPFL(lam=0.5)
    context = experiment(method).context()
    task, batch = context.task, Batch(*context.shards.part("train", 0))
    w = context.state.server["model"] | context.net.head
    g, q = w["gce"].mean(0), w["gce"][0]
    old = w["gce"].clone()

    def loss(*values: Tensor) -> Tensor:
        return method.loss(task, Tree(zip(w, values, strict=True)), batch, g, q, old)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def test_padding_is_left_out():
    w, f, _, batch = drawn()
    mask = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    padded = torch.cat([f, torch.full((2, 4), 1e3, dtype=torch.float64)]).requires_grad_()
    masked = Batch(padded, torch.cat([batch.y, torch.tensor([1, 1])]), mask)
    value = GPFL(lam=0.5).guide(padded, w, masked, w["gce"] + 0.1)
    assert float(value.detach()) == pytest.approx(float(GPFL(lam=0.5).guide(f, w, batch, w["gce"] + 0.1)), rel=1e-13)
    assert not torch.autograd.grad(value, padded)[0][6:].any()


# the conditions


def conditioned(method: GPFL, i: int, down: Tensor, own: Tensor | None = None, **fields: Any) -> tuple[Tensor, Tensor]:
    context = experiment(method, **fields).context()

    class Me:
        n = context.shards.size("train", i)
        counts = torch.bincount(context.shards.part("train", i)[1], minlength=CLASSES).double()

    return method.conditions(Me(), {"model": {"gce": down}}, {"own": own})


def test_the_conditions_are_means_of_the_embeddings():
    table = torch.randn(CLASSES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = experiment(GPFL()).context().shards.part("train", 0)[1]
    g, q = conditioned(GPFL(), 0, table)
    torch.testing.assert_close(g, (table[0] + table[1] + table[2]) / 3, rtol=0, atol=1e-14)
    torch.testing.assert_close(q, sum(table[c] for c in labels.tolist()) / len(labels), rtol=0, atol=1e-14)
    assert torch.equal(conditioned(GPFL(), 3, table)[1], table[1])  # a client of class 1 alone


def test_every_sample_counts_in_them_also_those_of_an_epochs_last_batch():
    table = torch.eye(CLASSES).double()
    for i, n in enumerate(SIZES):
        assert float((conditioned(GPFL(), i, table, batch_size=16)[1] * n).sum()) == pytest.approx(n, rel=1e-14)


def balanced(n: int) -> Federation:
    """One client that holds n samples of every class."""
    fed = federation((40,), seed=1)
    rows = torch.cat([(fed.dataset.y[:40] == c).nonzero()[:n, 0] for c in range(CLASSES)]).numpy()
    return Federation(fed.dataset, (rows,), fed.validation, fed.test, "balanced", "balanced")


def test_of_a_client_with_equally_many_of_each_class_both_conditions_are_one():
    found = compared({}, federation=balanced(4), ratio=1.0)
    assert found.context.shards.part("train", 0)[1].bincount().tolist() == [4] * CLASSES
    w = found.personal(0)
    torch.testing.assert_close(w["condition"], w["gce"].mean(0), rtol=0, atol=1e-14)


def test_received_conditions_are_of_the_newest_table_stale_ones_of_the_client_s_own():
    table, own = torch.ones(CLASSES, 4).double(), torch.full((CLASSES, 4), 2.0).double()
    for condition, value in (("received", 1.0), ("stale", 2.0)):
        for v in conditioned(GPFL(condition=condition), 0, table, own):
            torch.testing.assert_close(v, torch.full((4,), value).double())


def test_stale_conditions_are_0_before_a_client_has_trained_a_table():
    fields = {"ratio": ((0,), (1,), (0, 2)), "rounds": 3}
    found = run(experiment(GPFL(condition="stale"), **fields))
    before = run(experiment(GPFL(condition="stale"), **(fields | {"rounds": 2})))
    assert [bool(found.personal(i)["condition"].any()) for i in EVERYONE] == [True] * 3 + [False] * 5
    assert torch.equal(found.private(1)["own"], before.private(1)["own"])
    assert not torch.equal(found.private(0)["own"], before.private(0)["own"])
    assert "own" not in run(experiment(GPFL(), rounds=1)).private(0)


def test_the_conditions_are_constants_of_training():
    """Without the guide nothing moves the table: the personal route's condition does not reach it."""
    found = run(experiment(Unguided(mu=0.0), **PLAIN))
    assert found.server["model"]["gce"].equal(found.context.state.server["model"]["gce"])
    assert moved(found.server["model"], found.context.state.server["model"]) > 1e-3


# a step


def test_mu_decays_the_table_and_the_valve_alone_by_the_rate_of_the_round():
    """The table's rate follows the schedule as all rates do."""
    fields = STEP | {"ratio": ((0,), (0,)), "decay": 0.5}
    start = run(experiment(GPFL(mu=0.0), rounds=1, **fields)).server["model"]

    class Later(GPFL):
        """mu in the second round alone."""

        def local(self, me, down, mine):
            return GPFL(mu=0.7 if me.round else 0.0).local(me, down, mine)

    one, other = (run(experiment(m, rounds=2, **fields)) for m in (GPFL(mu=0.0), Later()))
    for name, value in start.items():
        pull = 0.1 * 0.5 * 0.7 * value if name.startswith(("gce", "cov.")) else 0 * value
        found = one.server["model"][name] - other.server["model"][name]
        torch.testing.assert_close(found, pull, rtol=0, atol=1e-14)
    assert moved(one.private(0)["model"], other.private(0)["model"]) == 0


def test_embeddings_of_absent_classes_are_trained_as_negatives():
    found = run(experiment(GPFL(mu=0.0), ratio=((3,),), rounds=1, **STEP))  # of class 1 alone
    before, after = found.context.state.server["model"]["gce"], found.server["model"]["gce"]
    assert all(float((after[c] - before[c]).abs().max()) > 1e-5 for c in range(CLASSES))
    w, (x, _) = found.context.net.weights, found.context.shards.part("train", 3)
    f = GPFL().valve(found.context.state.server["model"], found.context.task.features(w, x), before.mean(0))
    cosines = [torch.cosine_similarity(f, table[:, None], dim=2).mean(1) for table in (before, after)]
    assert [bool(a > b) for b, a in zip(*cosines, strict=True)] == [False, True, False]


def test_the_magnitude_holds_to_the_received_table_not_to_the_one_in_training():
    """Its gradient reaches the features alone: from the same state one step moves the table alike with and without."""
    one, other = (run(experiment(GPFL(lam=lam, mu=0.0), ratio=((0,),), rounds=1, **STEP)) for lam in (0.0, 5.0))
    torch.testing.assert_close(one.server["model"]["gce"], other.server["model"]["gce"], rtol=0, atol=1e-15)
    assert moved(one.server["model"], other.server["model"]) > 1e-3


# the rest


def test_the_head_stays_with_its_client():
    fields = {"ratio": ((0, 1), (2, 5), (1, 4)), "rounds": 3}
    found, before = run(experiment(GPFL(), **fields)), run(experiment(GPFL(), **(fields | {"rounds": 1})))
    assert not set(found.context.net.head) & set(found.server["model"])
    assert found.private(0)["model"].equals(before.private(0)["model"])
    assert moved(found.private(1)["model"], before.private(1)["model"]) > 1e-3
    assert found.private(7)["model"].equals(found.context.net.head)


@pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet"])
def test_the_table_begins_normal_and_the_valve_as_its_layers(images):
    net = experiment(GPFL(), images=images).context().net
    table = normal(net, "any", 60_000 // net.features)
    assert abs(float(table.mean())) < 0.02
    assert float(table.square().mean()) == pytest.approx(1, abs=0.02)
    assert float(table.pow(4).mean()) == pytest.approx(3, abs=0.15)
    assert table.isfinite().all()
    w = GPFL().init(net).server["model"]
    assert all(bool((w[f"cov.{k}.scale"] == 1).all()) and not w[f"cov.{k}.shift"].any() for k in ("gamma", "beta"))
    assert not torch.equal(w["cov.gamma.weight"], w["cov.beta.weight"])


@pytest.mark.parametrize("condition", ["received", "stale"])
def test_bytes_and_passes_of_a_round(condition):
    found, fedper = (run(experiment(m)) for m in (GPFL(condition=condition), FedPer()))
    d = WIDTH
    for a, b in zip(found.rounds[1:], fedper.rounds[1:], strict=True):
        assert a["bytes_down"] == b["bytes_down"] + 5 * 8 * (CLASSES * d + 2 * d**2 + 6 * d)
        assert a["bytes_up"] == a["bytes_down"]
        assert a["gradient_passes"] == b["gradient_passes"]


@pytest.mark.parametrize("hyper", [{"lam": -0.1}, {"mu": -0.1}, {"condition": "newest"}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"GPFL.{next(iter(hyper))} must be"):
        GPFL(**hyper)


def test_data_without_classes_are_refused():
    with pytest.raises(UsageError, match="asks for samples' classes"):
        on_quadratics(GPFL(), rounds=1)


def test_defaults_leave_nothing_off():
    assert GPFL() == GPFL(lam=0.01, mu=0.1, condition="received")
