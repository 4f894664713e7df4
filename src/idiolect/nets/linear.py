"""Networks of linear layers alone; they take samples of any shape, flattened."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

from idiolect.errors import UsageError
from idiolect.nets.network import Network
from idiolect.nets.refusals import sizes, widened


def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (100,), width: float = 1.0) -> Network:
    """Flattened samples, linear layers of `hidden` outputs with ReLU, linear. `width` scales `hidden`."""
    hidden = sizes("mlp", hidden=hidden)
    if not hidden:
        raise UsageError("mlp: 'hidden' needs at least one layer, found (). Without one it is logistic.")
    hidden = widened("mlp", width, *hidden)
    body: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    inputs = prod(shape)
    for layer, outputs in enumerate(hidden, 1):
        linear: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(inputs, outputs), relu=nn.ReLU())
        body[f"hidden{layer}"] = nn.Sequential(linear)
        inputs = outputs
    return Network(nn.Sequential(body), nn.Linear(inputs, classes))


def logistic(shape: tuple[int, ...], classes: int) -> Network:
    """Multinomial logistic regression: a linear head on the flattened sample, no blocks."""
    return Network(nn.Sequential(OrderedDict(flatten=nn.Flatten())), nn.Linear(prod(shape), classes))


NETWORKS = {"mlp": mlp, "logistic": logistic}
