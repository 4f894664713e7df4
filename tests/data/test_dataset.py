"""What a data set accepts and refuses."""

import dataclasses

import numpy as np
import pytest
import torch

from idiolect.data import Dataset, from_arrays
from idiolect.errors import UsageError

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 2, 1])


def test_arrays_of_either_kind_give_the_same_data_set():
    for x, y in (
        (X, Y),
        (torch.tensor(X), torch.tensor(Y)),
        (X.tolist(), Y.tolist()),
        (X.astype(float), Y * 1.0),
    ):
        data = from_arrays(x, y, name="mine", group=["a", "b", "a", "b"])
        assert (data.name, data.classes, data.network, data.loss) == ("mine", 3, "mlp", "cross_entropy")
        assert data.x.dtype == torch.float32
        assert data.y.dtype == torch.int64
        assert torch.equal(data.x, torch.tensor(X))
        assert data.y.tolist() == [0, 1, 2, 1]
        assert len(data) == 4
        assert data.shape == (3,)
        assert data.strata.tolist() == [0, 1, 2, 1]
        assert data.group is not None
        assert data.group.tolist() == ["a", "b", "a", "b"]


def test_the_arrays_are_copied():
    x, y = X.copy(), Y.copy()
    data = from_arrays(x, y)
    x[:], y[:] = -1, 0
    assert torch.equal(data.x, torch.tensor(X))
    assert data.y.tolist() == Y.tolist()


def test_bfloat16_is_taken():
    assert from_arrays(torch.tensor(X).bfloat16(), Y).x.dtype == torch.float32


@pytest.mark.parametrize(
    ("shape", "network"),
    [((2, 7), "mlp"), ((2, 1, 8, 8), "convnet3"), ((2, 1, 28, 28), "cnn4"), ((2, 3, 32, 28), "cnn4")],
)
def test_the_default_network_follows_the_shape(shape, network):
    assert from_arrays(np.zeros(shape), [0, 1]).network == network
    assert from_arrays(np.zeros(shape), [0, 1], network="logistic").network == "logistic"


def test_whole_numbers_are_token_ids():
    data = from_arrays(np.ones((2, 5), np.int32), [0, 1])
    assert data.x.dtype == torch.int64
    assert data.network == "fasttext"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_numbers_that_are_not_finite_are_refused_with_their_row(bad):
    x = X.astype(np.float64)
    x[2, 1] = bad
    with pytest.raises(UsageError, match=r"NaN or inf in 1 rows, the first is row 2"):
        from_arrays(x, Y)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0, 1, 2], r"x of shape \[4, 3\] and y of shape \[3\]"),
        ([0.5, 1, 2, 1], r"expected integer labels, found 0\.5"),
        ([np.nan, 1, 2, 1], "expected integer labels, found nan"),
        ([np.inf, 1, 2, 1], "expected integer labels, found inf"),
        ([True, False, True, False], "found True and False"),
        (["a", "b", "a", "b"], "expected integer labels, found <U1"),
        ([3, 7, 3, 7], r"found \{3, 7\}.*return_inverse=True.*classes=C"),
        ([0, 2, 0, 2], r"found \{0, 2\}"),
        ([-1, 0, 1, 0], r"found \{-1, 0, 1\}"),
        ([[0], [1], [2], [1]], r"labels of shape \[rows\]"),
    ],
)
def test_labels_that_are_none_are_refused(y, message):
    with pytest.raises(UsageError, match=message):
        from_arrays(X, y)


def test_absent_classes_are_taken_when_the_number_of_classes_is_given():
    assert from_arrays(X, [3, 7, 3, 7], classes=8).classes == 8
    with pytest.raises(UsageError, match=r"expected labels in 0\.\.6, found 7"):
        from_arrays(X, [3, 7, 3, 7], classes=7)
    with pytest.raises(UsageError, match=r"expected labels in 0\.\.7, found -1"):
        from_arrays(X, [3, 7, -1, 7], classes=8)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 3), np.uint8), r"uint8.*/ 255"),
        (np.zeros((4, 3), bool), "found bool"),
        (np.array([["a"]] * 4), "found <U1"),
        (np.zeros(4), r"a single feature per row is x\[:, None\]"),
        (np.zeros((4, 0)), "one row and one feature"),
        (np.full((4, 3), -1), "expected token ids from 0, found -1"),
        ([[1.0], [1.0, 2.0], [1.0], [1.0]], "one rectangular array"),
    ],
)
def test_samples_that_are_none_are_refused(x, message):
    with pytest.raises(UsageError, match=message):
        from_arrays(x, Y)


def test_no_rows_are_refused():
    with pytest.raises(UsageError, match="at least one row"):
        from_arrays(np.zeros((0, 3)), np.zeros(0, int))


def test_the_constructor_checks_too():
    x, y = torch.tensor(X), torch.tensor(Y)
    with pytest.raises(UsageError, match="float64"):
        Dataset("d", x.double(), y, 3, "mlp")
    with pytest.raises(UsageError, match=r"y of shape \[\]"):
        Dataset("d", x, torch.tensor(1), 3, "mlp")
    with pytest.raises(UsageError, match="int64 labels"):
        Dataset("d", x, y.float(), 3, "mlp")
    with pytest.raises(UsageError, match="'cross_entropy' or 'squared', found 'hinge'"):
        Dataset("d", x, y, 3, "mlp", loss="hinge")
    with pytest.raises(UsageError, match="one entry of group per row"):
        Dataset("d", x, y, 3, "mlp", group=np.zeros(3))
    with pytest.raises(UsageError, match="name a client for every row"):
        Dataset("d", x, y, 3, "mlp", group=np.array([0, 1, np.nan, 1]))
    with pytest.raises(UsageError, match="True or False per row"):
        Dataset("d", x, y, 3, "mlp", official_test=np.zeros(4, int))


def test_squared_loss_takes_finite_float_targets_of_its_outputs():
    x, y = torch.tensor(X), torch.ones(4, 2)
    data = Dataset("d", x, y, 2, "point", loss="squared")
    assert data.strata.tolist() == [0, 0, 0, 0]
    with pytest.raises(UsageError, match=r"float32 targets of shape \[rows, 1\]"):
        Dataset("d", x, y, 1, "point", loss="squared")
    with pytest.raises(UsageError, match="finite numbers in y"):
        Dataset("d", x, y / 0, 2, "point", loss="squared")


def test_the_repr_is_short():
    assert repr(from_arrays(X, Y)) == ("Dataset('arrays', x=[4, 3], classes=3, network='mlp', loss='cross_entropy')")


def test_token_ids_are_counted():
    assert from_arrays(X, Y).tokens is None
    ids = np.array([[3, 1], [0, 2], [7, 0], [1, 1]])
    data = from_arrays(ids, Y)
    assert data.tokens == 8
    assert dataclasses.replace(data, tokens=20).tokens == 20
    with pytest.raises(UsageError, match="expected token ids below tokens=7, found 7"):
        dataclasses.replace(data, tokens=7)


def test_a_data_set_is_fitted_once_and_stays_known_by_what_it_came_from():
    def centred(data, rows):
        return dataclasses.replace(data, x=data.x - data.x[rows].mean(0))

    plain = from_arrays(X, Y)
    assert plain.fitted(np.array([0])) is plain
    raw = dataclasses.replace(plain, fit=centred)
    data = raw.fitted(np.array([0, 1]))
    assert torch.equal(data.x, raw.x - raw.x[:2].mean(0))
    assert data.origin is raw
    assert data.digest == raw.digest == plain.digest
    assert data.fitted(np.array([3])) is data
    assert torch.equal(raw.x, plain.x)
