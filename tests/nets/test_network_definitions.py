"""The networks against their definitions, written out once more on plain weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, conv1d, conv2d, linear, max_pool1d, max_pool2d

from idiolect import nets


def given(name, shape, **options):
    """A network in eval mode with norm layers that do something, its weights by name, and three samples."""
    torch.manual_seed(0)
    network = nets.build(name, shape, 5, **options).double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(values, 0.5, 1.5)
    return network.eval(), network.state_dict(), torch.randn(3, *shape, dtype=torch.double)


def normalise(w, name, x):
    at = f"body.{name}."
    return batch_norm(
        x, w[at + "running_mean"], w[at + "running_var"], w[at + "weight"], w[at + "bias"], training=False
    )


def classify(w, z):
    return linear(z, w["head.weight"], w["head.bias"])


def dense(w, name, z):
    return linear(z, w[f"body.{name}.linear.weight"], w[f"body.{name}.linear.bias"]).clamp(min=0)


@pytest.mark.parametrize(("name", "blocks"), [("convnet3", 3), ("convnet4", 4)])
def test_convnet(name, blocks):
    network, w, x = given(name, (3, 21, 18))
    z = x
    for k in range(1, blocks + 1):
        z = conv2d(z, w[f"body.block{k}.conv.weight"], w[f"body.block{k}.conv.bias"], padding=1)
        z = max_pool2d(normalise(w, f"block{k}.norm", z).clamp(min=0), 2)
    torch.testing.assert_close(network(x), classify(w, z.mean((2, 3))))


@pytest.mark.parametrize(
    ("name", "options", "layers"),
    [("cnn4", {}, 1), ("lenet5", {}, 1), ("lenet5", {"hidden": (120, 84), "width": 0.5}, 2)],
)
def test_two_convolutions(name, options, layers):
    network, w, x = given(name, (3, 21, 18), **options)
    z = x
    for k in (1, 2):
        z = conv2d(z, w[f"body.block{k}.conv.weight"], w[f"body.block{k}.conv.bias"])
        z = max_pool2d(z.clamp(min=0), 2)
    z = z.flatten(1)
    for k in range(1, layers + 1):
        z = dense(w, f"hidden{k}", z)
    torch.testing.assert_close(network(x), classify(w, z))


@pytest.mark.parametrize(
    ("name", "groups", "linears"),
    [("resnet18", (2, 2, 2, 2), 0), ("resnet9", (1, 2, 2, 1), 2), ("resnet20", (3, 3, 3), 2)],
)
def test_resnet(name, groups, linears):
    network, w, x = given(name, (3, 13, 11))

    def convolve(at, z, stride=1):
        kernel = w[f"body.{at}.weight"]
        return conv2d(z, kernel, stride=stride, padding=1 if kernel.shape[-1] == 3 else 0)

    z = normalise(w, "stage1.norm", convolve("stage1.stem", x)).clamp(min=0)
    for stage, count in enumerate(groups, 1):
        for block in range(1, count + 1):
            at, stride = f"stage{stage}.block{block}", 2 if (stage > 1 and block == 1) else 1
            y = normalise(w, f"{at}.norm1", convolve(f"{at}.conv1", z, stride)).clamp(min=0)
            y = normalise(w, f"{at}.norm2", convolve(f"{at}.conv2", y))
            if stride == 2:
                z = normalise(w, f"{at}.shortcut.norm", convolve(f"{at}.shortcut.conv", z, 2))
            z = (y + z).clamp(min=0)
    z = z.mean((2, 3))
    for k in range(1, linears + 1):
        z = dense(w, f"hidden{k}", z)
    torch.testing.assert_close(network(x), classify(w, z))


def test_mlp_and_logistic():
    network, w, x = given("mlp", (2, 3), hidden=(7, 6))
    torch.testing.assert_close(network(x), classify(w, dense(w, "hidden2", dense(w, "hidden1", x.flatten(1)))))
    network, w, x = given("logistic", (2, 3))
    torch.testing.assert_close(network(x), classify(w, x.flatten(1)))


def test_fasttext():
    network, w, _ = given("fasttext", (4,), vocabulary=9, dim=6)
    table = w["body.embedding.table.weight"]
    z = torch.stack([(table[8] + table[1] + table[1]) / 3, table[5]])
    z = linear(z, w["body.hidden.weight"], w["body.hidden.bias"])
    torch.testing.assert_close(network(torch.tensor([[8, 1, 1, 0], [0, 5, 0, 0]])), classify(w, z))


def test_nplm():
    network, w, _ = given("nplm", (3,), vocabulary=9, dim=2, hidden=5)
    ids = torch.tensor([[8, 1, 1], [0, 5, 2]])
    z = torch.stack([torch.cat([w["body.embedding.weight"][k] for k in row]) for row in ids])
    z = linear(z, w["body.hidden.linear.weight"], w["body.hidden.linear.bias"]).tanh()
    torch.testing.assert_close(network(ids), classify(w, z))


def test_harcnn():
    network, w, x = given("harcnn", (3, 1, 33), width=0.25)
    z = x[:, :, 0]
    for k in (1, 2):
        z = conv1d(z, w[f"body.block{k}.conv.weight"][:, :, 0], w[f"body.block{k}.conv.bias"])
        z = max_pool1d(z.clamp(min=0), 2)
    z = dense(w, "hidden2", dense(w, "hidden1", z.flatten(1)))
    torch.testing.assert_close(network(x), classify(w, z))


def test_tinyvit_has_the_encoder_blocks_of_torch():
    network, w, x = given("tinyvit", (3, 8, 12), depth=2, dim=16, heads=2)
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # [B, T, 48]
    z = linear(patches, w["body.patches.project.weight"].flatten(1), w["body.patches.project.bias"])
    z = z + w["body.patches.position"].T
    renamed = {
        "norm1": "norm1", "norm2": "norm2", "linear1": "inner", "linear2": "outer",
        "self_attn.out_proj": "attention.out", "self_attn.in_proj_": "attention.query_key_value.",
    }  # fmt: skip
    for block in (1, 2):
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True).double()
        ours = {}
        for key in layer.state_dict():
            theirs = next(name for name in renamed if key.startswith(name))
            ours[key] = w[f"body.encoder{block}." + key.replace(theirs, renamed[theirs], 1)]
        layer.load_state_dict(ours)
        z = layer(z)
    last = "body.encoder2.norm3."
    z = nn.functional.layer_norm(z, (16,), w[last + "weight"], w[last + "bias"]).mean(1)
    torch.testing.assert_close(network(x), classify(w, z))
