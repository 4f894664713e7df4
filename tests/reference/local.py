"""Local: every client trains its own model and nothing is ever sent."""

from __future__ import annotations

from .world import Result, World, initial, train


def run(world: World) -> Result:
    models = [initial(world) for _ in range(world.clients)]
    for r in range(world.rounds):
        for i in world.participants(r):
            models[i] = train(world, models[i], i, r)
    return Result(server={}, clients=models)
