"""Images are decoded once; what the cache holds is what decoding gives, or it is made anew."""

import errno
import io
import multiprocessing
import os
import warnings

import numpy as np
import pytest
from PIL import Image

from idiolect.data import cache, images
from idiolect.errors import UsageError

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 3, 3), dtype=np.uint8)


def encoded(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


BLOBS = [encoded(one) for one in PIXELS]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache of the test's own, and the number of images that were decoded."""
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def opened(monkeypatch):
    rows = []
    original = images._open
    monkeypatch.setattr(images, "_open", lambda where, row, blob: rows.append(row) or original(where, row, blob))
    return rows


def decode(blobs=BLOBS):
    return images.decode("here", blobs)


def test_the_same_bytes_are_decoded_once_and_mapped(folder, opened):
    assert np.array_equal(decode(), PIXELS)
    before = len(opened)
    again = decode()
    assert np.array_equal(again, PIXELS)
    assert len(opened) == before > 0
    assert isinstance(again, np.memmap)
    assert [file.suffix for file in folder.iterdir()] == [".npy"]
    assert np.array_equal(np.load(next(folder.iterdir())), PIXELS)  # a common format


def test_other_bytes_another_order_or_another_number_are_another_set(folder):
    for blobs, pixels in ((BLOBS, PIXELS), (BLOBS[::-1], PIXELS[::-1]), (BLOBS[:2], PIXELS[:2])):
        assert np.array_equal(decode(blobs), pixels)
    assert len(list(folder.iterdir())) == 3
    assert cache.key("a", [b"bc", b"d"]) != cache.key("a", [b"b", b"cd"])
    assert cache.key("a", [b"bc"]) != cache.key("b", [b"bc"])


def test_large_sets_are_decoded_some_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(images, "BLOCK", 2 * PIXELS[0].nbytes)
    assert [len(some) for some in images._decoded("here", BLOBS)] == [2, 2, 1]
    assert np.array_equal(decode(), PIXELS)


def test_another_size_is_another_file(folder):
    whole = decode()
    small = images.decode("here", BLOBS, 2)
    assert small.shape == (len(BLOBS), 2, 2, PIXELS.shape[3])
    assert len(list(folder.glob("*.npy"))) == 2
    assert np.array_equal(images.decode("here", BLOBS, 2), small)
    assert np.array_equal(decode(), whole)


def truncated(file):
    file.write_bytes(file.read_bytes()[:-20])


def flipped(file):
    held = bytearray(file.read_bytes())
    held[-30] ^= 1
    file.write_bytes(held)


def flipped_header(file):
    held = bytearray(file.read_bytes())
    held[held.index(b"(5, 4, 3, 3)") + 1] = ord("4")
    file.write_bytes(held)


def foreign(file):
    np.save(file, PIXELS)  # the right pixels, but not from us: nothing says that they are whole


def empty(file):
    file.write_bytes(b"")


def another(file):
    """A sound file of another set under this one's name."""
    own = {f.name for f in file.parent.iterdir()}
    decode(BLOBS[:3])
    other = next(f for f in file.parent.iterdir() if f.name not in own)
    os.replace(other, file)


@pytest.mark.parametrize("harm", [truncated, flipped, flipped_header, foreign, empty, another])
def test_what_is_not_as_it_was_written_is_made_anew(folder, opened, harm):
    decode()
    (file,) = folder.iterdir()
    harm(file)
    before = len(opened)
    assert np.array_equal(decode(), PIXELS)
    assert len(opened) > before
    before = len(opened)
    assert np.array_equal(decode(), PIXELS)
    assert len(opened) == before


def test_off_means_that_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for word in ("off", ""):
        monkeypatch.setenv("IDIOLECT_CACHE", word)
        assert cache.directory() is None
        assert np.array_equal(decode(), PIXELS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", None, "home/.cache/idiolect"),
        ("linux", "XDG_CACHE_HOME", "own/idiolect"),
        ("darwin", None, "home/Library/Caches/idiolect"),
        ("win32", "LOCALAPPDATA", "own/idiolect/cache"),
    ],
)
def test_the_folder_is_the_platforms(tmp_path, monkeypatch, platform, variable, expected):
    monkeypatch.setattr(cache.sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("IDIOLECT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "own"))
    assert cache.directory() == tmp_path / expected


def test_where_nothing_can_be_written_there_is_one_warning_and_the_pixels(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be kept in .*IDIOLECT_CACHE=off") as heard:
        assert np.array_equal(decode(), PIXELS)
    assert len(heard) == 1


def test_a_full_disk_leaves_nothing_half_written(folder, monkeypatch):
    def full(self, part):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache._Counted, "write", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert np.array_equal(decode(), PIXELS)
    assert not list(folder.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full is Linux's")
def test_a_disk_that_is_really_full(folder, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "mkstemp", lambda *_: (os.open("/dev/full", os.O_WRONLY), str(folder / "gone")))
    with pytest.warns(UserWarning, match="No space left on device"):
        assert np.array_equal(decode(), PIXELS)


def test_images_that_cannot_be_decoded_leave_nothing(folder):
    with pytest.raises(UsageError, match="row 3 of 'here'"):
        decode([*BLOBS[:3], b"no image", BLOBS[4]])
    with pytest.raises(UsageError, match="row 1 of 'here', found no bytes"):
        decode([BLOBS[0], None])
    assert not list(folder.iterdir())
    with pytest.raises(UsageError, match="at least one row"):
        decode([])


def found(folder, start, answers):
    os.environ["IDIOLECT_CACHE"] = str(folder)
    start.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers.put(np.array_equal(decode(), PIXELS))


def test_processes_that_decode_at_once_all_get_the_pixels(folder):
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(3), context.Queue()
    others = [context.Process(target=found, args=(folder, start, answers)) for _ in range(3)]
    for other in others:
        other.start()
    assert all(answers.get(timeout=60) for _ in others)
    for other in others:
        other.join()
    assert [file.suffix for file in folder.iterdir()] == [".npy"]


def test_statistics_do_not_depend_on_how_many_are_looked_at_together(monkeypatch):
    whole = images.channel_statistics(PIXELS)
    monkeypatch.setattr("idiolect.data.stored.BLOCK", PIXELS[0].nbytes)
    assert images.channel_statistics(PIXELS) == whole
    scaled = PIXELS.reshape(-1, 3) / 255
    assert np.allclose(whole, [scaled.mean(0), scaled.std(0)])
