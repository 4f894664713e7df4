"""Arrays in .npz and .safetensors files: names, pixels, and that nothing in them is ever executed."""

import pickle
import zipfile

import numpy as np
import pytest
import torch
from forms import PIXELS, X, Y, put
from safetensors.torch import save_file

from idiolect.data import load
from idiolect.errors import UsageError

WRITERS = {
    ".npz": lambda path, arrays: np.savez(path, **arrays),
    ".safetensors": lambda path, arrays: save_file({k: torch.tensor(v) for k, v in arrays.items()}, path),
}


@pytest.fixture(params=WRITERS)
def holding(request, tmp_path):
    def write(**arrays):
        WRITERS[request.param](tmp_path / f"held{request.param}", arrays)
        return tmp_path / f"held{request.param}"

    return write


def test_x_y_and_group(holding):
    data = load(holding(x=X, y=Y, group=np.arange(24) // 8))
    assert np.array_equal(data.x.numpy(), X.astype(np.float32))
    assert (data.name, data.y.tolist(), data.official_test) == ("held", Y.tolist(), None)
    assert data.group.tolist() == (np.arange(24) // 8).tolist()


def test_train_and_test_become_the_official_test_set(holding):
    parts = {"x_train": X[:20], "y_train": Y[:20], "x_test": X[20:], "y_test": Y[20:]}
    data = load(holding(**parts))
    assert np.array_equal(data.x.numpy(), X.astype(np.float32))
    assert data.official_test.tolist() == [False] * 20 + [True] * 4
    groups = {"group_train": np.arange(20), "group_test": np.arange(4)}
    assert load(holding(**parts, **groups)).group.tolist() == [*range(20), *range(4)]
    assert load(holding(x_train=X, y_train=Y)).official_test is None
    with pytest.raises(UsageError, match="an array group_test"):
        load(holding(**parts, group_train=np.arange(20)))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "Expected arrays x and y in .*found x; save"),
        ({"a": X, "b": Y}, "Expected arrays x and y in .*found a, b"),
        ({"x": X, "y": Y, "x_train": X}, "either x or x_train"),
        ({"x": X, "y": Y[:5]}, "one y per row of x"),
        ({"x": X, "y": Y + 0.5}, "integer labels, found 0.5"),
        ({"x": X, "y": Y * 0}, "two classes or more in .*found 0 alone"),
        ({"x": PIXELS, "y": Y * 0}, "two classes or more in .*found 0 alone"),
        ({"x": X, "y": Y, "group": np.arange(5)}, "one entry of group per row"),
        ({"x": X * np.nan, "y": Y}, "NaN or inf in 24 rows"),
        ({"x": X[:0], "y": Y[:0]}, "expected"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "an array y_test"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "x_train and x_test of one kind"),
        ({"x_train": PIXELS, "y_train": Y, "x_test": PIXELS / 255, "y_test": Y}, "x_train and x_test of one kind"),
        ({"x_train": X, "y_train": np.array(1), "x_test": X, "y_test": Y}, "a row for each sample"),
        ({"x": PIXELS.reshape(24, -1), "y": Y}, "looks like raw pixels"),
        ({"x": np.array(3.0), "y": np.array(1)}, "expected"),
        ({"x": PIXELS, "y": Y[:5]}, "one y per row"),
        ({"x": PIXELS, "y": Y + 0.5}, "integer labels"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(holding, arrays, message):
    with pytest.raises(UsageError, match=message):
        load(holding(**arrays))


def test_pixels_are_scaled_and_normalised_by_the_training_images(holding):
    path = holding(x_train=PIXELS[:20], y_train=Y[:20], x_test=PIXELS[20:], y_test=Y[20:])
    data = load(path)
    train = PIXELS[:20] / 255
    assert data.x.shape == (24, 1, 8, 8)
    assert np.allclose(data.x[:, 0].numpy(), (PIXELS / 255 - train.mean()) / train.std(), atol=1e-5)
    assert np.allclose(load(path, mean=[0], std=[1]).x[:, 0].numpy(), PIXELS / 255)


def test_channels_first_or_last(holding):
    colour = np.stack([PIXELS, PIXELS // 2, PIXELS // 4], axis=3)
    expected = colour.transpose(0, 3, 1, 2) / 255
    plain = {"mean": [0] * 3, "std": [1] * 3}
    for x in (colour, np.ascontiguousarray(colour.transpose(0, 3, 1, 2))):
        assert np.allclose(load(holding(x=x, y=Y), **plain).x.numpy(), expected)
    path = holding(x=colour[:, :, :3], y=Y)  # three rows high and three colours
    with pytest.raises(UsageError, match="say channels=first or channels=last"):
        load(holding(x=np.ascontiguousarray(colour[:, :3]), y=Y))
    path = holding(x=np.ascontiguousarray(colour[:, :3]), y=Y)
    assert np.allclose(load(path, channels="last", **plain).x.numpy(), expected[:, :, :3])
    assert load(path, channels="first", **plain).x.shape == (24, 3, 8, 3)
    for options in ({"channels": "middle"}, {"channels": "last", "mean": [0]}):
        with pytest.raises(UsageError):
            load(path, **options)


def test_options_of_pixels_are_refused_for_numbers(holding):
    with pytest.raises(UsageError, match=r"for pixels, uint8; x in .* is float64 \[24, 3\]"):
        load(holding(x=X, y=Y), mean=[0])


def test_bfloat16_is_taken(tmp_path):
    save_file({"x": torch.ones(2, 3).bfloat16(), "y": torch.tensor([0, 1])}, tmp_path / "b.safetensors")
    assert load(tmp_path / "b.safetensors").x.tolist() == [[1] * 3] * 2


# nothing is executed


class Creates:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_that_creates_a_file_does_so_when_it_is_read(tmp_path):
    """Or the tests below would show nothing."""
    pickle.loads(pickle.dumps(Creates(tmp_path / "made"))).close()
    assert (tmp_path / "made").exists()


def test_objects_in_an_npz_are_refused_and_nothing_is_executed(tmp_path):
    trap = np.array([Creates(tmp_path / "made")], object)
    np.savez(tmp_path / "bad.npz", x=X, y=Y, group=trap)
    with pytest.raises(UsageError, match="Expected plain arrays in"):
        load(tmp_path / "bad.npz")
    with zipfile.ZipFile(tmp_path / "worse.npz", "w") as archive:
        archive.writestr("x.npy", pickle.dumps(Creates(tmp_path / "made")))
        archive.writestr("y", pickle.dumps(Creates(tmp_path / "made")))
    with pytest.raises(UsageError, match="Expected plain arrays in"):
        load(tmp_path / "worse.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.npz", "worse.npz"]


@pytest.mark.parametrize(
    "name", ["a.npz", "a.pt", "a.pkl", "a.safetensors", "a.parquet", "a.csv", "data_batch_1", "a-idx3-ubyte"]
)
def test_a_pickle_under_any_name_is_refused_unread(tmp_path, name):
    path = put(tmp_path / name, pickle.dumps(Creates(tmp_path / "made")))
    for target in (path, tmp_path):
        with pytest.raises(UsageError):
            load(target)
    torch.save(Creates(tmp_path / "made"), path)
    with pytest.raises(UsageError):
        load(path)
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_arrays_larger_than_memory_are_refused(tmp_path):
    head = {"descr": "<f8", "fortran_order": False, "shape": (10**14,)}
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive, archive.open("x.npy", "w") as raw:
        np.lib.format.write_array_header_1_0(raw, head)
    with pytest.raises(UsageError, match="plain arrays"):
        load(tmp_path / "huge.npz")


def test_one_array_without_a_name_is_refused(tmp_path):
    with open(tmp_path / "one.npz", "wb") as raw:
        np.save(raw, X)
    with pytest.raises(UsageError, match="plain arrays"):
        load(tmp_path / "one.npz")
