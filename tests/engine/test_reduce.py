"""Replies are combined in the order in which they are given: weighted means, sums, rows; what breaks the contract is named."""

import gc

import pytest
import torch

from idiolect.engine.reduce import Reduction
from idiolect.errors import ContractError
from idiolect.method import Up
from idiolect.tree import Tree


def model(seed):
    draw = torch.Generator().manual_seed(seed)
    return Tree({"w": torch.randn(4, 3, generator=draw), "b": torch.randn(3, generator=draw)})


SERVER = {"model": model(0)}


def reduced(replies, server=SERVER):
    """`replies`: (client, up, samples)."""
    reduction = Reduction("fedavg.local", server)
    for reply in replies:
        reduction.add(*reply)
    return reduction


def test_a_mean_is_weighted_by_samples():
    sizes = {4: 7, 1: 2, 3: 11}
    up = reduced([(i, Up(mean={"model": model(i)}), n) for i, n in sizes.items()]).result()
    for name in ("w", "b"):
        exact = sum(n * model(i)[name].double() for i, n in sizes.items()) / 20
        torch.testing.assert_close(up.mean["model"][name].double(), exact, rtol=0, atol=1e-6)
    assert up.weight == 20


def test_a_reply_may_give_its_own_weight():
    own = reduced([(i, Up(mean={"model": model(i)}, weight=1), n) for i, n in ((0, 5), (1, 50))]).result()
    plain = reduced([(i, Up(mean={"model": model(i)}), 1) for i in (0, 1)]).result()
    assert own.mean["model"].equals(plain.mean["model"])
    fractions = reduced([(i, Up(mean={"model": model(i)}, weight=w), 1) for i, w in ((0, 0.25), (1, 0.75))]).result()
    exact = model(0) * 0.25 + model(1) * 0.75
    assert torch.allclose(fractions.mean["model"]["w"], exact["w"], atol=1e-6)


def test_equal_replies_give_exactly_themselves():
    third = Tree({"w": torch.full((4, 3), 1 / 3), "b": torch.full((3,), 0.1)})
    up = reduced([(i, Up(mean={"model": third.clone()}), n) for i, n in enumerate((3, 7, 11, 13, 17))]).result()
    assert up.mean["model"].equals(third)


def test_one_reply_is_its_own_mean_and_a_copy():
    sent = model(1)
    up = reduced([(0, Up(mean={"model": sent}), 3)]).result()
    assert up.mean["model"].equals(sent)
    assert up.mean["model"]["w"].data_ptr() != sent["w"].data_ptr()


def test_a_reply_of_no_weight_counts_for_nothing():
    replies = [(0, Up(mean={"model": model(0)}), 4), (1, Up(mean={"model": model(1)}, weight=0), 9)]
    assert reduced(replies).result().mean["model"].equals(model(0))
    assert reduced(replies[::-1]).result().mean["model"].equals(model(0))
    assert reduced(replies[1:]).result().mean["model"].equals(model(1))  # the only one there is


def test_a_sum_ignores_weights():
    up = reduced([(i, Up(sum={"c": model(i), "n": torch.tensor(1.0)}), 10 * i + 1) for i in range(3)]).result()
    assert torch.equal(up.sum["c"]["w"], model(0)["w"] + model(1)["w"] + model(2)["w"])
    assert float(up.sum["n"]) == 3


def test_whole_numbers_can_be_summed():
    up = reduced([(i, Up(sum={"count": torch.tensor([i, 1])}), 1) for i in range(4)]).result()
    assert up.sum["count"].tolist() == [6, 4]


def test_rows_stand_in_the_order_of_ids_whatever_came_first():
    replies = [(i, Up(rows={"model": model(i), "loss": torch.tensor(float(i))}), 1) for i in (5, 2, 9)]
    up = reduced(replies).result()
    assert up.rows["loss"].tolist() == [2.0, 5.0, 9.0]
    assert torch.equal(up.rows["model"]["w"], torch.stack([model(i)["w"] for i in (2, 5, 9)]))
    reduction = reduced(replies)
    assert sorted(reduction.weights) == [2, 5, 9]


def test_replies_may_be_overwritten_once_they_are_added():
    """They are views of a buffer that the next reply will fill."""
    reduction = Reduction("m.local", SERVER)
    buffer = model(1)
    for i in (1, 2):
        for k, v in model(i).items():
            buffer[k].copy_(v)
        reduction.add(i, Up(mean={"model": buffer}, sum={"s": buffer}, rows={"r": buffer}), 1)
    for v in buffer.values():
        v.fill_(torch.nan)
    up = reduction.result()
    assert torch.allclose(up.mean["model"]["w"], (model(1)["w"] + model(2)["w"]) / 2)
    assert torch.equal(up.sum["s"]["b"], model(1)["b"] + model(2)["b"])
    assert torch.equal(up.rows["r"]["w"][1], model(2)["w"])


def test_the_order_of_adding_decides_the_bits_and_nothing_else_does():
    replies = [(i, Up(mean={"model": model(i)}), n) for i, n in enumerate((3, 7, 11, 13))]
    assert reduced(replies).result().mean["model"].equals(reduced(replies).result().mean["model"])
    other = reduced(replies[::-1]).result().mean["model"]
    assert torch.allclose(other["w"], reduced(replies).result().mean["model"]["w"], atol=1e-6)


def test_the_mean_is_the_plain_one_to_the_bit():
    """mean += (reply - mean) weight / total, tensor by tensor, in the order of the replies."""
    sizes = (3, 7, 11, 13)
    mean, total = dict(model(0)), float(sizes[0])
    for i, n in enumerate(sizes[1:], 1):
        total += n
        mean = {k: torch.lerp(mean[k], v, n / total) for k, v in model(i).items()}
    found = reduced([(i, Up(mean={"model": model(i)}), n) for i, n in enumerate(sizes)]).result()
    assert found.mean["model"].equals(Tree(mean))


def held():
    """Bytes of all tensors that are alive in this process, each storage once."""
    alive = [o.untyped_storage() for o in gc.get_objects() if type(o) is torch.Tensor and o.device.type == "cpu"]
    return sum({s.data_ptr(): s.nbytes() for s in alive}.values())


def grown(kind, replies):
    """What is held at most beyond what was, in models: while each reply is added, and after `result`."""
    server = {"model": Tree({f"w{k}": torch.ones(1000) for k in range(20)})}
    reduction, start, most = Reduction("m.local", server), held(), 0.0
    for i in range(replies):
        up = Up(**{kind: {"model": server["model"].map(lambda v, i=i: v + i)}})
        reduction.add(i, up, 1 + i)
        most = max(most, (held() - start) / server["model"].nbytes)
        del up
    stacked, peak = torch.stack, [0]

    def watched(tensors):
        row = stacked(tensors)
        peak.append(held() - start)
        return row

    torch.stack = watched
    try:
        result = reduction.result()
    finally:
        torch.stack = stacked
    return most, max(peak) / server["model"].nbytes, (held() - start) / server["model"].nbytes, result


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_mean_and_a_sum_hold_one_model_however_many_reply(kind):
    few, many = grown(kind, 3), grown(kind, 50)
    assert few[:3] == many[:3] == (2.0, 0.0, 1.0)  # the mean, and the reply that is being added


def test_rows_are_held_once_and_one_entry_twice_while_they_are_stacked():
    most, peak, after, result = grown("rows", 20)
    assert (most, after) == (21.0, 20.0)
    assert 20.0 < peak <= 20.0 + 20 / 20  # of 20 entries, 20 rows
    assert result.rows["model"]["w7"][:, 0].tolist() == [1.0 + i for i in range(20)]


def test_nothing_sent_is_nothing():
    up = reduced([(0, Up(), 3), (1, Up(), 4)]).result()
    assert (up.mean, up.sum, up.rows) == ({}, {}, {})
    assert Reduction("m.local", SERVER).result().mean == {}


@pytest.mark.parametrize(
    ("replies", "sentence"),
    [
        (
            [Up(mean={"model": Tree({**model(1), "x": torch.ones(1)})})],
            'm.local returned up.mean["model"] with 3 tensors, init declared 2; extra: x (client 0). '
            "Send exactly what init declared, e.g. w.pick(...).",
        ),
        (
            [Up(mean={"model": model(1).pick(["w"])})],
            'm.local returned up.mean["model"] with 1 tensors, init declared 2; lacking: b (client 0). '
            "Send exactly what init declared, e.g. w.pick(...).",
        ),
        (
            [Up(mean={"model": model(1).to(torch.float64)})],
            "m.local returned up.mean[\"model\"] entry 'w' as torch.float64 [4, 3], init declared torch.float32 [4, 3] "
            "(client 0).",
        ),
        (
            [Up(mean={"model": torch.ones(3)})],
            'm.local returned up.mean["model"] as Tensor, init declared Tree (client 0).',
        ),
        (
            [Up(mean={"count": torch.tensor([1, 2])})],
            'm.local returned up.mean["count"] of torch.int64, which has no mean (client 0).',
        ),
        (
            [Up(sum={"a": torch.ones(1)}), Up(sum={"b": torch.ones(1)})],
            "m.local returned up.sum with slots b, other clients a (client 1). Every reply has the same slots.",
        ),
        (
            [Up(mean={"model": model(1)}), Up()],
            "m.local returned up.mean with slots none, other clients model (client 1). Every reply has the same slots.",
        ),
        (
            [Up(rows={"p": torch.ones(2)}), Up(rows={"p": torch.ones(3)})],
            "m.local returned up.rows[\"p\"] entry '' as torch.float32 [3], init declared torch.float32 [2] (client 1).",
        ),
    ],
)
def test_what_breaks_the_contract_is_named(replies, sentence):
    reduction, last = Reduction("m.local", SERVER), len(replies) - 1
    for i, up in enumerate(replies[:-1]):
        reduction.add(i, up, 1)
    with pytest.raises(ContractError) as error:
        reduction.add(last, replies[last], 1)
    assert str(error.value) == sentence
