"""Residual networks for small images: a 3x3 stem without pooling, then stages of basic blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from idiolect.errors import UsageError, unknown
from idiolect.nets.network import Network
from idiolect.nets.refusals import image, sizes, widened

CHANNELS_PER_GROUP = 16  # of norm="group": the setting of Wu & He (2018) that fits every width used here
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels),
}


def resnet18(shape: tuple[int, ...], classes: int, norm: str = "batch", width: float = 1.0) -> Network:
    """ResNet-18 with a 3x3 stem and no stem pooling; four stages of two basic blocks, 64 to 512 channels.

    The sizes in FedAIMS's tables are this network's (11,220,132 parameters for CIFAR-100). Its blocks are
    the four stages; the stem belongs to the first. `norm` is "batch" or "group" (groups of 16 channels).
    `width` scales the channels, to multiples of 16.
    """
    stem, *stages = widened("resnet18", width, 64, 64, 128, 256, 512, multiple=CHANNELS_PER_GROUP)
    return _resnet("resnet18", shape, classes, stem, (2, 2, 2, 2), tuple(stages), (), norm)


def resnet9(shape: tuple[int, ...], classes: int, norm: str = "batch") -> Network:
    """FedLAG's "ResNet-9": stem of 32 channels, (1, 2, 2, 1) basic blocks, three linear layers.

    Its table 5 gives, for MNIST and EMNIST: an initial convolution of 32 channels, (1, 2, 2, 1) blocks of
    (32, 64, 128, 256) channels, three linear layers of (256, 128, 10) outputs, ReLU, 6.81 MB.
    Chosen: basic blocks of two 3x3 convolutions with `norm` ("batch" or "group"); stride 2 from the second
    group on; a 1x1 convolution in the shortcut where the shape changes; average pooling before the linear
    layers, which have ReLU between them; as many outputs as classes (the table says 10 for EMNIST too,
    which the text gives 62). 1,695,210 parameters for MNIST: 6.78 MB, or 6.80 MB with the statistics of
    BatchNorm.
    The last linear layer is the head; the other two are the last two blocks of the body.
    """
    return _resnet("resnet9", shape, classes, 32, (1, 2, 2, 1), (32, 64, 128, 256), (256, 128), norm)


def resnet20(shape: tuple[int, ...], classes: int, blocks: tuple[int, ...] = (3, 3, 3), norm: str = "batch") -> Network:
    """FedLAG's "ResNet-20": stem of 64 channels, (3, 3, 3) basic blocks, three linear layers.

    Its table 5 gives, for CIFAR-10: an initial convolution of 64 channels, (3, 3, 3) blocks of
    (64, 128, 256) channels, three linear layers of (256, 128, 10) outputs, ReLU, 17.54 MB; for CIFAR-100
    `blocks=(2, 3, 4)`, 100 outputs and again 17.54 MB, which cannot be both.
    Chosen: as for `resnet9`. 4,425,162 parameters for CIFAR-10 (17.70 MB), 5,543,460 for CIFAR-100 with
    `blocks=(2, 3, 4)` (22.17 MB).
    """
    blocks = sizes("resnet20", blocks=blocks)
    if len(blocks) != 3:
        raise UsageError(f"resnet20: 'blocks' needs 3 numbers, one for each group, found {blocks!r}.")
    return _resnet("resnet20", shape, classes, 64, blocks, (64, 128, 256), (256, 128), norm)


def _resnet(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    stem: int,
    blocks: tuple[int, ...],
    widths: tuple[int, ...],
    hidden: tuple[int, ...],
    norm: str,
) -> Network:
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    channels, _, _ = image(name, shape)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = stem
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), 1):
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if stage == 1:
            layers |= {"stem": _convolve(channels, stem, 3), "norm": NORMS[norm](stem), "relu": nn.ReLU()}
        for block in range(1, count + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            layers[f"block{block}"] = Residual(inputs, width, stride, NORMS[norm])
            inputs = width
        body[f"stage{stage}"] = nn.Sequential(layers)
    body["pool"] = nn.AdaptiveAvgPool2d(1)
    body["flatten"] = nn.Flatten()
    for layer, width in enumerate(hidden, 1):
        linear: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(inputs, width), relu=nn.ReLU())
        body[f"hidden{layer}"] = nn.Sequential(linear)
        inputs = width
    return Network(nn.Sequential(body), nn.Linear(inputs, classes))


class Residual(nn.Module):
    """The basic block of He et al. (2016): relu(x + F(x)), F two 3x3 convolutions with normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = _convolve(inputs, outputs, 3, stride)
        self.norm1 = norm(outputs)
        self.conv2 = _convolve(outputs, outputs, 3)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            layers: OrderedDict[str, nn.Module] = OrderedDict(
                conv=_convolve(inputs, outputs, 1, stride), norm=norm(outputs)
            )
            self.shortcut = nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _convolve(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


NETWORKS = {"resnet18": resnet18, "resnet9": resnet9, "resnet20": resnet20}
