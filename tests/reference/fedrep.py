"""FedRep. Collins et al., ICML 2021, Algorithm 1: shared body, private head; each round the head first, on
the body as received, and then the body, under the head just trained.

The body's average is weighted by n_i. The body is in eval mode while the head is trained.
"""

from __future__ import annotations

from .world import Result, World, average, copy, initial, part, size, train


def run(world: World, head_epochs: int = 10, body_epochs: int | None = None) -> Result:
    body = part(initial(world), "body.")
    heads = [part(initial(world), "head.") for _ in range(world.clients)]
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            w = train(world, {**body, **heads[i]}, i, r, only="head.", order=0, epochs=head_epochs)
            w = train(world, w, i, r, only="body.", order=1, epochs=body_epochs)
            heads[i] = part(w, "head.")
            uploads.append(part(w, "body."))
            weights.append(size(world, i))
        body = average(uploads, weights)
    return Result(server=body, clients=[{**copy(body), **heads[i]} for i in range(world.clients)])
