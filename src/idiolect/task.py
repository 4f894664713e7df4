"""The task: a network with named parts, its loss, and the batch. `Net` is what `init` sees; `Task` is what losses see.

While a client trains, the leaves of its live weights are the parameters of one resident module, so that a step costs
what a plain PyTorch step costs. Any other weights (a reference model, a mixture) run through `functional_call`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from idiolect import nets
from idiolect.engine.orders import key
from idiolect.errors import UsageError
from idiolect.tree import Tree

NORMS = (nn.modules.batchnorm._BatchNorm,)
DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU)


def chunk(x: Tensor) -> int:
    """Samples at a time where no gradient is asked for: of images on a CPU so few that a layer's output stays in the
    cache, which is 1.5 times as fast as 256 of them."""
    return 64 if x.dim() == 4 and x.device.type == "cpu" else 512


class Features(NamedTuple):
    """Features that stand in for inputs: `logits` and `features` take them as they are."""

    z: Tensor


class Batch(NamedTuple):
    """Samples of one step. `mask` is None, or 1 for real samples and 0 for padding (stacked clients). `beside` holds
    what `me.train(beside=...)` was given for these samples."""

    x: Any
    y: Tensor
    mask: Tensor | None = None
    beside: Any = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of per-sample values over the real samples."""
        if self.mask is None:
            return values.mean()
        # padding may hold any number; where() keeps it out of the gradient too
        return torch.where(self.mask > 0, values, 0.0).sum() / self.mask.sum().clamp(min=1.0)

    def by_class(self, values: Tensor, classes: int) -> Tensor:
        """Per-class sums of per-sample rows: [B, d] -> [classes, d]."""
        member = (self.y[:, None] == torch.arange(classes, device=self.y.device)).to(values.dtype)  # [B, classes]
        if self.mask is not None:
            member = member * self.mask[:, None].to(values.dtype)
        return member.T @ values


class Net:
    """The network as `init` sees it: initial weights under the names of its parts.

    `weights` is everything; `body` and `head` are its two parts; `trainable` leaves out normalisation buffers; `blocks`
    are the body's children that own parameters, in order; `layers` are the modules that own parameters, in order.
    `clients` is how many the run has.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        classes: int,
        seed: int,
        dtype: torch.dtype,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        clients: int = 1,
    ) -> None:
        module = strip_counters(module)
        if set(dict(module.named_children())) != {"body", "head"}:
            raise UsageError(
                f"A network has exactly two children, 'body' and 'head'; {type(module).__name__} has "
                f"{', '.join(dict(module.named_children())) or 'none'}. Wrap it: idiolect.nets.Network(body, head)."
            )
        self.module = module.to(dtype)
        self.shape, self.classes, self.seed, self.dtype, self.clients = shape, classes, seed, dtype, clients
        self.name, self.options = name, dict(options or {})  # by which `nets.build` made it, where it did
        self.others: dict[str, nn.Module] = {}
        self.weights = Tree({k: v.detach().clone() for k, v in _named(module)})
        self.buffers = frozenset(k for k, _ in module.named_buffers())

    @cached_property
    def body(self) -> Tree:
        return Tree({k: v for k, v in self.weights.items() if k.startswith("body.")})

    @cached_property
    def head(self) -> Tree:
        return Tree({k: v for k, v in self.weights.items() if k.startswith("head.")})

    @cached_property
    def trainable(self) -> Tree:
        return self.weights.drop(self.buffers)

    @cached_property
    def layers(self) -> dict[str, Tree]:
        """Modules that own parameters -> their entries (weight with bias; a norm layer with its buffers)."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in self.weights.items():
            found.setdefault(name.rpartition(".")[0], {})[name] = value
        return {k: Tree(v) for k, v in found.items()}

    @cached_property
    def norms(self) -> frozenset[str]:
        """Names of the normalisation layers (modules)."""
        kinds = (*NORMS, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)
        return frozenset(k for k, m in self.module.named_modules() if isinstance(m, kinds))

    @cached_property
    def blocks(self) -> tuple[Tree, ...]:
        names = [f"body.{k}." for k, m in self._body.named_children() if any(True for _ in m.parameters())]
        return tuple(Tree({k: v for k, v in self.weights.items() if k.startswith(prefix)}) for prefix in names)

    def add(self, part: str, network: str | None = None, share: float | None = None) -> Tree:
        """Another network beside this one, its weights named below `part.`; losses ask for it by
        `task.logits(w, x, part)`. `network` is its name, by default this one's; `share` scales its parameters."""
        options = self.options if network is None else {}
        if (network := network or self.name) is None:
            raise UsageError(f"A network given as an object has no second copy to serve as {part}; name one.")
        if share is not None:
            options = nets.scaled(network, self.shape, self.classes, share, **options)
        with self._drawing("extra", part):
            module = strip_counters(nets.build(network, self.shape, self.classes, **options)).to(self.dtype)
        return self._beside(part, module)

    def twin(self, part: str) -> Tree:
        """A copy of this network beside it, named and asked for as in `add`: the same initial weights."""
        return self._beside(part, copy.deepcopy(self.module))

    def _beside(self, part: str, module: nn.Module) -> Tree:
        self.others[part] = module
        self.buffers |= {f"{part}.{k}" for k, _ in module.named_buffers()}
        return Tree({f"{part}.{k}": v.detach().clone() for k, v in _named(module)})

    def fresh(self, purpose: str) -> Tree:
        """The weights of another initialisation of this network: a function of (seed, purpose) alone. The layers of a
        network given as an object draw theirs anew (`reset_parameters`)."""
        with self._drawing("fresh", purpose):
            if self.name is None:
                module = _redrawn(self.module)
            else:
                module = nets.build(self.name, self.shape, self.classes, **self.options)
        return Tree(_named(module)).pick(self.weights).to(self.dtype).clone()

    @contextmanager
    def _drawing(self, *purpose: str) -> Iterator[None]:
        """PyTorch's random state is a function of (seed, purpose) inside, and what it was afterwards."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key(self.seed, *purpose))
            yield

    @property
    def _body(self) -> nn.Module:
        return self.module.get_submodule("body")

    def last(self, k: int) -> Tree:
        """The entries of the last k layers."""
        if not 1 <= k <= len(self.layers):
            raise UsageError(f"The network has {len(self.layers)} layers; the last {k} were asked for.")
        chosen = list(self.layers.values())[-k:]
        return Tree({n: v for layer in chosen for n, v in layer.items() if n not in self.buffers})

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Channels of each block's feature; the last is the feature that the head sees."""
        task = Task(self)
        with torch.no_grad():
            blocks = task.blocks(self.weights, task.example())
        return tuple(z.shape[1] for z in blocks)

    @cached_property
    def features(self) -> int:
        """The dimension of the feature that the head sees."""
        task = Task(self)
        with torch.no_grad():
            return int(task.features(self.weights, task.example()).shape[1])

    def linear(self, name: str, inputs: int, outputs: int) -> Tree:
        """Initial weights of an extra linear layer, PyTorch's default, drawn from (seed, name)."""
        draw = torch.Generator().manual_seed(key(self.seed, "extra", name))
        bound = 1 / math.sqrt(inputs)
        weight = torch.empty(outputs, inputs, dtype=self.dtype).uniform_(-bound, bound, generator=draw)
        bias = torch.empty(outputs, dtype=self.dtype).uniform_(-bound, bound, generator=draw)
        return Tree({f"{name}.weight": weight, f"{name}.bias": bias})


def unfit(net: Net) -> tuple[str, nn.Module] | None:
    """The first layer, by its name, that moves buffers or draws numbers in a step: what neither stacked nor compiled
    steps can have."""
    for part, module in {"": net.module, **net.others}.items():
        for name, m in module.named_modules(prefix=part):
            if isinstance(m, NORMS + DRAWS):
                return name, m
    return None


def linear(w: Tree, name: str, x: Tensor) -> Tensor:
    """Apply an extra linear layer that `Net.linear` made."""
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


class Task:
    """What a loss sees: the network's functions of (weights, input), and the run's loss."""

    def __init__(
        self, net: Net, loss: str = "cross_entropy", device: str = "cpu", autocast: torch.dtype | None = None
    ) -> None:
        self.net, self.device, self.autocast = net, device, autocast
        self.classes = net.classes
        self.kind = loss
        self.live = _whole(net)  # its parameters are the leaves of the weights in training
        self.still = _whole(net).eval()  # reference models
        self.moving = _whole(net)  # mixtures that are trained through; its modes follow the phase
        for m in (self.live, self.still, self.moving):
            m.to(device)
            if len(net.shape) == 3:
                m.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._live = dict(_named(self.live))
        self._networks = [frozenset(net.weights)] + [
            frozenset(k for k in self._live if k.startswith(part + ".")) for part in net.others
        ]
        self._modes: dict[frozenset[str], list[tuple[nn.Module, nn.Module, bool]]] = {}
        self._set: tuple[frozenset[str], bool] | None = None  # the phase that the modes are set for
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._resident: Tree | None = None  # the weights last laid out, where they are all that the module has
        self.live.eval()
        self.moving.eval()

    # the network's functions

    def logits(self, w: Tree, x: Any, part: str = "") -> Tensor:
        """The network's logits, or those of the one beside it that `Net.add` or `Net.twin` named `part`."""
        if isinstance(x, Features):
            return self.head(w, x.z)
        return self._apply(w, x, part)

    def features(self, w: Tree, x: Any) -> Tensor:
        return x.z if isinstance(x, Features) else self._apply(w, x, "body")

    def head(self, w: Tree, z: Tensor) -> Tensor:
        return self._apply(w, z, "head")

    def blocks(self, w: Tree, x: Tensor) -> list[Tensor]:
        """Each block's feature: the global average of its output over space; the last is the body's own feature."""
        found: list[Tensor] = []
        for name, child in self.net._body.named_children():
            x = self._apply(w, x, f"body.{name}")
            if any(True for _ in child.parameters()):
                found.append(x.flatten(2).mean(2) if x.dim() > 2 else x)
        found[-1] = x
        return found

    def criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """The run's loss of given logits, over the real samples."""
        return batch.mean(self.losses(logits, batch.y)) if batch.mask is not None else self._mean(logits, batch.y)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Per-sample losses."""
        if self.kind == "squared":
            return 0.5 * (logits - y).square().sum(1)
        return F.cross_entropy(logits, y, reduction="none")

    def _mean(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean() if self.kind == "squared" else F.cross_entropy(logits, y)

    def loss(self, w: Tree, batch: Batch) -> Tensor:
        return self.criterion(self.logits(w, batch.x), batch)

    def example(self) -> Tensor:
        """Two samples of the right shape, for asking a network its dimensions."""
        embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in self.net.module.modules())
        return torch.zeros((2, *self.net.shape), dtype=torch.long if embeds else self.net.dtype)

    def _apply(self, w: Tree, x: Any, part: str) -> Tensor:
        if self.autocast is None:
            return self._applied(w, x, part)
        with torch.autocast(torch.device(self.device).type, self.autocast):
            return self._applied(w, x, part).float()  # losses and all that methods compute: in float32

    def _applied(self, w: Tree, x: Any, part: str) -> Tensor:
        prefix = part + "." if part else ""
        names = self._names(part)
        if w is self._resident or all(w.get(k) is p for k, p in names.items()):
            return (self.live.get_submodule(part) if part else self.live)(x)
        try:
            weights = {k[len(prefix) :]: w[k] for k in names}
        except KeyError as lacking:
            raise KeyError(f"the weights lack {lacking} of the network; they have {', '.join(w)}") from None
        if any(t.requires_grad for t in weights.values()):
            module = self.moving
            if module.training:  # train-mode buffers are written in place: into those in training, never into others
                weights = {k: v.clone() if self._foreign(prefix + k, v) else v for k, v in weights.items()}
        else:
            module = self.still
        return functional_call(module.get_submodule(part) if part else module, weights, (x,))

    def _foreign(self, name: str, value: Tensor) -> bool:
        return name in self.net.buffers and value is not self._live[name]

    def _names(self, part: str) -> dict[str, Tensor]:
        if part not in self._parts:
            names = self.net.weights if not part else [k for k in self._live if k.startswith(part + ".")]
            self._parts[part] = {k: self._live[k] for k in names}
        return self._parts[part]

    # laying weights out for training and evaluation

    def lay(self, w: Tree, trained: Iterable[str], single: bool = False) -> Tree:
        """Copy `w` into the resident module and give back the live Tree: its leaves are the module's tensors, those
        of `trained` require gradients. Modules train where something below them is trained; the rest are in eval
        mode. `single`: a client of one sample, whose norm layers stay in eval mode. Entries that are not a whole
        network (mixing weights, say) become leaves of their own, and the network is in eval mode."""
        trained = frozenset(trained)
        whole = self._whole(w)
        live: dict[str, Tensor] = {}
        with torch.no_grad():
            for k, v in w.items():
                p = self._live[k] if k in whole else None
                if p is None:
                    p = v.detach().clone(memory_format=torch.contiguous_format)
                else:
                    p.copy_(v)
                live[k] = p.requires_grad_(k in trained) if p.is_floating_point() else p
        if (now := (trained & whole, single)) != self._set:
            self._set = now
            for module, twin, mode in self._mode_list(now[0]):
                module.training = twin.training = mode and not (single and isinstance(module, NORMS))
        laid = Tree(live)
        self._resident = laid if whole == self._live.keys() else None
        return laid

    def set_modes(self, w: Tree, trained: frozenset[str]) -> None:
        """The modes of a phase, for weights that are not laid out here (stacked clients)."""
        self._set = None
        for _, twin, mode in self._mode_list(trained & self._whole(w)):
            twin.training = mode

    def _whole(self, w: Tree) -> frozenset[str]:
        """Names of the networks of which `w` has every entry."""
        return frozenset().union(*(names for names in self._networks if names <= w.keys()))

    def _mode_list(self, trained: frozenset[str]) -> list[tuple[nn.Module, nn.Module, bool]]:
        if trained not in self._modes:
            owners = {prefix for k in trained for prefix in _prefixes(k)}
            found: list[tuple[nn.Module, nn.Module, bool]] = []
            twins = dict(self.moving.named_modules())
            for name, module in self.live.named_modules():
                owns = any(True for _ in module.parameters())
                found.append((module, twins[name], (name if owns else name.rpartition(".")[0]) in owners))
            self._modes[trained] = found
        return self._modes[trained]


def _whole(net: Net) -> nn.Module:
    """A copy of the network, and of those beside it as further children."""
    module = copy.deepcopy(net.module)
    for part, other in net.others.items():
        module.add_module(part, copy.deepcopy(other))
    return module


def _redrawn(module: nn.Module) -> nn.Module:
    """A copy whose layers have drawn their weights anew."""
    module = copy.deepcopy(module)
    for name, m in module.named_modules():
        if isinstance(m, NORMS) and m.track_running_stats:
            m.num_batches_tracked = torch.tensor(0)  # which it resets too
        if callable(draw := getattr(m, "reset_parameters", None)):
            draw()
        elif any(True for _ in m.parameters(recurse=False)):
            raise UsageError(
                f"Another initialisation of a network given as an object needs `reset_parameters` of every layer; "
                f"{name or type(module).__name__} ({type(m).__name__}) has none. Add it, or name a network."
            )
    return strip_counters(module)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:k]) for k in range(len(parts) + 1)]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, layer by layer, in the order of the modules."""
    return [
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, m in module.named_modules()
        for name, value in [*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)]
    ]


def strip_counters(module: nn.Module) -> nn.Module:
    """A copy without BatchNorm's batch counters: integers have no mean, and a fixed momentum does not need them."""
    module = copy.deepcopy(module)
    for m in module.modules():
        if isinstance(m, NORMS) and m.num_batches_tracked is not None:
            if m.momentum is None:
                raise UsageError("BatchNorm with momentum=None averages by its counter; give it a fixed momentum.")
            m.num_batches_tracked = None
    return module
