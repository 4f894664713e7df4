"""Texts as token ids: their words, and the hashed n-grams of words, as fastText takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idiolect.data.dataset import Dataset, count_classes
from idiolect.data.partition.split import is_whole
from idiolect.data.vocabulary import SPECIAL, Vocabulary
from idiolect.errors import UsageError
from idiolect.nets.text import PADDING

Index = NDArray[np.int64]

SPACED = ".,()!?"
RULES = str.maketrans({**{mark: f" {mark} " for mark in SPACED}, "'": " '  ", ";": " ", ":": " "})


def tokenise(text: str) -> list[str]:
    """Lower-case words and marks, by the rule of torchtext's `basic_english`, which PFLlib's AG News uses.

    The marks . , ( ) ! ? and ' are tokens of their own; the quotation mark " is left out, without a space; ; and :
    and <br /> are spaces; everything else between spaces is a token.
    """
    return text.lower().replace('"', "").replace("<br />", " ").translate(RULES).split()


def dataset(
    where: Path,
    texts: Sequence[str],
    labels: Tensor,
    *,
    name: str,
    length: int,
    ngrams: int,
    buckets: int,
    vocabulary: tuple[int, int | None],
    classes: int | None = None,
    network: str | None = None,
    group: NDArray[np.str_] | None = None,
    official_test: NDArray[np.bool_] | None = None,
) -> Dataset:
    """One row of `length` token ids per text: cut there, and padded with 0 after its end; behind them the n-grams of
    two to `ngrams` tokens, each hashed into one of `buckets` ids. `vocabulary` is (min_count, max_size)."""
    for what, value in {"length": length, "ngrams": ngrams, "buckets": buckets}.items():
        if not is_whole(value, 1):
            raise UsageError(f"Expected a whole number of at least 1 for {what} of '{where}', found {value!r}.")
    buckets = buckets if ngrams > 1 else 0
    x, words = encode(texts, length)
    if len(words) == len(SPECIAL):
        raise UsageError(f"Expected texts with words in '{where}', found none; check the column or the files.")
    if ngrams > 1:
        x = np.concatenate([x, hashed(x, words, ngrams, buckets)], 1)
    return Dataset(
        name,
        torch.from_numpy(x),
        labels,
        classes=classes or count_classes(name, labels),
        network=network or "fasttext",
        group=group,
        official_test=official_test,
        tokens=len(words) + buckets,
        words=words,
        fit=Vocabulary(*vocabulary, buckets=buckets),
    )


def encode(texts: Sequence[str], length: int) -> tuple[Index, tuple[str, ...]]:
    """Ids [texts, length], and the word that each id stands for, in the order in which the texts have them."""
    ids = {word: k for k, word in enumerate(SPECIAL)}
    x = np.full((len(texts), length), PADDING, np.int64)
    for row, text in enumerate(texts):
        found = [ids.setdefault(token, len(ids)) for token in tokenise(text)[:length]]
        x[row, : len(found)] = found
    return x, tuple(ids)


def hashed(x: Index, words: Sequence[str], ngrams: int, buckets: int) -> Index:
    """The bucket of every n-gram of 2 to `ngrams` tokens, after the ids of the words; padding where there is none.

    fastText's rule: h <- h * 116049371 + (hash of the next word), beginning with the first word's hash, modulo 2^64,
    then modulo `buckets`. Words' hashes count as signed numbers of 32 bits. What is unknown has its own hash, too.
    """
    word = np.array([fnv(w) for w in words], np.uint32).astype(np.int32).astype(np.int64).astype(np.uint64)[x]
    columns, h = [], word
    for n in range(2, min(ngrams, x.shape[1]) + 1):
        h = h[:, :-1] * np.uint64(116049371) + word[:, n - 1 :]  # wraps at 2^64
        bucket = len(words) + (h % np.uint64(buckets)).astype(np.int64)
        columns.append(np.where(x[:, n - 1 :] == PADDING, PADDING, bucket))
    return np.concatenate([np.empty((len(x), 0), np.int64), *columns], 1)


def fnv(word: str) -> int:
    """fastText's hash of a word: FNV-1a of 32 bits over its UTF-8 bytes, each taken as a signed number."""
    h = 2166136261
    for byte in word.encode("utf-8", "surrogatepass"):
        h = ((h ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619) & 0xFFFFFFFF
    return h
