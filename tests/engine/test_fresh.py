"""`Net.fresh`: further initialisations of the network, functions of (seed, purpose)."""

import pytest
import torch
from torch import nn

from harness import experiment, federation, moved
from idiolect.errors import UsageError
from idiolect.method import linear
from idiolect.nets import Network


def net(**fields):
    return experiment("fedavg", **fields).context().net


def own(seed=0):
    """A network given as an object: convolution, BatchNorm, linear."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return Network(nn.Sequential(*layers), nn.Linear(3, 3))


KINDS = {
    "mlp": {},
    "convnet": {"images": True},
    "options": {"network_options": {"hidden": (7, 4)}},
    "an object": {"federation": federation(images=True), "network": own()},
    "without buffers": {"images": True, "buffers": "drop"},
    "an object without buffers": {"federation": federation(images=True), "network": own(), "buffers": "drop"},
}
KIND = pytest.mark.parametrize("fields", KINDS.values(), ids=list(KINDS))


@KIND
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_names_shapes_and_dtypes_are_the_network_s(fields, dtype):
    made = net(**fields, dtype=dtype)
    fresh = made.fresh("a")
    assert list(fresh) == list(made.weights)
    assert all((v.shape, v.dtype) == (made.weights[k].shape, made.weights[k].dtype) for k, v in fresh.items())
    assert not any(v.requires_grad for v in fresh.values())


@KIND
def test_it_is_a_function_of_seed_and_purpose_alone(fields):
    made = net(**fields)
    first = made.fresh("a")
    assert made.fresh("a").equals(first)
    torch.manual_seed(99)
    assert net(**fields).fresh("a").equals(first)
    for other in (made.fresh("b"), net(**fields, seed=4).fresh("a"), made.weights):
        drawn = first.drop(first.keys() - {k for k in first if first[k].std() > 0 and k not in made.buffers})
        assert drawn
        assert all(float((drawn[k] - other[k]).abs().max()) > 1e-3 for k in drawn)


@KIND
def test_nothing_else_is_drawn_or_changed(fields):
    made = net(**fields)
    before, weights = torch.get_rng_state(), made.weights.clone()
    fresh = made.fresh("a")
    assert torch.equal(before, torch.get_rng_state())
    assert weights.equals(made.weights)
    assert moved(weights, net(**fields).weights) == 0
    assert not {v.data_ptr() for v in fresh.values()} & {v.data_ptr() for v in dict(made.module.state_dict()).values()}


@KIND
def test_it_is_drawn_as_the_network_itself_is(fields):
    """Many draws have the spread of the layer's own initialisation; norm layers start as they do."""
    made = net(**fields)
    many = [made.fresh(str(k)) for k in range(60)]
    weight = torch.stack([w["head.weight"] for w in many])
    bound = weight.shape[-1] ** -0.5
    assert float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    for k in made.buffers:
        assert torch.equal(many[0][k], made.weights[k])


def test_an_object_s_statistics_start_anew():
    module = own()
    with torch.no_grad():
        module.body[1].running_mean += 5.0
        module.body[1].weight += 5.0
    fresh = net(federation=federation(images=True), network=module).fresh("a")
    assert not fresh["body.1.running_mean"].any()
    assert torch.equal(fresh["body.1.weight"], torch.ones(3, dtype=torch.float64))
    assert module.body[1].running_mean.eq(5).all()


def test_networks_beside_it_are_no_part_of_it():
    made = net()
    plain = made.fresh("supervisor")
    beside = made.add("supervisor")
    assert made.fresh("supervisor").equals(plain)
    assert moved(beside.under("supervisor"), plain) > 1e-3


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


def test_a_layer_that_cannot_draw_anew_is_named():
    made = net(network=Network(nn.Sequential(Scale(), nn.Linear(6, 4)), nn.Linear(4, 3)))
    with pytest.raises(UsageError, match=r"body\.0 \(Scale\) has none"):
        made.fresh("a")


def test_what_it_gives_is_a_network_s_weights():
    context = experiment("fedavg").context()
    w, x = context.net.fresh("a"), context.shards.part("train", 0)[0]
    expected = linear(w, "head", context.task.features(w, x))
    torch.testing.assert_close(context.task.logits(w, x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(6, 3), (4,) * 5], ids=len)
def test_the_network_knows_how_many_clients_there_are(sizes):
    assert net(sizes=sizes).clients == len(sizes)
