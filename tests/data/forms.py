"""A small data set in each form that a local reader takes: 24 rows of two classes, told apart by their first feature.

Each function writes it below a folder and gives the path to load, with the options it needs.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

Y = np.arange(24) % 2
X = np.random.default_rng(0).normal(size=(24, 3)).round(3)
X[:, 0] += 3 * Y
PIXELS = np.random.default_rng(1).integers(0, 256, (24, 8, 8), dtype=np.uint8)
WORDS = np.array(["cat", "dog"])[Y]
WHO = np.array(["a", "b", "c"])[np.arange(24) // 8]

Made = tuple[Path, dict[str, Any]]


def png(pixels, kind="PNG") -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def put(path: Path, held: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(held.encode() if isinstance(held, str) else held)
    return path


def lines(rows, header="u,v,w,label,who") -> str:
    cells = [[*map(str, X[k]), WORDS[k], WHO[k]] for k in rows]
    return "".join(f"{line}\n" for line in ([header] if header else []) + [",".join(one) for one in cells])


def idx_bytes(array, code=8, order=">") -> bytes:
    return (
        struct.pack(f"{order}HBB", 0, code, array.ndim)
        + struct.pack(f"{order}{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def cifar_bytes(labels, pixels, coarse=None) -> bytes:
    """Records of the labels and red, green and blue one after the other; pixels [n, 32, 32, 3]."""
    first = [] if coarse is None else [coarse]
    return b"".join(
        bytes([*(int(of[k]) for of in (*first, labels))]) + pixels[k].transpose(2, 0, 1).tobytes()
        for k in range(len(labels))
    )


COLOUR = np.random.default_rng(2).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)


def csv_file(folder: Path) -> Made:
    return put(folder / "table.csv", lines(range(24))), {"group": "who"}


def csv_zipped(folder: Path) -> Made:
    return put(folder / "table.tsv.gz", gzip.compress(lines(range(24)).replace(",", "\t").encode())), {"group": "who"}


def csv_by_client(folder: Path) -> Made:
    for client in "abc":
        put(folder / "sites" / f"{client}.csv", lines(np.flatnonzero(client == WHO)))
    return folder / "sites", {"features": ["u", "v", "w"]}


def csv_train_test(folder: Path) -> Made:
    put(folder / "t" / "train.csv", lines(range(18)))
    put(folder / "t" / "test.csv", lines(range(18, 24)))
    return folder / "t", {"group": "who"}


def parquet_file(folder: Path) -> Made:
    columns = {"u": X[:, 0], "v": X[:, 1], "w": X[:, 2], "label": WORDS.tolist(), "who": WHO.tolist()}
    pq.write_table(pa.table(columns), folder / "table.parquet")
    return folder / "table.parquet", {"group": "who"}


def parquet_folder(folder: Path) -> Made:
    (folder / "parts").mkdir()
    for part, rows in (("train", slice(0, 18)), ("test", slice(18, 24))):
        table = pa.table({"u": X[rows, 0], "v": X[rows, 1], "label": Y[rows]})
        pq.write_table(table, folder / "parts" / f"{part}-00000-of-00001.parquet")
    return folder / "parts", {}


def images_by_class(folder: Path) -> Made:
    for k in range(24):
        put(folder / "pets" / WORDS[k] / f"{k:02}.png", png(PIXELS[k]))
    return folder / "pets", {}


def images_train_test(folder: Path) -> Made:
    for k in range(24):
        put(folder / "pets" / ("train" if k < 18 else "test") / WORDS[k] / f"{k:02}.png", png(PIXELS[k]))
    return folder / "pets", {}


def images_by_client(folder: Path) -> Made:
    for k in range(24):
        put(folder / "pets" / WHO[k] / WORDS[k] / f"{k:02}.png", png(PIXELS[k]))
    return folder / "pets", {}


def idx_folder(folder: Path) -> Made:
    for part, rows, end in (("train", slice(0, 18), ""), ("t10k", slice(18, 24), ".gz")):
        for what, array in (("images-idx3", PIXELS[rows]), ("labels-idx1", Y[rows].astype(np.uint8))):
            held = idx_bytes(array)
            put(folder / "mnist" / f"{part}-{what}-ubyte{end}", gzip.compress(held) if end else held)
    return folder / "mnist", {}


def idx_file(folder: Path) -> Made:
    return idx_folder(folder)[0] / "train-images-idx3-ubyte", {}


def cifar10(folder: Path) -> Made:
    for k in range(5):
        rows = slice(4 * k, 4 * k + 4)
        put(folder / "c10" / f"data_batch_{k + 1}.bin", cifar_bytes(Y[rows], COLOUR[rows]))
    put(folder / "c10" / "test_batch.bin", cifar_bytes(Y[20:], COLOUR[20:]))
    return folder / "c10", {}


def cifar100(folder: Path) -> Made:
    put(folder / "c100" / "train.bin", cifar_bytes(Y[:20] + 98, COLOUR[:20], Y[:20] + 18))
    put(folder / "c100" / "test.bin", cifar_bytes(Y[20:] + 98, COLOUR[20:], Y[20:] + 18))
    return folder / "c100", {"label": "coarse"}


def npz(folder: Path) -> Made:
    np.savez(folder / "arrays.npz", x=X, y=Y, group=WHO)
    return folder / "arrays.npz", {}


def npz_parts(folder: Path) -> Made:
    np.savez_compressed(folder / "k.npz", x_train=PIXELS[:18], y_train=Y[:18], x_test=PIXELS[18:], y_test=Y[18:])
    return folder / "k.npz", {}


def safetensors(folder: Path) -> Made:
    save_file({"x": torch.tensor(X), "y": torch.tensor(Y)}, folder / "t.safetensors")
    return folder / "t.safetensors", {}


FORMS = {
    form.__name__: form
    for form in (
        csv_file, csv_zipped, csv_by_client, csv_train_test, parquet_file, parquet_folder, images_by_class,
        images_train_test, images_by_client, idx_folder, idx_file, cifar10, cifar100, npz, npz_parts, safetensors,
    )
}  # fmt: skip


def images_as_on_the_hub(folder: Path) -> Made:
    for part, rows in (("train", range(18)), ("test", range(18, 24))):
        cells = [{"bytes": png(PIXELS[k]), "path": None} for k in rows]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({"image": pa.array(cells, kind), "label": Y[rows.start : rows.stop]})
        pq.write_table(table, _made(folder / "hub") / f"{part}-00000-of-00001.parquet")
    return folder / "hub", {}


def texts_with_labels(folder: Path) -> Made:
    for part, rows in (("train", slice(0, 18)), ("test", slice(18, 24))):
        table = pa.table({"text": [f"A {word}, I saw." for word in WORDS[rows]], "label": Y[rows]})
        pq.write_table(table, _made(folder / "news") / f"{part}-00000-of-00001.parquet")
    return folder / "news", {"length": 6}


def texts_by_client(folder: Path) -> Made:
    for client in "abc":
        put(folder / "play" / f"{client}.txt", "to be or not\n" * 4)
    return folder / "play", {"length": 5}


def leaf(folder: Path) -> Made:
    users = {who: {"x": X[who == WHO].tolist(), "y": Y[who == WHO].tolist()} for who in "abc"}
    for part, of in (("train", "ab"), ("test", "c")):
        held = {"users": list(of), "num_samples": [8] * len(of), "user_data": {who: users[who] for who in of}}
        put(folder / "leaf" / part / "all.json", json.dumps(held))
    return folder / "leaf", {}


def signals_table(folder: Path) -> Made:
    rows = [f"{k / 50},{X[k, 0]},{X[k, 1]},{WORDS[k]},{WHO[k]}\n" for k in range(24)]
    return put(folder / "walks.csv", "time,ax,ay,activity,subject\n" + "".join(rows)), {"length": 4}


def signals_arrays(folder: Path) -> Made:
    for who in "abc":
        np.save(_made(folder / "walks") / f"{who}.npy", np.column_stack([X, Y])[who == WHO])
    return folder / "walks", {"length": 4}


def signals_windows(folder: Path) -> Made:
    for who in "abc":
        x = PIXELS[who == WHO][:, :2].astype(np.float32)
        np.savez(_made(folder / "windows") / f"{who}.npz", x=x, y=Y[who == WHO])
    return folder / "windows", {}


def uci_har(folder: Path) -> Made:
    for part, rows in (("train", slice(0, 18)), ("test", slice(18, 24))):
        inside = folder / "har" / part
        for name in ("acc_x", "gyro_z"):
            signal = "".join(" ".join(f"{v:.3e}" for v in row) + "\n" for row in X[rows])
            put(inside / "Inertial Signals" / f"{name}_{part}.txt", signal)
        put(inside / f"y_{part}.txt", "".join(f"{y + 1}\n" for y in Y[rows]))
        put(inside / f"subject_{part}.txt", "".join(f"{ord(who)}\n" for who in WHO[rows]))
    return folder / "har", {}


def pfllib(folder: Path) -> Made:
    """As it saves them: each file holds a pickled dictionary of arrays."""
    for number, who in enumerate("abc"):
        rows = np.flatnonzero(who == WHO)
        for part, chosen in (("train", rows[:6]), ("test", rows[6:])):
            with (_made(folder / "peer" / part) / f"{number}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": X[chosen].astype(np.float32), "y": Y[chosen]})
    put(folder / "peer" / "config.json", json.dumps({"num_clients": 3, "num_classes": 2}))
    return folder / "peer", {}


def npy_folder(folder: Path) -> Made:
    for name, array in (("x", X.astype(np.float32)), ("y", Y), ("group", WHO)):
        np.save(_made(folder / "large") / f"{name}.npy", array)
    return folder / "large", {}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


OTHERS = {
    form.__name__: form
    for form in (
        images_as_on_the_hub, texts_with_labels, texts_by_client, leaf, signals_table, signals_arrays,
        signals_windows, uci_har, pfllib, npy_folder,
    )
}  # fmt: skip
