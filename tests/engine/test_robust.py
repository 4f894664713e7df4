"""Robust means, each against the same thing said slowly; and how far a few wrong replies move them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.engine.robust import RULES, Clip, Geometric, Krum, Median, MultiKrum, Trimmed, rule
from idiolect.errors import UsageError


def replies(count=9, seed=0):
    """Two entries of each reply, in float64, and shares that sum to one."""
    draw = np.random.default_rng(seed)
    updates = [torch.from_numpy(draw.normal(size=(count, *shape))) for shape in ((2, 3), (4,))]
    shares = draw.uniform(0.5, 2.0, count)
    return updates, torch.from_numpy(shares / shares.sum())


def vectors(updates):
    """The replies as lists of numbers."""
    return [[float(v) for u in updates for v in u[k].reshape(-1)] for k in range(len(updates[0]))]


def said(found):
    return [float(v) for u in found for v in u.reshape(-1)]


def middle(values):
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def squared(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def krum_order(points, bad):
    scores = []
    for k, p in enumerate(points):
        others = sorted(squared(p, q) for j, q in enumerate(points) if j != k)
        scores.append(sum(others[: len(points) - bad - 2]))
    return sorted(range(len(points)), key=lambda k: (scores[k], k))


@pytest.mark.parametrize("count", [7, 8, 12])
@pytest.mark.parametrize("seed", range(3))
def test_each_is_what_its_paper_says(count, seed):
    updates, shares = replies(count, seed)
    points, p = vectors(updates), shares.tolist()
    columns = list(zip(*points, strict=True))
    close = lambda found, expected: pytest.approx(expected, abs=1e-12) == said(found)
    assert close(Median()(updates, shares), [middle(c) for c in columns])
    for share in (0.0, 0.1, 0.3):
        cut = math.floor(share * count + 1e-9)
        trimmed = [sorted(c)[cut : count - cut] for c in columns]
        assert close(Trimmed(share)(updates, shares), [sum(c) / len(c) for c in trimmed])
    for bad in (1, 2):
        order = krum_order(points, bad)
        assert close(Krum(bad)(updates, shares), points[order[0]])
        kept = [points[k] for k in order[: count - bad]]
        assert close(MultiKrum(bad)(updates, shares), [sum(c) / len(kept) for c in zip(*kept, strict=True)])
    for norm in (0.5, 3.0, 100.0):
        factors = [q * min(1, norm / math.sqrt(squared(v, [0] * len(v)))) for q, v in zip(p, points, strict=True)]
        assert close(
            Clip(norm)(updates, shares), [sum(f * x for f, x in zip(factors, c, strict=True)) for c in columns]
        )


@pytest.mark.parametrize("seed", range(3))
def test_nothing_near_the_geometric_median_is_nearer_to_the_replies(seed):
    updates, shares = replies(8, seed)
    points, p = vectors(updates), shares.tolist()
    far = lambda v: sum(q * math.sqrt(squared(v, point)) for q, point in zip(p, points, strict=True))
    found = said(Geometric(1000)(updates, shares))
    for k, step in itertools.product(range(len(found)), (1e-3, -1e-3)):
        assert far(found) < far([v + step * (j == k) for j, v in enumerate(found)])


@pytest.mark.parametrize("name", sorted(RULES))
def test_equal_replies_give_themselves(name):
    update = [torch.randn(3, 2, generator=torch.Generator().manual_seed(0))]
    found = rule(f"{name}:100" if name == "clip" else name)(
        [u.expand(7, *u.shape) for u in update], torch.full((7,), 1 / 7).double()
    )
    assert found[0].shape == (3, 2)
    assert torch.allclose(found[0], update[0], atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["median", "trimmed:0.3", "krum:2", "multikrum:2", "geometric"]),
    st.integers(0, 99),
    st.floats(10, 1e6),
)
def test_two_wrong_replies_of_ten_do_not_carry_it_away(name, seed, size):
    """The mean goes where they pull it; these stay within what the honest replies say."""
    updates, _ = replies(10, seed)
    honest = max(math.sqrt(squared(v, [0] * 10)) for v in vectors([u[2:] for u in updates]))
    for u in updates:
        u[:2] = size * 10
    shares = torch.full((10,), 0.1, dtype=torch.float64)
    found = said(rule(name)(updates, shares))
    assert math.sqrt(squared(found, [0] * 10)) <= 2 * honest
    assert math.sqrt(squared(said(Trimmed(0.0)(updates, shares)), [0] * 10)) > 2 * honest


@pytest.mark.parametrize("name", ["median", "trimmed:0.2", "krum:1", "multikrum:1", "geometric"])
def test_the_order_of_replies_does_not_matter(name):
    updates, _ = replies(9)
    shares = torch.full((9,), 1 / 9, dtype=torch.float64)
    order = [4, 2, 8, 0, 6, 1, 7, 5, 3]
    one, two = (said(rule(name)(us, shares)) for us in (updates, [u[order] for u in updates]))
    assert one == pytest.approx(two, abs=1e-9)


@pytest.mark.parametrize("text", ["median", "trimmed:0.1", "krum:2", "multikrum:3", "clip:2.5", "geometric:50,1e-06"])
def test_a_text_names_a_rule_and_the_rule_its_text(text):
    assert str(rule(text)) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("medien", "Unknown reduction 'medien'. Did you mean median"),
        ("trimmed:0.5", r"trimmed leaves out a share in \[0, 0.5\)"),
        ("krum:x", "krum takes numbers, as in 'krum:1'"),
        ("krum:0", "krum takes a whole number of at least 1 for bad"),
        ("median:1", "median takes 0 numbers at most"),
        ("clip:0", "clip takes a length > 0"),
        ("mean:1", "Unknown reduction 'mean'"),
    ],
)
def test_what_names_no_rule_is_refused(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        rule(text)


def test_the_mean_is_no_rule():
    assert rule("mean") is None


@pytest.mark.parametrize(
    ("text", "least"), [("median", 1), ("trimmed:0", 1), ("trimmed:0.2", 5), ("trimmed:0.3", 4), ("krum:2", 7)]
)
def test_how_many_replies_each_needs(text, least):
    assert rule(text).least == least
    updates, _ = replies(least)
    shares = torch.full((least,), 1 / least, dtype=torch.float64)
    found = said(rule(text)(updates, shares))
    plain = said(Trimmed(0.0)(updates, shares))
    assert text in ("median", "trimmed:0") or found != pytest.approx(plain, abs=1e-9)  # it leaves something out
