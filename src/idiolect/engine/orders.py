"""Randomness as a function of (seed, purpose, round, client, ...): never of what ran before."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from idiolect.sampling import Sampler


def key(seed: int, *purpose: object) -> int:
    """A 63-bit key of the seed and what the randomness is for."""
    text = repr((seed, *purpose)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def draw(seed: int, *purpose: object) -> np.random.Generator:
    """NumPy's counter-based generator of that key."""
    return np.random.Generator(np.random.Philox(key(seed, *purpose)))


def epoch_order(n: int, seed: int, round: int, client: int, order: int, epoch: int, share: float = 1.0) -> Tensor:
    """The samples of one epoch in the order of their use. With `share` < 1: of one random subset of ceil(share * n)
    samples, the same for every epoch of the phase."""
    chosen = None
    if share < 1.0:
        chosen = draw(seed, "share", round, client, order).permutation(n)[: math.ceil(share * n)]
        n = len(chosen)
    shuffled = draw(seed, "order", round, client, order, epoch).permutation(n)
    return torch.from_numpy(shuffled if chosen is None else chosen[shuffled])


def cuts(n: int, size: int) -> list[tuple[int, int]]:
    """Where an epoch of n samples is cut into batches. A last batch of one sample joins the batch before it, for it has
    no variance to normalise by; where every batch is of one sample, all stay."""
    ends = [*range(size, n, size), n]
    if size > 1 and len(ends) > 1 and ends[-1] - ends[-2] == 1:
        del ends[-2]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def batches(
    n: int, size: int, seed: int, round: int, client: int, order: int, epoch: int, share: float = 1.0
) -> list[Tensor]:
    """One epoch as a list of index batches."""
    indices = epoch_order(n, seed, round, client, order, epoch, share)
    return [indices[a:b] for a, b in cuts(len(indices), size)]


def participants(rule: Sampler, num_clients: int, seed: int, round: int) -> list[int]:
    """Who takes part in a round: a function of (seed, round), the same for every method."""
    return rule(num_clients, draw(seed, "participants", round), round)
