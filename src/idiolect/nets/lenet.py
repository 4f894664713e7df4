"""Networks of two unpadded 5x5 convolutions and linear layers: LeNet-5 and the 4-layer CNN."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from idiolect.nets.network import Network
from idiolect.nets.refusals import image, sizes, widened


def lenet5(shape: tuple[int, ...], classes: int, width: float = 1.0, hidden: tuple[int, ...] = (120,)) -> Network:
    """LeNet-5: two conv 5x5 of 6 and 16 channels with pooling, hidden linear layers, linear.

    FedSimSup gives "two convolutional layers and two linear layers" and cites LeCun et al. (1998). Taken
    from LeCun: 6 and 16 channels, no padding, a hidden layer of 120. Chosen: ReLU and max-pool, as in
    today's versions. `hidden=(120, 84)` is LeCun's network with its three linear layers.
    `width` scales channels and hidden layers; about 0.4 leaves a sixth of the parameters, FedSimSup's
    supervisor.
    """
    hidden = sizes("lenet5", hidden=hidden)
    first, second, *linear = widened("lenet5", width, 6, 16, *hidden)
    return _two_convolutions("lenet5", shape, classes, (first, second), tuple(linear))


def cnn4(shape: tuple[int, ...], classes: int, width: float = 1.0) -> Network:
    """Two blocks [conv 5x5, 32 and 64 channels; ReLU; max-pool 2], linear 512 with ReLU, linear.

    FedAH's 4-layer CNN, which is McMahan et al.'s (2017) without padding. It also stands in for FedPAM's
    "lightweight CNN" for MNIST, of which that paper says no more. `width` scales channels and hidden layer.
    """
    first, second, linear = widened("cnn4", width, 32, 64, 512)
    return _two_convolutions("cnn4", shape, classes, (first, second), (linear,))


def _two_convolutions(
    name: str, shape: tuple[int, ...], classes: int, channels: tuple[int, int], hidden: tuple[int, ...]
) -> Network:
    inputs, *sides = image(name, shape, 16, "two unpadded 5x5 convolutions, each before a 2x2 pooling")
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for block, outputs in enumerate(channels, 1):
        body[f"block{block}"] = _block(inputs, outputs)
        inputs = outputs
    body["flatten"] = nn.Flatten()
    height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
    inputs *= height * width
    for layer, outputs in enumerate(hidden, 1):
        linear: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(inputs, outputs), relu=nn.ReLU())
        body[f"hidden{layer}"] = nn.Sequential(linear)
        inputs = outputs
    return Network(nn.Sequential(body), nn.Linear(inputs, classes))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(inputs, outputs, 5), relu=nn.ReLU(), pool=nn.MaxPool2d(2)
    )
    return nn.Sequential(layers)


NETWORKS = {"lenet5": lenet5, "cnn4": cnn4}
