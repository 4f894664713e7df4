"""Texts with labels: their words, the vocabulary of those rows that are trained on, and folders of them."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idiolect import Run, run
from idiolect.data import Federation, federate, load, words
from idiolect.data.readers import reader_of
from idiolect.errors import UsageError
from idiolect.nets.text import PADDING

TEXTS = ["The cat, the mat.", "A dog!", "the dog saw the cat", "Owls hoot", "the mat", "dogs: 'hoot'"]
LABELS = [0, 1, 1, 0, 0, 1]
NAMES = {"names": ["home", "away"], "_type": "ClassLabel"}


def write(file, texts=TEXTS, labels=LABELS, text="text", label="label", names=True, **columns):
    table = pa.table({text: texts, label: labels, **columns})
    about = {b"huggingface": json.dumps({"info": {"features": {label: NAMES}}}).encode()} if names else None
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(about), file)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train-00000-of-00002.parquet", TEXTS[:2], LABELS[:2])
    write(tmp_path / "train-00001-of-00002.parquet", TEXTS[2:4], LABELS[2:4])
    write(tmp_path / "test-00000-of-00001.parquet", TEXTS[4:], LABELS[4:])
    return tmp_path


def divided(data, train, test):
    """A federation of one client with these rows."""
    parts = ([np.array(rows, np.int64)] for rows in (train, [], test))
    return Federation(data, *parts, "hash", "by hand")


def spelt(data, row):
    return [data.words[k] for k in data.x[row].tolist() if k != PADDING]


# words


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("You can now install TorchText using pip!", "you can now install torchtext using pip !"),
        ('He said: "it\'s (nearly) 3.5%; no?"', "he said it ' s ( nearly ) 3 . 5% no ?"),
        ("a<br />b<BR />c", "a b c"),
        ('semi"quoted', "semiquoted"),
        (" \t\u00a0 \n", ""),
        ("ÉCOLE straße 東京", "école straße 東京"),
    ],
)
def test_tokens(text, tokens):
    assert words.tokenise(text) == tokens.split()


STEPS = [("'", " '  "), ('"', ""), (r"\.", " . "), ("<br />", " "), (",", " , "), (r"\(", " ( "), (r"\)", " ) ")]
STEPS += [("!", " ! "), (r"\?", " ? "), (";", " "), (":", " "), (r"\s+", " ")]


@given(st.text(st.sampled_from("aB é.,()!?;:'\"<br />\n\t"), max_size=40))
def test_tokens_are_those_of_replacements_one_after_another(text):
    expected = text.lower()
    for pattern, instead in STEPS:
        expected = re.sub(pattern, instead, expected)
    assert words.tokenise(text) == expected.split()


def test_hashes_of_words_are_fasttexts():
    assert words.fnv("") == 0x811C9DC5
    assert words.fnv("a") == 0xE40C292C  # the published values of FNV-1a, for ASCII
    assert words.fnv("foobar") == 0xBF9CF968
    assert words.fnv("é") == _fnv_of([0xC3, 0xA9]) != words.fnv("e")


def _fnv_of(values):
    """With bytes above 127 as negative numbers, as fastText's code has them."""
    h = 2166136261
    for value in values:
        signed = value - 256 if value > 127 else value
        h = ((h ^ (signed % 2**32)) * 16777619) % 2**32
    return h


@pytest.mark.parametrize("ngrams", [2, 3, 9])
def test_n_grams_are_those_of_a_slow_loop(ngrams):
    texts = ["the cat sat on the mat", "the", "", "émigré 東京 cat sat"]
    x, known = words.encode(texts, 5)
    found = words.hashed(x, known, ngrams, 13)
    for row, text in zip(found, texts, strict=True):
        tokens = text.split()[:5]
        expected = []
        for first in range(len(tokens)):
            h = _signed(words.fnv(tokens[first])) % 2**64
            for last in range(first + 1, min(first + ngrams, len(tokens))):
                h = (h * 116049371 + _signed(words.fnv(tokens[last]))) % 2**64
                expected.append(len(known) + h % 13)
        assert sorted(row[row != PADDING].tolist()) == sorted(expected)
    assert found.shape[1] == sum(6 - n for n in range(2, min(ngrams, 5) + 1))


def _signed(h):
    return h - 2**32 if h >= 2**31 else h


# the vocabulary


def test_rows_are_cut_and_padded_and_come_in_order(folder):
    data = load(folder, length=4)
    assert (data.name, data.network, data.classes, data.shape) == (folder.name, "fasttext", 2, (4,))
    assert data.official_test.tolist() == [False] * 4 + [True] * 2
    assert data.y.tolist() == LABELS
    assert data.class_names == ("home", "away")
    assert [spelt(data, row) for row in range(6)] == [words.tokenise(text)[:4] for text in TEXTS]
    assert data.x[1].tolist()[3:] == [PADDING]
    assert data.x.max() + 1 == data.tokens == len(data.words)


def test_a_word_that_only_test_rows_have_is_unknown(folder):
    data = divided(load(folder, length=6), train=[0, 1], test=[2, 3]).dataset
    assert set(data.words[2:]) == {"the", "cat", ",", "mat", ".", "a", "dog", "!"}
    assert spelt(data, 2) == ["the", "dog", "<unknown>", "the", "cat"]
    assert spelt(data, 3) == ["<unknown>"] * 2
    assert spelt(data, 0) == words.tokenise(TEXTS[0])


def test_validation_rows_do_not_contribute(folder):
    data = load(folder)
    rows = [np.array([row]) for row in (0, 1, 3)]
    assert "dog" not in Federation(data, *([part] for part in rows), "hash", "by hand").dataset.words


def test_the_vocabulary_follows_the_split(folder):
    raw = load(folder)
    federations = [federate(raw, "iid", 1, seed, test=0.4, test_from="merged") for seed in range(4)]
    for federation in federations:
        trained = {word for row in federation.train[0] for word in words.tokenise(TEXTS[row])}
        assert set(federation.dataset.words[2:]) == trained
        assert federation.dataset.tokens == len(trained) + 2
        assert federation.dataset.digest == raw.digest  # one data set
    assert len({federation.dataset.words for federation in federations}) > 1


def test_words_come_by_frequency_then_by_themselves(folder):
    data = divided(load(folder), range(6), []).dataset
    assert data.words[:9] == ("<padding>", "<unknown>", "the", "'", "cat", "dog", "hoot", "mat", "!")


def test_rare_words_and_those_beyond_the_size_are_unknown(folder):
    data = divided(load(folder, min_count=2), range(6), []).dataset
    assert set(data.words[2:]) == {"the", "cat", "dog", "mat", "hoot", "'"}
    assert spelt(data, 1) == ["<unknown>", "dog", "<unknown>"]
    data = divided(load(folder, max_size=4), range(6), []).dataset
    assert data.words == ("<padding>", "<unknown>", "the", "'")
    assert data.tokens == 4
    with pytest.raises(UsageError, match="at least min_count=9 times, found none"):
        divided(load(folder, min_count=9), range(6), [])


def test_n_grams_follow_the_words_and_keep_their_buckets(folder):
    raw = load(folder, length=4, ngrams=3, buckets=50)
    data = divided(raw, [0, 1], [2, 3]).dataset
    assert data.shape == (4 + 3 + 2,)
    assert data.tokens == len(data.words) + 50
    before, after = raw.x[:, 4:], data.x[:, 4:]
    assert ((before == PADDING) == (after == PADDING)).all()
    shift = len(raw.words) - len(data.words)
    assert torch.equal(after[after != PADDING] + shift, before[before != PADDING])
    assert (data.x[3, 4:] >= len(data.words)).sum() == 1  # "owls hoot", both unknown: a pair all the same


def test_the_network_has_as_many_embeddings_as_the_vocabulary_of_its_split(folder):
    sizes = set()
    for seed in range(4):
        experiment = Run(
            method="fedavg", data=str(folder), split="iid", clients=1, seed=seed, test=0.4, test_from="merged"
        )
        table = experiment.module().body.embedding.table
        assert (
            table.num_embeddings == experiment.federation.dataset.tokens == experiment.context().options["vocabulary"]
        )
        sizes.add(table.num_embeddings)
    assert len(sizes) > 1
    given = Run(
        method="fedavg", data=str(folder), split="iid", clients=1, network_options={"vocabulary": 500, "dim": 4}
    )
    assert given.module().body.embedding.table.weight.shape == (500, 4)
    with pytest.raises(UsageError, match=r"token ids, found vocabulary=3; leave it out, or give \d+ or more"):
        Run(method="fedavg", data=str(folder), split="iid", clients=1, network_options={"vocabulary": 3}).module()
    with pytest.raises(UsageError, match=r"'mlp' takes numbers, .* has token ids; use fasttext or nplm"):
        Run(method="fedavg", data=str(folder), split="iid", clients=1, network="mlp").module()


@pytest.mark.parametrize("method", ["fedavg", "fedah"])
def test_it_trains(tmp_path, method):
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 120)
    texts = [" ".join(draw.choice(["war", "vote"] if y else ["goal", "match"], 3)) + " and the" for y in labels]
    write(tmp_path / "train-0.parquet", texts, labels)
    found = run(
        Run(
            method=method, data=str(tmp_path), data_options={"length": 8, "ngrams": 2, "buckets": 20}, split="iid",
            clients=3, rounds=6, lr=1.0, backend="serial",
        )
    )  # fmt: skip
    assert found.summary["accuracy"]["received"]["plain"]["last"] > 0.95


# folders


def test_the_reader_is_the_one_for_texts(folder, tmp_path):
    assert reader_of(folder).__name__.endswith("texts")
    moved = tmp_path / "in data – 中"
    write(moved / "data" / "train-0.parquet")
    assert reader_of(moved).__name__.endswith("texts")
    assert load(moved).name == "in data – 中"
    write(tmp_path / "numbers" / "train-0.parquet", [1.0] * 6)
    assert reader_of(tmp_path / "numbers") is not reader_of(folder)


def test_columns_are_found_or_asked_for(tmp_path):
    write(tmp_path / "train-0.parquet", text="title", label="topic", body=["b"] * 6, who=list("aabbcc"))
    with pytest.raises(UsageError, match=r"one text column .* found title, body, who; name it by text="):
        load(tmp_path)
    data = load(tmp_path, text="title", group="who")
    assert data.group.tolist() == list("aabbcc")
    assert data.classes == 2
    for asked, message in {"titel": "Did you mean title", "topic": "Expected strings in column 'topic'"}.items():
        with pytest.raises(UsageError, match=message):
            load(tmp_path, text=asked)
    with pytest.raises(UsageError, match="integer labels in column 'body'"):
        load(tmp_path, text="title", label="body")


def test_one_class_is_taken(tmp_path):
    write(tmp_path / "train-0.parquet", labels=[0] * 6, names=False)
    assert load(tmp_path).classes == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"texts": [*TEXTS[:5], None]}, "a text in every row .* found 1 rows without one"),
        ({"texts": ["", " "] * 3}, "Expected texts with words .* found none"),
        ({"labels": [0, 1, 2, 0, 1, 0]}, r"labels in 0\.\.1, found 2"),
        ({"labels": [0, 5] * 3, "names": False}, r"found \{0, 5\}"),
        ({"labels": [None, 1] * 3}, "every row of column 'label' .* found 3 without one"),
        ({"texts": pa.array([b"caf\xe9"] * 6).view(pa.string())}, "texts in UTF-8 in column 'text'"),
        ({"texts": pa.array([], pa.string()), "labels": pa.array([], pa.int64())}, "found none"),
    ],
)
def test_rows_that_cannot_be_taken_are_refused(tmp_path, changed, message):
    write(tmp_path / "train-0.parquet", **changed)
    with pytest.raises(UsageError, match=message):
        load(tmp_path)


def test_broken_files_are_refused(tmp_path):
    write(tmp_path / "train-0.parquet")
    whole = (tmp_path / "train-0.parquet").read_bytes()
    (tmp_path / "test-0.parquet").write_bytes(whole[:-20])
    with pytest.raises(UsageError, match=r"Expected a Parquet file, .*test-0"):
        load(tmp_path)
    (tmp_path / "test-0.parquet").unlink()
    (tmp_path / "train-0.parquet").write_bytes(whole[:4] + bytes(len(whole) // 2 - 4) + whole[len(whole) // 2 :])
    with pytest.raises(UsageError, match="Expected a Parquet file"):
        load(tmp_path)
    at = whole.index(b"mat")  # in the column itself
    (tmp_path / "train-0.parquet").write_bytes(whole[:20] + b"\xff" * (at - 20) + whole[at:])
    with pytest.raises(UsageError, match=r"Expected whole .*files"):
        load(tmp_path)


@pytest.mark.parametrize("option", ["length", "ngrams", "buckets", "min_count"])
def test_options_out_of_range_are_refused(folder, option):
    with pytest.raises(UsageError, match=option):
        load(folder, **{option: 0})
    with pytest.raises(UsageError, match="max_size"):
        load(folder, max_size=2)
