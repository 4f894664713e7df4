"""A small federation with everything that goes wrong in it, and the bridge from a run to the references' `World`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from idiolect import Result, Run, run
from idiolect.data import Dataset, Federation
from idiolect.data.federated import split_hash
from idiolect.data.ragged import Ragged
from idiolect.engine import orders
from idiolect.nets import build
from idiolect.tree import Tree
from reference.world import Result as Reference
from reference.world import World

SIZES = (17, 9, 5, 3, 12, 7, 4, 11)  # unequal, several smaller than a batch; 5, 9, 17 leave a last batch of one
CLASSES = 3


def federation(sizes: tuple[int, ...] = SIZES, images: bool = False, seed: int = 0) -> Federation:
    """Clients of these sizes with label-skewed, partly separable data, each with 4 test rows. Client 3 has one class."""
    draw = np.random.default_rng(seed)
    shape = (1, 8, 8) if images else (6,)
    x, y, train, test, at = [], [], [], [], 0
    for client, n in enumerate(sizes):
        skew = draw.dirichlet([0.6] * CLASSES)
        labels = draw.choice(CLASSES, size=n + 4, p=skew)
        if client == 3:
            labels[:] = 1
        centres = np.stack([np.full(shape, c - 1.0) for c in range(CLASSES)])
        x.append(centres[labels] * 0.7 + draw.normal(size=(n + 4, *shape)) + 0.2 * client)
        y.append(labels)
        train.append(np.arange(at, at + n))
        test.append(np.arange(at + n, at + n + 4))
        at += n + 4
    data = Dataset(
        "small", torch.tensor(np.concatenate(x), dtype=torch.float32), torch.tensor(np.concatenate(y)), CLASSES, "mlp"
    )
    parts = [Ragged.of(part) for part in (train, [[]] * len(train), test)]
    return Federation(data, *parts, split_hash(*parts), "small")


def opposed() -> Federation:
    """Eight equal clients with all classes, well apart; every other one calls each class by the next one's name."""
    fed = federation((18,) * 8)
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(len(fed.dataset.y)) % CLASSES
    x = 2 * torch.eye(6)[:CLASSES][y] + 0.3 * torch.randn(len(y), 6, generator=draw)
    for i in range(1, 8, 2):
        for rows in (fed.train[i], fed.test[i]):
            y[rows] = (y[rows] + 1) % CLASSES
    return dataclasses.replace(fed, dataset=dataclasses.replace(fed.dataset, x=x, y=y))


def experiment(method: Any, **fields: Any) -> Run:
    """Four rounds in float64 with 5 of 8 unequal clients, momentum, weight decay and a falling rate."""
    images = fields.pop("images", False)
    fed = fields.pop("federation", None) or federation(fields.pop("sizes", SIZES), images)
    fields.setdefault("network", "convnet3" if images else "mlp")
    if fields["network"] == "mlp":
        fields.setdefault("network_options", {"hidden": (5,)})
    base: dict[str, Any] = {
        "data": fed.dataset, "split": fed, "clients": fed.clients, "rounds": 4, "ratio": 0.65, "epochs": 2, "batch_size": 4, "lr": 0.1,
        "momentum": 0.5, "weight_decay": 0.01, "schedule": "exponential", "decay": 0.9, "dtype": "float64", "backend": "serial", "seed": 3,
    }  # fmt: skip
    return Run(method=method, **{**base, **fields})


def world(experiment: Run, supervisor: Any = None) -> World:
    """The same experiment as the references see it."""
    context = experiment.context()

    def batches(
        i: int, r: int, order: int, epoch: int, share: float = 1.0, count: int | None = None
    ) -> list[torch.Tensor]:
        n = context.shards.size("train", i) if count is None else count
        found = orders.batches(n, experiment.batch_size, experiment.seed, r, i, order, epoch, share)
        if (pace := experiment.faults.pace(r, i)) < 1:  # of a phase of the run's epochs
            found = found[: max(math.ceil(pace * experiment.epochs * len(found)) - epoch * len(found), 0)]
        return found

    def heard(r: int) -> list[int]:
        there, _ = experiment.faults.there(r, experiment.participants(r))
        return [i for i in there if not experiment.faults.lost(r, i)]

    def linear(name: str, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = context.net.linear(name, inputs, outputs)
        return layer[f"{name}.weight"], layer[f"{name}.bias"]

    def split(i: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        n = context.shards.size("train", i)
        order = torch.from_numpy(orders.draw(experiment.seed, "split", i).permutation(n))
        first = min(max(math.ceil(share * n - 1e-9), 1), max(n - 1, 1))  # at least one each, where there are two
        return order[:first].sort().values, order[first:].sort().values

    def draw(purpose: str, r: int, i: int) -> np.random.Generator:
        return orders.draw(experiment.seed, purpose, r, i)

    return World(
        clients=experiment.clients, rounds=experiment.rounds, classes=context.classes, participants=heard,
        data=lambda i: context.shards.part("train", i), batches=batches, module=lambda: experiment.module(), lr=context.rate,
        epochs=experiment.epochs, momentum=experiment.momentum, weight_decay=experiment.weight_decay, linear=linear, split=split, draw=draw,
        another=lambda purpose: dict(context.net.fresh(purpose)),
        loss=lambda out, y: 0.5 * (out - y).square().sum(1).mean() if context.loss == "squared" else torch.nn.functional.cross_entropy(out, y),
    )  # fmt: skip


def agree(found: Result, reference: Reference, tolerance: float = 1e-10) -> None:
    """Shared and every personal model of the engine are the reference's, entry by entry."""
    shared = found.server.get("model", Tree())
    assert set(shared) == set(reference.server)
    for name, value in reference.server.items():
        torch.testing.assert_close(
            shared[name], value, rtol=0, atol=tolerance, msg=lambda m, name=name: f"shared {name}: {m}"
        )
    for i, expected in enumerate(reference.clients):
        own = found.personal(i)
        assert set(own) == set(expected), f"client {i}: {sorted(set(own) ^ set(expected))}"
        for name, value in expected.items():
            torch.testing.assert_close(
                own[name], value, rtol=0, atol=tolerance, msg=lambda m, i=i, name=name: f"client {i} {name}: {m}"
            )


def moved(a: Tree, b: Tree) -> float:
    """The largest difference of two Trees."""
    return max(float((a[k] - b[k]).abs().max()) for k in a)


__all__ = ["agree", "build", "experiment", "federation", "moved", "opposed", "run", "world"]
