"""pFedHN: its reference, FedAvg as its limit, what the server's network makes and learns, the vectors, odd clients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from harness import SIZES, agree, experiment, moved, opposed, run, world
from idiolect import Result
from idiolect.engine import orders
from idiolect.errors import UsageError
from idiolect.method import Facts, Rows, Up
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.pfedhn import PFedHN
from idiolect.tree import Tree, stack
from reference import pfedhn as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
SMALL = {"hidden": 7, "server_lr": 0.1}


def vector(found: Result, i: int) -> Tensor:
    return found.progress.rows[i]["embedding"]


def compared(hyper: dict, **fields) -> Result:
    found = run(experiment(PFedHN(**hyper), **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    for slot in ("hyper", "velocity"):
        assert moved(found.server[slot], Tree(expected.extra[slot])) < 1e-10
    for i in range(found.run.clients):
        torch.testing.assert_close(vector(found, i), expected.extra["embedding"][i], rtol=0, atol=1e-10)
    return found


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {"hidden": 6},
        SMALL,
        SMALL | {"layers": 1, "server_lr": 0.02},
        SMALL | {"embedding": 5, "layers": 2},
        SMALL | {"server_momentum": 0.0, "server_weight_decay": 0.0},
        SMALL | {"server_momentum": 0.5, "server_weight_decay": 0.1},
    ],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = compared(hyper, images=images)
    start = run(experiment(PFedHN(**hyper), images=images, rounds=0))
    assert moved(found.server["hyper"], start.server["hyper"]) > 1e-3


def test_engine_equals_reference_with_the_paper_s_network():
    found = compared({})
    assert found.server["hyper"]["hyper1.weight"].shape == (100, 3)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (5,)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    compared(SMALL, sizes=sizes)


def test_networks_of_other_layers():
    compared(SMALL, network_options={"hidden": (6, 4)})


# FedAvg as its limit


class Forgetful(PFedHN):
    """All weights of the server's network are 0 but the biases of its last layers, which are the network's own."""

    def init(self, net):
        state = super().init(net)
        flat = {f"out:{k}.bias": v.reshape(-1).clone() for k, v in net.trainable.items()}
        hyper = state.server["hyper"].zeros() | flat
        return dataclasses.replace(state, server={**state.server, "hyper": hyper})


PLAIN = {"server_lr": 1.0, "server_momentum": 0.0, "server_weight_decay": 0.0}


@IMAGES
def test_a_network_that_tells_no_clients_apart_is_fedavg_of_equal_clients(images):
    """A step of 1 on the biases adds the mean of all updates."""
    fields = {"sizes": (8,) * 8, "images": images}
    found, fedavg, apart = (
        run(experiment(m, **fields)) for m in (Forgetful(hidden=5, **PLAIN), FedAvg(), PFedHN(hidden=20))
    )
    assert max(moved(found.personal(i), fedavg.personal(i)) for i in EVERYONE) < 1e-12
    assert min(moved(apart.personal(i), apart.personal(0)) for i in EVERYONE[1:]) > 1e-3


def test_its_means_are_plain_ones_whatever_clients_have():
    fields = {"rounds": 1, "sizes": (12, 3)}
    whole, *alone = (
        run(experiment(Forgetful(hidden=5, **PLAIN), **fields, ratio=r)).personal(0) for r in (1.0, ((0,),), ((1,),))
    )
    assert moved(whole, (alone[0] + alone[1]) / 2) < 1e-12
    assert moved(run(experiment(FedAvg(), **fields, ratio=1.0)).personal(0), whole) > 1e-3


@IMAGES
def test_without_a_step_of_the_server_parameters_stay(images):
    found, start = (run(experiment(PFedHN(hidden=5, server_lr=0.0), images=images, rounds=r)) for r in (4, 1))
    names = found.context.net.trainable
    assert all(found.personal(i).pick(names).equals(start.personal(i).pick(names)) for i in EVERYONE)
    assert (moved(found.personal(0), start.personal(0)) > 1e-3) == images  # statistics are shared


# what is made


def made(found: Result, i: int) -> Tree:
    """h(v_i; phi), written out."""
    phi, a, k = found.server["hyper"], vector(found, i), 1
    while f"hyper{k}.weight" in phi:
        a, k = (phi[f"hyper{k}.weight"] @ a + phi[f"hyper{k}.bias"]).clamp(min=0), k + 1
    shapes = found.context.net.trainable
    return Tree({n: (phi[f"out:{n}.weight"] @ a + phi[f"out:{n}.bias"]).reshape(w.shape) for n, w in shapes.items()})


@IMAGES
@pytest.mark.parametrize("layers", [1, 3])
def test_a_client_predicts_with_what_its_vector_makes(images, layers):
    found = run(experiment(PFedHN(**SMALL, layers=layers), images=images))
    assert sum(k.startswith("hyper") for k in found.server["hyper"]) == 2 * layers
    for i in EVERYONE:
        own = found.personal(i)
        assert moved(made(found, i), own.pick(found.context.net.trainable)) < 1e-12
        assert set(own) == set(found.context.net.weights)
        assert all(own[k].shape == v.shape for k, v in found.context.net.weights.items())


def test_statistics_of_normalisation_are_one_plain_mean_for_all():
    fields = {"images": True, "rounds": 1, "sizes": (12, 6, 4)}
    whole = run(experiment(PFedHN(**SMALL), **fields, ratio=((0, 1),)))
    alone = [run(experiment(PFedHN(**SMALL), **fields, ratio=((i,),))) for i in (0, 1)]
    names = [k for k in whole.context.net.buffers if k.endswith("running_mean")]
    mean = (alone[0].personal(0).pick(names) + alone[1].personal(1).pick(names)) / 2
    for i in range(3):
        assert moved(whole.personal(i).pick(names), mean) < 1e-12
    assert moved(mean, alone[0].personal(0).pick(names)) > 1e-3
    assert not any(k.rpartition(".")[0].removeprefix("out:") in names for k in whole.server["hyper"])


def test_every_layer_is_drawn_under_its_name():
    context = experiment(PFedHN(**SMALL, layers=2)).context()
    phi, net = context.state.server["hyper"], context.net
    expected = net.linear("hyper1", 3, 7) | net.linear("hyper2", 7, 7)
    for name, w in net.trainable.items():
        expected |= net.linear(f"out:{name}", 7, w.numel())
    assert list(phi) == list(expected)
    assert phi.equals(expected)
    assert not any(v.any() for v in context.state.server["velocity"].values())


# the vectors


@pytest.mark.parametrize(("sizes", "width"), [((4,) * 3, 1), ((4,) * 4, 2), ((4,) * 11, 3), ((4,) * 12, 4)], ids=str)
def test_their_width_follows_the_number_of_clients(sizes, width):
    found = run(experiment(PFedHN(hidden=4), sizes=sizes, rounds=1))
    assert vector(found, 0).shape == (width,)


@pytest.mark.parametrize("width", [None, 6])
def test_they_are_drawn_from_the_seed_and_the_client(width):
    """Also of those that do not take part."""
    found = run(experiment(PFedHN(hidden=4, embedding=width), rounds=1, ratio=((0,),)))
    for i in EVERYONE[1:]:
        drawn = orders.draw(found.run.seed, "embedding", 0, i).standard_normal(width or 3)
        assert vector(found, i).tolist() == drawn.tolist()
    other = run(experiment(PFedHN(hidden=4, embedding=width), rounds=1, ratio=((0,),), seed=9))
    assert not torch.equal(vector(found, 1), vector(other, 1))


def test_they_are_standard_normal():
    found = run(experiment(PFedHN(hidden=2, embedding=2000), rounds=1, ratio=((0,),)))
    drawn = torch.stack([vector(found, i) for i in EVERYONE[1:]])
    assert abs(float(drawn.mean())) < 0.03
    assert abs(float(drawn.std()) - 1) < 0.03
    assert float(torch.corrcoef(drawn).fill_diagonal_(0).abs().max()) < 0.1


def test_they_are_drawn_once_and_move_with_their_client_alone():
    """In public code the optimiser moves all of them in every round."""
    turns = ((0, 1), (1, 2), (2,))
    at = [run(experiment(PFedHN(**SMALL), ratio=turns, rounds=r)) for r in (1, 2, 3)]
    for before, after, ids in ((*at[:2], turns[1]), (*at[1:], turns[2])):
        for i in EVERYONE:
            assert torch.equal(vector(before, i), vector(after, i)) == (i not in ids)
        assert all(moved(before.personal(i), after.personal(i)) > 1e-4 for i in EVERYONE)  # the network learns for all


def test_they_are_drawn_in_the_first_round_that_anyone_takes_part_in():
    runs = (experiment(PFedHN(**SMALL), ratio="bernoulli:0.2", seed=seed) for seed in range(100))
    late = next(r for r in runs if not r.participants(0) and r.participants(1))
    found = run(late)
    assert len({tuple(vector(found, i).tolist()) for i in EVERYONE}) == 8


# what is learned


def stepped(ids: tuple[int, ...], weights: tuple[float, ...], seed: int = 0, **hyper) -> tuple:
    """The server before and after a round of made-up replies, and what they differ by from what was made."""
    method = PFedHN(**({"hidden": 5, "server_lr": 0.1} | hyper))
    context = experiment(method).context()
    server, empty = context.state.server, Rows(context.state.rows)
    facts = Facts(0, 8, ids, weights, 0.1, 4, 3)
    server, rows = method.plan(server, empty, facts)
    draw = torch.Generator().manual_seed(seed)
    deltas, replies = [], []
    for i in ids:
        theta = method.down(server, rows[i])["model"]
        delta = theta.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype))
        deltas.append(delta)
        replies.append(theta + delta)
    up = Up(rows={"model": stack(replies)}, mean={"buffers": Tree()})
    new, after = method.server(server, rows, up, facts)
    return method, server, rows, new, after, dict(zip(ids, deltas, strict=True))


def product(method: PFedHN, server, row, delta: Tree) -> float:
    return float(delta.dot(method.down(server, row)["model"]))


@pytest.mark.parametrize("ids", [(2,), (0, 2, 5)], ids=str)
def test_its_gradient_is_that_of_finite_differences(ids):
    """After one step without decay: phi moved by server_lr times the slope of the mean of <delta_i, h(v_i; phi)>."""
    method, server, rows, new, _, deltas = stepped(ids, (9.0,) * len(ids), server_weight_decay=0.0)
    slope = (new["hyper"] - server["hyper"]) / 0.1
    draw = torch.Generator().manual_seed(5)
    for _ in range(5):
        way = slope.map(lambda v: torch.randn(v.shape, generator=draw, dtype=v.dtype))
        ends = [{**server, "hyper": server["hyper"] + way * e} for e in (1e-6, -1e-6)]
        up, low = (sum(product(method, s, rows[i], deltas[i]) for i in ids) / len(ids) for s in ends)
        assert float(slope.dot(way)) == pytest.approx((up - low) / 2e-6, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ids", [(2,), (0, 2, 5)], ids=str)
def test_each_vector_s_gradient_is_that_of_finite_differences_of_its_own_client(ids):
    """Not divided by the number of participants."""
    method, server, rows, _, after, deltas = stepped(ids, (9.0,) * len(ids), server_weight_decay=0.0)
    for i in ids:
        slope = (after[i]["embedding"] - rows[i]["embedding"]) / 0.1
        for k in range(3):
            way = 1e-6 * torch.eye(3, dtype=torch.float64)[k]
            up, low = (product(method, server, {"embedding": rows[i]["embedding"] + e}, deltas[i]) for e in (way, -way))
            assert float(slope[k]) == pytest.approx((up - low) / 2e-6, rel=1e-5, abs=1e-6)


def test_what_is_made_goes_where_the_client_went():
    """The sign of the update: in small steps, <delta, theta' - theta> grows."""
    method, server, rows, new, after, deltas = stepped((2,), (4.0,), server_lr=1e-4, server_weight_decay=0.0)
    before, now = (product(method, s, r[2], deltas[2]) for s, r in ((server, rows), (new, after)))
    assert now > before + 1e-4
    only_vector = product(method, server, after[2], deltas[2])
    assert only_vector > before


def test_all_participants_count_alike():
    _, _, _, one, _, _ = stepped((0, 2, 5), (1.0, 100.0, 3.0))
    _, _, _, two, _, _ = stepped((0, 2, 5), (1.0, 1.0, 1.0))
    assert one["hyper"].equals(two["hyper"])


def test_momentum_goes_on_from_round_to_round():
    """u after a second round is m times the first, and the new gradient with decay."""
    fields = {"ratio": ((0, 1), (2, 3))}
    hyper = SMALL | {"server_momentum": 0.9, "server_weight_decay": 0.01}
    first, second = (run(experiment(PFedHN(**hyper), **fields, rounds=r)) for r in (1, 2))
    assert moved(second.server["hyper"], first.server["hyper"] - 0.1 * second.server["velocity"]) < 1e-14
    start = run(experiment(PFedHN(**hyper), **fields, rounds=0)).server["hyper"]
    assert moved(first.server["hyper"], start - 0.1 * first.server["velocity"]) < 1e-14
    name = "hyper1.bias"
    without = SMALL | {"server_momentum": 0.0, "server_weight_decay": 0.01}
    assert moved(run(experiment(PFedHN(**without), **fields, rounds=1)).server["hyper"], first.server["hyper"]) < 1e-14
    other = run(experiment(PFedHN(**without), **fields, rounds=2)).server["velocity"]
    assert float((second.server["velocity"] - first.server["velocity"] * 0.9 - other)[name].abs().max()) < 1e-12


def test_clients_that_do_not_move_teach_nothing():
    fields = {"lr": 1e-300, "weight_decay": 0.0}
    found, start = (run(experiment(PFedHN(**SMALL, server_weight_decay=0.0), **fields, rounds=r)) for r in (4, 1))
    assert all(moved(found.personal(i), start.personal(i)) < 1e-12 for i in EVERYONE)


def test_decay_shrinks_the_network_and_the_participants_vectors():
    fields = {"lr": 1e-300, "weight_decay": 0.0, "rounds": 1, "ratio": ((0, 1),)}
    hyper = SMALL | {"server_weight_decay": 0.5}
    found = run(experiment(PFedHN(**hyper), **fields))
    assert moved(found.server["hyper"], 0.95 * found.context.state.server["hyper"]) < 1e-12
    for i in EVERYONE:
        drawn = torch.tensor(orders.draw(found.run.seed, "embedding", 0, i).standard_normal(3))
        torch.testing.assert_close(vector(found, i), (0.95 if i < 2 else 1) * drawn, rtol=0, atol=1e-12)


def test_clients_that_contradict_each_other_are_served_better_than_by_one_model():
    fields = {
        "federation": opposed(), "ratio": 1.0, "rounds": 40, "epochs": 3, "lr": 0.1, "schedule": "constant",
        "network_options": {"hidden": (16,)},
    }  # fmt: skip
    found, fedavg = (run(experiment(m, **fields)) for m in (PFedHN(hidden=30, server_lr=0.03), FedAvg()))
    assert found.rounds[-1]["received_loss"] < 0.7 * fedavg.rounds[-1]["received_loss"]


# the rest


def test_bytes_and_passes_of_a_round():
    found, fedavg = (run(experiment(m, images=True)) for m in (PFedHN(**SMALL), FedAvg()))
    for a, b in zip(found.rounds, fedavg.rounds, strict=True):
        for column in ("bytes_down", "bytes_up", "gradient_passes"):
            assert a[column] == b[column]


def test_after_training_a_client_has_its_own_model():
    found = run(experiment(PFedHN(**SMALL), rounds=1, ratio=((0,),)))
    trained = next(r for r in found.clients if (r["moment"], r["split"]) == ("trained", "test"))
    received = next(
        r for r in found.clients if (r["moment"], r["client"], r["round"], r["split"]) == ("received", 0, 1, "test")
    )
    assert abs(trained["loss"] - received["loss"]) > 1e-3


@pytest.mark.parametrize(
    "hyper",
    [
        {"embedding": 0}, {"hidden": 0}, {"layers": 0}, {"server_lr": -0.1}, {"server_lr": math.nan},
        {"server_momentum": -0.1}, {"server_momentum": 1.0}, {"server_weight_decay": -1.0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=rf"PFedHN\.{next(iter(hyper))} must be"):
        PFedHN(**hyper)


def test_defaults_are_the_paper_s():
    assert PFedHN() == PFedHN(
        embedding=None, hidden=100, layers=3, server_lr=0.01, server_momentum=0.9, server_weight_decay=1e-3
    )
