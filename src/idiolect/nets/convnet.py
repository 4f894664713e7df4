"""Plain convolutional networks whose blocks all have the same number of channels (FedAIMS)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from idiolect.nets.network import Network
from idiolect.nets.refusals import image, widened


def convnet3(shape: tuple[int, ...], classes: int, width: float = 1.0) -> Network:
    """Three blocks [conv 3x3, 64 channels; BatchNorm; ReLU; max-pool 2], average pool, linear.

    FedAIMS's network for EMNIST. Widths and padding follow from the bytes in its tables: 77,935 parameters
    for its 47 classes. `width` scales the channels.
    """
    return _convnet("convnet3", shape, classes, blocks=3, channels=widened("convnet3", width, 64)[0])


def convnet4(shape: tuple[int, ...], classes: int, width: float = 1.0) -> Network:
    """Four blocks [conv 3x3, 128 channels; BatchNorm; ReLU; max-pool 2], average pool, linear.

    FedAIMS's network for CIFAR-10. Widths and padding follow from the bytes in its tables: 448,650 parameters
    for its 10 classes. `width` scales the channels.
    """
    return _convnet("convnet4", shape, classes, blocks=4, channels=widened("convnet4", width, 128)[0])


def _convnet(name: str, shape: tuple[int, ...], classes: int, blocks: int, channels: int) -> Network:
    inputs, _, _ = image(name, shape, 2**blocks, f"each of its {blocks} blocks halves the side")
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for block in range(1, blocks + 1):
        body[f"block{block}"] = _block(inputs, channels)
        inputs = channels
    body["pool"] = nn.AdaptiveAvgPool2d(1)
    body["flatten"] = nn.Flatten()
    return Network(nn.Sequential(body), nn.Linear(channels, classes))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(inputs, outputs, 3, padding=1),
        norm=nn.BatchNorm2d(outputs),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(2),
    )
    return nn.Sequential(layers)


NETWORKS = {"convnet3": convnet3, "convnet4": convnet4}
