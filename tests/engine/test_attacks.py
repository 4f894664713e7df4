"""Attacks: who attacks, and what is sent instead, against the same thing said slowly."""

from __future__ import annotations

import statistics

import pytest
import torch

from idiolect.engine.attacks import Attack, attack
from idiolect.errors import UsageError
from idiolect.method import Up
from idiolect.tree import Tree

SERVER = {
    "model": Tree({"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}),
    "c": Tree({"w": torch.zeros(2).double()}),
}


def replies(count=6):
    draw = torch.Generator().manual_seed(0)
    numbers = [torch.randn(2, generator=draw, dtype=torch.float64) for _ in range(2 * count)]
    return [
        (
            10 + k,
            Up(
                mean={"model": Tree({"w": numbers[2 * k]}), "dx": numbers[2 * k + 1]}, sum={"c": numbers[k]}, weight=3.0
            ),
        )
        for k in range(count)
    ]


def corrupted(text, bad=(11, 14)):
    found, before = replies(), replies()
    attack(text).corrupt(found, bad, SERVER, seed=5, round=2)
    for (client, up), (_, was) in zip(found, before, strict=True):
        if client not in bad:
            assert up.mean["model"].equals(was.mean["model"])
            assert torch.equal(up.mean["dx"], was.mean["dx"])
        assert torch.equal(up.sum["c"], was.sum["c"])  # what is not averaged stays
        assert up.weight == 3.0
    return {c: u.mean for c, u in found}, {c: u.mean for c, u in before}


@pytest.mark.parametrize(
    ("text", "factor"), [("sign:0.3", -1.0), ("sign:0.3,4", -4.0), ("scale:0.3", 10.0), ("scale:0.3,2.5", 2.5)]
)
def test_an_update_is_turned_round_or_made_longer(text, factor):
    found, before = corrupted(text)
    for i in (11, 14):
        for k in range(2):
            held = float(SERVER["model"]["w"][k])
            assert float(found[i]["model"]["w"][k]) == pytest.approx(
                held + factor * (float(before[i]["model"]["w"][k]) - held)
            )
            assert float(found[i]["dx"][k]) == pytest.approx(factor * float(before[i]["dx"][k]))  # itself an update


def test_noise_has_the_length_of_the_update_and_another_direction_each():
    found, before = corrupted("random:0.3,2")
    for i in (11, 14):
        update, was = found[i]["model"]["w"] - SERVER["model"]["w"], before[i]["model"]["w"] - SERVER["model"]["w"]
        assert float(update.norm()) == pytest.approx(2 * float(was.norm()))
    assert not torch.allclose(found[11]["dx"] / found[11]["dx"].norm(), found[14]["dx"] / found[14]["dx"].norm())
    assert torch.equal(corrupted("random:0.3,2")[0][11]["dx"], found[11]["dx"])


def test_a_little_is_the_attackers_mean_less_some_deviations():
    found, before = corrupted("little:0.3,1.5", bad=(10, 12, 15))
    for k in range(2):
        values = [float(before[i]["dx"][k]) for i in (10, 12, 15)]
        expected = statistics.fmean(values) - 1.5 * statistics.pstdev(values)
        assert all(float(found[i]["dx"][k]) == pytest.approx(expected) for i in (10, 12, 15))


def test_the_size_of_a_little_is_the_paper_s():
    """Baruch et al., section 3.3: of 50 workers 24 are corrupted, s = 25 + 1 - 24 = 2 are needed, z = Phi^-1(24/26)."""
    from idiolect.engine.attacks import _hidden

    assert _hidden(50, 24) == pytest.approx(statistics.NormalDist().inv_cdf(24 / 26))
    assert _hidden(10, 9) > 0


def test_wrong_labels_are_honestly_sent():
    found, before = corrupted("labels:0.3")
    assert all(found[i]["model"].equals(before[i]["model"]) for i in found)


def test_attackers_are_a_share_drawn_from_the_seed():
    rule = Attack("sign", 0.25, 1.0)
    assert len(rule.attackers(20, 0)) == 5
    assert rule.attackers(20, 0) == rule.attackers(20, 0)
    assert rule.attackers(20, 0) != rule.attackers(20, 1)
    assert Attack("labels", 0.25, 0.0).attackers(20, 0) == rule.attackers(20, 0)  # whatever they do


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sgn:0.2", "Unknown attack 'sgn'. Did you mean sign"),
        ("sign", "written as 'sign:SHARE' or 'sign:SHARE,SIZE'; found 'sign'"),
        ("sign:1.5", r"share lies in \(0, 1\)"),
        ("scale:0.2,-1", "its size is at least 0"),
        ("scale:0.2,x", "written as"),
    ],
)
def test_what_names_no_attack_is_refused(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        attack(text)


def test_none_is_no_attack():
    assert attack("none") is None
