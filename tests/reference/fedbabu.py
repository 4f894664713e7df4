"""FedBABU. Oh, Kim and Yun, ICLR 2022: only the body is trained and averaged, under the initial head, which is
everybody's for ever; a client predicts with a copy that it fine-tunes on its own training data.

The copy, the received body under the initial head, is fine-tuned as a whole ("all") or in its head alone, on the
frozen body; nothing of it is kept. With no tuning epochs the client predicts with the copy as it is.
"""

from __future__ import annotations

from .world import Result, World, average, copy, initial, part, size, train

FINE_TUNING_ORDER = 8


def run(world: World, tune_epochs: int = 5, tune_part: str = "all") -> Result:
    only = {"all": "", "head": "head."}[tune_part]
    head = part(initial(world), "head.")
    body = part(initial(world), "body.")
    for r in range(world.rounds):
        uploads, weights = [], []
        for i in world.participants(r):
            w = train(world, {**body, **head}, i, r, only="body.", order=0)
            uploads.append(part(w, "body."))
            weights.append(size(world, i))
        body = average(uploads, weights)
    whole = {**body, **head}
    tuned = [
        train(world, whole, i, world.rounds, only=only, order=FINE_TUNING_ORDER, epochs=tune_epochs)
        for i in range(world.clients)
    ]
    return Result(server=body, clients=tuned, extra={"before": [copy(whole) for _ in range(world.clients)]})
