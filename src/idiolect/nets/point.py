"""One number per input: the network of the quadratics, whose weights are the point w itself."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

from idiolect.nets.network import Network


def point(shape: tuple[int, ...], classes: int) -> Network:
    """A linear layer without bias that starts at zero, on the flattened sample."""
    head = nn.Linear(prod(shape), classes, bias=False)
    nn.init.zeros_(head.weight)
    return Network(nn.Sequential(OrderedDict(flatten=nn.Flatten())), head)


NETWORKS = {"point": point}
