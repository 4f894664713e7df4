"""FedBABU: its reference, FedRep, FineTune and Local as its limits, the head that nobody trains, the copy that is tuned."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import checks
from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result, catalogue
from idiolect.errors import UsageError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedbabu import FedBABU
from idiolect.methods.fedrep import FedRep
from idiolect.methods.local import Local
from idiolect.tree import Tree
from reference import fedbabu as reference

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
PARTS = pytest.mark.parametrize("part", ["all", "head"])
EVERYONE = range(len(SIZES))


def found(method, **fields) -> Result:
    return run(experiment(method, **fields))


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [{}, {"tune_epochs": 2, "tune_part": "head"}, {"tune_epochs": 1}, {"tune_epochs": 0}],
    ids=str,
)
def test_engine_equals_reference(hyper, images):
    one = found(FedBABU(**hyper), images=images)
    agree(one, reference.run(world(one.run), **hyper))


@PARTS
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, part):
    one = found(FedBABU(tune_part=part), sizes=sizes)
    agree(one, reference.run(world(one.run), tune_part=part))


# its limits


@IMAGES
def test_its_bodies_are_those_of_fedrep_without_a_head_phase_to_the_bit(images):
    one, fedrep = (found(m, images=images) for m in (FedBABU(), FedRep(head_epochs=0)))
    checks.same_shared(one, fedrep)
    fedavg = found(FedAvg(), images=images)
    assert moved(one.server["model"], fedavg.server["model"].pick(one.server["model"])) > 1e-3


@IMAGES
@PARTS
def test_its_tuning_is_finetune_s(images, part):
    """To the bit; of the head alone to rounding, whose features FedBABU computes once."""
    fields = {"finetune.epochs": 3, "finetune.part": part, "fedbabu.tune_epochs": 0}
    wrapped = found(catalogue.build("fedbabu+finetune", fields), images=images)
    one, untuned = (found(FedBABU(e, part), images=images) for e in (3, 0))
    checks.same_shared(one, wrapped)
    checks.apart(one, untuned)
    assert all(moved(one.personal(i), wrapped.personal(i)) <= (0 if part == "all" else 1e-12) for i in EVERYONE)


@IMAGES
def test_without_rounds_it_is_a_round_of_local(images):
    """In full batches, whose order does not matter."""
    fields = {"images": images, "batch_size": 64}
    one, local = found(FedBABU(2), rounds=0, **fields), found(Local(), rounds=1, ratio=1.0, **fields)
    assert all(moved(one.personal(i), local.personal(i)) < 1e-12 for i in EVERYONE)


def test_a_client_alone_is_a_network_whose_head_has_no_optimiser():
    one = found(FedBABU(0), sizes=(9,), ratio=1.0, batch_size=64, weight_decay=0.1)
    module = one.run.module().double()
    x, y = one.context.shards.part("train", 0)
    for r in range(4):
        optimizer = torch.optim.SGD(module.body.parameters(), one.context.rate(r), momentum=0.5, weight_decay=0.1)
        for _ in range(2):
            module.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
    expected = Tree({k: v.detach() for k, v in module.named_parameters()})
    assert moved(one.personal(0), expected) < 1e-13


# the head


@IMAGES
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_the_head_stays_the_initial_one_to_the_bit(images, weight_decay):
    """A gradient of 0, as in other public code, would let momentum and weight decay move it."""
    one = found(FedBABU(0), images=images, weight_decay=weight_decay, momentum=0.9, lr=0.02)
    net = one.context.net
    for i in EVERYONE:
        assert one.private(i)["model"].equals(net.head)
        assert one.personal(i).pick(net.head).equals(net.head)
        assert one.personal(i).pick(net.body).equals(one.server["model"])
    assert set(one.server["model"]) == set(net.body)
    assert moved(one.server["model"], net.body) > 1e-2


def test_the_frozen_part_is_the_head_not_the_body():
    """Other papers describe it the other way round."""
    one = found(FedBABU(0), rounds=1)
    net = one.context.net
    assert all(moved(one.server["model"].pick([k]), net.body.pick([k])) > 1e-4 for k in net.body)


# the copy


@IMAGES
def test_everybody_tunes_the_newest_shared_body(images):
    """Public code tunes what a client last had: its own body before averaging, or one of many rounds ago."""
    one = found(FedBABU(tune_part="head"), images=images, ratio=((0, 1), (1, 2), (1, 4), (2, 4)))
    net = one.context.net
    for i in EVERYONE:
        assert one.personal(i).pick(net.body).equals(one.server["model"])
        assert moved(one.personal(i).pick(net.head), net.head) > 1e-4


def test_tuning_all_moves_body_and_head():
    one = found(FedBABU())
    net = one.context.net
    for i in EVERYONE:
        assert moved(one.personal(i).pick(net.body), one.server["model"]) > 1e-4
        assert moved(one.personal(i).pick(net.head), net.head) > 1e-4


@IMAGES
def test_evaluating_leaves_nothing_behind(images):
    often, once = (found(FedBABU(), images=images, evaluate_every=k) for k in (1, 1000))
    longer = found(FedBABU(tune_epochs=9, tune_part="head"), images=images)
    for other in (once, longer):
        checks.same_shared(often, other)
        assert all(often.private(i)["model"].equals(other.private(i)["model"]) for i in EVERYONE)
    checks.same_personal(often, once)


def test_the_copy_fits_its_client_better_the_longer_it_is_tuned():
    results = [found(FedBABU(epochs)) for epochs in (0, 3, 30)]
    task = results[0].context.task
    for i in EVERYONE:
        x, y = results[0].context.shards.part("train", i)
        losses = [float(task.losses(task.logits(r.personal(i), x), y).mean()) for r in results]
        assert losses[0] > losses[1] > losses[2]


@PARTS
def test_one_step_of_tuning_by_hand(part):
    """From the received body under the initial head, at the rate of the next round."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "batch_size": 64}
    one, before = found(FedBABU(1, part), **plain), found(FedBABU(0), **plain)
    module = one.run.module().double()
    for i in EVERYONE:
        module.load_state_dict(dict(before.personal(i)))
        module.zero_grad()
        x, y = one.context.shards.part("train", i)
        cross_entropy(module(x), y).backward()
        lr = one.context.rate(4)
        rates = {k: lr if part == "all" or k.startswith("head.") else 0.0 for k, _ in module.named_parameters()}
        expected = Tree({k: v.detach() - rates[k] * v.grad for k, v in module.named_parameters()})
        assert moved(one.personal(i), expected) < 1e-14


# the rest


def test_bodies_are_weighted_by_samples():
    """In the authors' code they are not."""
    checks.the_server_holds_the_mean_by_samples(FedBABU)


@IMAGES
def test_bytes_and_passes_of_a_round(images):
    """The head is never sent; tuning is not counted."""
    one = found(FedBABU(), images=images)
    for row in one.rounds[1:]:
        assert row["bytes_down"] == row["bytes_up"] == 5 * 8 * one.context.net.body.size
        assert row["gradient_passes"] == pytest.approx(2)


@pytest.mark.parametrize("hyper", [{"tune_epochs": -1}, {"tune_part": "body"}, {"tune_part": ""}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"FedBABU.{next(iter(hyper))} must be"):
        FedBABU(**hyper)


def test_a_network_without_a_body_is_refused():
    with pytest.raises(UsageError, match="FedBABU trains the body alone, and the network has none"):
        found(FedBABU(), network="logistic", network_options={})


def test_defaults_are_the_paper_s():
    assert FedBABU() == FedBABU(tune_epochs=5, tune_part="all")
