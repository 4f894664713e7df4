"""Networks for windows of signals, (channels, 1, length)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from idiolect.nets.network import Network
from idiolect.nets.refusals import UnfitError, widened

SHORTEST = 28  # readings: two convolutions over 9 without padding, each before a pooling by 2, leave one


def harcnn(shape: tuple[int, ...], classes: int, width: float = 1.0) -> Network:
    """Two blocks [conv over 9 readings, 32 and 64 channels; ReLU; max-pool 2], linear 1024 and 512 with ReLU, linear.

    The HAR-CNN with which FedDBE's experiments classify activities, in the sizes of PFLlib. `width` scales channels
    and hidden layers.
    """
    if len(shape) != 3 or shape[1] != 1 or shape[2] < SHORTEST:
        raise UnfitError(
            f"harcnn needs signals (channels, 1, length) of at least {SHORTEST} readings, found samples of shape "
            f"{shape}."
        )
    first, second, *linear = widened("harcnn", width, 32, 64, 1024, 512)
    inputs, _, length = shape
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for block, outputs in enumerate((first, second), 1):
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv=nn.Conv2d(inputs, outputs, (1, 9)), relu=nn.ReLU(), pool=nn.MaxPool2d((1, 2))
        )
        body[f"block{block}"] = nn.Sequential(layers)
        inputs, length = outputs, (length - 8) // 2
    body["flatten"] = nn.Flatten()
    inputs *= length
    for layer, outputs in enumerate(linear, 1):
        body[f"hidden{layer}"] = nn.Sequential(OrderedDict(linear=nn.Linear(inputs, outputs), relu=nn.ReLU()))
        inputs = outputs
    return Network(nn.Sequential(body), nn.Linear(inputs, classes))


NETWORKS = {"harcnn": harcnn}
