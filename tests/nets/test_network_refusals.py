"""Networks by name, and what is refused with which sentence."""

from __future__ import annotations

import pytest
import torch

from idiolect import nets
from idiolect.errors import UsageError


def refusal(*args, **options):
    with pytest.raises(UsageError) as caught:
        nets.build(*args, **options)
    return str(caught.value)


def test_names_and_descriptions():
    assert nets.names() == [
        "cnn4", "convnet3", "convnet4", "fasttext", "harcnn", "lenet5", "logistic",
        "mlp", "nplm", "point", "resnet18", "resnet20", "resnet9", "tinyvit",
    ]  # fmt: skip
    for name in nets.names():
        assert nets.describe(name).endswith(".")
    assert nets.describe("logistic").startswith("Multinomial logistic regression")


def test_unknown_name():
    assert refusal("covnet3", (1, 28, 28), 10).startswith("Unknown network 'covnet3'. Did you mean convnet3")
    with pytest.raises(UsageError, match=r"Unknown network 'lenet'\. Did you mean lenet5"):
        nets.describe("lenet")


@pytest.mark.parametrize(
    ("name", "option", "sentence"),
    [
        ("lenet5", "widht", "lenet5 has no option 'widht'. Did you mean width? Its options: width, hidden."),
        ("resnet18", "zzz", "resnet18 has no option 'zzz'. Its options: norm, width."),
        ("cnn4", "norm", "cnn4 has no option 'norm'. Its options: width."),
        ("logistic", "width", "logistic has no option 'width'. Its options: none."),
    ],
)
def test_unknown_option(name, option, sentence):
    assert refusal(name, (3, 32, 32), 10, **{option: 1}) == sentence


@pytest.mark.parametrize(
    ("name", "smallest", "reason"),
    [
        ("convnet3", 8, "each of its 3 blocks halves the side"),
        ("convnet4", 16, "each of its 4 blocks halves the side"),
        ("lenet5", 16, "two unpadded 5x5 convolutions, each before a 2x2 pooling"),
        ("cnn4", 16, "two unpadded 5x5 convolutions, each before a 2x2 pooling"),
        ("tinyvit", 4, "one patch"),
    ],
)
def test_images_that_are_too_small(name, smallest, reason):
    sentence = f"{name} needs images of at least {smallest}x{smallest} ({reason}), found {{}}."
    assert refusal(name, (3, smallest - 1, 40), 10).startswith(sentence.format(f"{smallest - 1}x40"))
    assert refusal(name, (3, 40, smallest - 1), 10).startswith(sentence.format(f"40x{smallest - 1}"))
    network = nets.build(name, (3, smallest, smallest), 10)  # the stated size works, in training too
    assert network.train()(torch.randn(2, 3, smallest, smallest)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet18", "resnet9", "resnet20"])
def test_residual_networks_take_any_size(name):
    assert nets.build(name, (3, 1, 1), 10).train()(torch.randn(2, 3, 1, 1)).shape == (2, 10)


def test_what_fits_instead_is_named():
    start, others = refusal("cnn4", (1, 8, 8), 10).split(" Networks that take samples of shape (1, 8, 8): ")
    assert start.endswith("found 8x8.")
    assert others.removesuffix(".").split(", ") == nets.fitting((1, 8, 8), 10)
    assert {"convnet3", "mlp", "resnet18", "tinyvit"} <= set(nets.fitting((1, 8, 8), 10))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 10, 10), (561,), (4, 7)])
def test_fitting_is_true(shape):
    before = torch.random.get_rng_state()
    fitting = nets.fitting(shape, 10)
    assert torch.equal(before, torch.random.get_rng_state())
    for name in nets.names():
        if name in fitting:
            assert all(not p.is_meta for p in nets.build(name, shape, 10).parameters())
        else:
            refusal(name, shape, 10)


@pytest.mark.parametrize("name", ["convnet3", "resnet18", "resnet9", "lenet5", "cnn4", "tinyvit"])
def test_vectors_are_no_images(name):
    sentence = refusal(name, (561,), 6)
    expected = f"{name} needs images (channels, height, width), found samples of shape (561,)."
    assert sentence.startswith(expected)
    assert "logistic, mlp" in sentence


@pytest.mark.parametrize("name", ["fasttext", "nplm"])
def test_images_are_no_texts(name):
    sentence = refusal(name, (1, 28, 28), 10)
    assert sentence.startswith(f"{name} needs token ids (length,), found samples of shape (1, 28, 28).")


@pytest.mark.parametrize("shape", [(9, 1, 27), (9, 2, 128), (128,)])
def test_signals_have_one_row_and_a_length(shape):
    assert f"(channels, 1, length) of at least 28 readings, found samples of shape {shape}." in refusal(
        "harcnn", shape, 6
    )


def test_patches_must_tile_the_image():
    sentence = refusal("tinyvit", (1, 10, 10), 2)
    assert "sides are multiples of the patch's, 4, found 10x10. Option 'patch' sets it." in sentence
    assert nets.build("tinyvit", (1, 10, 10), 2, patch=5)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("resnet18", {"norm": "layer"}, "Known: batch, group."),
        ("resnet20", {"blocks": (3, 3)}, "'blocks' needs 3 numbers, one for each group, found (3, 3)."),
        ("resnet20", {"blocks": (3, 0, 3)}, "'blocks' needs integers of at least 1, found (3, 0, 3)."),
        ("lenet5", {"width": 0.0}, "'width' must be a number above 0, found 0.0."),
        ("lenet5", {"hidden": (0,)}, "'hidden' needs integers of at least 1, found (0,)."),
        ("mlp", {"hidden": ()}, "'hidden' needs at least one layer, found (). Without one it is logistic."),
        ("mlp", {"hidden": (1.5,)}, "'hidden' needs integers of at least 1, found (1.5,)."),
        ("lenet5", {"width": "half"}, "'width' must be a number above 0, found 'half'."),
        ("fasttext", {"dim": True}, "'dim' needs an integer of at least 1, found True."),
        ("nplm", {"hidden": 0}, "'hidden' needs an integer of at least 1, found 0."),
        ("tinyvit", {"depth": 0}, "'depth' needs an integer of at least 1, found 0."),
        ("tinyvit", {"heads": 3}, "'dim' must be a multiple of 'heads', found dim=64 and heads=3."),
    ],
)
def test_options_out_of_range(name, options, reason):
    sentence = refusal(name, (3, 32, 32), 10, **options)
    assert sentence in (f"{name}: {reason}", f"Unknown norm 'layer'. {reason}")


def test_shape_and_classes_out_of_range():
    assert refusal("mlp", (3, 0), 10) == "mlp: 'shape' needs integers of at least 1, found (3, 0)."
    assert refusal("mlp", (3,), 0) == "mlp: 'classes' needs an integer of at least 1, found 0."
    assert refusal("mlp", (), 10) == "mlp: 'shape' is one sample's shape without the batch, found ()."


def test_one_hidden_layer_may_be_given_as_a_number():
    assert str(nets.build("mlp", (9,), 3, hidden=20)) == str(nets.build("mlp", (9,), 3, hidden=[20]))
