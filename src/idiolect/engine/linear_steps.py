"""Plain SGD on linear layers with ReLU between, by its gradients as they are written on paper.

Of a step of such a network most is bookkeeping: here it is three products a layer, the last of which adds the gradient
to the weights as it is made. For a batch of n samples with logits z and labels y

    dz = (softmax(z) - onehot(y)) / n,    dW = dz' a,    db = dz' 1,    da = dz W where a > 0,

layer by layer from above. The same mathematics as autograd's, rounded otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from idiolect.client import Phase, is_plain
from idiolect.engine import steps
from idiolect.optim import SGD
from idiolect.task import Features, Net, Task
from idiolect.tree import Tree

where_positive = torch.ops.aten.threshold_backward.default  # a ReLU's gradient


@dataclass(frozen=True)
class Linear:
    """One layer: the names of its entries, and whether a ReLU follows."""

    weight: str
    bias: str
    relu: bool


def chain(net: Net) -> list[Linear] | None:
    """The network's layers, the head's last, if it is nothing but linear layers with ReLU between."""
    found: list[Linear] = []
    modules = [(name, m) for name, m in net.module.named_modules() if not list(m.children())]
    for name, m in modules:
        if type(m) is nn.Linear and m.bias is not None:
            found.append(Linear(f"{name}.weight", f"{name}.bias", False))
        elif type(m) is nn.ReLU and found:
            found[-1] = Linear(found[-1].weight, found[-1].bias, True)
        elif type(m) is not nn.Flatten or found:
            return None
    entries = {k for layer in found for k in (layer.weight, layer.bias)}
    whole = entries == net.weights.keys() and not net.others and not (found and found[-1].relu)
    return found if whole and modules[-1][0] == "head" else None


def fits(task: Task, phase: Phase, layers: list[Linear]) -> bool:
    """Whether the phase is plain SGD of whole layers on the run's cross-entropy."""
    trained = set(phase.trained)
    return (
        is_plain(phase.loss)
        and task.kind == "cross_entropy"
        and task.autocast is None
        and phase.optimizer == SGD()
        and (phase.correct, phase.step, phase.project, phase.clip, phase.augment) == (None,) * 5
        and not phase.carried
        and trained <= {k for layer in layers for k in (layer.weight, layer.bias)}
        and all((layer.weight in trained) == (layer.bias in trained) for layer in layers)
    )


def train(task: Task, phase: Phase, layers: list[Linear]) -> Tree:
    """What `steps.train` gives, to rounding."""
    layers = layers[-1:] if isinstance(phase.x, Features) else layers
    trained = set(phase.trained)
    live = {k: v.detach().clone() if k in trained else v for k, v in phase.weights.items()}
    held = [Held(live[k.weight], live[k.weight].t(), live[k.bias], k.relu, k.weight in trained) for k in layers]
    lowest = next(i for i, layer in enumerate(held) if layer.moves)
    one = held[-1].bias.new_full((1, 1), -1.0)
    with torch.no_grad():
        for (batch,) in steps.batches(task, phase):
            inputs = _forward(held, batch.x)
            d = torch.softmax(inputs.pop(), 1)
            n = d.shape[0]
            d.scatter_add_(1, batch.y.unsqueeze(1), one.expand(n, 1))
            _backward(held, inputs, d, lowest, -phase.lr / n)
    return Tree(live)


class Held(NamedTuple):
    """One layer as it is trained: its entries, the same memory in every step."""

    weight: Tensor
    turned: Tensor
    bias: Tensor
    relu: bool
    moves: bool


def _forward(held: list[Held], x: Any) -> list[Tensor]:
    """The input of every layer, and the logits."""
    a = x.z if isinstance(x, Features) else x.flatten(1)
    inputs = [a]
    for layer in held:
        a = torch.addmm(layer.bias, a, layer.turned)
        inputs.append(a.relu_() if layer.relu else a)
    return inputs


def _backward(held: list[Held], inputs: list[Tensor], d: Tensor, lowest: int, rate: float) -> None:
    """Move each trained layer by `rate` times its gradient; `d` is that of the logits, before the division by n."""
    for i in range(len(held) - 1, lowest - 1, -1):
        layer = held[i]
        below = where_positive(d @ layer.weight, inputs[i], 0) if i > lowest else d
        if layer.moves:
            layer.weight.addmm_(d.t(), inputs[i], alpha=rate)
            layer.bias.add_(d.sum(0), alpha=rate)
        d = below
