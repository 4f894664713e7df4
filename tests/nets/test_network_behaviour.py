"""Every network: its parts, its outputs, that it learns, and that it runs from named and stacked weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from idiolect import nets

SMALL = [
    ("convnet3", (1, 8, 8), {}),
    ("convnet4", (3, 16, 16), {}),
    ("resnet18", (3, 8, 8), {}),
    ("resnet18", (3, 8, 8), {"norm": "group"}),
    ("resnet9", (1, 8, 8), {}),
    ("resnet20", (3, 8, 8), {"blocks": (1, 2, 1)}),
    ("lenet5", (1, 16, 16), {}),
    ("lenet5", (3, 20, 16), {"width": 0.4, "hidden": (120, 84)}),
    ("cnn4", (3, 16, 16), {}),
    ("fasttext", (12,), {"vocabulary": 40}),
    ("nplm", (12,), {"vocabulary": 40}),
    ("harcnn", (3, 1, 30), {"width": 0.2}),
    ("mlp", (9,), {"hidden": (20, 10)}),
    ("logistic", (1, 5, 5), {}),
    ("point", (6,), {}),
    ("tinyvit", (3, 8, 12), {"dim": 16, "depth": 3}),
]
small = pytest.mark.parametrize(("name", "shape", "options"), SMALL, ids=lambda v: str(v))


def samples(name, shape, count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    if name in ("fasttext", "nplm"):
        return torch.randint(0, 40, (count, *shape), generator=draw)
    return torch.randn(count, *shape, generator=draw)


def build(name, shape, options, classes=5, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nets.build(name, shape, classes, **options)


def test_every_network_is_tried():
    assert {row[0] for row in SMALL} == set(nets.names())


@small
def test_parts(name, shape, options):
    network = build(name, shape, options)
    assert [child for child, _ in network.named_children()] == ["body", "head"]
    assert isinstance(network.body, nn.Sequential)
    assert type(network.head) is nn.Linear
    owners = {key.split(".")[1] for key, _ in network.body.named_parameters(prefix="body")}
    assert network.blocks == [key for key, _ in network.body.named_children() if key in owners]
    assert set(network.blocks) == owners


@small
def test_output_is_the_head_of_the_body(name, shape, options):
    network, x = build(name, shape, options).eval(), samples(name, shape, 3)
    features = network.body(x)
    assert features.shape == (3, network.head.in_features)
    assert network(x).shape == (3, 5)
    torch.testing.assert_close(network(x), network.head(features))


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for shape in ((1, 28, 28), (3, 32, 32), (3, 64, 64)) for name in nets.fitting(shape, 7)]
    + [("convnet4", (3, 64, 64)), ("convnet4", (1, 17, 30)), ("lenet5", (1, 16, 23)), ("cnn4", (3, 19, 16))]
    + [("logistic", (561,)), ("mlp", (561,)), ("harcnn", (9, 1, 128)), ("harcnn", (1, 1, 29))],
)  # fmt: skip
def test_output_of_the_usual_inputs(name, shape):
    assert nets.build(name, shape, 7).eval()(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "shape", "widths"),
    [
        ("convnet3", (1, 8, 8), [64, 64, 64]),
        ("convnet4", (3, 16, 16), [128, 128, 128, 128]),
        ("resnet18", (3, 16, 16), [64, 128, 256, 512]),
        ("resnet9", (1, 16, 16), [32, 64, 128, 256, 256, 128]),
        ("resnet20", (3, 16, 16), [64, 128, 256, 256, 128]),
        ("lenet5", (1, 16, 16), [6, 16, 120]),
        ("cnn4", (1, 16, 16), [32, 64, 512]),
        ("fasttext", (12,), [32, 32]),
        ("nplm", (12,), [12, 128]),
        ("harcnn", (9, 1, 28), [32, 64, 1024, 512]),
        ("mlp", (9,), [100]),
        ("logistic", (9,), []),
        ("point", (1,), []),
        ("tinyvit", (1, 8, 8), [64, 64, 64]),
    ],
)
def test_channels_of_the_blocks(name, shape, widths):
    network, x = nets.build(name, shape, 5).eval(), samples(name, shape, 2)
    found = []
    for child, module in network.body.named_children():
        x = module(x)
        if child in network.blocks:
            found.append(x.shape[1])
    assert found == widths


def test_resnet18_halves_from_the_second_stage_on():
    x, sides = torch.randn(1, 3, 32, 32), []
    for stage in list(nets.build("resnet18", (3, 32, 32), 10).eval().body)[:4]:
        x = stage(x)
        sides.append(x.shape[-1])
    assert sides == [32, 16, 8, 4]


@small
def test_a_tiny_batch_is_learnt(name, shape, options):
    network, x, y = build(name, shape, options), samples(name, shape, 10), torch.arange(10) % 5
    network.train()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001 if "resnet" in name else 0.01)
    losses = []
    for _ in range(12):
        loss = cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


@small
def test_every_parameter_matters(name, shape, options):
    network = build(name, shape, options, seed=1)
    cross_entropy(network.train()(samples(name, shape, 10)), torch.arange(10) % 5).backward()
    assert all(p.grad.any() for p in network.parameters())


@small
def test_stacked_weights_equal_one_network_after_another(name, shape, options):
    members = [build(name, shape, options, seed=seed).eval().double() for seed in range(3)]
    shell = copy.deepcopy(members[0]).to("meta")
    parameters, buffers = stack_module_state(members)
    x, y = samples(name, shape, 4), torch.arange(4) % 5
    x = x if name in ("fasttext", "nplm") else x.double()

    def logits(p, b, x):
        return functional_call(shell, (p, b), (x,))

    def loss(p, b, x, y):
        return cross_entropy(logits(p, b, x), y)

    found = vmap(logits, in_dims=(0, 0, None))(parameters, buffers, x)
    torch.testing.assert_close(found, torch.stack([member(x) for member in members]))

    gradients = vmap(grad(loss), in_dims=(0, 0, None, None))(parameters, buffers, x, y)
    for k, member in enumerate(members):
        cross_entropy(member(x), y).backward()
        for key, p in member.named_parameters():
            torch.testing.assert_close(gradients[key][k], p.grad)


@small
def test_input_is_left_as_it_was(name, shape, options):
    network, x = build(name, shape, options).train(), samples(name, shape, 4)
    before = x.clone()
    network(x).sum().backward()
    assert torch.equal(x, before)


@small
def test_channels_last_copies_and_pickles(name, shape, options):
    network, x = build(name, shape, options).eval(), samples(name, shape, 4)
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))
    if len(shape) == 3:
        twin = copy.deepcopy(network).to(memory_format=torch.channels_last)
        torch.testing.assert_close(twin(x.contiguous(memory_format=torch.channels_last)), network(x))


@small
def test_same_random_state_same_weights(name, shape, options):
    one, two = build(name, shape, options).state_dict(), build(name, shape, options).state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_fasttext_leaves_padding_out_of_the_mean():
    network = nets.build("fasttext", (4,), 3, vocabulary=10)
    short, long = torch.tensor([[7, 3, 0, 0]]), torch.tensor([[7, 3, 0, 0, 0, 0, 0]])
    table = network.body.embedding.table.weight
    torch.testing.assert_close(network.body.embedding(short)[0], (table[7] + table[3]) / 2)
    torch.testing.assert_close(network(short), network(long))


def test_fasttext_of_padding_alone_is_zero_and_trains():
    network = nets.build("fasttext", (4,), 3, vocabulary=10)
    ids = torch.tensor([[0, 0, 0, 0], [1, 2, 0, 0]])
    assert torch.equal(network.body.embedding(ids)[0], torch.zeros(32))
    network(ids).square().sum().backward()
    gradient = network.body.embedding.table.weight.grad
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert gradient[1].any()


def test_tinyvit_sees_where_a_patch_lies():
    network = nets.build("tinyvit", (1, 8, 8), 3).eval()
    left = torch.zeros(1, 1, 8, 8)
    left[..., :4] = 1.0
    assert not torch.allclose(network(left), network(left.flip(-1)))


def test_group_norm_has_no_statistics():
    assert not dict(nets.build("resnet18", (3, 8, 8), 10, norm="group").named_buffers())
    assert dict(nets.build("resnet18", (3, 8, 8), 10).named_buffers())
