"""FedDBE: its reference, FedAvg as its limit, the phase before the first round, the running mean, the vector."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.method import Batch
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.feddbe import FedDBE, centre
from idiolect.tree import Tree
from reference import feddbe as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))
OFF = {"kappa": 0.0, "personal_bias": False}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
WIDTH = 5  # of the mlp's features

# the reference


def compared(hyper: dict[str, Any], **fields: Any) -> Result:
    found = run(experiment(FedDBE(**hyper), **fields))
    expected = reference.run(world(found.run), **hyper)
    agree(found, expected)
    torch.testing.assert_close(found.server["mean"], expected.extra["mean"], rtol=0, atol=1e-10)
    for i in range(found.run.clients):
        scores = FedDBE().logits(found.context.task, found.personal(i), found.context.shards.part("train", i)[0])
        torch.testing.assert_close(scores, expected.extra["logits"][i], rtol=0, atol=1e-10)
    return found


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"kappa": 1.0, "mean_momentum": 0.1}, {"kappa": 0.0}, {"personal_bias": False, "mean_momentum": 0.6}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    compared(hyper, images=images)


@pytest.mark.parametrize("mean_momentum", [1.0, 0.3])
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, mean_momentum):
    compared({"kappa": 1.0, "mean_momentum": mean_momentum}, sizes=sizes)


# FedAvg as its limit, and what either part does


@IMAGES
def test_without_both_parts_it_is_fedavg_to_the_bit(images):
    """The training before the first round leaves nothing behind."""
    found, fedavg = (run(experiment(m, images=images)) for m in (FedDBE(**OFF), FedAvg()))
    assert found.server["model"].equals(fedavg.server["model"])
    for i in EVERYONE:
        own = found.personal(i)
        assert own.drop(["bias"]).equals(fedavg.personal(i))
        assert not own["bias"].any()


@pytest.mark.parametrize("hyper", [{"kappa": 0.0}, {"kappa": 1.0, "personal_bias": False}], ids=str)
def test_either_part_alone_is_more_than_fedavg(hyper):
    found, fedavg = (run(experiment(m)) for m in (FedDBE(**hyper), FedAvg()))
    assert moved(found.server["model"], fedavg.server["model"]) > 1e-3


def test_the_larger_kappa_the_nearer_are_the_means_of_features_to_the_common_one():
    fields = PLAIN | {"ratio": 1.0, "rounds": 3, "epochs": 10, "lr": 0.02}
    far = []
    for kappa in (0.0, 5.0, 50.0):
        found = run(experiment(FedDBE(kappa=kappa), **fields))
        task, common = found.context.task, found.server["mean"]
        z = [task.features(found.personal(i), found.context.shards.part("train", i)[0]) for i in EVERYONE]
        far.append(sum(float((v.mean(0) - common).norm()) for v in z))
    assert far[0] > far[1] + 0.5 > far[2] + 1


def test_a_constant_moves_between_the_vector_and_the_heads_bias():
    found = run(experiment(FedDBE(kappa=1.0)))
    w, task, x = found.personal(0), found.context.task, found.context.shards.part("test", 0)[0]
    v = torch.arange(WIDTH).double()
    shifted = w | {"bias": w["bias"] + v, "head.bias": w["head.bias"] - w["head.weight"] @ v}
    assert w["bias"].any()
    torch.testing.assert_close(FedDBE().logits(task, shifted, x), FedDBE().logits(task, w, x), rtol=0, atol=1e-12)


def test_with_a_vector_of_0_it_predicts_as_the_shared_model():
    found = run(experiment(FedDBE(kappa=1.0)))
    task, x = found.context.task, found.context.shards.part("test", 0)[0]
    w = found.personal(0)
    assert torch.equal(FedDBE().logits(task, w | {"bias": 0 * w["bias"]}, x), task.logits(found.server["model"], x))
    assert not torch.allclose(FedDBE().logits(task, w, x), task.logits(found.server["model"], x), atol=1e-3)


# the terms


def drawn(rows: int = 6, width: int = 4) -> tuple[Tensor, Tensor, Tensor, Batch]:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    m, common = (torch.randn(width, generator=draw, dtype=torch.float64) for _ in range(2))
    return z, m, common, Batch(z, torch.zeros(rows, dtype=torch.int64))


def test_the_regularizer_is_half_the_mean_square_of_the_distance():
    """The public code calls its factor kl_weight; no divergence is meant."""
    _, m, common, _ = drawn()
    by_hand = sum(0.5 * float(a - b) ** 2 for a, b in zip(m, common, strict=True)) / len(m)
    assert float(FedDBE().regularizer(m, common)) == pytest.approx(by_hand, rel=1e-14)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_regularizers_gradient_is_that_of_finite_differences_and_of_the_batch_alone(share):
    z, m, common, batch = drawn()
    method = FedDBE(mean_momentum=share)

    def term(z: Tensor) -> Tensor:
        return method.regularizer(method.moved({"running": m}, batch, z), common)

    z = z.requires_grad_()
    assert torch.autograd.gradcheck(term, (z,))
    now = (1 - share) * m + share * z.detach().mean(0)
    (gradient,) = torch.autograd.grad(term(z), z)
    torch.testing.assert_close(gradient, (share * (now - common) / 4 / 6).expand(6, 4), rtol=1e-12, atol=0)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_whole_loss_s_gradient_is_that_of_finite_differences(share):
    method = FedDBE(kappa=2.0, mean_momentum=share)
    context = experiment(method).context()
    task, batch = context.task, Batch(*context.shards.part("train", 0))
    _, running, common, _ = drawn(1, WIDTH)
    w = context.state.server["model"] | {"bias": common.flip(0)}

    def loss(*values: Tensor) -> Tensor:
        own = Tree(zip(w, values, strict=True))
        return method.loss(task, own | {"running": running}, batch, common)[0]

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def test_padding_is_left_out():
    z, _, _, batch = drawn()
    mask = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    padded = torch.cat([z, torch.full((2, 4), torch.nan, dtype=torch.float64)])
    masked = centre(Batch(padded, batch.y, mask), padded)
    torch.testing.assert_close(masked, centre(batch, z), rtol=0, atol=1e-15)
    nobody = centre(Batch(padded, batch.y, 0 * mask), padded)
    assert not nobody.any()


# before the first round


def still(hyper: dict[str, Any], **fields: Any) -> tuple[Result, list[Tensor]]:
    """A run in which nothing moves, and every client's features."""
    found = run(experiment(FedDBE(**hyper), lr=0.0, **fields))
    task, shards = found.context.task, found.context.shards
    return found, [task.features(found.server["model"], shards.part("train", i)[0]) for i in range(found.run.clients)]


def test_the_common_mean_is_that_of_all_samples_of_all_clients():
    found, z = still({}, batch_size=32)
    torch.testing.assert_close(found.server["mean"], torch.cat(z).mean(0), rtol=0, atol=1e-12)


def test_it_is_weighted_by_samples_and_known_from_the_first_round_on_for_good():
    fields = {"ratio": ((1,), (2, 5), (1, 4), (6,))}
    one, four = (run(experiment(FedDBE(), rounds=r, **fields)) for r in (1, 4))
    assert torch.equal(one.server["mean"], four.server["mean"])
    rows = [four.progress.rows[i] for i in EVERYONE]
    assert [float(row["size"]) for row in rows] == list(SIZES)
    expected = sum(n * row["mean"] for n, row in zip(SIZES, rows, strict=True)) / sum(SIZES)
    torch.testing.assert_close(one.server["mean"], expected, rtol=0, atol=1e-14)


def test_after_rounds_of_nobody_the_common_mean_is_found_all_the_same():
    found, usual = (run(experiment(FedDBE(), ratio=ratio)) for ratio in ("bernoulli:0.1", 0.65))
    assert [found.run.participants(r) for r in range(2)] == [[], [1]]
    assert torch.equal(found.server["mean"], usual.server["mean"])
    assert torch.equal(found.private(1)["mean"], found.server["mean"])


def test_the_first_training_is_thrown_away():
    none = run(experiment(FedDBE(), rounds=0))
    assert none.server["model"].equals(none.context.net.weights)
    assert all(none.personal(i).drop(["bias"]).equals(none.context.net.weights) for i in EVERYONE)
    moved_on = [run(experiment(FedDBE(), rounds=0, epochs=e)).progress.rows[0]["mean"] for e in (1, 4)]
    assert float((moved_on[0] - moved_on[1]).abs().max()) > 1e-3


# the running mean


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_running_mean_begins_at_0_and_is_not_corrected_for_it(share):
    """After k batches of one and the same mean, 1 - (1 - share)^k of it."""
    found, z = still({"mean_momentum": share}, batch_size=32, epochs=3)
    for i in EVERYONE:
        expected = (1 - (1 - share) ** 3) * z[i].mean(0)
        torch.testing.assert_close(found.progress.rows[i]["mean"], expected, rtol=0, atol=1e-12)


def test_a_client_smaller_than_a_batch_has_a_mean_too():
    found, z = still({}, sizes=(2, 3, 1, 20), batch_size=10, epochs=1, rounds=0)
    for i in (0, 1, 2):
        torch.testing.assert_close(found.progress.rows[i]["mean"], z[i].mean(0), rtol=0, atol=1e-12)


class Watched(FedDBE):
    """Keeps where the running mean starts and ends, and the common mean in use."""

    seen: ClassVar[dict] = {}

    def local(self, me, down, mine):
        train = me.train

        def watched(w, given=(), **options):
            after = train(w, given=given, **options)
            self.seen[me.round, me.id] = w["running"].clone(), after["running"].clone(), given[0], "mean" in down
            return after

        me.train = watched
        return super().local(me, down, mine)


def watch(hyper: dict[str, Any], **fields: Any) -> tuple[Result, dict]:
    Watched.seen = {}
    return run(experiment(Watched(**hyper), **fields)), Watched.seen


def test_the_running_mean_begins_anew_in_every_round():
    _, seen = watch({"kappa": 1.0, "mean_momentum": 0.3}, ratio=1.0)
    assert len(seen) == 4 * 8
    assert all(not before.any() and after.any() for before, after, *_ in seen.values())


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_a_mean_momentum_of_1_sees_the_last_batch_alone(kappa):
    found, seen = watch({"kappa": kappa}, lr=0.0, rounds=1, ratio=1.0)
    task, shards, plain = found.context.task, found.context.shards, world(found.run)
    for i in EVERYONE:
        last = plain.batches(i, 0, 0, 1)[-1]
        z = task.features(found.server["model"], shards.part("train", i)[0][last])
        torch.testing.assert_close(seen[0, i][1], z.mean(0), rtol=0, atol=1e-12)


# the vector


def test_one_step_moves_the_vector_by_the_rate_of_the_round():
    """Also late in the run: it follows the schedule. Its gradient is the head's transpose on the residual."""
    fields = PLAIN | {"ratio": ((0,), (0,), (4,)), "rounds": 3, "batch_size": 32, "epochs": 1, "decay": 0.5}
    found = run(experiment(FedDBE(kappa=3.0), **fields))
    w = run(experiment(FedDBE(kappa=3.0), **(fields | {"rounds": 2}))).server["model"]
    x, y = found.context.shards.part("train", 4)
    residual = found.context.task.logits(w, x).softmax(1) - torch.nn.functional.one_hot(y, 3)
    expected = -0.1 * 0.25 * residual.mean(0) @ w["head.weight"]
    torch.testing.assert_close(found.personal(4)["bias"], expected, rtol=0, atol=1e-12)


def test_clients_that_are_away_keep_their_vector_and_new_ones_have_none():
    fields = {"ratio": ((0, 1), (2, 5), (1, 4)), "rounds": 3}
    found, before = run(experiment(FedDBE(), **fields)), run(experiment(FedDBE(), **(fields | {"rounds": 1})))
    assert torch.equal(found.personal(0)["bias"], before.personal(0)["bias"])
    assert found.personal(0)["bias"].any()
    assert not torch.equal(found.personal(1)["bias"], before.personal(1)["bias"])
    assert not any(found.personal(i)["bias"].any() for i in (3, 6, 7))


def test_the_vector_never_leaves_its_client():
    found = run(experiment(FedDBE()))
    assert set(found.server["model"]) == set(found.context.net.weights)
    assert set(found.progress.rows[0]) == {"mean", "size", "told"}


# what is sent


def test_bytes_and_passes_of_a_round():
    fields = {"ratio": ((0, 4), (0, 1), (1, 4), (2, 3))}
    found, fedavg = (run(experiment(m, **fields)) for m in (FedDBE(), FedAvg()))
    first, *rounds = found.rounds
    assert first["bytes_up"] == 8 * 8 * (WIDTH + 1)  # every client's mean and size
    assert first["gradient_passes"] == 2
    for new, a, b in zip((2, 1, 0, 2), rounds, fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == b["bytes_down"] + new * 8 * WIDTH  # the common mean, once for each client
        assert a["bytes_up"] == b["bytes_up"]
        assert a["gradient_passes"] == b["gradient_passes"]


def test_a_client_whose_reply_was_lost_is_told_the_common_mean_again():
    found, seen = watch({}, ratio=((0,),) * 6, rounds=6, drop=0.6)
    lost = [row["dropped"] == [0] for row in found.rounds[1:]]
    assert lost[0]
    assert not all(lost[:-1])
    heard = lost.index(False)
    assert [seen[r, 0][3] for r in range(6)] == [r <= heard for r in range(6)]
    assert all(torch.equal(common, found.server["mean"]) for _, _, common, _ in seen.values())


# the rest


@pytest.mark.parametrize(
    "hyper", [{"kappa": -0.1}, {"mean_momentum": 0.0}, {"mean_momentum": 1.1}, {"mean_momentum": -1.0}], ids=str
)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedDBE.{next(iter(hyper))} must be"):
        FedDBE(**hyper)


def test_defaults_leave_neither_part_off():
    assert FedDBE() == FedDBE(kappa=50.0, mean_momentum=1.0, personal_bias=True)
