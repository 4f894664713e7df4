"""Samples that are not kept as networks take them: the same numbers, of the rows that are asked for alone."""

import pickle

import numpy as np
import pytest
import torch

from idiolect.data import Dataset, federate, images, load
from idiolect.data.stored import Stored
from idiolect.errors import UsageError

DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (40, 5, 4, 3), dtype=np.uint8)
LABELS = np.arange(40) % 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def by_hand(pixels, mean=MEAN, std=STD):
    """What images were before any of them stayed pixels: contiguous, and normalised in place."""
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    by_channel = [torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in (mean, std)]
    return x.div_(255).sub_(by_channel[0]).div_(by_channel[1])


def folder(path, x, y=LABELS, **more):
    path.mkdir(exist_ok=True)
    for name, values in {"x": x, "y": y, **more}.items():
        np.save(path / f"{name}.npy", values)
    return path


@pytest.mark.parametrize("rows", [slice(None), slice(3, 11), np.array([7, 7, 0]), torch.tensor([39, 2])])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_pixels_become_the_same_bits_as_ever(tmp_path, where, rows):
    np.save(tmp_path / "x.npy", PIXELS)
    x = Stored(PIXELS if where == "memory" else tmp_path / "x.npy", MEAN, STD)
    assert (x.shape, x.dtype, len(x)) == ((40, 3, 5, 4), torch.float32, 40)
    assert torch.equal(x[rows], by_hand(PIXELS)[rows])
    assert x[rows].is_contiguous(memory_format=torch.channels_last)
    x[rows].zero_()
    assert torch.equal(x[rows], by_hand(PIXELS)[rows])  # what was given away is not what is kept


def test_every_byte_becomes_the_same_bits_whatever_is_beside_it():
    every = np.tile(np.arange(256, dtype=np.uint8)[:, None, None, None], (1, 1, 1, 3))
    x = Stored(every, MEAN, STD)
    assert torch.equal(torch.cat([x[k : k + 1] for k in range(256)]), by_hand(every))


def test_few_images_are_floats_and_many_are_pixels_of_the_same_value(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", PIXELS)
    held = np.load(tmp_path / "x.npy", mmap_mode="r")
    few = images.samples(tmp_path, PIXELS, LABELS, name="few", mean=MEAN, std=STD)
    assert torch.equal(few.x, by_hand(PIXELS))
    monkeypatch.setattr(images, "FLOATS", 0)
    for pixels, file in ((PIXELS, None), (held, tmp_path / "x.npy"), (held[2:], None), (held[::-1], None)):
        many = images.samples(tmp_path, pixels, LABELS[: len(pixels)], name="many", mean=MEAN, std=STD)
        assert isinstance(many.x, Stored)
        assert many.x.file == file  # a part of a file is not the file
        assert torch.equal(many.x[:], by_hand(np.array(pixels)))
        assert (many.shape, many.network) == (few.shape, few.network)
    measured = images.samples(tmp_path, PIXELS, LABELS, name="many", in_train=30)
    assert torch.equal(measured.x[:], by_hand(PIXELS, *images.channel_statistics(PIXELS[:30])))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("float32", torch.float32),
        ("float64", torch.float32),
        ("float16", torch.float32),
        (">f4", torch.float32),
        ("int32", torch.int64),
        ("uint16", torch.int64),
        (">i8", torch.int64),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_folder_of_arrays_holds_numbers_of_any_kind(tmp_path, kind, expected, order):
    values = DRAW.integers(0, 9, (40, 6)).astype(kind, order=order)
    data = load(folder(tmp_path, values, LABELS.astype(np.uint8), group=np.arange(40) // 10))
    assert (data.x.dtype, data.shape, data.classes, data.name) == (expected, (6,), 4, tmp_path.name)
    assert data.network == ("mlp" if expected.is_floating_point else "fasttext")
    assert torch.equal(
        data.x[:], torch.from_numpy(values.astype(values.dtype.newbyteorder("="), order="C")).to(expected)
    )
    assert data.y.tolist() == LABELS.tolist()
    assert data.group.tolist() == (np.arange(40) // 10).tolist()
    assert federate(data, "given", 4, 0).clients == 4


def test_a_folder_of_pixels_is_images(tmp_path):
    plain, scaled = load(folder(tmp_path, PIXELS)), load(tmp_path, mean=MEAN, std=STD, network="cnn4", classes=7)
    assert torch.equal(plain.x[:], by_hand(PIXELS, (0, 0, 0), (1, 1, 1)))
    assert torch.equal(scaled.x[:], by_hand(PIXELS))
    assert (plain.network, scaled.network, plain.classes, scaled.classes) == ("convnet3", "cnn4", 4, 7)


def test_opening_reads_no_samples(tmp_path):
    """A terabyte of zeros that are nowhere: a file with a hole."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (1 << 28, 1024))
    del x
    np.save(tmp_path / "y.npy", np.zeros(1 << 20, np.uint8))
    with pytest.raises(UsageError, match="one y per row"):
        load(tmp_path)
    stored = Stored(tmp_path / "x.npy")
    assert stored[torch.tensor([0, 200_000_000])].sum() == 0
    assert (tmp_path / "x.npy").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.float32([[0, 1], [2, np.nan], [3, 4]]), "finite numbers in x, found NaN or inf in row 1"),
        (np.float64([[0, 1], [2, 1e300], [3, 4]]), "finite numbers in x, found NaN or inf in row 1"),
        (np.int32([[0, 1], [2, -1], [3, 4]]), "token ids from 0, found less in row 1"),
    ],
)
def test_rows_are_checked_when_they_are_read(tmp_path, values, message):
    data = load(folder(tmp_path / "mine", values, [0, 1, 0]))
    assert len(data.x[torch.tensor([0, 2])]) == 2
    for rows in (slice(None), torch.tensor([2, 1]), np.array([1]), slice(1, 3)):
        with pytest.raises(UsageError, match=f"^mine: expected {message}"):
            data.x[rows]


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("what a file holds was executed",))


def test_files_that_hold_no_plain_array_are_refused(tmp_path):
    good = folder(tmp_path, np.zeros((3, 2), np.float32), [0, 1, 0])
    whole = (good / "x.npy").read_bytes()
    np.savez(tmp_path / "several.npz", a=np.zeros(2))
    cases = [
        b"",
        b"hello",
        whole[:-5],
        whole[:40],
        pickle.dumps(Bomb()),
        (tmp_path / "several.npz").read_bytes(),
    ]
    objects = np.empty(3, object)
    objects[:] = Bomb()
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    for content in (*cases, (tmp_path / "objects.npy").read_bytes()):
        for name in ("x", "y"):
            kept = (good / f"{name}.npy").read_bytes()
            (good / f"{name}.npy").write_bytes(content)
            with pytest.raises(UsageError, match=rf"one plain array in .*{name}\.npy"):
                load(good)
            (good / f"{name}.npy").write_bytes(kept)
    assert len(load(good)) == 3


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (PIXELS[0, 0], [0, 1, 0, 1], {}, r"uint8 pixels \[rows, height, width, channels\]"),
        (np.zeros((4, 2), np.float32), [0, 1, 0, 1], {"mean": [0]}, "leave mean and std out"),
        (np.zeros((4, 2), np.float32), [0, 1, 0], {}, "one y per row"),
        (np.zeros((4, 2), np.float32), [0, 1, 3, 1], {}, "expected labels 0, 1"),
        (np.zeros((4, 2), np.float32), [0.5, 1, 0, 1], {}, "integer labels"),
        (np.zeros((4, 2), bool), [0, 1, 0, 1], {}, "expected x as numbers, found bool"),
        (np.zeros(4, np.float32), [0, 1, 0, 1], {}, r"shape \[rows, ...\]"),
        (PIXELS[:4], [0, 1, 0, 1], {"std": [0, 1, 1]}, "std > 0"),
    ],
)
def test_folders_that_are_no_data_set_are_refused(tmp_path, x, y, options, message):
    with pytest.raises(UsageError, match=message):
        load(folder(tmp_path, x, np.array(y)), **options)


def test_labels_are_needed(tmp_path):
    np.save(tmp_path / "x.npy", PIXELS)
    with pytest.raises(UsageError, match=r"found no y\.npy"):
        load(tmp_path)


def test_another_process_gets_the_name_of_a_file_and_not_what_is_in_it(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100_000, 5), np.float32))
    x = Stored(tmp_path / "x.npy")
    told = pickle.dumps(x)
    assert len(told) < 1000
    assert torch.equal(pickle.loads(told)[:10], x[:10])
    held = Stored(PIXELS, MEAN, STD)
    assert torch.equal(pickle.loads(pickle.dumps(held))[:], by_hand(PIXELS))
    assert held.share_memory_().is_shared()
    assert torch.equal(held[:], by_hand(PIXELS))
    np.save(tmp_path / "x.npy", np.zeros((9, 5), np.float32))
    with pytest.raises(UsageError, match="has changed while it was in use"):
        pickle.loads(told)[:10]
    (tmp_path / "x.npy").unlink()
    with pytest.raises(UsageError, match="No such file"):
        pickle.loads(told)[:10]


def test_the_digest_follows_what_is_kept_and_how_it_is_scaled(tmp_path, monkeypatch):
    def digest(pixels, mean=MEAN, labels=LABELS):
        return Dataset("a", Stored(pixels, mean, STD), torch.from_numpy(labels), 4, "mlp").digest

    other = PIXELS.copy()
    other[-1, -1, -1, -1] ^= 1
    found = {digest(PIXELS), digest(other), digest(PIXELS, (0, 0, 0)), digest(PIXELS, labels=LABELS[::-1].copy())}
    assert len(found) == 4
    assert digest(PIXELS.copy()) in found
