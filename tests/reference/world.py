"""What a reference is given (`World`), what it returns (`Result`), and the few plain pieces they all share.

A state is a dict from the names of a module's parameters and buffers ("body.0.weight", "head.bias", ...) to
float64 tensors. The counters `num_batches_tracked` appear nowhere. Every function but `write` returns new
tensors and changes none of its arguments, so no two models can ever share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class World:
    """One federated run, without a method: who has what, who takes part when, in which order samples come."""

    clients: int
    rounds: int
    classes: int
    participants: Callable[[int], list[int]]  # round -> ascending client numbers
    data: Callable[[int], tuple[Tensor, Tensor]]  # client -> its training inputs and labels
    # (client, round, order, epoch, share=1.0, count=None) -> sample numbers, out of `count` instead of n_i where given
    batches: Callable[..., list[Tensor]]
    module: Callable[[], nn.Module]  # a new copy of the network with the initial weights; children body, head
    lr: Callable[[int], float]  # round -> learning rate
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy  # (outputs, labels) -> mean
    # (name, inputs, outputs) -> initial weight and bias of an extra layer, for the methods that have one
    linear: Callable[[str, int, int], tuple[Tensor, Tensor]] | None = None
    # purpose -> another initial state of the whole network, independent of the first
    another: Callable[[str], State] | None = None
    # (client, share) -> its sample numbers in two parts, ascending: ceil(share * n) to train on, the rest held out
    split: Callable[[int, float], tuple[Tensor, Tensor]] | None = None
    # (purpose, round, client) -> a generator of this draw alone
    draw: Callable[[str, int, int], np.random.Generator] | None = None


@dataclass
class Result:
    """What a method leaves: the shared state, the model each client predicts with next, and other things."""

    server: State
    clients: list[State]
    extra: dict = field(default_factory=dict)


def fresh(world: World) -> nn.Module:
    """The network with the initial weights, in float64, without batch normalisation's integer counters."""
    module = world.module().double()
    for layer in module.modules():
        if getattr(layer, "num_batches_tracked", None) is not None:
            layer.num_batches_tracked = None
    return module


def read(module: nn.Module) -> State:
    """A copy of every parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(module)}


def write(module: nn.Module, state: State) -> None:
    """Copy a state, which must have every name of the module and no other, into the module."""
    assert state.keys() == {name for name, _ in _tensors(module)}
    with torch.no_grad():
        for name, tensor in _tensors(module):
            tensor.copy_(state[name])


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def initial(world: World) -> State:
    """The initial state of the whole network."""
    return read(fresh(world))


def trainable(world: World) -> list[str]:
    """The names of the parameters: everything in a state that is not a buffer."""
    return [name for name, _ in fresh(world).named_parameters()]


def part(state: State, prefix: str) -> State:
    """A copy of the entries whose names begin with `prefix`, such as "body." or "head."."""
    return {name: tensor.clone() for name, tensor in state.items() if name.startswith(prefix)}


def copy(state: State) -> State:
    """A copy of all entries."""
    return part(state, "")


def samples(world: World, i: int) -> tuple[Tensor, Tensor]:
    """Client i's training data; floating point becomes float64, token ids and labels stay integers."""
    x, y = world.data(i)
    return (x.double() if x.is_floating_point() else x), (y.double() if y.is_floating_point() else y)


def size(world: World, i: int) -> int:
    """n_i, the number of client i's training samples."""
    return len(world.data(i)[1])


def average(states: list[State], weights: list[float]) -> State:
    """The mean with these weights, which are divided by their sum; parameters and buffers alike."""
    total = sum(weights)
    return {
        name: sum(weight / total * state[name] for weight, state in zip(weights, states, strict=True))
        for name in states[0]
    }


def pull(strength: float, anchor: State) -> Callable[[str, Tensor], Tensor]:
    """For `train`: the gradient of (strength / 2) ||w - anchor||^2, parameter by parameter."""
    return lambda name, w: strength * (w - anchor[name])


def train(
    world: World,
    start: State,
    i: int,
    r: int,
    *,
    only: str = "",
    order: int = 0,
    epochs: int | None = None,
    correct: Callable[[str, Tensor], Tensor] | None = None,
) -> State:
    """One phase of SGD on client i's data in round r, from the full state `start` to the one returned.

    Only parameters whose names begin with `only` are trained; a child of the network with no such parameter
    is in eval mode. `correct(name, w)` is what the method adds to the gradient of the parameter `name`, which
    is now w. Momentum starts anew in every call.
    """
    module = fresh(world)
    write(module, start)
    trained = [(name, w) for name, w in module.named_parameters() if name.startswith(only)]
    module.train()
    for child_name, child in module.named_children():
        if not any(name.startswith(child_name + ".") for name, _ in trained):
            child.eval()
    x, y = samples(world, i)
    velocity: State = {}
    for epoch in range(world.epochs if epochs is None else epochs):
        for batch in world.batches(i, r, order, epoch):
            module.zero_grad()
            world.loss(module(x[batch]), y[batch]).backward()
            with torch.no_grad():
                for name, w in trained:
                    g = w.grad.clone()
                    if correct is not None:
                        g = g + correct(name, w)
                    g = g + world.weight_decay * w
                    v = g if name not in velocity else world.momentum * velocity[name] + g
                    velocity[name] = v
                    w.copy_(w - world.lr(r) * v)
    return read(module)
