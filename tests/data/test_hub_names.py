"""Data sets by their names on the Hub: the same code, with folders on this disk in the place of the network."""

import gzip
import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from idiolect.data import federate, load, online
from idiolect.errors import UsageError
from idiolect.experiment import Run

datasets = pytest.importorskip("datasets")
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """No network, and nothing kept outside of the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv(online.ROOT, raising=False)
    datasets.disable_progress_bars()


def pictures(rows, side=8, colour=False):
    return RANDOM.integers(0, 256, (rows, side, side, 3) if colour else (rows, side, side), dtype=np.uint8)


def part(pixels, image="image", **columns):
    """A part of a data set, with lists of (value, its number of classes), or of plain values."""
    features = {image: datasets.Image()}
    values = {image: [Pictures.fromarray(one) for one in pixels]}
    for name, (column, classes) in columns.items():
        kind = datasets.ClassLabel(num_classes=classes) if classes else datasets.Value("string")
        features[name], values[name] = kind, column
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def publish(root, repo, config="data", **parts):
    """The parts as they lie in a repository of the Hub."""
    for name, one in parts.items():
        file = root / repo / config / f"{name}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        one.to_parquet(file)


def test_emnist_is_kept_as_its_own_files_and_stood_upright(tmp_path):
    """Rows and columns change places; the classes are all of them, whichever occur."""
    folder = tmp_path / "Royc30ne" / "emnist-balanced"
    folder.mkdir(parents=True)
    images, labels = {"train": pictures(6), "test": pictures(3)}, {"train": [0, 5, 46, 1, 2, 3], "test": [7, 7, 40]}
    for part_, pixels in images.items():
        head = struct.pack(">4i", 0x803, *pixels.shape)
        with gzip.open(folder / f"emnist-balanced-{part_}-images-idx3-ubyte.gz", "wb") as file:
            file.write(head + pixels.tobytes())
        with gzip.open(folder / f"emnist-balanced-{part_}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">2i", 0x801, len(pixels)) + bytes(labels[part_]))
    data = load("emnist_balanced", root=tmp_path, mean=[0], std=[1])
    assert (data.name, data.classes, len(data)) == ("emnist_balanced", 47, 9)
    assert data.y.tolist() == [*labels["train"], *labels["test"]]
    assert data.official_test.tolist() == [False] * 6 + [True] * 3
    both = np.concatenate([images["train"], images["test"]])
    assert np.array_equal((data.x[:][:, 0].numpy() * 255).round(), both.transpose(0, 2, 1))
    with pytest.raises(UsageError, match="Royc30ne/emnist-byclass"):
        load("emnist_byclass", root=tmp_path)
    with pytest.raises(UsageError, match="Unknown option of data set 'emnist_balanced' 'image'"):
        load("emnist_balanced", root=tmp_path, image="image")


def test_files_of_the_hub_need_a_network():
    code = "from idiolect.data import load\nload('emnist_balanced')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "The Hub cannot be reached for 'Royc30ne/emnist-balanced'" in done.stderr.splitlines()[-1]


@pytest.fixture
def cifar100(tmp_path):
    train, test = pictures(6, colour=True), pictures(3, colour=True)
    for_ = lambda pixels: part(
        pixels,
        "img",
        fine_label=(list(range(len(pixels))), 100),
        coarse_label=([k % 2 for k in range(len(pixels))], 20),
    )
    publish(tmp_path, "uoft-cs/cifar100", train=for_(train), test=for_(test))
    return np.concatenate([train, test])


def test_a_name_loads_the_hubs_data_set(cifar100, tmp_path, monkeypatch):
    data = load("cifar100", root=str(tmp_path), mean=[0] * 3, std=[1] * 3)
    assert data.name == "cifar100"
    assert data.classes == 100
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert torch.allclose(data.x, torch.tensor(cifar100).permute(0, 3, 1, 2) / 255)
    assert data.official_test.tolist() == [False] * 6 + [True] * 3
    coarse = load("cifar100", root=tmp_path, label="coarse_label")
    assert coarse.classes == 20
    assert coarse.y.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    monkeypatch.setenv(online.ROOT, str(tmp_path))
    by_id = load("hub:uoft-cs/cifar100", label="fine_label")
    assert by_id.name == "uoft-cs/cifar100"
    assert torch.equal(by_id.y, data.y)


def test_a_folder_of_the_same_gives_the_same(cifar100, tmp_path):
    named, folder = load("cifar100", root=tmp_path), load(tmp_path / "uoft-cs" / "cifar100", label="fine_label")
    assert torch.equal(named.x, folder.x)
    assert named.digest == folder.digest


@pytest.mark.parametrize("name", sorted(online.KNOWN))
def test_every_known_name_reads_its_columns(tmp_path, name):
    known = online.KNOWN[name]
    if "text" in known.options or known.idx:
        pytest.skip("has a test of its own")
    labels = {label: ([0, 1, 1, 0], classes) for label, classes in known.labels.items()}
    group = known.options.get("group")
    one = part(pictures(4), known.options["image"], **labels, **({group: (list("abab"), None)} if group else {}))
    publish(tmp_path, known.repo, **dict.fromkeys(("train", known.options.get("test", "test")), one))
    data = load(name, root=tmp_path)
    assert data.classes == next(iter(known.labels.values()))
    assert len(data) == 8
    assert (data.group is not None) == (group is not None)
    assert data.shape == (1, *[known.options.get("size", 8)] * 2)
    assert data.network == known.options.get("network", "convnet3")


def texts(root, repo="fancyzhx/ag_news"):
    kind = datasets.ClassLabel(names=["World", "Sports", "Business", "Sci/Tech"])
    features = datasets.Features({"text": datasets.Value("string"), "label": kind})
    for_ = lambda rows, labels: datasets.Dataset.from_dict({"text": rows, "label": labels}, features=features)
    train, test = ["a match, a win", "shares fell", "a new chip", "talks on peace"], ["a loss", "shares rose"]
    publish(root, repo, train=for_(train, [1, 2, 3, 0]), test=for_(test, [1, 2]))


def test_texts_by_name(tmp_path):
    texts(tmp_path)
    data = load("ag_news", root=tmp_path, length=5)
    folder = load(tmp_path / "fancyzhx" / "ag_news", length=5)
    assert (data.name, data.classes, data.network) == ("ag_news", 4, "fasttext")
    assert torch.equal(data.x, folder.x)
    assert data.words == folder.words
    assert data.official_test.tolist() == [False] * 4 + [True] * 2
    assert len(load("hub:fancyzhx/ag_news", root=tmp_path)) == 6
    with pytest.raises(UsageError, match="Unknown option of data set 'ag_news' 'mean'"):
        load("ag_news", root=tmp_path, mean=[0])
    with pytest.raises(UsageError, match="'ag_news': expected length as a whole number, found 'x'"):
        load("ag_news", root=tmp_path, length="x")


def test_femnists_writers_are_its_clients(tmp_path):
    one = part(pictures(6), character=([0, 1, 2, 3, 4, 61], 62), writer_id=(["f1", "f2", "f1", "f2", "f3", "f3"], None))
    publish(tmp_path, "flwrlabs/femnist", train=one)
    data = load("femnist", root=tmp_path)
    assert data.official_test is None
    assert [rows.tolist() for rows in federate(data, "given", 3, 0, test=0).train] == [[0, 2], [1, 3], [4, 5]]


def test_a_validation_set_stands_in_for_a_test_set(tmp_path):
    one = part(pictures(4), label=([0, 1, 2, 0], 3))
    publish(tmp_path, "zh-plus/tiny-imagenet", train=one, valid=one)
    data = load("tiny_imagenet", root=tmp_path)
    assert data.name == "tiny_imagenet (test: valid)"
    assert data.official_test.sum() == 4
    assert "tiny_imagenet (test: valid)" in federate(data, "iid", 2, 0, test_from="official").recipe
    publish(tmp_path, "flwrlabs/cinic10", train=one, validation=one, test=one)
    assert len(load("cinic10", root=tmp_path)) == 8
    both = load("cinic10", root=tmp_path, train="train+validation")
    assert both.name == "cinic10 (train: train+validation)"
    assert both.official_test.tolist() == [False] * 8 + [True] * 4
    with pytest.raises(UsageError, match=r"Unknown part of 'flwrlabs/cinic10' 'valid'. Did you mean validation"):
        load("cinic10", root=tmp_path, test="valid")


def test_a_test_set_without_labels_is_none(tmp_path):
    one, blind = (part(pictures(4), label=(labels, 3)) for labels in ([0, 1, 2, 0], [-1] * 4))
    publish(tmp_path, "o/n", train=one, test=blind, validation=one)
    assert load("hub:o/n", root=tmp_path).name == "o/n (test: validation)"
    publish(tmp_path, "o/m", train=one, test=blind)
    assert load("hub:o/m", root=tmp_path).official_test is None


def test_images_of_many_sizes_are_brought_to_one(tmp_path):
    wide = np.zeros((20, 40, 3), np.uint8)
    wide[:, 10:30] = 200  # all that a square about the middle holds
    cells = [Pictures.fromarray(wide), Pictures.fromarray(np.full((30, 30), 100, np.uint8))]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=1000)})
    one = datasets.Dataset.from_dict({"image": cells, "label": [0, 999]}, features=features)
    publish(tmp_path, "ILSVRC/imagenet-1k", train=one, validation=one)
    with pytest.raises(UsageError, match=r"found 20x40 and, in row 1, 30x30; resize them first .*size=20"):
        load(tmp_path / "ILSVRC" / "imagenet-1k")
    data = load("imagenet", root=tmp_path, size=5, mean=[0] * 3, std=[1 / 255] * 3)
    assert data.shape == (3, 5, 5)
    assert data.x[0, :, :, 1:4].unique().tolist() == pytest.approx([200])
    assert data.x[0].min() > 150  # a little of what was cut off shows at the edges
    assert data.x[1].unique().tolist() == pytest.approx([100])
    with pytest.raises(UsageError, match="a size of at least 1"):
        load("imagenet", root=tmp_path, size=0)


def test_another_copy_and_its_configuration(tmp_path):
    one = part(pictures(3), label=([0, 1, 46], 47))
    publish(tmp_path, "me/emnist", "balanced", train=one)
    readme = (
        "---\nconfigs:\n- config_name: balanced\n  data_files:\n  - split: train\n    path: balanced/train-*\n---\n"
    )
    (tmp_path / "me" / "emnist" / "README.md").write_text(readme)
    data = load("emnist_balanced", root=tmp_path, repo="me/emnist", config="balanced")
    assert (data.name, data.classes, len(data)) == ("emnist_balanced", 47, 3)
    with pytest.raises(UsageError, match=r"'me/emnist' cannot be read.*'letters' not found. Available: \['balanced'\]"):
        load("emnist_balanced", root=tmp_path, repo="me/emnist", config="letters")


@pytest.mark.parametrize("one", ["csv", "webdataset"])
def test_forms_without_images_in_tables_are_refused(tmp_path, one):
    (tmp_path / "o" / "n").mkdir(parents=True)
    if one == "csv":
        (tmp_path / "o" / "n" / "train.csv").write_text("a,label\n1,0\n2,1\n")
        message = "Expected a column of images"
    else:
        Pictures.fromarray(pictures(1)[0]).save(buffer := io.BytesIO(), "PNG")
        (tmp_path / "o" / "n" / "a").mkdir()
        (tmp_path / "o" / "n" / "a" / "1.png").write_bytes(buffer.getvalue())
        message = "Expected tables .parquet, arrow, csv, json. in the data set 'o/n', found the form 'imagefolder'"
    with pytest.raises(UsageError, match=message):
        load("hub:o/n", root=tmp_path)


def test_no_code_of_a_data_set_is_run(tmp_path):
    (tmp_path / "o" / "n").mkdir(parents=True)
    (tmp_path / "o" / "n" / "n.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError, match=r"'o/n' cannot be read.*scripts are no longer supported"):
        load("hub:o/n", root=tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hub:mnist", {}, "as in hub:ylecun/mnist, found 'mnist'"),
        ("hub:../../etc", {}, "as in hub:ylecun/mnist"),
        ("hub:a/b/c", {}, "as in hub:ylecun/mnist"),
        ("hub:https://x/y", {}, "as in hub:ylecun/mnist"),
        ("hub:o/n", {"root": "."}, "Expected the data set 'o/n' at '.*/o/n', found no folder there"),
        ("mnist", {"labels": "x"}, "Unknown option of data set 'mnist' 'labels'. Did you mean label"),
        ("mnis", {}, "Unknown data set 'mnis'. Did you mean mnist"),
        ("mnist", {}, "The Hub cannot be reached for 'ylecun/mnist' .*hf download --repo-type dataset ylecun/mnist"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said(tmp_path, monkeypatch, name, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        load(name, **options)
    assert "\n" not in str(error.value)


def test_a_folder_here_is_not_taken_for_the_hubs(tmp_path, monkeypatch):
    publish(tmp_path, "ylecun/mnist", train=part(pictures(2), label=([0, 1], 10)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot be reached"):
        load("mnist")


def test_a_broken_file_is_named(tmp_path):
    publish(tmp_path, "o/n", train=part(pictures(2), label=([0, 1], 2)))
    file = next((tmp_path / "o").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UsageError, match="The data set 'o/n' cannot be read from"):
        load("hub:o/n", root=tmp_path)


def test_a_run_by_name(cifar100, tmp_path):
    run = Run(method="local", data="cifar100", data_options={"root": str(tmp_path)}, split="iid", clients=2)
    assert Run.from_toml(run.to_toml()).dataset.digest == run.dataset.digest


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )  # fmt: skip


def test_without_a_network_the_command_line_says_so():
    done = command("-m", "idiolect", "run", "fedavg", "--data", "mnist", "--rounds", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("The Hub cannot be reached for 'ylecun/mnist'")
    assert done.stderr.count("\n") == 1


def test_without_the_library_it_says_what_to_install_and_the_package_never_imports_it(tmp_path):
    code = (
        "import sys, idiolect.cli, idiolect.experiment, idiolect.data; from idiolect.errors import UsageError\n"
        "assert not {'datasets', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.modules['datasets'] = None\n"
        "try: idiolect.data.load('mnist')\n"
        "except UsageError as error: print(error)\n"
    )
    done = command("-c", code)
    assert "pip install 'idiolect[hub]'" in done.stdout, done.stderr
    code = "from idiolect.data import online as o; o._library('o/n'); import datasets, huggingface_hub.constants as c; print(c.HF_HUB_DISABLE_TELEMETRY, datasets.config.HF_UPDATE_DOWNLOAD_COUNTS)"
    assert command("-c", code).stdout.split() == ["True", "False"]


def test_the_names_are_names_of_the_hub():
    assert all(online.NAME.fullmatch(known.repo) for known in online.KNOWN.values())
    assert len({known.repo for known in online.KNOWN.values()}) == len(online.KNOWN)
    assert not set(online.KNOWN) & {file.stem for file in Path(online.__file__).parent.joinpath("sources").glob("*.py")}
