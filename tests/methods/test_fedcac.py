"""FedCAC: its reference, FedAvg and Local at its ends, what is critical, who is combined with whom, odd clients."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import pytest
import torch

from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.methods import fedcac
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedcac import FedCAC, overlaps, packed, unpacked
from idiolect.methods.local import Local
from idiolect.tree import Tree, stack
from reference import fedcac as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
EVERYONE = range(len(SIZES))


class Alone(FedCAC):
    """Nobody has a partner: the threshold lies above every overlap."""

    def partners(self, overlap, t):
        return torch.eye(len(overlap), dtype=overlap.dtype)


class Watched(FedCAC):
    """Keeps what each client is sent and what it says."""

    seen: ClassVar[dict] = {}

    def local(self, me, down, mine):
        up, mine = super().local(me, down, mine)
        self.seen[me.round, me.id] = down["model"], up.rows["trained"], up.rows["critical"]
        return up, mine


def watch(hyper: dict | None = None, **fields: Any) -> tuple[Result, dict]:
    Watched.seen = {}
    return run(experiment(Watched(**(hyper or {})), **fields)), Watched.seen


def masks(rows: list[dict[str, list[int]]]) -> Tree:
    """Packed masks of several clients, as the server gets them."""
    return stack([Tree({k: packed(torch.tensor(v) > 0) for k, v in row.items()}) for row in rows])


def opened(mask: Tree, like: Tree) -> Tree:
    return Tree({k: unpacked(mask[k])[: v.numel()].view_as(v) for k, v in like.items()})


# the reference


def compared(hyper: dict, **fields: Any) -> None:
    found = run(experiment(FedCAC(**hyper), **fields))
    agree(found, reference.run(world(found.run), **hyper))


@IMAGES
@pytest.mark.parametrize(
    "hyper", [{}, {"tau": 0.3, "beta": 6}, {"tau": 0.9, "beta": 2}, {"tau": 1.0, "beta": 3}], ids=str
)
def test_engine_equals_reference(hyper, images):
    compared(hyper, images=images)
    compared(hyper, images=images, ratio=1.0, rounds=2)


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1), (4,)], ids=str)
@pytest.mark.parametrize("ratio", [0.65, 1.0])
def test_clients_of_one_sample_or_one_class(sizes, ratio):
    compared({"beta": 3}, sizes=sizes, ratio=ratio)


# what it becomes


@IMAGES
def test_with_nothing_critical_it_is_fedavg_to_the_bit(images):
    found, fedavg, between = (run(experiment(m, images=images)) for m in (FedCAC(tau=0.0), FedAvg(), FedCAC()))
    assert found.server["model"].equals(fedavg.server["model"])
    assert all(found.personal(i).equals(fedavg.personal(i)) for i in EVERYONE)
    assert moved(between.server["model"], fedavg.server["model"]) > 1e-3
    assert max(moved(between.personal(i), between.server["model"]) for i in EVERYONE) > 1e-2


def test_with_all_critical_and_no_partners_it_is_local_to_the_bit():
    """Everybody takes part from the first round on: who comes later starts from the shared model."""
    found, local, between = (run(experiment(m, ratio=1.0)) for m in (Alone(tau=1.0), Local(), FedCAC(beta=2)))
    assert all(found.personal(i).equals(local.personal(i)) for i in EVERYONE)
    assert max(moved(between.personal(i), local.personal(i)) for i in EVERYONE) > 1e-2


def test_with_all_critical_and_everybody_a_partner_it_is_the_uniform_fedavg():
    """All overlaps are 1, and so is their threshold at any time."""
    fields = {"sizes": (8,) * 8, "ratio": 1.0}
    found, fedavg = (run(experiment(m, **fields)) for m in (FedCAC(tau=1.0, beta=2), FedAvg()))
    assert max(moved(found.personal(i), fedavg.personal(i)) for i in EVERYONE) < 1e-12


@IMAGES
def test_identical_clients_are_fedavg_and_overlap_wholly(images):
    fed = federation((6, 6), images)
    same = dataclasses.replace(fed, **{k: (getattr(fed, k)[0],) * 3 for k in ("train", "validation", "test")})
    fields = {"federation": same, "ratio": 1.0, "batch_size": 8, "images": images}
    found, seen = watch(**fields)
    critical = stack([seen[3, i][2] for i in range(3)])
    torch.testing.assert_close(overlaps(critical), torch.ones(3, 3, dtype=torch.float64), rtol=0, atol=1e-15)
    fedavg = run(experiment(FedAvg(), **fields))
    assert all(moved(found.personal(i), fedavg.personal(i)) < 1e-12 for i in range(3))


def test_clients_of_like_labels_overlap_more():
    """Two groups of clients with two classes each."""
    fed = federation((24,) * 6)
    x, y = fed.dataset.x.clone(), torch.arange(len(fed.dataset.y)) % 2
    for i in range(6):
        rows = torch.as_tensor(fed.train[i])
        y[rows] = y[rows] + (i % 2)  # classes 0 and 1, or 1 and 2
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) + 2.0 * y[:, None]
    fed = dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, x=x, y=y))
    _, seen = watch(federation=fed, ratio=1.0, rounds=3)
    O = overlaps(stack([seen[2, i][2] for i in range(6)]))  # noqa: E741
    alike = (torch.arange(6)[:, None] + torch.arange(6)) % 2 == 0
    assert float(O[alike & ~torch.eye(6, dtype=torch.bool)].mean()) > float(O[~alike].mean()) + 0.02


# what is critical


def test_critical_by_hand():
    def mask(before: list, after: list, tau: float) -> list[int]:
        one, two = (torch.tensor(v, dtype=torch.float64) for v in (before, after))
        return FedCAC(tau=tau).critical(one, two).int().tolist()

    before, after = (
        [1.0, 1.0, 2.0, -1.0, 3.0],
        [1.5, 1.0, 1.0, -3.0, 3.1],
    )  # |(after - before) after|: .75, 0, 1, 6, .31
    assert mask(before, after, 0.4) == [0, 0, 1, 1, 0]
    assert mask(before, after, 0.79) == [1, 0, 1, 1, 0]  # int(3.95)
    assert mask(before, after, 0.1) == [0] * 5
    assert mask([0.0, 5.0], [1.0, 5.2], 0.5) == [0, 1]  # weighed by the weight itself: 1 and 1.04


def test_what_did_not_move_is_not_critical():
    """Public code takes the smallest positive sensitivity where the share reaches into the zeros."""
    w = torch.tensor([1.0, -2.0, 3.0, 0.5])
    assert FedCAC(tau=1.0).critical(w, w).tolist() == [False] * 4
    assert FedCAC(tau=1.0).critical(w, w * torch.tensor([1.0, 1.1, 1.0, 0.9])).tolist() == [False, True, False, True]
    assert FedCAC(tau=0.75).critical(w, torch.zeros(4)).tolist() == [False] * 4  # moved to 0


def test_ties_are_critical_together_and_no_size_is_too_small():
    one, two = torch.ones(4), torch.tensor([2.0, 2.0, 2.0, 1.5])
    assert FedCAC(tau=0.5).critical(one, two).tolist() == [True, True, True, False]
    tiny = FedCAC(tau=0.5).critical(one.double(), 1 + 1e-14 * torch.arange(4).double())
    assert tiny.tolist() == [False, False, True, True]


@IMAGES
def test_each_tensor_has_its_own_share(images):
    """Of weights and normalisation alike; statistics are none of them."""
    found, seen = watch({"tau": 0.4}, images=images, rounds=2, ratio=1.0)
    net = found.context.net
    for i in EVERYONE:
        before, after, mask = seen[1, i]
        assert mask.keys() == after.keys() == net.trainable.keys()
        for k, m in opened(mask, net.trainable).items():
            s = ((after[k] - before[k]) * after[k]).abs()
            count = int(0.4 * s.numel())
            assert int(m.sum()) == count
            if count:
                assert float(s[m].min()) > float(s[~m].max())
    assert {k for k in net.weights if k not in net.buffers} == set(net.trainable)


# overlaps and partners


def drawn(clients: int, seed: int = 0) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        {k: (torch.rand(n, generator=draw) < 0.4).int().tolist() for k, n in (("a", 11), ("b", 3), ("c", 40))}
        for _ in range(clients)
    ]


def test_overlaps_are_the_reference_s(monkeypatch):
    rows = drawn(6)
    plain = [{k: torch.tensor(v) > 0 for k, v in row.items()} for row in rows]
    expected = torch.tensor([[reference.overlap(a, b) for b in plain] for a in plain], dtype=torch.float64)
    for chunk in (fedcac.CHUNK, 1, 3):
        monkeypatch.setattr(fedcac, "CHUNK", chunk)
        torch.testing.assert_close(overlaps(masks(rows)), expected, rtol=0, atol=1e-15)


def test_overlaps_by_hand():
    rows = [{"a": [1, 1, 0], "b": [1]}, {"a": [1, 0, 0], "b": [1]}, {"a": [0, 0, 0], "b": [0]}]
    O = overlaps(masks(rows))  # noqa: E741
    assert O.diagonal().tolist() == [1, 1, 0]
    assert float(O[0, 1]) == pytest.approx(1 - 1 / 6)  # of one's own: not symmetric
    assert float(O[1, 0]) == pytest.approx(1 - 1 / 4)
    assert O[2].tolist() == [0, 0, 0]  # nothing critical: no division by 0
    assert O[:2, 2].tolist() == [0.5, 0.5]


PAIRS = torch.tensor([[1, 0.2, 0.4], [0.6, 1, 0.8], [0.0, 0.4, 1]], dtype=torch.float64)  # the mean of pairs is 0.4


@pytest.mark.parametrize(
    ("t", "beta", "expected"),
    [
        (0, 100, [[1, 0, 0], [1, 1, 1], [0, 0, 1]]),  # 0.404: not the mean itself
        (0, 4, [[1, 0, 0], [1, 1, 1], [0, 0, 1]]),  # 0.5
        (2, 4, [[1, 0, 0], [0, 1, 1], [0, 0, 1]]),  # 0.7
        (3, 4, [[1, 0, 0], [0, 1, 1], [0, 0, 1]]),  # the largest passes, to rounding
        (4, 4, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),  # 0.9: nobody
        (400, 4, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    ],
)
def test_partners_by_hand(t, beta, expected):
    assert FedCAC(beta=beta).partners(PAIRS, t).tolist() == expected
    pairs = PAIRS[~torch.eye(3, dtype=torch.bool)]
    bar = reference.threshold(PAIRS, t, beta)
    assert bar == pytest.approx(float(pairs.mean() + (t + 1) / beta * (pairs.max() - pairs.mean())))


def test_partners_become_fewer():
    overlap = overlaps(masks(drawn(8)))
    counts = [int(FedCAC(beta=10).partners(overlap, t).sum()) for t in range(12)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[5] > counts[9] > counts[10] == 8


def test_one_participant_has_no_partner():
    """Public code divides by the number of pairs."""
    assert FedCAC().partners(torch.ones(1, 1).double(), 0).tolist() == [[1.0]]
    found, seen = watch(ratio=((2,),), rounds=1)
    trained = seen[0, 2][1]
    assert moved(found.personal(2).pick(trained), trained) < 1e-15


# the combination


def by_hand(found: Result, seen: dict, r: int) -> dict[int, tuple[Tree, Tree]]:
    """What a round leaves its participants: the mean of their partners, and where it counts."""
    ids = sorted(i for k, i in seen if k == r)
    method, critical = found.run.method, [seen[r, i][2] for i in ids]
    partner = method.partners(overlaps(stack(critical)), r)
    result = {}
    for k, i in enumerate(ids):
        mine = [seen[r, j][1] for j, p in zip(ids, partner[k].tolist(), strict=True) if p]
        mean = Tree({n: sum(w[n] for w in mine) / len(mine) for n in mine[0]})
        result[i] = mean, opened(critical[k], mean)
    return result


def combined(server: Tree, mean: Tree, mask: Tree) -> Tree:
    return server | Tree({k: torch.where(mask[k], v, server[k]) for k, v in mean.items()})


@IMAGES
def test_means_of_partners_exist_after_the_first_round(images):
    """Public code sets critical weights back to their initial values there."""
    found, seen = watch({"beta": 4}, images=images, rounds=1, ratio=((1, 4, 5, 7),))
    kept = by_hand(found, seen, 0)
    initial = found.context.net.trainable
    for i in EVERYONE:
        if i not in kept:
            assert found.personal(i).equals(found.server["model"])
            continue
        assert moved(found.personal(i), combined(found.server["model"], *kept[i])) < 1e-12
        for k, m in kept[i][1].items():
            assert not bool((found.personal(i)[k] == initial[k])[m].any())


def test_each_client_gets_its_own_partners_mean_also_when_replies_are_lost():
    found, seen = watch({"beta": 2}, rounds=1, ratio=1.0, drop=0.4)
    lost = found.rounds[1]["dropped"]
    assert 0 < len(lost) < len(SIZES) - 2
    kept = by_hand(found, {k: v for k, v in seen.items() if k[1] not in lost}, 0)
    for i in EVERYONE:
        expected = found.server["model"] if i in lost else combined(found.server["model"], *kept[i])
        assert moved(found.personal(i), expected) < 1e-12
    assert all(moved(kept[i][0], kept[j][0]) > 1e-3 for i, j in itertools.combinations(kept, 2))


def test_a_client_that_is_away_keeps_its_critical_weights_and_gets_the_newest_others():
    found, seen = watch({"beta": 3}, ratio=((0, 1, 4), (2, 5, 6), (2, 5, 7)), rounds=3)
    for i in (0, 1, 4):
        assert moved(found.personal(i), combined(found.server["model"], *by_hand(found, seen, 0)[i])) < 1e-12
    after = by_hand(found, seen, 1)
    assert moved(found.personal(6), combined(found.server["model"], *after[6])) < 1e-12
    assert moved(seen[2, 2][0], found.personal(2)) > 1e-3


def test_training_starts_from_the_combination():
    one = run(experiment(FedCAC(), ratio=1.0, rounds=1))
    _, seen = watch(ratio=1.0, rounds=2)
    assert all(seen[1, i][0].equals(one.personal(i)) for i in EVERYONE)
    assert moved(one.personal(0), one.personal(1)) > 1e-2


def test_statistics_are_the_shared_ones():
    found, _ = watch(images=True, rounds=2)
    buffers = found.context.net.buffers
    assert buffers
    assert all(found.personal(i).pick(buffers).equals(found.server["model"].pick(buffers)) for i in EVERYONE)


def test_without_a_learning_rate_nothing_is_critical():
    found, seen = watch(lr=0.0)
    assert all(not v.any() for _, _, mask in seen.values() for v in mask.values())
    assert all(found.personal(i).equals(found.context.net.weights) for i in EVERYONE)


# the rest


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_masks_take_one_bit_an_entry(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    bits = packed(mask)
    assert bits.dtype == torch.uint8
    assert len(bits) == -(-mask.numel() // 8)
    assert torch.equal(unpacked(bits)[: mask.numel()].view(shape), mask)
    assert not unpacked(bits)[mask.numel() :].any()
    assert torch.equal(unpacked(torch.stack([bits, 0 * bits]))[0], unpacked(bits))


@IMAGES
def test_bytes_and_passes_of_a_round(images):
    found, fedavg = (run(experiment(m, images=images)) for m in (FedCAC(), FedAvg()))
    bits = sum(-(-v.numel() // 8) for v in found.context.net.trainable.values())
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == b["bytes_down"]
        assert a["bytes_up"] == b["bytes_up"] + 5 * bits
        assert a["gradient_passes"] == b["gradient_passes"]


@pytest.mark.parametrize("hyper", [{"tau": -0.1}, {"tau": 1.1}, {"beta": 0}, {"beta": -3}], ids=str)
def test_impossible_values_are_refused(hyper):
    """Among them the defaults of public code, beta 0."""
    with pytest.raises(UsageError, match=f"FedCAC.{next(iter(hyper))} must be"):
        FedCAC(**hyper)


def test_defaults_are_the_paper_s_for_cifar_10():
    assert FedCAC() == FedCAC(tau=0.5, beta=100)
