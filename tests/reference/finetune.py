"""FineTune: any method, trained exactly as it is; each client then predicts with a throw-away copy of its
model, fine-tuned on its own training data.

`inner` is the `run` of another reference (fix its settings with functools.partial). `part` is "all" or
"head"; with "head" the body is frozen and in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable

from . import fedavg
from .world import Result, World, train

FINE_TUNING_ORDER = 8


def run(
    world: World,
    inner: Callable[[World], Result] = fedavg.run,
    epochs: int = 5,
    part: str = "all",
) -> Result:
    only = {"all": "", "head": "head."}[part]
    before = inner(world)
    tuned = [
        train(world, model, i, world.rounds, only=only, order=FINE_TUNING_ORDER, epochs=epochs)
        for i, model in enumerate(before.clients)
    ]
    return Result(server=before.server, clients=tuned, extra={**before.extra, "before": before.clients})
