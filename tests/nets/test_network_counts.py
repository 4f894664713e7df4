"""Exact numbers of trainable parameters, against sums written out by hand."""

from __future__ import annotations

import pytest

from idiolect import nets

# one basic block: two 3x3 convolutions, two norms; where the shape changes a 1x1 convolution and its norm
STAGE_64 = 2 * (2 * 9 * 64 * 64 + 2 * 2 * 64)
INTO_128 = 9 * 64 * 128 + 9 * 128 * 128 + 2 * 2 * 128 + 64 * 128 + 2 * 128
IN_128 = 2 * 9 * 128 * 128 + 2 * 2 * 128
INTO_256 = 9 * 128 * 256 + 9 * 256 * 256 + 2 * 2 * 256 + 128 * 256 + 2 * 256
IN_256 = 2 * 9 * 256 * 256 + 2 * 2 * 256
INTO_512 = 9 * 256 * 512 + 9 * 512 * 512 + 2 * 2 * 512 + 256 * 512 + 2 * 512
IN_512 = 2 * 9 * 512 * 512 + 2 * 2 * 512
RESNET18 = (3 * 64 * 9 + 128) + STAGE_64 + INTO_128 + IN_128 + INTO_256 + IN_256 + INTO_512 + IN_512
IN_32 = 2 * 9 * 32 * 32 + 2 * 2 * 32
INTO_64 = 9 * 32 * 64 + 9 * 64 * 64 + 2 * 2 * 64 + 32 * 64 + 2 * 64
IN_64 = 2 * 9 * 64 * 64 + 2 * 2 * 64
THREE_LINEAR = (256 * 256 + 256) + (256 * 128 + 128)  # the third is the head
RESNET9 = (9 * 32 + 64) + IN_32 + INTO_64 + IN_64 + INTO_128 + IN_128 + INTO_256 + THREE_LINEAR
STEM_64 = 3 * 64 * 9 + 128
ENCODER_64 = 2 * 128 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64)

COUNTS = [
    ("convnet3", (1, 28, 28), 47, {}, (9 * 64 + 64 + 128) + 2 * (9 * 64 * 64 + 64 + 128) + 65 * 47),
    ("convnet4", (3, 32, 32), 10, {}, (27 * 128 + 128 + 256) + 3 * (9 * 128 * 128 + 128 + 256) + 129 * 10),
    ("resnet18", (3, 32, 32), 100, {}, RESNET18 + 513 * 100),
    ("resnet18", (3, 64, 64), 200, {}, RESNET18 + 513 * 200),
    ("resnet18", (3, 64, 64), 200, {"norm": "group"}, RESNET18 + 513 * 200),
    ("resnet9", (1, 28, 28), 10, {}, RESNET9 + 129 * 10),
    ("resnet20", (3, 32, 32), 10, {},
     STEM_64 + 3 * IN_64 + INTO_128 + 2 * IN_128 + INTO_256 + 2 * IN_256 + THREE_LINEAR + 129 * 10),
    ("resnet20", (3, 32, 32), 100, {"blocks": (2, 3, 4)},
     STEM_64 + 2 * IN_64 + INTO_128 + 2 * IN_128 + INTO_256 + 3 * IN_256 + THREE_LINEAR + 129 * 100),
    ("cnn4", (3, 32, 32), 10, {}, 76 * 32 + 801 * 64 + (64 * 5 * 5 + 1) * 512 + 513 * 10),
    ("cnn4", (1, 28, 28), 10, {}, 26 * 32 + 801 * 64 + (64 * 4 * 4 + 1) * 512 + 513 * 10),
    ("lenet5", (3, 32, 32), 10, {}, 76 * 6 + 151 * 16 + (16 * 5 * 5 + 1) * 120 + 121 * 10),
    ("lenet5", (1, 28, 28), 62, {}, 26 * 6 + 151 * 16 + (16 * 4 * 4 + 1) * 120 + 121 * 62),
    ("lenet5", (3, 32, 32), 10, {"hidden": (120, 84)}, 76 * 6 + 151 * 16 + 401 * 120 + 121 * 84 + 85 * 10),
    ("lenet5", (3, 32, 32), 10, {"width": 0.4}, 76 * 2 + 51 * 6 + (6 * 5 * 5 + 1) * 48 + 49 * 10),
    ("fasttext", (200,), 4, {}, 98_635 * 32 + 33 * 32 + 33 * 4),
    ("fasttext", (50,), 4, {"vocabulary": 1000, "dim": 8}, 1000 * 8 + 9 * 8 + 9 * 4),
    ("harcnn", (9, 1, 128), 6, {}, 82 * 32 + 289 * 64 + (64 * 26 + 1) * 1024 + 1025 * 512 + 513 * 6),
    ("nplm", (80,), 60, {"vocabulary": 60}, 60 * 16 + (80 * 16 + 1) * 128 + 129 * 60),
    ("mlp", (1, 28, 28), 10, {}, 785 * 100 + 101 * 10),
    ("mlp", (561,), 6, {"hidden": (64, 32)}, 562 * 64 + 65 * 32 + 33 * 6),
    ("logistic", (1, 28, 28), 10, {}, 785 * 10),
    ("point", (1,), 1, {}, 1),
    ("tinyvit", (3, 32, 32), 10, {}, (3 * 16 + 1) * 64 + 8 * 8 * 64 + 2 * ENCODER_64 + 128 + 65 * 10),
    ("tinyvit", (1, 28, 28), 10, {"patch": 7, "depth": 4},
     (7 * 7 + 1) * 64 + 4 * 4 * 64 + 4 * ENCODER_64 + 128 + 65 * 10),
]  # fmt: skip


def parameters(network):
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count"), COUNTS, ids=lambda v: str(v))
def test_number_of_parameters(name, shape, classes, options, count):
    assert parameters(nets.build(name, shape, classes, **options)) == count


def test_numbers_that_the_papers_give_or_imply():
    published = {
        ("convnet3", (1, 28, 28), 47): 77_935,
        ("convnet4", (3, 32, 32), 10): 448_650,
        ("resnet18", (3, 32, 32), 100): 11_220_132,
        ("resnet18", (3, 64, 64), 200): 11_271_432,
        ("cnn4", (3, 32, 32), 10): 878_538,
        ("resnet9", (1, 28, 28), 10): 1_695_210,
        ("resnet20", (3, 32, 32), 10): 4_425_162,
    }
    assert {known: parameters(nets.build(*known)) for known in published} == published


@pytest.mark.parametrize(("shape", "classes"), [((3, 32, 32), 10), ((1, 28, 28), 10), ((3, 32, 32), 100)])
def test_narrow_lenet_is_a_supervisor_of_about_a_sixth(shape, classes):
    whole, narrow = (parameters(nets.build("lenet5", shape, classes, width=w)) for w in (1.0, 0.4))
    assert 4.5 < whole / narrow < 7


def test_every_network_is_counted():
    assert {row[0] for row in COUNTS} == set(nets.names())
