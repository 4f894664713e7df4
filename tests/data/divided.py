"""What the tests of all splits share."""

import re
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

LABELS = np.random.default_rng(0).integers(0, 10, 2000)
seeds = st.integers(0, 2**32)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def histogram(labels, parts):
    return np.stack([np.bincount(labels[rows], minlength=labels.max() + 1) for rows in parts])


def check_rows(parts, rows, clients):
    """Every row once, ascending int64, nobody without rows."""
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(list(parts))), np.arange(rows))
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert (np.diff(part) > 0).all()


def alternatives(split, clients, sentence):
    """The splits and numbers of clients that a refusal asks for."""
    asked = sentence.partition("; ")[2]
    number = re.search(r"(\d+) clients", asked)
    changes = {k: int(v) for k, v in re.findall(r"(classes|minimum|shards|each|clusters)=(\d+)", asked)}
    both = [(replace(split, **changes), int(number[1]))] if changes and number else []
    either = [(replace(split, **changes), clients)] if changes else []
    either += [(split, int(number[1]))] if number else []
    return both if " and " in asked else either


def check_refusal(split, labels, clients, seed):
    """It divides the rows, or names what can be had instead."""
    try:
        assert len(split(labels, clients, seed)) == clients
        return
    except ValueError as refusal:
        sentence = str(refusal)
    found = alternatives(split, clients, sentence)
    assert found, sentence
    for other, number in found:
        assert len(other(labels, number, seed)) == number, sentence
