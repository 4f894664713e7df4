"""Feature shift: what each kind does to a sample, that it is a function of (sample, client, seed), and what is refused."""

import numpy as np
import pytest
import torch

from idiolect import Run, run
from idiolect.data import Dataset, federate, from_arrays
from idiolect.data.shift import SHIFTS, Colour, Noise, Rotation, Shifted, describe, parse
from idiolect.engine.work import Shards
from idiolect.errors import UsageError

DRAW = np.random.default_rng(0)
IMAGES = from_arrays(DRAW.normal(size=(60, 2, 6, 6)), np.arange(60) % 3)
VECTORS = from_arrays(DRAW.normal(size=(60, 5)), np.arange(60) % 3)
EVERY = [Rotation(4), Rotation(6, 15.0), Noise(0.5), Colour(0.3)]


def changed(shift, client, clients=4, rows=range(10), seed=0, data=IMAGES):
    """Rows as one client sees them."""
    rows = np.array(rows)
    shifted = Shifted(shift, shift.places(clients, seed), seed)
    return shifted(data.x[rows], np.full(len(rows), client), rows)


@pytest.mark.parametrize("shift", EVERY, ids=str)
def test_a_sample_is_changed_alike_whatever_it_comes_with(shift):
    all_ = changed(shift, 2)
    assert torch.equal(all_[3:7], changed(shift, 2, rows=range(3, 7)))
    assert torch.equal(all_.flip(0), changed(shift, 2, rows=range(9, -1, -1)))
    assert all_.dtype == torch.float32
    assert all_.shape == IMAGES.x[:10].shape


@pytest.mark.parametrize("shift", EVERY, ids=str)
def test_mixed_clients_each_get_their_own(shift):
    owner, rows = np.array([3, 0, 3, 1]), np.array([5, 6, 7, 5])
    found = Shifted(shift, shift.places(4, 0), 0)(IMAGES.x[rows], owner, rows)
    for k in range(4):
        assert torch.equal(found[k : k + 1], changed(shift, owner[k], rows=[rows[k]]))


@pytest.mark.parametrize("shift", EVERY, ids=str)
def test_clients_and_seeds_differ_and_the_data_stays(shift):
    before = IMAGES.x.clone()
    by_client = [changed(shift, client) for client in range(4)]
    assert len({x.numpy().tobytes() for x in by_client}) == 4
    assert any(not torch.equal(changed(shift, client, seed=1), by_client[client]) for client in range(4))
    assert torch.equal(IMAGES.x, before)


def test_rotations_are_exact_and_dealt_evenly():
    turned = [changed(Rotation(4), client, 8) for client in range(8)]
    kinds = [next(k for k in range(4) if torch.equal(torch.rot90(IMAGES.x[:10], k, (2, 3)), x)) for x in turned]
    assert sorted(kinds) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_other_angles_turn_in_between():
    """A slope that falls downwards falls by thirty degrees to the side after a turn by thirty, as after a quarter."""
    smooth = torch.outer(torch.linspace(-1, 1, 40), torch.ones(40))[None, None]
    tilted = Rotation(12)(smooth, np.arange(1), 1, 12, 0)[0, 0, 10:30, 10:30]
    down, right = (tilted[1:] - tilted[:-1]).mean(), (tilted[:, 1:] - tilted[:, :-1]).mean()
    quarter = torch.rot90(smooth, 1, (2, 3))[0, 0]
    assert (right > 0) == (quarter[0, 1] > quarter[0, 0])
    assert float((right / down).atan().rad2deg()) == pytest.approx(30, abs=1)


def test_noise_grows_from_none_to_its_level():
    rows = np.arange(60)
    found = [float((changed(Noise(0.5), client, 5, rows) - IMAGES.x).std()) for client in range(5)]
    assert found == pytest.approx([0, 0.125, 0.25, 0.375, 0.5], rel=0.05)
    alone = changed(Noise(0.5), 0, 1, rows) - IMAGES.x
    assert float(alone.std()) == pytest.approx(0.5, rel=0.05)
    assert float(alone.mean()) == pytest.approx(0, abs=0.03)
    assert changed(Noise(0.5), 3, data=VECTORS).shape == (10, 5)


def test_colour_is_a_gain_and_an_offset_by_channel():
    found, x = changed(Colour(0.3), 1), IMAGES.x[:10]
    for channel in range(2):
        slope = (found[1:, channel] - found[:-1, channel]) / (x[1:, channel] - x[:-1, channel])
        gain = slope.median()
        assert abs(gain - 1) <= 0.3
        offset = found[:, channel] - gain * x[:, channel]
        assert float(offset.std()) < 1e-4
        assert abs(offset.mean()) <= 0.3
    assert not torch.equal(found[:, 0] - x[:, 0], found[:, 1] - x[:, 1])


def test_a_federation_shifts_all_parts_and_says_so():
    plain = federate(IMAGES, "iid", 4, 0, validation=0.2)
    shifted = plain.shifted(Noise(0.5), 7)
    assert shifted.recipe == f"{plain.recipe}, shift noise:0.5"
    assert (
        len(
            {
                plain.split_hash,
                shifted.split_hash,
                plain.shifted(Noise(0.4), 7).split_hash,
                plain.shifted(Noise(0.5), 8).split_hash,
            }
        )
        == 4
    )
    shards = Shards.of(shifted, torch.float64)
    for part in ("train", "validation", "test"):
        for client in range(4):
            rows = getattr(shifted, part)[client]
            expected = shifted.shift(IMAGES.x[rows], np.full(len(rows), client), rows)
            assert torch.equal(shards.part(part, client)[0], expected.double())
    assert torch.equal(Shards.of(plain, torch.float32).part("train", 1)[0], IMAGES.x[plain.train[1]])


def test_a_client_keeps_its_change_when_it_is_held_out():
    shifted = federate(IMAGES, "iid", 6, 0).shifted(Noise(0.5), 0)
    apart = shifted.holding_out(2, 1)
    order = [k for k in range(6) if k not in apart.held_out] + list(apart.held_out)
    for now, was in enumerate(order):
        assert torch.equal(
            Shards.of(apart, torch.float32).part("train", now)[0],
            Shards.of(shifted, torch.float32).part("train", was)[0],
        )
    assert len({apart.split_hash, shifted.split_hash, federate(IMAGES, "iid", 6, 0).holding_out(2, 1).split_hash}) == 3


def test_a_run_is_shifted():
    base = {
        "method": "local",
        "data": IMAGES,
        "split": "iid",
        "clients": 4,
        "rounds": 1,
        "backend": "serial",
        "network": "mlp",
    }
    plain, shifted = (run(Run(**base, shift=shift)) for shift in ("none", "rotation:4"))
    assert shifted.summary["split"].endswith("shift rotation:4")
    assert plain.summary["split_hash"] != shifted.summary["split_hash"]
    assert [c["loss"] for c in plain.clients] != [c["loss"] for c in shifted.clients]


@pytest.mark.parametrize("text", ["rotation:4", "rotation:6,step=15", "noise:0.5", "colour:0.3"])
def test_texts_come_back(text):
    assert str(parse(text)) == text
    assert parse(text) in EVERY


def test_none_is_none_and_all_are_described():
    assert parse("none") is None
    assert [text.partition(":")[0] for text, _ in describe()] == sorted(SHIFTS)
    assert all(line for _, line in describe())


TOKENS = Dataset("tokens", torch.ones(9, 4, dtype=torch.int64), torch.arange(9) % 3, 3, "fasttext")
WIDE = from_arrays(np.zeros((9, 1, 4, 6)), np.arange(9) % 3)


@pytest.mark.parametrize(
    ("data", "text", "message"),
    [
        (TOKENS, "noise:0.5", "numbers as samples for shift 'noise:0.5', found token ids in 'tokens'; use shift=none"),
        (VECTORS, "rotation:4", r"images for shift 'rotation:4', found samples of shape \[5\]"),
        (WIDE, "rotation:4", "square images for shift 'rotation:4', found 4 x 6 in 'arrays'; use rotation:2"),
    ],
)
def test_samples_that_cannot_be_changed_are_refused(data, text, message):
    with pytest.raises(UsageError, match=message):
        federate(data, "iid", 2, 0).shifted(parse(text), 0)


def test_wide_images_turn_by_halves():
    federate(WIDE, "iid", 2, 0).shifted(Rotation(2), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nois:0.5", "Unknown shift 'nois'. Did you mean noise"),
        ("rotation:0", "at least 1 for angles"),
        ("rotation:4,step=400", r"degrees in \[0, 360\)"),
        ("noise:0", "finite number > 0 for level"),
        ("noise:inf", "finite number > 0 for level"),
        ("colour:-1", "finite number > 0 for strength"),
        ("noise:a", "found 'a' in 'noise:a'"),
    ],
)
def test_malformed_texts_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)
