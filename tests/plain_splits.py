"""Splits once more, client by client with plain loops: what the arrays of `idiolect.data` have to equal, bit for bit."""

from __future__ import annotations

import hashlib

import numpy as np

from idiolect.data.apportion import apportion
from idiolect.data.streams import stream


def dirichlet(labels, clients, seed, alpha, minimum):
    rows = rows_by_class(labels)
    shares = stream(seed, "dirichlet proportions").dirichlet(np.full(clients, float(alpha)), len(rows))
    counts = np.stack([apportion(share, len(these)) for share, these in zip(shares, rows, strict=True)], 1)
    return deal(rows, reach_minimum(counts, minimum), stream(seed, "dirichlet rows"))


def iid(labels, clients, seed):
    return [np.sort(part) for part in np.array_split(stream(seed, "iid rows").permutation(len(labels)), clients)]


def quantity(labels, clients, seed, alpha, minimum):
    share = stream(seed, "quantity proportions").dirichlet(np.full(clients, float(alpha)))
    sizes = reach_minimum(apportion(share, len(labels))[:, None], minimum)
    return deal([np.arange(len(labels))], sizes, stream(seed, "quantity rows"))


def pathological(labels, clients, seed, classes):
    rows, random = rows_by_class(labels), stream(seed, "pathological classes")
    held = np.zeros((clients, len(rows)), np.int64)
    for client in random.permutation(clients):
        held[client, np.lexsort((random.permutation(len(rows)), held.sum(0)))[:classes]] = 1
    counts = np.stack([apportion(column, len(these)) for column, these in zip(held.T, rows, strict=True)], 1)
    return deal(rows, counts, stream(seed, "pathological rows"))


def merge(labels, clients, seed):
    groups = rows_by_class(labels)
    hands, sizes = [[] for _ in range(clients)], [0] * clients
    for group in sorted(groups, key=lambda rows: -len(rows)):
        smallest = sizes.index(min(sizes))
        hands[smallest].extend(group)
        sizes[smallest] += len(group)
    return [np.sort(hand) for hand in hands]


def largest(labels, clients, seed):
    groups = rows_by_class(labels)
    kept = sorted(range(len(groups)), key=lambda k: -len(groups[k]))[:clients]
    return [groups[k] for k in sorted(kept)]


def rows_by_class(labels):
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def deal(rows, counts, random):
    hands = [[] for _ in range(len(counts))]
    for these, shares in zip(rows, counts.T, strict=True):
        for hand, part in zip(hands, np.split(random.permutation(these), np.cumsum(shares)[:-1]), strict=True):
            hand.extend(part)
    return [np.sort(np.array(hand, np.int64)) for hand in hands]


def reach_minimum(counts, minimum):
    counts = counts.copy()
    sizes = counts.sum(1)
    for receiver in np.argsort(sizes, kind="stable"):
        while sizes[receiver] < minimum:
            spare = sizes > minimum
            wanted = int(np.where(counts[spare].any(0), counts[receiver], -1).argmax())
            if counts[receiver, wanted] == 0:
                wanted = int(counts[sizes.argmax()].argmax())
            donor = int(np.where(spare & (counts[:, wanted] > 0), sizes, -1).argmax())
            moved = min(minimum - sizes[receiver], sizes[donor] - minimum, counts[donor, wanted])
            for client, change in ((donor, -moved), (receiver, moved)):
                counts[client, wanted] += change
                sizes[client] += change
    return counts


def carve(strata, rows, test, validation, random):
    """One client's rows: train, validation, test."""
    found, classes = np.unique(strata[rows], return_inverse=True)
    held = np.bincount(classes, minlength=len(found))
    for_test = apportion(held, size(len(rows), test, len(rows) - 1), random.permutation(len(found)))
    rest = held - for_test
    for_validation = apportion(rest, size(len(rows), validation, rest.sum() - 1), random.permutation(len(found)))
    counts = np.stack([rest - for_validation, for_validation, for_test])
    return deal([rows[classes == number] for number in range(len(found))], counts, random)


def size(rows, share, most):
    return 0 if share == 0 else max(0, min(max(int(np.floor(rows * share + 0.5)), 1), int(most)))


def deal_official(strata, owned, official, seed):
    classes = int(strata.max()) + 1
    held = np.stack([np.bincount(strata[rows], minlength=classes) for rows in owned])
    available = np.bincount(strata[official], minlength=classes)
    counts = nobody_empty(carried(held, available), held)
    rows = [official[strata[official] == number][: counts[:, number].sum()] for number in range(classes)]
    return deal(rows, counts, stream(seed, "official test rows"))


def carried(held, available):
    counts, owed = np.zeros_like(held), np.zeros(len(held))
    for number in np.flatnonzero(held.sum(0)):
        quota = held[:, number] * float(available[number]) / held[:, number].sum()
        counts[:, number] = np.floor(quota)
        claim = np.where(held[:, number] > 0, quota - counts[:, number] + owed, -np.inf)
        left = available[number] - counts[:, number].sum()
        counts[np.argsort(-claim, kind="stable")[:left], number] += 1
        owed += quota - counts[:, number]
    return counts


def nobody_empty(counts, held):
    counts = counts.copy()
    for client in np.flatnonzero((counts.sum(1) == 0) & (held.sum(1) > 0)):
        for number in np.argsort(-held[client], kind="stable")[: np.count_nonzero(held[client])]:
            donors = np.where(counts[:, number] > 0, counts.sum(1), 0)
            if donors.max() > 1:
                counts[donors.argmax(), number] -= 1
                counts[client, number] += 1
                break
    return counts


def federate(split, strata, official, clients, seed, test, validation, test_from):
    """Train, validation and test rows of each client; `split` is one of the functions above, with its options."""
    pool = np.arange(len(strata)) if test_from == "merged" else np.flatnonzero(~official)
    owned = [pool[rows] for rows in split(pool, clients, seed)]
    share = test if test_from == "merged" else 0.0
    parts = [
        carve(strata, rows, share, validation, stream(seed, f"holdout of client {client}"))
        for client, rows in enumerate(owned)
    ]
    if test_from == "official":
        left_out = np.setdiff1d(pool, np.concatenate(owned))
        tests = deal_official(strata, [*owned, left_out], np.flatnonzero(official), seed)
        parts = [[train, held, rows] for (train, held, _), rows in zip(parts, tests, strict=False)]
    return parts


def split_hash(parts):
    digest = hashlib.sha256(len(parts).to_bytes(8, "little"))
    for client in parts:
        for rows in client:
            digest.update(len(rows).to_bytes(8, "little"))
            digest.update(rows.astype("<i8").tobytes())
    return digest.hexdigest()
