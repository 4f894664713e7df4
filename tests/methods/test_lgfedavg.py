"""LG-FedAvg: its reference, FedAvg, FedPer and Local as its limits, which layers are whose, odd clients."""

from __future__ import annotations

import pytest
import torch

import checks
from harness import SIZES, agree, experiment, moved, run, world
from idiolect import Result
from idiolect.errors import UsageError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedper import FedPer
from idiolect.methods.lgfedavg import LGFedAvg
from idiolect.methods.local import Local
from idiolect.tree import Tree
from reference import lgfedavg as reference

EVERYONE = range(len(SIZES))
DEEP = {"network": "mlp", "network_options": {"hidden": (6, 5)}}  # three layers
BATCHNORM = {"images": True}  # convnet3, in which every convolution is followed by a norm layer
NETWORKS = pytest.mark.parametrize("fields", [DEEP, BATCHNORM], ids=["mlp", "convnet with BatchNorm"])
SHARED = pytest.mark.parametrize("shared", ["top", "bottom"])


def found(method, **fields) -> Result:
    return run(experiment(method, **fields))


def layers_of(fields) -> int:
    return len(experiment(FedAvg(), **fields).context().net.layers)


# the reference


@NETWORKS
@SHARED
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_engine_equals_reference(fields, shared, layers):
    one = found(LGFedAvg(shared, layers), **fields)
    agree(one, reference.run(world(one.run), shared, layers))


@SHARED
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes, layers, shared):
    one = found(LGFedAvg(shared, layers), sizes=sizes, **DEEP)
    agree(one, reference.run(world(one.run), shared, layers))


# its limits


@NETWORKS
def test_with_every_layer_shared_it_is_fedavg_to_the_bit(fields):
    one, fedavg = (found(m, **fields) for m in (LGFedAvg(layers=layers_of(fields)), FedAvg()))
    checks.same_shared(one, fedavg)
    checks.same_personal(one, fedavg)
    checks.apart(found(LGFedAvg(), **fields), fedavg)


@NETWORKS
def test_with_every_layer_private_it_is_local_to_the_bit(fields):
    one, local = (found(m, **fields) for m in (LGFedAvg("bottom", layers_of(fields)), Local()))
    checks.same_personal(one, local)
    assert not one.server["model"]
    assert sum(row["bytes_up"] + row["bytes_down"] for row in one.rounds) == 0
    checks.apart(found(LGFedAvg(), **fields), local)


@NETWORKS
def test_with_the_body_shared_it_is_fedper_to_the_bit(fields):
    one, fedper = (found(m, **fields) for m in (LGFedAvg("bottom"), FedPer()))
    checks.same_shared(one, fedper)
    checks.same_personal(one, fedper)
    checks.apart(found(LGFedAvg(), **fields), fedper)


def test_a_client_alone_is_fedavg_whatever_is_shared():
    fields = {"sizes": (9,), "ratio": 1.0}
    fedavg = found(FedAvg(), **fields)
    for method in (LGFedAvg(), LGFedAvg("bottom")):
        assert found(method, **fields).personal(0).equals(fedavg.personal(0))


# which layers are whose


@NETWORKS
def test_the_upper_layers_are_shared_not_the_lower_ones(fields):
    """The authors' code for CIFAR-10, and other public code, do the opposite."""
    one = found(LGFedAvg(), ratio=1.0, **fields)
    net = one.context.net
    assert set(one.server["model"]) == set(net.head)
    first = next(iter(net.layers.values()))
    for i in EVERYONE:
        assert set(one.private(i)["model"]) == set(net.body)
        assert one.personal(i).pick(net.head).equals(one.server["model"])
    own = [one.personal(i).pick(first) for i in EVERYONE]
    assert min(moved(a, b) for k, a in enumerate(own) for b in own[:k]) > 1e-4


@NETWORKS
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_top_and_bottom_split_the_network_at_the_same_place(fields, layers):
    top, bottom = (experiment(LGFedAvg(side, layers), **fields).context().state for side in ("top", "bottom"))
    assert set(top.server["model"]) == set(bottom.client["model"])
    assert set(bottom.server["model"]) == set(top.client["model"])
    assert not set(top.server["model"]) & set(top.client["model"])


def test_a_norm_layer_s_statistics_go_with_it():
    """The second layer from the top of this network is a norm layer."""
    context = experiment(LGFedAvg(layers=2), **BATCHNORM).context()
    norm = {f"body.block3.norm.{k}" for k in ("weight", "bias", "running_mean", "running_var")}
    assert set(context.state.server["model"]) == norm | set(context.net.head)
    assert "body.block2.norm.running_mean" in context.state.client["model"]
    one = found(LGFedAvg(layers=2), ratio=1.0, **BATCHNORM)
    means = {k: [one.personal(i)[f"body.{k}.norm.running_mean"] for i in EVERYONE] for k in ("block2", "block3")}
    assert not torch.equal(means["block2"][0], means["block2"][1])
    assert all(torch.equal(v, means["block3"][0]) for v in means["block3"])


@NETWORKS
def test_a_client_that_is_away_has_its_own_lower_and_the_newest_upper_layers(fields):
    one = found(LGFedAvg(), ratio=((0, 1), (1, 2), (1, 4), (2, 4)), **fields)
    early = found(LGFedAvg(), ratio=((0, 1),), rounds=1, **fields)
    body, initial = one.context.net.body, one.context.net.weights
    assert one.personal(0).pick(body).equals(early.personal(0).pick(body))
    assert one.personal(3).pick(body).equals(initial.pick(body))  # it never took part
    assert moved(one.server["model"], early.server["model"]) > 1e-3
    assert all(one.personal(i).pick(one.server["model"]).equals(one.server["model"]) for i in EVERYONE)


@SHARED
def test_shared_layers_are_weighted_by_samples(shared):
    """In the authors' code they are not."""
    checks.the_server_holds_the_mean_by_samples(LGFedAvg, shared=shared)


def test_lower_and_upper_layers_are_trained_by_the_same_steps():
    """Plain SGD by hand: the gradients of both are taken at the same weights, before either moves."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "epochs": 1, "batch_size": 64, "rounds": 1, "ratio": ((0,),)}
    one = found(LGFedAvg(), **plain)
    module = one.run.module().double()
    x, y = one.context.shards.part("train", 0)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    stepped = Tree({k: v.detach() - 0.1 * v.grad for k, v in module.named_parameters()})
    assert moved(one.personal(0), stepped) < 1e-14


# the rest


@NETWORKS
@SHARED
def test_bytes_and_passes_of_a_round(fields, shared):
    one = found(LGFedAvg(shared), **fields)
    part = one.context.net.head if shared == "top" else one.context.net.body
    for row in one.rounds[1:]:
        assert row["bytes_down"] == row["bytes_up"] == 5 * 8 * part.size
        assert row["gradient_passes"] == pytest.approx(2)


@pytest.mark.parametrize("hyper", [{"shared": "middle"}, {"shared": ""}, {"layers": 0}, {"layers": -1}], ids=str)
def test_impossible_values_are_refused(hyper):
    with pytest.raises(UsageError, match=f"LGFedAvg.{next(iter(hyper))} must be"):
        LGFedAvg(**hyper)


def test_more_layers_than_there_are_are_refused():
    with pytest.raises(UsageError, match="The network has 2 layers; the last 3 were asked for"):
        found(LGFedAvg(layers=3))


def test_defaults_share_the_head():
    assert LGFedAvg() == LGFedAvg(shared="top", layers=1)
