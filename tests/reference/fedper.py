"""FedPer. Arivazhagan et al., arXiv 1912.00818, 2019: shared body, private head, trained together.

A client that never took part predicts with the newest body and the initial head. `private` are the prefixes
of the names that stay at the client: () is FedAvg, ("body.", "head.") is Local.
"""

from __future__ import annotations

from .world import Result, World, average, copy, initial, size, train


def run(world: World, private: tuple[str, ...] = ("head.",)) -> Result:
    start = initial(world)
    own_names = [name for name in start if name.startswith(private)]
    shared_names = [name for name in start if not name.startswith(private)]
    server = {name: start[name].clone() for name in shared_names}
    own = [{name: start[name].clone() for name in own_names} for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            trained = train(world, {**server, **own[i]}, i, r)
            own[i] = {name: trained[name] for name in own_names}
            uploads.append({name: trained[name] for name in shared_names})
            weights.append(size(world, i))
        server = average(uploads, weights)
    return Result(server=server, clients=[{**copy(server), **own[i]} for i in range(world.clients)])
