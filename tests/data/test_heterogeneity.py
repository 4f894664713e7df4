"""Measures of how clients differ, against sums over all pairs; the table and the picture of them."""

import io
import warnings
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idiolect.data import Dataset, Federation, federate
from idiolect.data import federated as federated_module
from idiolect.data import heterogeneity as heterogeneity_module
from idiolect.data.federated import split_hash
from idiolect.data.heterogeneity import Profile, gini
from idiolect.report import bubbles, division
from idiolect.report.bubbles import Bubbles


def made_of(table):
    """Clients with these numbers of rows of each class, dealt to all three parts."""
    table = np.array(table)
    labels = np.concatenate([np.repeat(np.arange(table.shape[1]), row) for row in table])
    bounds = np.concatenate([[0], np.cumsum(table.sum(1))])
    rows = [np.arange(a, b) for a, b in pairwise(bounds)]
    parts = [[own[k::3] for own in rows] for k in range(3)]
    data = Dataset("d", torch.zeros(len(labels), 1), torch.from_numpy(labels), table.shape[1], "mlp")
    return Federation(data, *parts, split_hash(*parts), "made")


TABLES = st.integers(1, 5).flatmap(
    lambda classes: st.lists(
        st.lists(st.integers(0, 7), min_size=classes, max_size=classes).filter(any), min_size=1, max_size=9
    )
)


@settings(deadline=None, max_examples=100)
@given(TABLES, st.sampled_from([1, 2, 100]))
def test_measures_are_what_loops_over_clients_and_pairs_find(table, at_once):
    with pytest.MonkeyPatch.context() as patch:  # pieces of any size give the same
        patch.setattr(heterogeneity_module, "AT_ONCE", at_once)
        patch.setattr(federated_module, "AT_ONCE", at_once)
        federation = made_of(table)
        profile = Profile.of(federation)
    shares = [[n / sum(row) for n in row] for row in table]
    entropies = [-sum(p * np.log2(p) for p in row if p) for row in shares]
    apart = [sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2 for p, q in combinations(shares, 2)]
    assert profile.entropies == pytest.approx(entropies, abs=1e-12)
    assert profile.sizes.tolist() == [sum(row) for row in table]
    assert profile.classes.tolist() == [sum(n > 0 for n in row) for row in table]
    assert profile.total_variation == (pytest.approx(np.mean(apart)) if apart else None)
    sizes = [sum(row) for row in table]
    twice = sum(abs(a - b) for a in sizes for b in sizes)
    assert profile.measures()["size_gini"] == pytest.approx(twice / (2 * len(sizes) * sum(sizes)))
    assert federation.histogram().tolist() == table
    assert federation.split_hash == split_hash(federation.train, federation.validation, federation.test)


def test_known_ends():
    alike, apart = made_of([[3, 3]] * 4), made_of([[5, 0], [0, 5]])
    assert (Profile.of(alike).total_variation, Profile.of(apart).total_variation) == (0.0, 1.0)
    assert Profile.of(alike).entropies.tolist() == [1.0] * 4
    assert gini(np.array([4, 4, 4])) == 0
    assert gini(np.array([0] * 99 + [7])) == pytest.approx(0.99)


def test_targets_that_are_no_labels_have_sizes_alone():
    data = Dataset("r", torch.zeros(12, 1), torch.zeros(12, 2), 2, "linear", loss="squared")
    federation = federate(data, "iid", 3, 0)
    profile = Profile.of(federation)
    assert profile.measures()["label_entropy_bits"] is None
    assert profile.measures()["total_variation"] is None
    said = division.text(federation, profile)
    assert "no labels; size Gini 0.000" in said
    assert "class" not in said
    assert set(bubbles.draw(federation)) == {"png", "svg"}


# the table


def test_the_text_has_a_line_per_client_and_what_was_measured():
    federation = made_of([[4, 0, 2], [0, 30, 0]])
    lines = division.text(federation, Profile.of(federation)).splitlines()
    assert lines[2].split() == ["client", "train", "validation", "test", "class", "0", "1", "2", "entropy"]
    assert lines[3].split() == ["0", "2", "2", "2", "4", "0", "2", "0.92"]
    assert lines[4].split() == ["1", "10", "10", "10", "0", "30", "0", "0.00"]
    assert lines[6].startswith(
        "label entropy 0.46 bits (mean over clients); total variation 1.000 (mean over all pairs"
    )
    assert lines[-1] == f"split hash {federation.split_hash}"


def test_many_clients_and_classes_are_summed_up():
    federation = made_of(np.eye(40, 20, dtype=int)[np.arange(40) % 20] * 2 + 1)
    lines = division.text(federation, Profile.of(federation)).splitlines()
    assert sum(line.split()[:1] == [str(k)] for k, line in enumerate(lines[3:13])) == 10
    assert lines[13] == "... and 30 more"
    assert lines[2].split() == ["client", "train", "validation", "test", "classes", "entropy"]
    assert [line.split()[0] for line in lines[16:22]] == ["smallest", "lowest", "median", "highest", "largest", "mean"]
    assert lines[18].split()[1:6] == ["22", "8", "7", "7", "20"]


# the picture


def test_few_clients_have_a_column_each():
    table = np.random.default_rng(0).integers(0, 9, (20, 10)) + 1
    found = Bubbles.of(made_of(table))
    assert (found.area == table).all()
    assert found.columns == [str(k) for k in range(20)]
    assert found.said == "client"


def test_of_many_clients_a_column_is_the_mean_of_some_alike():
    table = np.zeros((500, 10), int)
    table[np.arange(500), np.arange(500) % 10] = 4
    found = Bubbles.of(made_of(table))
    assert found.area.shape == (50, 10)
    assert (found.area == 4 * np.repeat(np.eye(10), 5, axis=0)).all()  # averages of unlike clients would all be alike
    assert found.said == "500 clients by their most frequent class; a column is the mean over 10 of them"
    odd = Bubbles.of(made_of(np.ones((101, 2), int)))
    assert odd.said.endswith("the mean over 2 to 3 of them")


def test_many_classes_are_added_up_in_neighbours():
    found = Bubbles.of(made_of(np.ones((3, 199), int)))
    assert found.area.tolist() == [[4] * 49 + [3]] * 3  # as many classes in each row, or bubbles could not be compared
    assert (found.classes[0], found.classes[-1]) == ("0–3", "196–198")


# what classes are called


def called(*names):
    federation = made_of(np.arange(1, len(names) + 1)[None] * 3)
    return replace(federation, dataset=replace(federation.dataset, class_names=names))


def test_classes_are_called_by_their_names():
    federation = called("well", "日本", "a name of more\nletters than there is room for")
    lines = division.text(federation, Profile.of(federation)).splitlines()
    assert lines[2:4] == [
        "client  train  validation  test  well  日本  a name of m…  entropy",
        "0           6           6     6     3     6             9     1.46",
    ]
    assert Bubbles.of(federation).classes == ["well", "1", "a name of more letters …"]  # 1: no such letters in the font
    assert division.facts(federation, Profile.of(federation))["class_names"] == federation.dataset.class_names
    numbers = called("7", "10")
    assert division.text(numbers, Profile.of(numbers)).splitlines()[2].split()[4:7] == ["class", "7", "10"]


def test_names_are_drawn_as_they_are_whatever_their_letters():
    federation = replace(called("$x_1", "$\\frac{", "日本"), recipe="価格 $x$, iid")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(bubbles.draw(federation)) == {"png", "svg"}


@pytest.mark.parametrize("shape", [(1, 1), (20, 10), (500, 62)])
def test_pictures_open_and_are_the_same_bytes_again(shape):
    from PIL import Image

    federation = made_of(np.random.default_rng(0).integers(0, 3, shape) + 1)
    images = bubbles.draw(federation)
    assert images == bubbles.draw(federation)
    picture = Image.open(io.BytesIO(images["png"]))
    assert picture.size[0] > 300
    assert picture.convert("L").getextrema()[0] < 100  # something is drawn
    assert ElementTree.fromstring(images["svg"]).tag.endswith("svg")
