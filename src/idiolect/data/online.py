"""Data sets by their names on the Hugging Face Hub, through the library `datasets`: `pip install idiolect[hub]`."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from idiolect.data import options_of
from idiolect.data.dataset import Dataset
from idiolect.data.readers import hub, idx, texts
from idiolect.errors import UsageError

PREFIX = "hub:"
ROOT = "IDIOLECT_HUB"  # a folder with owner/name in it: no network is used
TABLES = ("parquet", "arrow", "csv", "json")  # what is read of the Hub's forms: none of them runs code
NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
PRIVATE = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}


@dataclass(frozen=True)
class Known:
    """One data set of the Hub: the columns that may be its label, the default first, with the number of classes."""

    repo: str
    labels: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the reader's `load`
    config: str | None = None
    idx: bool = False  # whether it is kept in MNIST's own form


KNOWN = {
    "mnist": Known("ylecun/mnist", {"label": 10}, {"image": "image"}),
    "fashion_mnist": Known("zalando-datasets/fashion_mnist", {"label": 10}, {"image": "image"}),
    "emnist_balanced": Known("Royc30ne/emnist-balanced", {"label": 47}, {"image": "image"}, idx=True),
    "emnist_byclass": Known("Royc30ne/emnist-byclass", {"label": 62}, {"image": "image"}, idx=True),
    "femnist": Known("flwrlabs/femnist", {"character": 62}, {"image": "image", "group": "writer_id"}),
    "cifar10": Known("uoft-cs/cifar10", {"label": 10}, {"image": "img"}),
    "cifar100": Known("uoft-cs/cifar100", {"fine_label": 100, "coarse_label": 20}, {"image": "img"}),
    "tiny_imagenet": Known("zh-plus/tiny-imagenet", {"label": 200}, {"image": "image", "network": "resnet18"}),
    "cinic10": Known("flwrlabs/cinic10", {"label": 10}, {"image": "image"}),
    "imagenet": Known(
        "ILSVRC/imagenet-1k",
        {"label": 1000},
        {"image": "image", "network": "resnet18", "size": 64, "test": "validation"},  # its test set has no labels
    ),
    "ag_news": Known("fancyzhx/ag_news", {"label": 4}, {"text": "text"}),
}


def named(name: str) -> bool:
    """Whether this is a name of the Hub's: of `KNOWN`, or hub:owner/name."""
    return name in KNOWN or name.startswith(PREFIX)


def load(
    name: str, repo: str | None = None, config: str | None = None, root: str | Path | None = None, **options: Any
) -> Dataset:
    """A data set of the Hub: "cifar100", or "hub:owner/name" for any other, whose columns `image` or `text`,
    `label` and `group` are named where they are not plain. All other options are those of a folder of images or of
    texts (`readers/hub.py`, `readers/texts.py`).

    `repo` and `config` name another copy. `root`, or the variable IDIOLECT_HUB, is a folder in which the data sets lie
    as owner/name, downloaded before: then no network is used.
    """
    known = KNOWN.get(name) or Known(name.removeprefix(PREFIX), {})
    repo = known.repo if repo is None else repo
    if not NAME.fullmatch(repo):
        raise UsageError(f"Expected the name of a data set on the Hub, as in hub:ylecun/mnist, found '{repo}'.")
    if known.idx and repo == known.repo:
        return _idx(name, known, repo, root or os.environ.get(ROOT), options)
    options_of.check(name, OPTIONS, options)
    options = {"label": next(iter(known.labels), None), **known.options, **options}
    parts = fetch(repo, config or known.config, root or os.environ.get(ROOT))
    reader = texts if hub.are_texts(Path(repo), parts, options.get("train", "train")) else hub
    options_of.check(name, options_of.kinds(reader.load, positional=1), options)
    classes = known.labels.get(options["label"])
    return reader.samples(Path(repo), parts, name=name.removeprefix(PREFIX), classes=classes, **options)


def _idx(name: str, known: Known, repo: str, root: str | Path | None, options: Mapping[str, Any]) -> Dataset:
    """A data set in MNIST's own form (`readers/idx.py`), of which the Hub keeps the files as they are: EMNIST's, whose
    images lie on their side."""
    options_of.check(name, options_of.kinds(idx.load, positional=1), options)
    folder = _files(repo, ["*idx3-ubyte*", "*idx1-ubyte*"]) if root is None else _folder(repo, Path(root))
    found = idx.load(folder, **{"classes": known.labels["label"], "transpose": True, **options})
    return replace(found, name=name)


def _files(repo: str, patterns: list[str]) -> Path:
    """The folder of a repository's files, downloaded once."""
    _library(repo)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns=patterns))
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"Expected the data set '{repo}' on the Hub, found none that can be had ({_line(error)}); check the name, "
            "or name another copy by repo=."
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise _unreached(repo, error) from None


def _unreached(repo: str, error: Exception) -> UsageError:
    return UsageError(
        f"The Hub cannot be reached for '{repo}' ({_line(error)}). Where there is a network, run 'hf download "
        f"--repo-type dataset {repo} --local-dir DIR', and give DIR as --data here; or name by {ROOT} the folder in "
        f"which {repo} lies."
    )


OPTIONS = {
    name: kind for read in (hub.load, texts.load, load) for name, kind in options_of.kinds(read, positional=1).items()
}


def fetch(repo: str, config: str | None, root: str | Path | None) -> hub.Parts:
    """The files of each part, as `datasets` keeps them: downloaded once, or made from those below `root`."""
    datasets = _library(repo)
    place = f"hf://datasets/{repo}" if root is None else str(_folder(repo, Path(root)))
    try:
        builder = datasets.load_dataset_builder(place, name=config)
        form = type(builder).__module__.removeprefix("datasets.packaged_modules.").partition(".")[0]
        if form not in TABLES:
            raise UsageError(
                f"Expected tables ({', '.join(TABLES)}) in the data set '{repo}', found the form '{form}'; download "
                "it, and give its folder if that has a form that is read."
            )
        builder.download_and_prepare()
        made = builder.as_dataset()
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UsageError(
            f"Expected the data set '{repo}' on the Hub, found none that can be had ({_line(error)}); check the name, "
            "or log in by 'hf auth login' if it asks for that."
        ) from None
    except ConnectionError as error:
        raise _unreached(repo, error) from None
    except UsageError:
        raise
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"The data set '{repo}' cannot be read from '{place}': {_line(error)}") from None
    return {part: [Path(file["filename"]) for file in table.cache_files] for part, table in made.items()}


def _library(repo: str) -> ModuleType:
    for variable, value in PRIVATE.items():  # read when the library is imported
        os.environ.setdefault(variable, value)
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"'{repo}' comes from the Hugging Face Hub, for which the library datasets is needed; install it by pip "
            "install 'idiolect[hub]', or give the folder of a downloaded copy as --data."
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise UsageError(
            f"Expected version 4 or later of the library datasets, which runs no code of a data set, found "
            f"{datasets.__version__}; update it by pip install -U 'idiolect[hub]'."
        )
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt at what then fails
    return datasets


def _folder(repo: str, root: Path) -> Path:
    folder = root.expanduser().resolve() / repo
    if not folder.is_dir():
        raise UsageError(f"Expected the data set '{repo}' at '{folder}', found no folder there; check root and {ROOT}.")
    return folder


def _line(error: Exception) -> str:
    """The first line of what the library says, and its cause where it has one."""
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return (f"{first}: {str(error.__cause__).partition(chr(10))[0]}" if error.__cause__ else first)[:300]
