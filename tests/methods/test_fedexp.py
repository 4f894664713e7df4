"""FedEXP: its reference, FedAvg as its limit, the step of the server, what is predicted with, odd clients."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect import catalogue
from idiolect.engine.reduce import Reduction
from idiolect.errors import UsageError
from idiolect.method import Facts, Rows, Up
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedexp import FedEXP
from idiolect.tree import Tree
from reference import fedexp as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))

# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"eps": 0.1},
        {"eps": 0.0, "average_last": False},
        {"weights": "samples"},
        {"weights": "samples", "eps": 0.002},
    ],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    found = run(experiment(FedEXP(**hyper), images=images))
    agree(found, reference.run(world(found.run), **hyper))


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(FedEXP(), sizes=sizes))
    agree(found, reference.run(world(found.run)))


# FedAvg as its limit, and beyond it


@IMAGES
def test_with_a_large_eps_it_is_fedavg_to_the_bit(images):
    found = run(experiment(FedEXP(eps=1e6, weights="samples", average_last=False), images=images))
    fedavg = run(experiment(FedAvg(), images=images))
    assert found.server["model"].equals(fedavg.server["model"])
    assert all(found.personal(i).equals(fedavg.personal(i)) for i in EVERYONE)
    free = run(experiment(FedEXP(weights="samples", average_last=False), images=images))
    assert moved(free.server["model"], fedavg.server["model"]) > 1e-3


def test_one_participant_is_fedavg_to_the_bit():
    fields = {"ratio": [[2], [5], [2], [0]]}
    found, fedavg = (run(experiment(m, **fields)) for m in (FedEXP(), FedAvg()))
    assert found.server["model"].equals(fedavg.server["model"])
    assert [float(n["step"]) for n in found.notes] == [1.0] * len(found.notes)


def test_clients_that_agree_are_averaged_to_the_bit():
    """Equal clients, full batches: the ratio is 1/2 and the step 1."""
    fed = federation((6,))
    same = type(fed)(
        fed.dataset,
        tuple(fed.train) * 3,
        tuple(fed.validation) * 3,
        tuple(fed.test) * 3,
        fed.split_hash,
        "the same one",
    )
    fields = {"federation": same, "ratio": 1.0, "batch_size": 64}
    found, fedavg = (run(experiment(m, **fields)) for m in (FedEXP(eps=0.0), FedAvg()))
    assert found.server["model"].equals(fedavg.server["model"])


def test_the_server_goes_further_than_the_mean():
    found = run(experiment(FedEXP()))
    fedavg = run(experiment(FedAvg(), rounds=1, sizes=(8,) * 8, ratio=1.0))
    once = run(experiment(FedEXP(average_last=False), rounds=1, sizes=(8,) * 8, ratio=1.0))
    start, step = once.context.net.weights, float(once.notes[-1]["step"])
    assert step > 1.2
    far, mean = once.server["model"] - start, fedavg.server["model"] - start
    assert moved(far, mean * step) < 1e-12
    assert max(float(n["step"]) for n in found.notes) > 1.2


# the step of the server


def stepped(method: FedEXP, updates: list[Tree], sizes: list[int] | None = None, buffers: Tree | None = None):
    """One round of the server's from 0, with these updates."""
    buffers = buffers or Tree()
    start = updates[0].zeros()
    server = {
        "model": start | buffers.zeros(),
        "previous": start,
        "statistics": buffers.zeros(),
        "step": torch.ones((), dtype=torch.float64),
    }
    reduction = Reduction("fedexp.local", server)
    for i, d in enumerate(updates):
        weight = 1.0 if method.weights == "uniform" else None
        mean = {"model": d | buffers, "square": d.dot(d)}
        reduction.add(i, Up(mean=mean, weight=weight), sizes[i] if sizes else 1)
    ids = tuple(range(len(updates)))
    facts = Facts(round=0, num_clients=len(ids), ids=ids, weights=(1.0,) * len(ids), lr=0.1, rounds=1, seed=0)
    return method.server(server, Rows({}), reduction.result(), facts)[0]


def drawn(count: int, seed: int = 0) -> list[Tree]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (4,)}
    return [
        Tree({k: torch.randn(s, generator=draw, dtype=torch.float64) for k, s in shapes.items()}) for _ in range(count)
    ]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
def test_orthogonal_updates_of_one_length_take_half_as_many_steps_as_they_are(m):
    updates = [Tree({"a": 0.7 * torch.eye(8, dtype=torch.float64)[i]}) for i in range(m)]
    new = stepped(FedEXP(eps=0.0), updates)
    assert float(new["step"]) == pytest.approx(max(1.0, m / 2), rel=1e-12)


def test_the_step_by_hand():
    updates, sizes, eps = drawn(4), [5, 1, 2, 8], 0.03
    flat = torch.stack([d.flat() for d in updates])
    for weights in ("uniform", "samples"):
        q = torch.tensor(sizes if weights == "samples" else [1] * 4).double()
        q = q / q.sum()
        mean = (q[:, None] * flat).sum(0)
        squares = (q * flat.square().sum(1)).sum()  # the same weights above and below
        expected = squares / (2 * (mean.square().sum() + eps * (4 if weights == "samples" else 1)))
        new = stepped(FedEXP(eps=eps, weights=weights), updates, sizes)
        assert float(expected) > 1
        assert float(new["step"]) == pytest.approx(float(expected), rel=1e-12)
        torch.testing.assert_close(new["model"].flat(), expected * mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_step_is_never_below_one_and_knows_no_scale(seed):
    alike = [drawn(1, seed)[0] + 0.05 * d for d in drawn(3, seed + 100)]
    assert float(stepped(FedEXP(eps=0.0), alike)["step"]) == 1.0
    updates = drawn(5, seed)
    step = float(stepped(FedEXP(eps=0.0), updates)["step"])
    assert step > 1.0
    for scale in (1e-3, 40.0):
        assert float(stepped(FedEXP(eps=0.0), [d * scale for d in updates])["step"]) == pytest.approx(step, rel=1e-12)


def test_lengths_are_of_all_parameters_as_one_vector():
    """Opposed in one layer and alike in another: one step for both."""
    a, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([2.0]).double()
    new = stepped(FedEXP(eps=0.0), [Tree({"a": a, "b": b}), Tree({"a": -a, "b": b / 4})])
    step = (1 + 4 + 1 + 0.25) / (2 * 2 * 1.25**2)
    assert float(new["step"]) == pytest.approx(max(1.0, step))
    new = stepped(FedEXP(eps=0.0), [Tree({"a": 3 * a, "b": b}), Tree({"a": -3 * a, "b": b / 4})])
    step = (9 + 4 + 9 + 0.25) / (2 * 2 * 1.25**2)
    assert float(new["step"]) == pytest.approx(step)
    torch.testing.assert_close(new["model"]["b"], torch.full((1,), step * 1.25, dtype=torch.float64))
    assert float(new["model"]["a"].abs().max()) < 1e-15


def test_statistics_are_averaged_and_take_no_part_in_the_step():
    buffers = Tree({"mean": torch.tensor([100.0, -3.0]).double()})
    with_, without = stepped(FedEXP(), drawn(4), buffers=buffers), stepped(FedEXP(), drawn(4))
    assert torch.equal(with_["step"], without["step"])
    assert with_["model"].pick(buffers).equals(buffers)
    fields = {"images": True, "sizes": (8,) * 8, "ratio": 1.0, "rounds": 1}
    found, fedavg = (run(experiment(m, **fields)) for m in (FedEXP(), FedAvg()))
    statistics = found.context.net.buffers
    assert found.server["model"].pick(statistics).equals(fedavg.server["model"].pick(statistics))
    assert moved(found.server["model"], fedavg.server["model"]) > 1e-3


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_updates_of_nothing_leave_everything_finite_and_where_it_was(eps):
    found = run(experiment(FedEXP(eps=eps), lr=0.0))
    assert found.server["model"].equals(found.context.net.weights)
    assert all(float(n["step"]) == 1.0 for n in found.notes)
    away = [Tree({"a": torch.tensor([s]).double()}) for s in (1.0, -1.0)]  # the mean alone is nothing
    new = stepped(FedEXP(eps=eps), away)
    assert float(new["model"]["a"]) == 0.0
    assert float(new["step"]) == (1.0 if eps == 0 else pytest.approx(1 / (2 * eps)))


# what is predicted with


@IMAGES
def test_clients_predict_with_the_mean_of_the_last_two_iterates(images):
    found, before = (run(experiment(FedEXP(), images=images, rounds=r)) for r in (3, 2))
    middle = (found.server["model"] + before.server["model"]) / 2
    assert all(moved(found.personal(i), middle) < 1e-15 for i in EVERYONE)
    assert moved(middle, found.server["model"]) > 1e-3


@IMAGES
def test_averaging_changes_prediction_alone(images):
    found, last = (run(experiment(FedEXP(average_last=a), images=images)) for a in (True, False))
    assert found.server["model"].equals(last.server["model"])
    assert all(last.personal(i).equals(last.server["model"]) for i in EVERYONE)
    for a, b in zip(found.rounds, last.rounds, strict=True):
        assert (a["received_loss"] == b["received_loss"]) == (a["round"] == 0)
        assert a["trained_loss"] == b["trained_loss"]  # the client's own model, not averaged with anything


def test_a_run_keeps_one_file_for_all_who_predict_alike(tmp_path):
    found = run(experiment(FedEXP()), tmp_path / "kept")
    index = json.loads((tmp_path / "kept" / "models" / "index.json").read_text())
    assert set(index.values()) == {"shared.safetensors"}
    assert Tree(load_file(tmp_path / "kept" / "models" / "shared.safetensors")).equals(found.personal(0))
    slots = Tree(load_file(tmp_path / "kept" / "models" / "server.safetensors"))
    assert slots.pick(f"model/{k}" for k in found.server["model"]).flat().equal(found.server["model"].flat())


def test_inside_fedlag_clients_predict_with_their_own_layers_and_the_mean_of_the_rest():
    none = run(experiment(catalogue.build("fedexp+fedlag", {"top_k": 0, "warmup": 0})))
    plain = run(experiment(FedEXP()))
    assert all(none.personal(i).equals(plain.personal(i)) for i in EVERYONE)
    wrapped = catalogue.build("fedexp+fedlag", {"top_k": 1, "warmup": 0, "threshold": 0.0})
    found, before = (run(experiment(wrapped, rounds=r, ratio=1.0)) for r in (3, 2))
    personal = {k for k, own in found.server["personal"].items() if own}
    assert personal
    middle = (found.server["model"] + before.server["model"]) / 2
    for i in EVERYONE:
        for name, value in found.personal(i).items():
            own = name.rpartition(".")[0] in personal
            expected = found.private(i)["returned"][name] if own else middle[name]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-15)


# the rest


def test_bytes_and_passes_of_a_round():
    found, fedavg = (run(experiment(m)) for m in (FedEXP(), FedAvg()))
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == b["bytes_down"]
        assert a["bytes_up"] == b["bytes_up"] + 5 * 8  # one number of each participant
        assert a["gradient_passes"] == b["gradient_passes"]


@pytest.mark.parametrize("hyper", [{"weights": "uniformly"}, {"eps": -1e-9}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedEXP.{next(iter(hyper))} must be"):
        FedEXP(**hyper)
