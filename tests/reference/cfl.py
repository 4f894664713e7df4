"""CFL. Sattler, Mueller, Samek, TNNLS 2020, Algorithms 1 to 3: clusters of clients, split in two where updates disagree.

All clients begin in cluster 0. In a round participant i trains the model theta_c of its cluster c, and

    Delta_i = w_i - theta_c                                       the server keeps it until i's next participation
    theta_c <- theta_c + sum of n_i Delta_i / sum of n_i          over the participants of c; buffers too

Then each cluster with participants is looked at, by the last Delta_i of all its members, participants or not:

    ||sum of n_i Delta_i / sum of n_i|| < eps1   and   max ||Delta_i|| > eps2

If so it is cut into the two parts whose largest cosine between them is the smallest: the most similar groups are merged,
by the largest cosine between them, until two are left. If sqrt((1 - that cosine) / 2) > gamma, the part with the lowest
client number stays cluster c, the other gets the next free number; both begin from the new theta_c. A cluster of one,
or with a member that never took part, is not split. Norms and cosines are of parameters, without buffers.
"""

from __future__ import annotations

import math

from .world import Result, State, World, copy, initial, size, train, trainable


def run(world: World, eps1: float = 0.4, eps2: float = 1.6, gamma: float = 0.0) -> Result:
    models = [initial(world)]
    cluster = [0] * world.clients
    updates: dict[int, State] = {}
    names = trainable(world)
    history = []
    for r in range(world.rounds):
        ids = world.participants(r)
        delta = {i: difference(train(world, models[cluster[i]], i, r), models[cluster[i]]) for i in ids}
        for i in ids:
            updates[i] = {name: delta[i][name] for name in names}
        touched = sorted({cluster[i] for i in ids})
        for c in touched:
            own = [i for i in ids if cluster[i] == c]
            step = mean([delta[i] for i in own], [size(world, i) for i in own])
            models[c] = {name: models[c][name] + step[name] for name in step}
        for c in touched:
            members = [i for i in range(world.clients) if cluster[i] == c]
            if len(members) < 2 or any(i not in updates for i in members):
                continue
            known = [updates[i] for i in members]
            if not wants_split(known, [size(world, i) for i in members], eps1, eps2):
                continue
            stays, leaves, cross = bipartition(known)
            if math.sqrt((1 - cross) / 2) > gamma:
                assert 0 in stays
                models.append(copy(models[c]))
                for a in leaves:
                    cluster[members[a]] = len(models) - 1
        history.append(list(cluster))
    clients = [copy(models[cluster[i]]) for i in range(world.clients)]
    return Result(server={}, clients=clients, extra={"models": models, "cluster": history, "updates": updates})


def difference(u: State, v: State) -> State:
    return {name: u[name] - v[name] for name in u}


def mean(states: list[State], weights: list[int]) -> State:
    return {
        name: sum(n * state[name] for n, state in zip(weights, states, strict=True)) / sum(weights)
        for name in states[0]
    }


def wants_split(updates: list[State], sizes: list[int], eps1: float, eps2: float) -> bool:
    """The cluster as a whole has come to rest, some client in it has not."""
    return norm(mean(updates, sizes)) < eps1 and max(norm(u) for u in updates) > eps2


def bipartition(updates: list[State]) -> tuple[list[int], list[int], float]:
    """Positions of the two parts, the one with position 0 first, and the largest cosine between them."""
    count = len(updates)
    alike = [[cosine(u, v) for v in updates] for u in updates]
    groups = [[a] for a in range(count)]

    def closeness(one: list[int], two: list[int]) -> float:
        return max(alike[a][b] for a in one for b in two)

    while len(groups) > 2:
        pairs = [(s, t) for s in range(len(groups)) for t in range(s + 1, len(groups))]
        s, t = max(pairs, key=lambda pair: closeness(groups[pair[0]], groups[pair[1]]))
        groups[s] = sorted(groups[s] + groups[t])
        del groups[t]
    first, second = sorted(groups)
    return first, second, closeness(first, second)


def norm(u: State) -> float:
    return math.sqrt(sum(float((tensor**2).sum()) for tensor in u.values()))


def cosine(u: State, v: State) -> float:
    """In [-1, 1]; 0 where one of the two did not move."""
    lengths = norm(u) * norm(v)
    product = sum(float((u[name] * v[name]).sum()) for name in u)
    return max(-1.0, min(1.0, product / lengths)) if lengths > 0 else 0.0
