"""Mistakes in fedlag.py, and what notices them."""

from functools import partial

import torch

from checks import named
from harness import agree, experiment, run, world
from reference import fedlag as reference

USUAL = {"top_k": 2, "threshold": -0.05, "warmup": 1}


def is_its_reference(kind, **hyper):
    """Around FedAvg on a convnet: models, conflicts and personal layers."""
    method = kind(named("fedavg"), **{**USUAL, **hyper})
    found = run(experiment(method, images=True, rounds=5))
    expected = reference.run(
        world(found.run), k=method.top_k, xi=method.threshold, warmup=method.warmup, scores=method.scores,
        weights=method.weights, skip_norm=method.skip_norm,
    )  # fmt: skip
    agree(found, expected)
    assert torch.equal(torch.stack([n["conflicts"].flat() for n in found.notes]), expected.extra["conflicts"])
    chosen = [[layer in on for layer in expected.extra["layers"]] for on in expected.extra["personal"]]
    assert torch.stack([n["personal"].flat() for n in found.notes]).tolist() == chosen


LAG, SUMMED = is_its_reference, partial(is_its_reference, scores="warmup", warmup=2)
LATER, SAMPLES = partial(is_its_reference, warmup=2), partial(is_its_reference, weights="samples")
NORMS = partial(is_its_reference, skip_norm=True, top_k=9)

MUTANTS = [
    ("(cosines < threshold)", "(cosines > threshold)", LAG),
    (".triu(1).sum()", ".sum()", LAG),
    ("products[layer] + inner_products(", "inner_products(", LAG),  # the bias alone
    ("/ torch.outer(length, length)", "", LAG),
    ('rows[i]["upload"] if rows[i]["uploaded"] else start', "start", LAG),  # updates from the server's model
    ('.drop(kept(down["model"], server))} if row["uploaded"]', '} if row["uploaded"]', LAG),
    ('mine["returned"] | down["model"]', 'mine["returned"].zeros() | down["model"]', LAG),
    ('"returned": model}', '"returned": mine["returned"]}', LAG),
    ('"returned": model}', '"returned": self.filled(me, down, mine)["model"]}', LAG),
    ('if self.weights == "uniform" and self.top_k and run', "if self.top_k and run", SAMPLES),
    ("self.top_k and run.round >= self.warmup", "self.top_k", LAG),
    ("run.round >= self.warmup:", "run.round > self.warmup:", LAG),
    ("run.round + 1 >= self.warmup", "run.round >= self.warmup", LATER),
    ('if self.scores == "round":', "if True:", SUMMED),
    ("before + conflicts if", "conflicts if", SUMMED),
    ("-int(scores[layer])", "int(scores[layer])", LAG),
    ("(score > 0) & (layer in best)", "score >= 0 if layer in best else score < 0", LAG),
    ("self.skip_norm and k in net.norms", "False", NORMS),
]
