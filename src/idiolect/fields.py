"""The fields of `Run`: their defaults, and what the command line says of them. They are here as `--help` does without
torch, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from idiolect.data import Dataset, Federation, Split, SplitFile
    from idiolect.data.shift import Shift
    from idiolect.method import Method


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _mapping(text: str) -> Any:
    return field(default_factory=dict, metadata={"help": text})


# how rows are divided where neither the user nor a finished division (a split file, a federation) says
DIVISION: dict[str, Any] = {"clients": 20, "test": 0.25, "validation": 0.0, "test_from": "auto"}


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What an experiment is made of. A field that the command line can set has a help text."""

    method: Method | str
    data: str | Dataset = _field(
        "digits",
        "a data set's name (digits, synthetic, toy2d, quadratics; of the Hub mnist, cifar10, ..., hub:owner/name), or "
        "the path of files as they are: a table, images, arrays, texts, signals, ...",
    )
    data_options: Mapping[str, Any] = _mapping("what the data set's loader takes, as group=writer")
    split: str | Split | SplitFile | Federation = _field(
        "dirichlet:0.1",
        "how rows are divided over the clients: dirichlet:0.1, balanced:0.1, resampled:0.1, pathological:2, shards:2, "
        "blocks:2, extended:2, quantity:0.5, clusters:10, iid, given (by the data), flwr:PARTITIONER, flbench:FILE; or "
        "a FILE.parquet of 'idiolect split'",
    )
    clients: int = _field(None, "number of clients; a split file has its own")
    rounds: int = _field(50, "number of rounds")
    ratio: float | str | Sequence[Sequence[int]] = _field(1.0, "who takes part: 0.1, bernoulli:0.1, 0.5..1")
    epochs: int = _field(1, "local epochs in a round")
    batch_size: int = _field(10, "samples in a step")
    lr: float = _field(0.01, "learning rate")
    momentum: float = _field(0.0, "momentum of SGD")
    weight_decay: float = _field(0.0, "weight decay")
    nesterov: bool = _field(False, "Nesterov's momentum")
    optimizer: str = _field("sgd", "sgd, adam or adamw")
    clip: float | None = _field(None, "largest norm of a gradient")
    schedule: str = _field("constant", "learning rate over the rounds: constant, exponential, step, cosine")
    decay: float = _field(0.99, "factor of the exponential and step schedules")
    every: int = _field(100, "rounds between two steps of the step schedule")
    augment: str = _field("none", "random changes of training images: none, crop:4, flip or crop:4,flip")
    network: str | nn.Module | None = _field(None, "a network's name; default: the data set's")
    network_options: Mapping[str, Any] = _mapping("what the network takes, as hidden=[200]")
    buffers: str = _field("average", "running statistics of norm layers: average, local, drop")
    seed: int = _field(0, "seed of everything; a split file stays as it is")
    test: float = _field(None, "share of each client's rows to test on; a split file has its own")
    validation: float = _field(None, "share of each client's rows to validate on; a split file has its own")
    test_from: str = _field(
        None,
        "test rows: official, merged (a share of each client's), or auto: official where there are any; a split file "
        "has its own",
    )
    shift: str | Shift = _field("none", "how samples differ by client: rotation:4, noise:0.5, colour:0.5")
    held_out: float = _field(0.0, "clients that never train, evaluated apart: a share, or a number from 1")
    drop: float = _field(0.0, "probability that a participant trains and its reply is lost")
    absent: float = _field(0.0, "probability that a client drawn for a round is away from it")
    slow: float = _field(0.0, "probability that a participant does only a part of its steps, drawn evenly")
    late: float = _field(0.0, "probability that a client joins only in some round of the first half")
    leave: float = _field(0.0, "probability that a client leaves for good in some round of the second half")
    on_bad_reply: str = _field(
        "drop", "a reply with NaN or inf in it: drop (refused and recorded), stop (the run ends), accept"
    )
    reduce: str = _field(
        "mean",
        "what averaged replies become: mean, median, trimmed:SHARE of either end, krum:BAD or multikrum:BAD clients to "
        "withstand, clip:NORM of updates, geometric",
    )
    attack: str = _field(
        "none",
        "hostile clients, simulated, as KIND:SHARE or KIND:SHARE,SIZE: sign:0.2, scale:0.2,10, random:0.2, little:0.2, "
        "labels:0.2",
    )
    evaluate_every: int = _field(1, "rounds between two evaluations")
    evaluate_clients: int | None = _field(None, "clients scored as received, drawn once; default: all")
    checkpoint_every: int = _field(10, "rounds between two checkpoints; 0: none")
    secure: bool = _field(False, "refuse what needs individual replies at the server (secure aggregation)")
    backend: str = _field("workers", "where clients run: workers, serial, stacked")
    steps: str = _field("loop", "how steps are taken: loop (to the bit), compiled, stacked, auto (the fastest here)")
    workers: int | None = _field(None, "worker processes; default: one per core")
    time_limit: float | None = _field(
        None, "seconds a client may take; one that takes longer is run once more; default: any"
    )
    dtype: str = _field("float32", "float32 or float64")
    autocast: str | None = _field(None, "bfloat16: networks compute in it, where the processor has it; default: none")
    device: str = _field("cpu", "where clients train and predict: cpu, cuda, cuda:1, ...; the server stays on the CPU")
