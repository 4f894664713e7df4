"""FedBN: its reference, FedAvg and Local as its limits, which layers stay with a client, odd clients."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import checks
from harness import SIZES, agree, experiment, federation, moved, run, world
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedbn import FedBN
from idiolect.methods.local import Local
from idiolect.nets import Network
from reference import fedbn as reference

EVERYONE = range(len(SIZES))
NETWORKS = {
    "convnet with BatchNorm": {"images": True},
    "transformer with LayerNorm": {
        "images": True, "network": "tinyvit", "network_options": {"dim": 8, "depth": 1, "heads": 2},
    },
    "mlp without": {},
}  # fmt: skip
IMAGES = {"images": True}


def both(fields: dict, *methods):
    return (run(experiment(m, **fields)) for m in methods)


# the reference


@pytest.mark.parametrize("fields", NETWORKS.values(), ids=NETWORKS)
def test_engine_equals_reference(fields):
    found = run(experiment(FedBN(), **fields))
    agree(found, reference.run(world(found.run)))


@pytest.mark.parametrize("sizes", [(6, 1, 1, 3, 9), (1, 1, 1, 1)], ids=str)
def test_clients_of_one_sample_or_one_class(sizes):
    found = run(experiment(FedBN(), sizes=sizes, **NETWORKS["transformer with LayerNorm"]))
    agree(found, reference.run(world(found.run)))


def test_a_client_of_one_sample_keeps_the_statistics_it_has():
    """One sample has no variance to normalise by: batch normalisation is in eval mode."""
    found = run(experiment(FedBN(), sizes=(6, 1, 4), images=True, ratio=1.0))
    single, other = (found.private(i)["model"] for i in (1, 0))
    initial, buffers = found.context.net.weights, sorted(found.context.net.buffers)
    assert single.pick(buffers).equals(initial.pick(buffers))
    assert moved(single.drop(buffers), initial.pick(single.drop(buffers))) > 1e-4
    assert moved(other.pick(buffers), initial.pick(buffers)) > 1e-2


# FedAvg and Local as its limits


def test_without_normalisation_layers_it_is_fedavg_to_the_bit():
    found, fedavg = both({}, FedBN(), FedAvg())
    checks.same_shared(found, fedavg)
    checks.same_personal(found, fedavg)
    assert all(not found.private(i)["model"] for i in EVERYONE)


def test_with_no_layer_kept_it_is_fedavg_to_the_bit_and_with_all_kept_local():
    found, shared, private, fedavg, local = both(
        IMAGES, FedBN(), checks.all_shared(FedBN)(), checks.all_private(FedBN)(), FedAvg(), Local()
    )
    checks.same_shared(shared, fedavg)
    checks.same_personal(private, local)
    checks.apart(found, fedavg)
    checks.apart(found, local)


def test_a_client_alone_is_fedavg_to_the_bit():
    fields = {"images": True, "sizes": (9,), "ratio": 1.0}
    found, fedavg = both(fields, FedBN(), FedAvg())
    assert found.personal(0).equals(fedavg.personal(0))


def test_in_the_first_round_what_is_shared_is_fedavg_s_to_the_bit():
    found, fedavg = both(IMAGES | {"rounds": 1}, FedBN(), FedAvg())
    shared = found.server["model"]
    assert shared.equals(fedavg.server["model"].pick(shared))
    later, fedavg = both(IMAGES, FedBN(), FedAvg())
    assert moved(later.server["model"], fedavg.server["model"]) > 1e-3


# which layers stay


def norm_names(module: nn.Module) -> set[str]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)
    return {
        f"{name}.{entry}"
        for name, layer in module.named_modules()
        if isinstance(layer, kinds)
        for entry, value in [*layer.named_parameters(), *layer.named_buffers()]
        if value.is_floating_point()
    }


@pytest.mark.parametrize("fields", NETWORKS.values(), ids=NETWORKS)
def test_weights_and_statistics_of_every_normalisation_layer_stay_and_nothing_else(fields):
    """The paper's and SiloBN's difference: statistics alone are not enough."""
    found = run(experiment(FedBN(), **fields))
    expected = norm_names(found.run.module())
    assert set(found.private(0)["model"]) == expected
    assert set(found.server["model"]) == set(found.context.net.weights) - expected
    if fields == IMAGES:
        assert {k.rpartition(".")[2] for k in expected} == {"weight", "bias", "running_mean", "running_var"}


def named() -> Network:
    """Layers whose names say nothing, or the wrong thing; one norm layer has no weights."""
    torch.manual_seed(0)
    layers = OrderedDict(
        bn=nn.Conv2d(1, 4, 3, stride=2), plain=nn.BatchNorm2d(4, affine=False), group=nn.GroupNorm(2, 4),
        relu=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
    )  # fmt: skip
    return Network(nn.Sequential(layers), nn.Linear(4, 3))


def test_layers_are_known_by_their_kind_not_by_their_name():
    """Public code: whatever has "bn" in its name stays, and nothing else does."""
    found = run(experiment(FedBN(), federation=federation(SIZES, images=True), network=named()))
    assert set(found.private(0)["model"]) == {
        "body.plain.running_mean", "body.plain.running_var", "body.group.weight", "body.group.bias",
    }  # fmt: skip
    agree(found, reference.run(world(found.run)))


def test_a_client_s_layers_are_those_of_its_own_last_training():
    """However long it was away; one that never took part has the initial ones."""
    ratio = ((0, 1), (1, 2), (1, 4))
    found, first = (run(experiment(FedBN(), images=True, ratio=ratio, rounds=r)) for r in (3, 1))
    assert found.private(0)["model"].equals(first.private(0)["model"])
    initial = found.context.net.weights
    for i in (3, 5, 6, 7):
        assert found.private(i)["model"].equals(initial.pick(found.private(i)["model"]))
    own = [found.private(i)["model"] for i in (0, 1, 2, 4)]
    assert min(moved(a, b) for k, a in enumerate(own) for b in own[:k]) > 1e-3
    for i in EVERYONE:
        assert found.personal(i).equals(found.server["model"] | found.private(i)["model"])


def test_training_starts_from_a_client_s_own_layers():
    """Alone in its rounds, it goes on as if it kept everything."""
    fields = {"images": True, "ratio": ((0,), (0,))}
    found, local = both(fields | {"rounds": 2}, FedBN(), Local())
    assert found.personal(0).equals(local.personal(0))


def test_statistics_are_private_whatever_becomes_of_shared_ones():
    average, local = (run(experiment(FedBN(), images=True, buffers=b)) for b in ("average", "local"))
    checks.same_shared(average, local)
    checks.same_personal(average, local)


def test_it_is_more_than_local_statistics():
    found = run(experiment(FedBN(), images=True))
    silo = run(experiment(FedAvg(), images=True, buffers="local"))
    checks.apart(found, silo)


# the rest


def test_stacked_clients_keep_their_layers_too():
    fields = NETWORKS["transformer with LayerNorm"]
    serial, stacked = (run(experiment(FedBN(), backend=b, **fields)) for b in ("serial", "stacked"))
    assert all(moved(serial.personal(i), stacked.personal(i)) < 1e-10 for i in EVERYONE)


def test_bytes_and_passes_of_a_round():
    found, fedavg = both(IMAGES, FedBN(), FedAvg())
    kept = 8 * found.private(0)["model"].size
    assert kept
    for a, b in zip(found.rounds[1:], fedavg.rounds[1:], strict=True):
        assert a["bytes_down"] == a["bytes_up"] == b["bytes_up"] - 5 * kept
        assert a["gradient_passes"] == b["gradient_passes"] == pytest.approx(2)


def test_it_has_no_hyper_parameters():
    assert FedBN().fields() == {}
