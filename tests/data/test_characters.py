"""Text files by client and LEAF's JSON: windows of characters, the vocabulary of those trained on, numbers, refusals."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idiolect import Run, run
from idiolect.data import Federation, federate, load, windows
from idiolect.data.readers import leaf, reader_of, text_files
from idiolect.errors import UsageError

HAMLET = "To be, or not to be: that is the question.\n"
PUCK = "Lord, what fools these mortals be!\n"


@pytest.fixture
def play(tmp_path):
    folder = tmp_path / "Ein Stück"
    folder.mkdir()
    (folder / "Hamlet.txt").write_text(HAMLET * 3, encoding="utf-8")
    (folder / "Puck.txt").write_text(PUCK * 2, encoding="utf-8")
    (folder / "Ophélia 東.txt").write_text("Ô là là — bonne nuit, adieu 🎭!" * 2, encoding="utf-8")
    (folder / ".DS_Store").write_bytes(b"\x00\xff")
    return folder


def spelt(data, row):
    return "".join(data.words[k] for k in data.x[row]), data.words[data.y[row]]


def divided(data, train, test):
    """A federation of one client with these rows."""
    return Federation(data, *([np.array(rows, np.int64)] for rows in (train, [], test)), "hash", "by hand")


# windows


@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 9))
def test_windows_are_those_of_a_loop(size, length, stride):
    series = np.arange(2 * size).reshape(size, 2)
    expected = [series[at : at + length].T for at in range(0, size - length + 1, stride)]
    assert windows.cut(series, length, stride).tolist() == [one.tolist() for one in expected]


# files by client


def test_each_row_is_a_window_of_a_client_and_the_character_after_it(play):
    data = load(play, length=7, stride=3)
    assert (data.name, data.network, data.shape) == ("Ein Stück", "nplm", (7,))
    at = 0
    for client in ("Hamlet", "Ophélia 東", "Puck"):
        text = (play / f"{client}.txt").read_text(encoding="utf-8")
        for start in range(0, len(text) - 7, 3):
            assert spelt(data, at) == (text[start : start + 7], text[start + 7])
            assert data.group[at] == client
            at += 1
    assert at == len(data)
    assert data.words[:2] == ("<padding>", "<unknown>")
    assert data.classes == data.tokens == len(data.words)


def test_by_default_no_character_is_in_two_rows(play):
    data = load(play, length=9)
    hamlet = [spelt(data, row) for row in np.flatnonzero(data.group == "Hamlet")]
    assert "".join(x + y for x, y in hamlet) == (HAMLET * 3)[: len(hamlet) * 10]
    assert len(HAMLET * 3) - 10 < len(hamlet) * 10


def test_a_character_that_only_test_rows_have_is_unknown(play):
    data = load(play, length=4)
    puck, others = np.flatnonzero(data.group == "Puck"), np.flatnonzero(data.group != "Puck")
    seen = divided(data, puck, others).dataset
    assert set("".join(seen.words[2:])) == set((PUCK * 2)[: len(puck) * 5])
    assert [spelt(seen, row) for row in puck] == [spelt(data, row) for row in puck]
    for row in others:
        expected = [c if c in seen.words else "<unknown>" for c in "".join(spelt(data, row))]
        assert [*(seen.words[k] for k in seen.x[row]), seen.words[seen.y[row]]] == expected
    assert seen.classes == seen.tokens == len(seen.words) < data.classes
    assert (seen.y[others] == 1).any()


def test_a_character_that_is_only_ever_the_next_one_is_known(tmp_path):
    (tmp_path / "a.txt").write_text("abcZ" + "abc!")
    data = divided(load(tmp_path, length=3), [0], [1]).dataset
    assert set(data.words[2:]) == set("abcZ")
    assert data.y.tolist() == [data.words.index("Z"), 1]


def test_rare_characters_are_unknown(play):
    data = divided(load(play, length=4, max_size=5), range(20), []).dataset
    assert data.classes == len(data.words) == 5
    assert data.y.max() <= 4


def test_marks_of_byte_order_and_line_ends_are_no_characters(tmp_path):
    for name, content in {"a": b"\xef\xbb\xbfab\r\nab\rab\nab", "b": b"ab\nab\nab\nab"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    data = load(tmp_path, length=2)
    rows = [[spelt(data, row) for row in np.flatnonzero(data.group == client)] for client in "ab"]
    assert rows[0] == rows[1] == [("ab", "\n")] * 3


def test_other_encodings_are_given(tmp_path):
    (tmp_path / "a.txt").write_bytes("né à Nîmes".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("été".encode("latin-1"))
    assert spelt(load(tmp_path, length=2, encoding="latin-1"), 0) == ("né", " ")
    with pytest.raises(
        UsageError, match=r"Expected text in utf-8 in .*a\.txt.*save it as UTF-8, or give its encoding="
    ):
        load(tmp_path, length=2)
    for encoding in ("hex", "klingon"):
        with pytest.raises(UsageError, match=f"Unknown encoding '{encoding}'"):
            load(tmp_path, length=2, encoding=encoding)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_files_in_utf_16_are_refused_or_named(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("what fools".encode(encoding))
    with pytest.raises(UsageError, match=r"Expected text in utf-8 in .*a\.txt"):
        load(tmp_path, length=2)
    assert spelt(load(tmp_path, length=2, encoding=encoding), 0) == ("wh", "a")
    (tmp_path / "a.txt").write_bytes("what fools".encode(encoding)[:-1])
    with pytest.raises(UsageError, match=rf"Expected text in {encoding} in .*a\.txt"):
        load(tmp_path, length=2, encoding=encoding)


def test_files_too_short_for_a_window_are_named(play):
    (play / "Silent.txt").write_bytes(b"")
    (play / "Shy.txt").write_text("Ay.")
    with pytest.raises(UsageError, match=r"at least 5 characters .* found 3 of 'Shy', and less than that in 1 others"):
        load(play, length=4)
    (play / "Shy.txt").unlink()
    with pytest.raises(UsageError, match=r"found 0 of 'Silent'; leave those out"):
        load(play, length=4)


@pytest.mark.parametrize("options", [{"length": 0}, {"stride": 0}, {"length": True}, {"stride": 2.5}])
def test_lengths_out_of_range_are_refused(play, options):
    with pytest.raises(UsageError, match="whole number of at least 1"):
        text_files.load(play, **options)


def test_only_folders_of_text_files_alone_are_taken(play, tmp_path):
    assert reader_of(play) is text_files
    (play / "data").mkdir()
    assert reader_of(play) is None
    (tmp_path / "none").mkdir()
    assert reader_of(tmp_path / "none") is None


@pytest.mark.parametrize(("network", "method"), [("nplm", "fedavg"), ("nplm", "fedper"), ("fasttext", "fedavg")])
def test_networks_learn_the_next_character(tmp_path, network, method):
    for client, letters in {"up": "abcdef", "round": "fedcba"}.items():
        (tmp_path / f"{client}.txt").write_text(letters * 40)
    found = run(
        Run(
            method=method, data=str(tmp_path), data_options={"length": 4}, split="given", clients=2, rounds=8,
            lr=0.5, network=network, backend="serial",
        )
    )  # fmt: skip
    accuracy = found.summary["accuracy"]["received"]["plain"]
    assert accuracy["best"] > 0.9 if network == "nplm" else accuracy["best"] > 0.3
    assert found.context.classes == found.run.federation.dataset.classes == 8


# LEAF


def content(users, counts=True):
    held = {"users": list(users), "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()}}
    return ({"num_samples": [len(y) for _, y in users.values()]} if counts else {}) | held


SPOKEN = {"HAMLET": (["To be", "or no"], [",", "t"]), "PÜCK": (["Lord,"], ["ü"])}
PIXELS = {"f0": ([[0, 0.5, 1, 0.25], [1, 1, 0, 0]], [2, 0]), "f1": ([[0, 0, 0, 1]], [1])}


def save(file, users, /, **changed):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**content(users), **changed}), encoding="utf-8")


def test_strings_are_characters_and_the_next_one(tmp_path):
    save(tmp_path / "shakespeare.json", SPOKEN)
    data = load(tmp_path / "shakespeare.json")
    assert (data.name, data.network) == ("shakespeare", "nplm")
    assert [spelt(data, row) for row in range(3)] == [("To be", ","), ("or no", "t"), ("Lord,", "ü")]
    assert data.group.tolist() == ["HAMLET", "HAMLET", "PÜCK"]
    seen = divided(data, [0, 1], [2]).dataset
    assert spelt(seen, 2) == ("<unknown>or<unknown>,", "<unknown>")


def test_numbers_are_vectors_or_of_a_given_shape(tmp_path):
    save(tmp_path / "all.json", PIXELS)
    data = load(tmp_path / "all.json")
    assert torch.equal(data.x, torch.tensor([*PIXELS["f0"][0], *PIXELS["f1"][0]]))
    assert (data.network, data.classes, data.y.tolist()) == ("mlp", 3, [2, 0, 1])
    assert data.group.tolist() == ["f0", "f0", "f1"]
    assert load(tmp_path, shape=[1, 2, 2], classes=62).x.shape == (3, 1, 2, 2)
    for shape in ([1, 28, 28], [2.0, 2], [-2, -2]):
        with pytest.raises(UsageError, match=r"Expected (samples of|a) shape"):
            leaf.load(tmp_path, shape=shape)


def test_train_and_test_are_told_apart(tmp_path):
    save(tmp_path / "train" / "all_data_0.json", SPOKEN)
    save(tmp_path / "train" / "all_data_1.json", {"LEAR": (["Blow!"], ["B"])})
    save(tmp_path / "test" / "all_data_0.json", {"HAMLET": (["Words"] * 3, [",", "s", "t"])})
    data = load(tmp_path)
    assert data.group.tolist() == ["HAMLET", "HAMLET", "PÜCK", "LEAR"] + ["HAMLET"] * 3
    assert data.official_test.tolist() == [False] * 4 + [True] * 3
    assert "s" not in federate(data, "given", 3, 0, test_from="official").dataset.words


def test_it_trains_on_numbers(tmp_path):
    save(tmp_path / "all.json", {f"f{k}": ([[k, 0, 1], [k, 1, 0]] * 10, [0, 1] * 10) for k in range(3)})
    found = run(Run(method="fedavg", data=str(tmp_path), split="given", clients=3, rounds=5, lr=0.5, backend="serial"))
    assert found.summary["accuracy"]["received"]["plain"]["last"] == 1


@pytest.mark.parametrize(
    ("users", "changed", "message"),
    [
        ({"a": (["ab"], ["c", "d"])}, {}, "as many x as y of user 'a' .* found 1 and 2"),
        ({"a": ([], [])}, {}, "as many x as y of user 'a' .* at least one, found 0 and 0"),
        ({"a": (["ab"], ["c"])}, {"users": ["a", "b"], "num_samples": [1, 1]}, "lists x and y of user 'b'"),
        ({"a": (["ab"], ["c"])}, {"num_samples": [7]}, "'num_samples' says"),
        ({"a": (["ab"], ["c"])}, {"num_samples": [1, 1]}, "'num_samples' says"),
        ({"a": (["ab"], ["c"])}, {"users": [3]}, "Expected LEAF's 'users'"),
        ({"a": (["ab"], ["c"])}, {"users": "a"}, "Expected LEAF's 'users'"),
        ({"a": (["ab"], ["c"])}, {"user_data": []}, "Expected LEAF's 'users', .* and 'user_data'"),
        ({"a": (["ab"], ["c"])}, {"user_data": {"a": {"x": "ab", "y": ["c"]}}}, "lists x and y of user 'a'"),
        ({"a": (["ab"], ["c"])}, {"users": [], "num_samples": []}, "Expected users .* found none"),
        ({"a": (["ab", "abc"], ["c", "d"])}, {}, "strings of one length .* found strings of 2 to 3"),
        ({"a": (["ab"], ["cd"])}, {}, "one character as y .* such as 'cd'"),
        ({"a": ([""], ["c"])}, {}, "strings of one length"),
        ({"a": (["ab"], [1])}, {}, "strings with strings as y"),
        ({"a": ([[1, 2], [3]], [0, 1])}, {}, "lists of numbers of one length"),
        ({"a": ([[1, 10**400]], [0])}, {}, "lists of numbers of one length"),
        ({"a": ([[1, None]], [0])}, {}, "finite numbers in x"),
        ({"a": ([[1, {}]], [0])}, {}, "lists of numbers of one length"),
        ({"a": ([[1, 2]], [0.5])}, {}, "integer labels, found 0.5"),
        ({"a": ([[1, 2], [1, 2]], [0, 5])}, {}, r"found \{0, 5\}"),
    ],
)
def test_files_that_are_not_as_leaf_has_them_are_refused(tmp_path, users, changed, message):
    save(tmp_path / "all.json", users, **changed)
    with pytest.raises(UsageError, match=message):
        load(tmp_path / "all.json")


@pytest.mark.parametrize(
    "broken",
    [
        json.dumps(content(SPOKEN)).encode()[:-9],
        json.dumps(content(SPOKEN)).encode("utf-16"),
        b'{"users": ["\xff"]}',
        b'{"users": ' + b"[" * 100_000,
        b'["users", "user_data", "num_samples"]',
    ],
    ids=["cut", "UTF-16", "not UTF-8", "deep", "a list"],
)
def test_broken_json_is_refused(tmp_path, broken):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "all.json").write_bytes(broken)
    save(tmp_path / "train" / "whole.json", SPOKEN)
    with pytest.raises(UsageError, match=r"Expected (JSON|text in utf-8|LEAF's 'users'.*) in .*all\.json"):
        load(tmp_path)


def test_a_mark_of_byte_order_is_passed_over_and_one_class_taken(tmp_path):
    held = json.dumps(content({"a": ([[1, 2], [3, 4]], [0, 0])}, counts=False))
    (tmp_path / "all.json").write_bytes(b"\xef\xbb\xbf" + held.encode())
    assert load(tmp_path).classes == 1


def test_other_json_is_left_to_other_readers(tmp_path):
    (tmp_path / "config.json").write_text('{"num_clients": 20}')
    assert reader_of(tmp_path) is None
    assert reader_of(tmp_path / "config.json") is None
