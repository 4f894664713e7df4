"""Folders of images, IDX files and CIFAR's own files, written here byte by byte."""

import gzip
import os
import pickle
import struct
import unicodedata

import numpy as np
import pytest
from forms import (
    COLOUR,
    PIXELS,
    WHO,
    WORDS,
    Y,
    cifar10,
    cifar100,
    cifar_bytes,
    idx_bytes,
    idx_folder,
    images_by_class,
    images_by_client,
    images_train_test,
    png,
    put,
)

from idiolect.data import load
from idiolect.errors import UsageError

PLAIN = {"mean": [0], "std": [1]}
BYTES = Y.astype(np.uint8)


def pixels(data):
    return (data.x * 255).round().numpy().astype(np.uint8)[:, 0]


# folders


def test_images_come_by_class_and_by_name(tmp_path):
    folder, _ = images_by_class(tmp_path)
    data = load(folder, **PLAIN)
    order = [*range(0, 24, 2), *range(1, 24, 2)]
    assert (data.name, data.classes, data.class_names, data.group, data.official_test) == (
        "pets",
        2,
        ("cat", "dog"),
        None,
        None,
    )
    assert data.y.tolist() == [0] * 12 + [1] * 12
    assert np.array_equal(pixels(data), PIXELS[order])
    measured = load(folder)
    assert abs(measured.x.mean()) < 1e-5
    assert abs(measured.x.std(correction=0) - 1) < 1e-5


def test_images_come_by_client_and_class(tmp_path):
    folder, _ = images_by_client(tmp_path)
    data = load(folder, **PLAIN)
    assert data.group.tolist() == WHO.tolist()
    order = sorted(range(24), key=lambda k: (WHO[k], WORDS[k], k))
    assert np.array_equal(pixels(data), PIXELS[order])
    assert data.y.tolist() == Y[order].tolist()


@pytest.mark.parametrize("make", [images_by_class, images_by_client])
def test_train_and_test_of_either(tmp_path, make):
    for part in ("train", "test"):
        make(tmp_path / part)
        (tmp_path / part / "pets").rename(tmp_path / f"all-{part}")
        (tmp_path / part).rmdir()
        (tmp_path / "root").mkdir(exist_ok=True)
        (tmp_path / f"all-{part}").rename(tmp_path / "root" / part)
    data = load(tmp_path / "root", **PLAIN)
    assert data.official_test.tolist() == [False] * 24 + [True] * 24
    assert np.array_equal(pixels(data)[:24], pixels(data)[24:])
    assert (data.group is not None) == (make is images_by_client)


def test_statistics_are_those_of_the_training_images(tmp_path):
    folder, _ = images_train_test(tmp_path)
    data = load(folder)
    assert abs(data.x[~data.official_test].mean()) < 1e-5
    assert abs(data.x[data.official_test].mean()) > 1e-5


def test_train_alone_is_no_client_and_a_class_may_be_called_train(tmp_path):
    for kind in ("cat", "dog"):
        put(tmp_path / "a" / "train" / kind / "1.png", png(PIXELS[0]))
    data = load(tmp_path / "a")
    assert (len(data), data.group, data.official_test) == (2, None, None)
    for kind in ("train", "plane"):
        put(tmp_path / "b" / kind / "1.png", png(PIXELS[0]))
    assert load(tmp_path / "b", std=[1]).class_names == ("plane", "train")
    put(tmp_path / "a" / "val" / "cat" / "1.png", png(PIXELS[0]))
    with pytest.raises(UsageError, match="found 'val' beside them"):
        load(tmp_path / "a")


def test_names_in_any_script_and_numbers_by_their_value(tmp_path):
    for kind in ("10", "9", "2"):
        put(tmp_path / "n" / kind / "1.jpg", png(PIXELS[0], "JPEG"))
    assert load(tmp_path / "n").class_names == ("2", "9", "10")
    composed, apart = (unicodedata.normalize(form, "Ärztin") for form in ("NFC", "NFD"))
    put(tmp_path / "ü 数" / "一" / composed / "图.PNG", png(PIXELS[0]))
    put(tmp_path / "ü 数" / "二" / apart / "图.PNG", png(PIXELS[1]))
    put(tmp_path / "ü 数" / "二" / "猫" / "图.png", png(PIXELS[2]))
    data = load(tmp_path / "ü 数")
    assert (data.name, data.class_names, data.group.tolist()) == ("ü 数", (composed, "猫"), ["一", "二", "二"])


def test_hidden_files_and_others_are_passed_over(tmp_path):
    folder, _ = images_by_class(tmp_path)
    before = load(folder).digest
    for extra in (
        ".DS_Store",
        "cat/Thumbs.db",
        "readme.txt",
        "__MACOSX/cat/1.png",
        ".cache/x/1.png",
        "cat/.hidden.png",
    ):
        put(folder / extra, b"no image")
    assert load(folder).digest == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["1.png", "2.png"], r"class/image.png or client/class/image.png in .*found '1.png'"),
        (["cat/1.png"], "two classes or more in .*found 'cat' alone"),
        (["a/cat/1.png", "b/cat/1.png"], "two classes or more in .*found 'cat' alone"),
        (["cat/1.png", "dog/1.bmp"], r"png or .jpg images in .*1.bmp'; convert"),
        (["cat/1.png", "dog/a/1.png"], "images at one depth in .*'cat/1.png' and 'dog/a/1.png'"),
        (["a/b/cat/1.png", "a/b/dog/1.png"], "found 'a/b/dog/1.png'|found 'a/b/cat/1.png'"),
        (["cat/1.png", "dog/1.png", "owl/"], "Expected images in '.*owl', found none"),
        (["a/cat/1.png", "a/dog/1.png", "b/cat/"], "Expected images in '.*b', found none"),
        (["train/cat/1.png", "train/dog/1.png", "test/cat/"], "Expected images in '.*test/cat', found none"),
    ],
)
def test_folders_that_cannot_be_understood_are_refused(tmp_path, files, message):
    for file in files:
        if file.endswith("/"):
            (tmp_path / file).mkdir(parents=True, exist_ok=True)
        else:
            put(tmp_path / file, png(PIXELS[0]))
    with pytest.raises(UsageError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("held", [b"", b"no image", png(PIXELS[0])[:-40], png(PIXELS[0][:4])])
def test_an_image_that_cannot_be_taken_is_named(tmp_path, held):
    folder, _ = images_by_class(tmp_path)
    put(folder / "dog" / "05.png", held)
    with pytest.raises(UsageError, match=r"'.*dog/05\.png'"):
        load(folder)


def test_a_link_to_nothing_is_named(tmp_path):
    folder, _ = images_by_class(tmp_path)
    (folder / "dog" / "99.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(UsageError, match=r"an image in '.*dog/99\.png', found: No such file"):
        load(folder)


def test_files_are_read_when_they_are_decoded_and_not_before(tmp_path, monkeypatch):
    """So that a large folder costs its pixels, not its files beside them."""
    from idiolect.data import images
    from idiolect.data.readers.folders import _Blobs

    folder, _ = images_by_class(tmp_path)
    seen = []
    decode = images.decode
    monkeypatch.setattr(images, "decode", lambda where, blobs: seen.append(blobs) or decode(where, blobs))
    load(folder)
    assert isinstance(seen[0], _Blobs)
    assert all(isinstance(held, os.PathLike) for held in seen[0].files)


# idx


def test_idx_pairs_zipped_or_not_become_train_and_test(tmp_path):
    folder, _ = idx_folder(tmp_path)
    data = load(folder, **PLAIN)
    assert np.array_equal(pixels(data), PIXELS)
    assert (data.name, data.y.tolist(), data.classes) == ("mnist", Y.tolist(), 2)
    assert data.official_test.tolist() == [False] * 18 + [True] * 6
    one = load(folder / "t10k-images-idx3-ubyte.gz", **PLAIN)
    assert np.array_equal(pixels(one), PIXELS[18:])


def test_labels_beside_may_be_zipped_when_images_are_not(tmp_path):
    put(tmp_path / "x-images.idx3-ubyte", idx_bytes(PIXELS))
    put(tmp_path / "x-labels.idx1-ubyte.gz", gzip.compress(idx_bytes(BYTES)))
    assert len(load(tmp_path / "x-images.idx3-ubyte")) == 24


def test_emnist_has_several_sets_in_a_folder_on_their_side(tmp_path):
    for name, shift in (("balanced", 0), ("letters", 1)):
        for part in ("train", "test"):
            put(tmp_path / f"emnist-{name}-{part}-images-idx3-ubyte.gz", gzip.compress(idx_bytes(PIXELS)))
            put(
                tmp_path / f"emnist-{name}-{part}-labels-idx1-ubyte.gz",
                gzip.compress(idx_bytes(BYTES + np.uint8(shift))),
            )
    with pytest.raises(UsageError, match="found emnist-balanced, emnist-letters; choose by prefix=emnist-balanced"):
        load(tmp_path)
    with pytest.raises(UsageError, match="Did you mean emnist-letters"):
        load(tmp_path, prefix="letters")
    data = load(tmp_path, prefix="emnist-letters", transpose=True, **PLAIN)
    assert np.array_equal(pixels(data)[:24], PIXELS.transpose(0, 2, 1))
    assert (data.y.tolist()[:4], data.class_names) == ([0, 1, 0, 1], ("1", "2"))
    assert load(tmp_path, prefix="emnist-balanced").class_names is None


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (idx_bytes(PIXELS)[:-1], None, r"Expected 1,536 bytes of images .*found 1,535; download"),
        (idx_bytes(PIXELS) + b"x", None, r"Expected 1,536 bytes of images .*found 1,537"),
        (idx_bytes(PIXELS)[:10], None, "Expected an IDX file of images, found other bytes"),
        (b"", None, "Expected an IDX file of images"),
        (b"hello, this is no IDX file", None, "found other bytes in"),
        (idx_bytes(PIXELS)[3::-1] + idx_bytes(PIXELS)[4:], None, "bytes in the wrong order: IDX is big-endian"),
        (
            idx_bytes(PIXELS)[:4] + struct.pack("<3I", 24, 8, 8) + PIXELS.tobytes(),
            None,
            "numbers have their bytes in the wrong order",
        ),
        (idx_bytes(PIXELS[0]), None, "images as uint8 in 3 dimensions in .*found uint8 in 2"),
        (idx_bytes(PIXELS.astype(">f4"), 13), None, "found float32 in 3"),
        (idx_bytes(BYTES), None, "found uint8 in 1; is it the file"),
        (None, idx_bytes(BYTES[:5]), "label for each of the 24 images .*found 5"),
        (None, idx_bytes(PIXELS), "labels as uint8 in 1 dimensions"),
        (None, idx_bytes(BYTES * 0), "two classes or more .*found '0' alone"),
        (idx_bytes(PIXELS[:0]), idx_bytes(BYTES[:0]), "no rows"),
        (gzip.compress(idx_bytes(PIXELS))[:-30], None, "broken off or not whole"),
        (b"\x1f\x8b not gzip", None, "broken off or not whole"),
    ],
)
def test_idx_files_that_are_not_whole_or_another_kind_are_refused(tmp_path, images, labels, message):
    put(tmp_path / "train-images-idx3-ubyte", idx_bytes(PIXELS) if images is None else images)
    put(tmp_path / "train-labels-idx1-ubyte", idx_bytes(BYTES) if labels is None else labels)
    for path in (tmp_path, tmp_path / "train-images-idx3-ubyte"):
        with pytest.raises(UsageError, match=message):
            load(path)


def test_idx_files_without_their_partner_are_refused(tmp_path):
    put(tmp_path / "t10k-images-idx3-ubyte", idx_bytes(PIXELS))
    with pytest.raises(UsageError, match="a file of training images in"):
        load(tmp_path)
    with pytest.raises(UsageError, match=r"the labels of 't10k-images.*t10k-labels-idx1-ubyte', found nothing"):
        load(tmp_path / "t10k-images-idx3-ubyte")
    with pytest.raises(UsageError, match="with 'images' in its name"):
        load(put(tmp_path / "train-labels-idx1-ubyte", idx_bytes(BYTES)))
    put(tmp_path / "train-images-idx3-ubyte", idx_bytes(PIXELS[:, :4]))
    put(tmp_path / "t10k-labels-idx1-ubyte", idx_bytes(BYTES))
    with pytest.raises(UsageError, match="images of one size"):
        load(tmp_path)
    put(tmp_path / "train-images-idx3-ubyte.gz", gzip.compress(idx_bytes(PIXELS)))
    with pytest.raises(UsageError, match="one file of train images"):
        load(tmp_path)


# cifar


def test_cifar10_by_its_batches(tmp_path):
    folder, _ = cifar10(tmp_path)
    data = load(folder, mean=[0] * 3, std=[1] * 3)
    assert np.array_equal(
        (data.x * 255).round().numpy().astype(np.uint8), COLOUR[[*range(20), *range(20, 24)]].transpose(0, 3, 1, 2)
    )
    assert (data.name, data.y.tolist(), data.classes, data.class_names) == ("cifar10", Y.tolist(), 10, None)
    assert data.official_test.tolist() == [False] * 20 + [True] * 4
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    put(folder / "batches.meta.txt", "\n".join(names) + "\n\n")
    assert load(folder).class_names == tuple(names)
    outer = tmp_path / "outer"
    outer.mkdir()
    folder.rename(outer / "cifar-10-batches-bin")
    assert load(outer).digest == load(outer / "cifar-10-batches-bin").digest


def test_cifar100_fine_and_coarse(tmp_path):
    folder, _ = cifar100(tmp_path)
    fine, coarse = load(folder), load(folder, label="coarse")
    assert (fine.classes, fine.y.tolist()) == (100, (Y + 98).tolist())
    assert (coarse.classes, coarse.y.tolist()) == (20, (Y + 18).tolist())
    with pytest.raises(UsageError, match="label=fine or label=coarse, found 'rough'"):
        load(folder, label="rough")


@pytest.mark.parametrize(
    ("file", "held", "message"),
    [
        (
            "data_batch_2.bin",
            cifar_bytes(Y[:2], COLOUR[:2])[:-1],
            r"records of 3,073 bytes in .*data_batch_2.bin', found 6,145 bytes",
        ),
        ("data_batch_2.bin", b"", "found 0 bytes"),
        ("test_batch.bin", cifar_bytes([10], COLOUR[:1]), r"labels in 0\.\.9 in .*found 10"),
        ("data_batch_3.bin", None, "Expected 'data_batch_3.bin' in"),
    ],
)
def test_cifar_files_that_are_not_whole_are_refused(tmp_path, file, held, message):
    folder, _ = cifar10(tmp_path)
    if held is None:
        (folder / file).unlink()
    else:
        put(folder / file, held)
    with pytest.raises(UsageError, match=message):
        load(folder)
    with pytest.raises(UsageError, match="no label= for CIFAR-10"):
        load(folder, label="fine")


@pytest.mark.parametrize(
    ("number", "names"), [(10, ["data_batch_1", "batches.meta"]), (100, ["train", "test", "meta"])]
)
@pytest.mark.parametrize("inner", [False, True])
def test_pickled_cifar_is_refused_unread_with_what_to_download(tmp_path, number, names, inner):
    for name in names:
        below = ("cifar-10-batches-py" if number == 10 else "cifar-100-python") if inner else "."
        put(tmp_path / "py" / below / name, pickle.dumps({b"data": 1}))
    with pytest.raises(
        UsageError, match=rf"CIFAR-{number}'s Python version: pickles.*Download cifar-{number}-binary.tar.gz"
    ):
        load(tmp_path / "py")
