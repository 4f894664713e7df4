"""FedEXP. Jhunjhunwala, Wang and Joshi, ICLR 2023: FedAvg whose server step is extrapolated.

    D_i = w_i - w^t,  Dbar = sum_i q_i D_i,  w^{t+1} = w^t + eta Dbar
    "uniform":  q_i = 1 / m,  eta = max(1, sum_i ||D_i||^2 / (2 m (||Dbar||^2 + eps)))
    "samples":  q_i = p_i,    eta = max(1, sum_i p_i ||D_i||^2 / (2 (||Dbar||^2 + m eps)))    the authors' code

The norms are of all parameters as one vector. Buffers are averaged plainly. Clients train from w^t and predict
with the average of the last two iterates, w^t and w^{t-1} (w^{-1} = w^0); without `average_last`, with w^t.
"""

from __future__ import annotations

from .world import Result, State, World, average, copy, initial, size, train, trainable


def run(world: World, eps: float = 1e-3, weights: str = "uniform", average_last: bool = True) -> Result:
    assert weights in ("uniform", "samples")
    names = trainable(world)
    server = before = initial(world)
    rates = []
    for r in range(world.rounds):
        participants = world.participants(r)
        ends = [train(world, server, i, r) for i in participants]
        share = [size(world, i) if weights == "samples" else 1 for i in participants]
        mean = average(ends, share)
        squares = [squared_distance(end, server, names) for end in ends]
        spread = sum(q * square for q, square in zip(share, squares, strict=True)) / sum(share)
        floor = len(participants) * eps if weights == "samples" else eps
        below = squared_distance(mean, server, names) + floor
        rates.append(max(1.0, spread / (2 * below)) if below > 0 else 1.0)
        before, server = server, extrapolated(server, mean, names, rates[-1])
    predicting = average([server, before], [1, 1]) if average_last else server
    return Result(server=copy(server), clients=[copy(predicting) for _ in range(world.clients)], extra={"eta": rates})


def squared_distance(u: State, v: State, names: list[str]) -> float:
    return sum(float(((u[name] - v[name]) ** 2).sum()) for name in names)


def extrapolated(start: State, mean: State, names: list[str], rate: float) -> State:
    """start + rate * (mean - start) in the parameters; the mean elsewhere."""
    return {name: start[name] + rate * (w - start[name]) if name in names else w.clone() for name, w in mean.items()}
