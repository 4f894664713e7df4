"""kNN-Per: its reference, FedAvg and the nearest neighbour as its limits, the datastore, odd clients, saved models."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result, catalogue
from idiolect import run as run_to
from idiolect.data import federate
from idiolect.data.sources import quadratics
from idiolect.errors import UsageError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.knnper import KNNPer
from idiolect.tree import Tree
from reference import knnper as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
STORE = ("datastore.features", "datastore.labels")


def answers(found: Result, i: int, split: str = "test") -> Tensor:
    """Client i's class probabilities for its own samples."""
    x = found.context.shards.part(split, i)[0]
    return found.run.method.logits(found.context.task, found.personal(i), x).exp()


def compare(found: Result, **hyper) -> None:
    seen = world(found.run)
    expected = reference.run(seen, **hyper)
    agree(found, expected)
    for i in range(found.run.clients):
        known = expected.extra["probabilities"][i]
        torch.testing.assert_close(answers(found, i, "train"), known, rtol=0, atol=1e-10)
        x = found.context.shards.part("test", i)[0].double()
        hyper = {"k": 10, "lam": 0.5, "sigma": 1.0} | hyper
        known = reference.probabilities(seen, expected.clients[i], x, **hyper)
        torch.testing.assert_close(answers(found, i), known, rtol=0, atol=1e-10)


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper", [{}, {"k": 1, "lam": 0.9}, {"k": 3, "sigma": 0.05}, {"lam": 0.0}, {"lam": 1.0}, {"sigma": 20.0}], ids=str
)
def test_engine_equals_reference(hyper, images):
    compare(run(experiment(KNNPer(**hyper), images=images)), **hyper)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (40, 2)], ids=str)
@pytest.mark.parametrize("k", [1, 10])
def test_clients_of_one_sample_or_one_class(sizes, k):
    compare(run(experiment(KNNPer(k=k), sizes=sizes)), k=k)


# its limits


@IMAGES
def test_it_trains_as_fedavg_to_the_bit(images):
    found, fedavg = (run(experiment(m, images=images)) for m in (KNNPer(), FedAvg()))
    assert found.server["model"].equals(fedavg.server["model"])
    assert all(found.personal(i).drop(STORE).equals(fedavg.personal(i)) for i in EVERYONE)
    for a, b in zip(found.rounds, fedavg.rounds, strict=True):
        for column in ("bytes_down", "bytes_up", "gradient_passes", "participants"):
            assert a[column] == b[column]


@IMAGES
def test_without_lam_it_predicts_as_fedavg(images):
    found, fedavg, mixed = (run(experiment(m, images=images)) for m in (KNNPer(lam=0.0), FedAvg(), KNNPer()))
    for a, b in zip(found.clients, fedavg.clients, strict=True):
        assert a["correct"] == b["correct"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)
    for i in EVERYONE:
        x = found.context.shards.part("test", i)[0]
        plain = found.context.task.logits(fedavg.personal(i), x).softmax(1)
        torch.testing.assert_close(answers(found, i), plain, rtol=0, atol=1e-12)
        assert float((answers(mixed, i) - plain).abs().max()) > 1e-3


def test_with_lam_1_and_k_1_it_is_the_nearest_neighbour():
    found = run(experiment(KNNPer(k=1, lam=1.0)))
    for i in EVERYONE:
        z, known = (
            found.context.task.features(found.server["model"], found.context.shards.part(s, i)[0])
            for s in ("test", "train")
        )
        labels = found.context.shards.part("train", i)[1]
        nearest = [min(range(len(known)), key=lambda j: math.dist(row, known[j].tolist())) for row in z.tolist()]
        assert answers(found, i).argmax(1).tolist() == labels[nearest].tolist()


def test_with_lam_1_a_client_knows_its_own_samples_and_no_other_class():
    found = run(experiment(KNNPer(k=1, lam=1.0)))
    for i in EVERYONE:
        z, labels = found.personal(i)[STORE[0]], found.personal(i)[STORE[1]]
        if len(z.unique(dim=0)) == len(z):
            assert answers(found, i, "train").argmax(1).tolist() == labels.tolist()
        assert set(answers(found, i).argmax(1).tolist()) <= set(labels.tolist())


def test_a_wide_kernel_over_all_samples_gives_the_labels_shares():
    found = run(experiment(KNNPer(k=100, lam=1.0, sigma=1e9)))
    for i in EVERYONE:
        labels = found.context.shards.part("train", i)[1]
        shares = torch.bincount(labels, minlength=3) / len(labels)
        torch.testing.assert_close(answers(found, i), shares.double().expand(4, 3), rtol=0, atol=1e-7)


@IMAGES
def test_probabilities_add_up_to_1(images):
    found = run(experiment(KNNPer(k=4, lam=0.7), images=images))
    for i in EVERYONE:
        torch.testing.assert_close(answers(found, i).sum(1), torch.ones(4).double(), rtol=0, atol=1e-12)


def test_the_mixture_is_linear_in_lam():
    at = {lam: run(experiment(KNNPer(k=3, lam=lam))) for lam in (0.0, 0.3, 1.0)}
    for i in EVERYONE:
        whole = torch.lerp(answers(at[0.0], i), answers(at[1.0], i), 0.3)
        torch.testing.assert_close(answers(at[0.3], i), whole, rtol=0, atol=1e-12)


# the neighbours


def remembered(z, features, labels, classes=3, **hyper) -> Tensor:
    task = run(experiment("fedavg", rounds=0)).context.task
    w = Tree({STORE[0]: torch.tensor(features, dtype=torch.float64), STORE[1]: torch.tensor(labels)})
    return KNNPer(**hyper).remembered(task, w, torch.tensor(z, dtype=torch.float64))


def test_neighbours_by_hand():
    points, labels = [[0.0, 0.0], [3.0, 4.0], [0.0, 2.0], [9.0, 9.0]], [0, 1, 0, 2]
    found = remembered([[0.0, 0.0]], points, labels, k=3, sigma=2.0)
    e = [1.0, math.exp(-5 / 2), math.exp(-2 / 2)]  # distances, not their squares
    expected = torch.tensor([[e[0] + e[2], e[1], 0.0]], dtype=torch.float64) / sum(e)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_of_equally_far_samples_the_earlier_counts():
    points, labels = [[1.0], [-1.0], [1.0], [5.0]], [2, 1, 0, 0]
    assert remembered([[0.0]], points, labels, k=1).tolist() == [[0.0, 0.0, 1.0]]
    assert remembered([[0.0]], points, labels, k=2).tolist() == [[0.0, 0.5, 0.5]]


def test_near_samples_far_from_the_origin_are_told_apart():
    """As a product of all pairs the distances would be lost in rounding."""
    points = [[1e7 + k] for k in range(40)]
    found = remembered([[1e7 + 7.4]] * 40, points, [k % 3 for k in range(40)], k=1)
    assert found.tolist() == [[0.0, 1.0, 0.0]] * 40


def test_a_sample_that_is_far_from_all_still_has_neighbours():
    for distance in (1e3, 1e8):
        found = remembered([[distance]], [[0.0], [1.0]], [0, 1], sigma=1e-3)
        assert found.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_are_finite_for_classes_that_no_neighbour_has(dtype):
    found = run(experiment(KNNPer(k=1, lam=1.0), dtype=dtype))
    for i in EVERYONE:
        x = found.context.shards.part("test", i)[0]
        assert found.run.method.logits(found.context.task, found.personal(i), x).isfinite().all()
    assert all(math.isfinite(row["received_loss"]) for row in found.rounds)


# the datastore


@IMAGES
def test_the_datastore_is_of_the_newest_shared_model(images):
    found = run(experiment(KNNPer(), images=images, ratio=((0, 1), (1, 2))))
    task, shared = found.context.task, found.server["model"]
    for i in (0, 5):  # 5 never took part
        x, y = found.context.shards.part("train", i)
        own = found.personal(i)
        with torch.no_grad():
            torch.testing.assert_close(own[STORE[0]], task.features(shared, x), rtol=0, atol=1e-12)
        assert torch.equal(own[STORE[1]], y)
        assert not own[STORE[0]].requires_grad


def test_a_client_s_answers_depend_on_no_other_client_s_datastore():
    found = run(experiment(KNNPer(lam=1.0)))
    alone = run(experiment(KNNPer(lam=1.0), rounds=0))
    assert float((answers(found, 0) - answers(alone, 0)).abs().max()) > 1e-6  # other features
    first, second = found.personal(0), found.personal(1)
    assert len(first[STORE[0]]) == SIZES[0]
    assert len(second[STORE[0]]) == SIZES[1]


def test_after_training_the_datastore_is_of_the_client_s_own_model():
    """As is whatever a participant predicts with then."""
    fields = {"ratio": ((0,),), "rounds": 1}
    found = run(experiment(KNNPer(), **fields))
    (trained,) = [r for r in found.clients if r["moment"] == "trained" and r["split"] == "test"]
    received = next(r for r in found.clients if (r["moment"], r["client"], r["round"]) == ("received", 0, 1))
    assert trained["loss"] == pytest.approx(received["loss"], abs=1e-12)  # it alone took part: its model is the shared


@pytest.mark.parametrize("backend", ["serial", "workers", "stacked"])
def test_datastores_of_all_sizes_come_from_every_backend(backend):
    found = run(experiment(KNNPer(), backend=backend, workers=2 if backend == "workers" else None))
    serial = run(experiment(KNNPer()))
    assert all(moved(found.personal(i), serial.personal(i)) < 1e-12 for i in EVERYONE)


def test_a_saved_model_predicts_by_itself(tmp_path):
    found = run_to(experiment(KNNPer()), out=tmp_path / "run")
    for i in EVERYONE:
        saved = Tree(load_file(tmp_path / "run" / "models" / f"client-{i:05d}.safetensors"))
        assert saved.equals(found.personal(i))
        assert saved[STORE[1]].dtype == torch.int64
        x = found.context.shards.part("test", i)[0]
        again = found.run.method.logits(found.context.task, saved, x)
        torch.testing.assert_close(again.exp(), answers(found, i), rtol=0, atol=0)


# the rest


@pytest.mark.parametrize("backend", ["serial", "stacked"])
def test_a_head_may_be_tuned_for_the_mixture(backend):
    tuned, plain = (run(experiment(catalogue.build(n), backend=backend)) for n in ("knnper+finetune", "knnper"))
    assert all(torch.equal(tuned.personal(i)[STORE[1]], plain.personal(i)[STORE[1]]) for i in EVERYONE)
    assert max(moved(tuned.personal(i), plain.personal(i)) for i in EVERYONE) > 1e-3


@pytest.mark.parametrize(
    "hyper",
    [{"k": 0}, {"lam": -0.1}, {"lam": 1.1}, {"sigma": 0.0}, {"sigma": -1.0}, {"sigma": math.inf}],
    ids=str,
)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"KNNPer.{next(iter(hyper))} must be"):
        KNNPer(**hyper)


def test_data_without_classes_are_refused():
    fed = federate(quadratics.load(), "given", 2, 0, test=0.0)
    with pytest.raises(UsageError, match="classes"):
        run(experiment(KNNPer(), federation=fed, network="point", network_options={}, rounds=1))


def test_defaults_are_the_paper_s():
    assert KNNPer() == KNNPer(k=10, lam=0.5, sigma=1.0)
