"""pFedHN. Shamsian et al., ICML 2021, Algorithm 1: a network at the server makes each client's parameters of its vector.

Client i has a vector v_i, standard normal at first, of width 1 + floor(N / 4) unless given. The hypernetwork h has
fully connected layers hyper1, hyper2, ..., with a ReLU after each, and one linear layer "out:name" for each parameter
of the network. In a round, for every participant i,

    theta_i = h(v_i; phi), its parameters; buffers are shared
    theta~_i = theta_i after E epochs,   Delta_i = theta~_i - theta_i
    server, at the phi and v_i of the round's beginning:
    g   = mean over the participants, each alike, of the gradient of -<Delta_i, h(v_i; phi)> with respect to phi
    u  <- server_momentum * u + g + server_weight_decay * phi,   phi <- phi - server_lr * u        (u = 0 at first)
    v_i <- v_i - server_lr * (gradient of -<Delta_i, h(v_i; phi)> with respect to v_i + server_weight_decay * v_i)
    buffers <- mean of the participants', each alike

Client i predicts with h(v_i; phi) and the shared buffers. The gradients are written out, layer by layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .world import Result, State, World, average, initial, train, trainable


def run(
    world: World,
    embedding: int | None = None,
    hidden: int = 100,
    layers: int = 3,
    server_lr: float = 0.01,
    server_momentum: float = 0.9,
    server_weight_decay: float = 1e-3,
) -> Result:
    width = 1 + world.clients // 4 if embedding is None else embedding
    names = trainable(world)
    shapes = {name: initial(world)[name].shape for name in names}
    buffers = {name: tensor for name, tensor in initial(world).items() if name not in names}
    v = [torch.tensor(world.draw("embedding", 0, i).standard_normal(width)) for i in range(world.clients)]
    phi = layers_of(world, width, hidden, layers, shapes)
    velocity = {name: torch.zeros_like(tensor) for name, tensor in phi.items()}
    for r in range(world.rounds):
        ids = world.participants(r)
        slopes, replies = [], []
        new = list(v)
        for i in ids:
            theta = generate(phi, v[i], layers, shapes)
            reply = train(world, {**theta, **buffers}, i, r)
            delta = {name: reply[name] - theta[name] for name in names}
            g, g_v = gradient(phi, v[i], layers, delta)
            slopes.append(g)
            new[i] = v[i] - server_lr * (g_v + server_weight_decay * v[i])
            replies.append({name: reply[name] for name in buffers})
        for name in phi:
            g = sum(slope[name] for slope in slopes) / len(ids)
            velocity[name] = server_momentum * velocity[name] + g + server_weight_decay * phi[name]
            phi[name] = phi[name] - server_lr * velocity[name]
        v = new
        buffers = average(replies, [1.0] * len(ids))
    clients = [{**generate(phi, v[i], layers, shapes), **copied(buffers)} for i in range(world.clients)]
    extra = {"hyper": phi, "velocity": velocity, "embedding": v, "buffers": buffers}
    return Result(server={}, clients=clients, extra=extra)


def layers_of(world: World, width: int, hidden: int, layers: int, shapes: dict[str, torch.Size]) -> State:
    """The hypernetwork's initial parameters."""
    sizes = {f"hyper{k}": (width if k == 1 else hidden, hidden) for k in range(1, layers + 1)}
    sizes |= {f"out:{name}": (hidden, shape.numel()) for name, shape in shapes.items()}
    phi = {}
    for name, (inputs, outputs) in sizes.items():
        weight, bias = world.linear(name, inputs, outputs)
        phi[f"{name}.weight"], phi[f"{name}.bias"] = weight.double().clone(), bias.double().clone()
    return phi


def activations(phi: State, v: Tensor, layers: int) -> list[Tensor]:
    """The vector, and what comes out of every hidden layer."""
    found = [v]
    for k in range(1, layers + 1):
        found.append((phi[f"hyper{k}.weight"] @ found[-1] + phi[f"hyper{k}.bias"]).clamp(min=0))
    return found


def generate(phi: State, v: Tensor, layers: int, shapes: dict[str, torch.Size]) -> State:
    """h(v; phi)"""
    a = activations(phi, v, layers)[-1]
    return {
        name: (phi[f"out:{name}.weight"] @ a + phi[f"out:{name}.bias"]).reshape(shape) for name, shape in shapes.items()
    }


def gradient(phi: State, v: Tensor, layers: int, delta: State) -> tuple[State, Tensor]:
    """Of -<delta, h(v; phi)>, with respect to phi and to v: backpropagation by hand."""
    a = activations(phi, v, layers)
    g: State = {}
    back = torch.zeros_like(a[-1])
    for name, moved in delta.items():
        out = -moved.reshape(-1)
        g[f"out:{name}.weight"], g[f"out:{name}.bias"] = torch.outer(out, a[-1]), out
        back = back + phi[f"out:{name}.weight"].T @ out
    for k in range(layers, 0, -1):
        out = torch.where(a[k] > 0, back, torch.zeros_like(back))
        g[f"hyper{k}.weight"], g[f"hyper{k}.bias"] = torch.outer(out, a[k - 1]), out
        back = phi[f"hyper{k}.weight"].T @ out
    return g, back


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}
