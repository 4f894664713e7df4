"""Networks by name: `build("convnet3", (1, 28, 28), 47)`.

A network lives in the file of its family, which lists its builders in `NETWORKS`; every file of this
package is looked at, so a new file is all that a new family needs. A builder is
`name(shape, classes, **options) -> Network`, where `shape` is one sample's shape without the batch:
`(1, 28, 28)` for an image, `(561,)` for a vector, `(200,)` for 200 token ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import torch

from idiolect.errors import UsageError, unknown
from idiolect.nets.network import Network
from idiolect.nets.refusals import UnfitError, positive, sizes

__all__ = ["Network", "build", "describe", "fitting", "names", "scaled", "takes"]

Builder = Callable[..., Network]


def build(name: str, shape: Sequence[int], classes: int, **options: object) -> Network:
    """The network `name` for samples of `shape`, freshly initialised from torch's random state."""
    builder = _builder(name)
    _refuse_unknown(name, options, _options(builder))
    positive(name, classes=classes)
    shape = sizes(name, shape=tuple(shape))
    if not shape:
        raise UsageError(f"{name}: 'shape' is one sample's shape without the batch, found ().")
    try:
        return builder(shape, classes, **options)
    except UnfitError as error:
        others = ", ".join(fitting(shape, classes))
        raise UnfitError(f"{error} Networks that take samples of shape {shape}: {others}.") from None


def names() -> list[str]:
    """Names of all networks, sorted."""
    return sorted(_builders())


def describe(name: str) -> str:
    """One line on the network `name`."""
    return (inspect.getdoc(_builder(name)) or "").partition("\n")[0]


def takes(name: str, option: str) -> bool:
    """Whether the network `name` has this option."""
    return option in _options(_builder(name))


def fitting(shape: Sequence[int], classes: int) -> list[str]:
    """Names of the networks that take samples of `shape` with their default options."""
    found = []
    with torch.device("meta"):  # shapes only: no memory, no random numbers
        for name in names():
            try:
                _builder(name)(tuple(shape), classes)
            except UnfitError:
                continue
            found.append(name)
    return found


def scaled(name: str, shape: Sequence[int], classes: int, share: float, **options: object) -> dict[str, object]:
    """The options with which the network `name` has about `share` times the parameters: its `width` is searched."""
    if "width" not in _options(_builder(name)):
        able = ", ".join(n for n in names() if "width" in _options(_builder(n)))
        raise UsageError(f"{name} has no option 'width' to scale it by; networks that have one: {able}.")

    def parameters(width: float) -> int:
        with torch.device("meta"):
            network = build(name, shape, classes, **{**options, "width": width})
        return sum(p.numel() for p in network.parameters())

    target = share * parameters(1.0)
    return {**options, "width": min((k / 100 for k in range(5, 101)), key=lambda w: abs(parameters(w) - target))}


@cache
def _builders() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    for file in iter_modules(__path__):
        family = getattr(import_module(f"{__name__}.{file.name}"), "NETWORKS", {})
        twice = sorted(found.keys() & family.keys())
        if twice:
            raise ImportError(f"nets/{file.name}.py lists {', '.join(twice)}, which another file lists too.")
        found |= family
    return found


def _builder(name: str) -> Builder:
    if name not in _builders():
        raise unknown("network", name, _builders())
    return _builders()[name]


def _options(builder: Builder) -> list[str]:
    return [option for option in inspect.signature(builder).parameters if option not in ("shape", "classes")]


def _refuse_unknown(name: str, options: dict[str, object], known: list[str]) -> None:
    listed = ", ".join(known) or "none"
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"{name} has no option '{option}'.{hint} Its options: {listed}.")
