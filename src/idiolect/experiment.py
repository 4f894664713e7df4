"""`Run`: one experiment as a value. `run(Run(...))` carries it out; what it was stands beside every result."""

from __future__ import annotations

import copy
import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from pathlib import Path
from typing import Any, cast

import tomli_w
import torch
from torch import nn

from idiolect import augment, catalogue, precision
from idiolect.client import Settings
from idiolect.data import Dataset, Federation, Split, SplitFile, federate, load, parse
from idiolect.data import shift as shifts
from idiolect.data.dataset import digest
from idiolect.data.find import taken
from idiolect.data.shift import Shift
from idiolect.engine import attacks, orders, robust
from idiolect.engine.faults import FAULTS, Faults
from idiolect.engine.reception import ON_BAD_REPLY, Reception
from idiolect.engine.work import Context, Shards
from idiolect.errors import UsageError, said, unknown
from idiolect.fields import DIVISION, Fields
from idiolect.method import Method, Wrapper
from idiolect.nets import build, names, takes
from idiolect.optim import SGD, Adam, Schedule
from idiolect.sampling import Sampler, sampler
from idiolect.task import NORMS

BACKENDS = ("workers", "serial", "stacked")
STEPS = ("loop", "compiled", "stacked", "auto")
POSITIVE = ("clip", "time_limit")  # or none
BUFFERS = ("average", "local", "drop")
KINDS: tuple[tuple[str, Any, str], ...] = (
    ("method", Method, "a method or its name"),
    ("data", (str, Dataset), "a data set, its name, its path or arrays (x, y)"),
    ("data_options", Mapping, "options by their names"),
    ("split", (Split, SplitFile, Federation), "a split, its text, a split file or a federation"),
    ("network", (str, nn.Module, type(None)), "a network or its name"),
    ("network_options", Mapping, "options by their names"),
    ("nesterov", bool, "true or false"),
    ("secure", bool, "true or false"),
    ("reduce", str, "a reduction such as mean or median"),
    ("attack", str, "an attack such as sign:0.2, or none"),
    ("shift", (str, Shift), "a shift or its text"),
)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Run(Fields):
    """One experiment. Validated when it is made; `to_toml` and `from_toml` are exact inverses."""

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", catalogue.build(self.method))
        if isinstance(self.split, str | os.PathLike):
            object.__setattr__(self, "split", SplitFile.named(self.split) or parse(str(self.split)))
        if isinstance(self.shift, str):
            object.__setattr__(self, "shift", shifts.parse(self.shift) or "none")
        object.__setattr__(self, "data", taken(self.data))
        for name, kinds, expected in KINDS:
            if not isinstance(getattr(self, name), kinds):
                raise UsageError(f"{name} must be {expected}; found {getattr(self, name)!r}.")
        self._settle_division()
        for name in ("lr", "momentum", "weight_decay", "decay", "test", "validation", "held_out", *FAULTS, *POSITIVE):
            value = getattr(self, name)
            if value is not None or name not in POSITIVE:
                object.__setattr__(self, name, _number(name, value))
        for name in ("clients", "rounds", "epochs", "batch_size", "evaluate_every", "every", "checkpoint_every"):
            _whole(name, getattr(self, name), 0 if name in ("rounds", "checkpoint_every") else 1)
        _whole("seed", self.seed, 0)
        for name in ("workers", "evaluate_clients"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        _among("backend", self.backend, BACKENDS)
        _among("steps", self.steps, STEPS)
        if self.backend == "stacked" and self.steps != "loop":
            raise UsageError(f"backend=stacked stacks all clients' steps in one process; found steps={self.steps} too.")
        _among("buffers", self.buffers, BUFFERS)
        _among("dtype", self.dtype, tuple(DTYPES))
        _device(self.device)
        if self.autocast is not None:
            _among("autocast", self.autocast, tuple(precision.AUTOCAST))
            precision.refuse(self.autocast, self.dtype, self.device)
        _among("optimizer", self.optimizer, ("sgd", "adam", "adamw"))
        _among("test_from", self.test_from, ("auto", "merged", "official"))
        if self.lr < 0:
            raise UsageError(f"lr must be a number >= 0; found {self.lr}.")
        for name in POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise UsageError(f"{name} must be a number > 0, or none; found {getattr(self, name)}.")
        if self.time_limit is not None and self.backend != "workers":
            raise UsageError(
                f"time_limit needs processes that can be watched, and backend={self.backend} has one, which cannot "
                "watch itself. Use backend=workers, or leave time_limit out."
            )
        for name in FAULTS:
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be a probability in [0, 1); found {getattr(self, name)}.")
        _among("on_bad_reply", self.on_bad_reply, ON_BAD_REPLY)
        self._check_held_out()
        _ = self.sampler, self.settings, self._schedule, self.reception
        self._check_reception()
        self.method.check(self)  # type: ignore[union-attr]
        self._rehearse()

    def _settle_division(self) -> None:
        """A split that is finished has its own numbers; what contradicts them is refused, not ignored."""
        made: dict[str, Any] = {}
        if isinstance(self.split, Federation | SplitFile):
            made = {**self.split.made_with, "clients": self.split.clients}
        for name, default in DIVISION.items():
            if (given := getattr(self, name)) is None:
                object.__setattr__(self, name, made.get(name, default))
            elif name in made and given not in (made[name], "auto"):
                whose = f"'{self.split.path}'" if isinstance(self.split, SplitFile) else "the federation given"
                raise UsageError(f"{name} must be the {made[name]} of {whose}; found {given}. Leave {name} out.")

    def _check_held_out(self) -> None:
        if self.held_out < 0 or (self.held_out >= 1 and self.held_out != int(self.held_out)):
            raise UsageError(f"held_out must be a share in [0, 1) or a whole number of clients; found {self.held_out}.")
        if self.num_clients < 1:
            raise UsageError(
                f"held_out must leave a client to train; found {self.held_out:g} of {self.clients} clients."
            )
        if isinstance(self.split, Federation) and self.split.held_out and self.held_out:
            raise UsageError("The federation given holds clients out already; leave held_out at 0.")
        if isinstance(self.split, Federation) and self.split.shift is not None and isinstance(self.shift, Shift):
            raise UsageError("The federation given shifts its samples already; leave shift at none.")

    def _check_reception(self) -> None:
        honest = self.num_clients - len(self.reception.attackers)
        if self.evaluate_clients is not None and self.evaluate_clients > honest:
            those = "clients that do not attack" if self.reception.attackers else "clients"
            raise UsageError(f"evaluate_clients must be at most the {honest} {those}; found {self.evaluate_clients}.")
        if self.secure and self.replaces_mean:
            raise UsageError(
                f"{self.replaces_mean} needs every reply by itself, which secure aggregation hides; take one of the "
                "two."
            )
        rule, most = self.reception.rule, self.sampler.largest(self.num_clients)
        if rule is not None and most < rule.least:
            raise UsageError(
                f"reduce={self.reduce} needs {rule.least} replies, and no round has more than {most} participants; "
                "take another reduction, or a larger ratio."
            )

    @property
    def replaces_mean(self) -> str:
        """The field by which something else is averaged than what clients send, or otherwise than by the mean."""
        if self.reception.rule is not None:
            return f"reduce={self.reduce}"
        hostile = self.reception.attack
        return f"attack={self.attack}" if hostile is not None and hostile.sends else ""

    def _rehearse(self) -> None:
        """Refuse what only shows in a round: a wrapper that finds nothing to wrap, individuals in a secure run, a
        reduction or an attack that the method's replies go past."""
        if self.secure or self.replaces_mean or isinstance(self.method, Wrapper):
            from idiolect.rehearsing import refuse  # which makes a run of its own

            refuse(cast(Method, self.method), self.secure, self.replaces_mean)

    # what the engine asks

    @cached_property
    def num_clients(self) -> int:
        """The clients that may take part: the first ones. Those held out come after them."""
        if isinstance(self.split, Federation) and self.split.held_out:
            return self.clients - len(self.split.held_out)
        if 0 < self.held_out < 1:
            return self.clients - max(1, int(self.clients * self.held_out + 0.5))
        return self.clients - int(self.held_out)

    @cached_property
    def sampler(self) -> Sampler:
        return sampler(self.ratio, self.num_clients)

    def participants(self, round: int) -> list[int]:
        """A function of (seed, round) alone: the same for every method."""
        return orders.participants(self.sampler, self.num_clients, self.seed, round)

    @cached_property
    def faults(self) -> Faults:
        """What goes wrong with participation."""
        return Faults(self.seed, self.rounds, **{name: getattr(self, name) for name in FAULTS})

    @cached_property
    def reception(self) -> Reception:
        """How the server takes replies in."""
        hostile = attacks.attack(self.attack)
        bad = hostile.attackers(self.num_clients, self.seed) if hostile else frozenset()
        return Reception(self.on_bad_reply, robust.rule(self.reduce), hostile, bad, self.seed)

    @property
    def liars(self) -> frozenset[int]:
        """Clients that train on wrong labels."""
        hostile = self.reception.attack
        return self.reception.attackers if hostile is not None and not hostile.sends else frozenset()

    def evaluates(self, finished: int) -> bool:
        """Whether clients are evaluated after so many rounds."""
        return finished % self.evaluate_every == 0 or finished == self.rounds

    @cached_property
    def evaluated(self) -> Sequence[int]:
        """The clients that are scored as received: all but attackers, or as many of those that train as asked for, the
        same in every round, and all that are held out."""
        if self.evaluate_clients is None and not self.reception.attackers:
            return range(self.clients)
        honest = [i for i in range(self.num_clients) if i not in self.reception.attackers]
        count = len(honest) if self.evaluate_clients is None else self.evaluate_clients
        drawn = orders.draw(self.seed, "evaluated").choice(honest, count, replace=False).tolist()
        return [*sorted(drawn), *range(self.num_clients, self.clients)]

    @property
    def evaluated_in_words(self) -> str:
        bad = len(self.reception.attackers)
        if self.evaluate_clients is None:
            return f"all clients but the {bad} that attack" if bad else "all clients"
        of = f"{self.num_clients - bad:,} clients" + (" that do not attack" if bad else "")
        return f"{self.evaluate_clients:,} of {of}, drawn once from the seed"

    @cached_property
    def settings(self) -> Settings:
        if self.optimizer == "sgd":
            optimizer: SGD | Adam = SGD(self.momentum, self.weight_decay, self.nesterov)
        elif self.momentum:
            raise UsageError(f"momentum is SGD's; {self.optimizer} has its own. Set momentum=0 or optimizer=sgd.")
        else:
            optimizer = Adam(weight_decay=self.weight_decay, decoupled=self.optimizer == "adamw")
        return Settings(self.seed, self.epochs, self.batch_size, optimizer, self.clip, augment.parse(self.augment))

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule(self.schedule, self.decay, self.every)

    @cached_property
    def dataset(self) -> Dataset:
        return load(self.data, **self.data_options) if isinstance(self.data, str) else self.data

    @cached_property
    def federation(self) -> Federation:
        """The clients, with what happens to their samples, those last that are held out."""
        federation, away = self._divided, self.clients - self.num_clients
        if isinstance(self.shift, Shift):
            federation = federation.shifted(self.shift, self.seed)
        return federation.holding_out(away, self.seed) if self.held_out else federation

    @cached_property
    def _divided(self) -> Federation:
        if isinstance(self.split, Federation):
            own, data = self.split.dataset, self.dataset
            if (own.name, len(own)) != (data.name, len(data)):
                raise UsageError(f"The federation given divides '{own.name}', data is '{data.name}'; give the same.")
            return self.split
        if isinstance(self.split, SplitFile):
            return self.split.open(self.dataset)
        return federate(
            self.dataset, self.split, self.clients, self.seed, test=self.test, validation=self.validation,
            test_from=self.test_from,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def _network_name(self) -> str | None:
        return None if isinstance(self.network, nn.Module) else self.network or self.dataset.network

    @cached_property
    def _options(self) -> Mapping[str, Any]:
        """The network's options: those given, and the number of token ids where the data has such."""
        name, tokens = self._network_name, self.federation.dataset.tokens
        if name is None or tokens is None:
            return self.network_options
        if not takes(name, "vocabulary"):
            able = " or ".join(other for other in names() if takes(other, "vocabulary"))
            raise UsageError(f"Network '{name}' takes numbers, '{self.dataset.name}' has token ids; use {able}.")
        vocabulary = self.network_options.get("vocabulary", tokens)
        if isinstance(vocabulary, int) and vocabulary < tokens:
            raise UsageError(
                f"'{self.dataset.name}' has {tokens} token ids, found vocabulary={vocabulary}; leave it out, or give "
                f"{tokens} or more."
            )
        return {**self.network_options, "vocabulary": vocabulary}

    def module(self) -> nn.Module:
        """The network with the initial weights of this seed."""
        data = self.federation.dataset
        if isinstance(self.network, nn.Module):
            module = copy.deepcopy(self.network)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(orders.key(self.seed, "network"))
                module = build(self.network or data.network, data.shape, data.classes, **self._options)
        if self.buffers == "drop":
            for m in module.modules():
                if isinstance(m, NORMS):  # batch statistics, in evaluation as well
                    m.track_running_stats, m.running_mean, m.running_var, m.num_batches_tracked = (
                        False,
                        None,
                        None,
                        None,
                    )
        return module

    def context(self) -> Context:
        """All that one client's process needs."""
        data = self.federation.dataset
        if self.settings.augment is not None:
            self.settings.augment.check(data.name, data.shape)
        if self.liars and data.loss == "squared":
            raise UsageError(f"attack={self.attack} needs classes, and '{data.name}' has numbers; take another attack.")
        return Context(
            method=cast(Method, self.method), module=self.module(), shape=data.shape,
            classes=data.classes, loss=data.loss, dtype=DTYPES[self.dtype],
            shards=Shards.of(self.federation, DTYPES[self.dtype]), settings=self.settings,
            lr=self.lr, schedule=self._schedule, rounds=self.rounds, own_buffers=self.buffers == "local",
            device=self.device, network=self._network_name, options=self._options, num_clients=self.num_clients,
            autocast=None if self.autocast is None else precision.AUTOCAST[self.autocast],
            liars=self.liars,
        )  # type: ignore[arg-type]  # fmt: skip

    @property
    def identity(self) -> str:
        """Runs with the same text give the same bits: the run file without what changes none."""
        backend = "workers" if self.backend == "serial" else self.backend
        return dataclasses.replace(self, workers=None, checkpoint_every=0, backend=backend).to_toml()

    # run files

    def to_toml(self, **settled: Any) -> str:
        """The run as TOML; it runs again as it is. Data or networks given as objects are named, not stored. `settled`:
        fields that a run chose for itself."""
        table: dict[str, Any] = {"method": {"name": self.method.name, **catalogue.settings(self.method)}}  # type: ignore
        for f in dataclasses.fields(self):
            value = settled.get(f.name, getattr(self, f.name))
            if f.name == "method" or value == DIVISION.get(f.name, f.default) or value is None:
                continue
            if isinstance(value, Dataset):
                value = f"<given: {value.name}, {value.digest}>"
            elif isinstance(value, nn.Module):
                value = f"<given: {type(value).__name__}, {digest(value.state_dict().values())}>"
            elif isinstance(value, Federation):
                value = f"<given: {value.split_hash}>"
            elif isinstance(value, Split | SplitFile | Shift):
                value = str(value)
            elif isinstance(value, Mapping):
                value = dict(value)
                if not value:
                    continue
            elif isinstance(value, list | tuple):
                value = [list(ids) for ids in value]
            table[f.name] = value
        method = {k: "none" if v is None else v for k, v in table.pop("method").items()}  # TOML has no null
        return tomli_w.dumps({**table, "method": _nested(method)})

    def made(self, text: str) -> bool:
        """Whether a run file is of this run, which may have chosen how it takes steps."""
        return text in [self.to_toml(steps=s) for s in (STEPS if self.steps == "auto" else (self.steps,))]

    @staticmethod
    def from_toml(text: str, **given: Any) -> Run:
        """The run of a TOML text; `given` fields stand in for what the text can only name (data, network)."""
        return Run.from_table(_parsed("The run file", text) | given)

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Run:
        table = dict(table)
        method = table.pop("method", None)
        if isinstance(method, Mapping):
            fields = flat({k: v for k, v in method.items() if k != "name"})
            if "name" not in method:
                raise UsageError("The run file's [method] has no name.")
            if not isinstance(method["name"], str):
                raise UsageError(f"The name of the run file's [method] must be a word; found {method['name']!r}.")
            method = catalogue.build(method["name"], fields)
        if method is None:
            raise UsageError("A run needs a method.")
        known = {f.name for f in dataclasses.fields(Run)}
        for name, value in table.items():
            if name not in known:
                raise unknown("field of a run", name, known)
            if isinstance(value, str) and value.startswith("<given: "):
                raise UsageError(f"The run was made with {name} as an object ({value}); hand it over as {name}=...")
        return Run(method=method, **table)


def _device(name: str) -> None:
    try:
        kind = torch.device(name).type if isinstance(name, str) else ""
    except RuntimeError:
        kind = ""
    if not kind:
        raise UsageError(f"device must be a device of PyTorch, such as cpu or cuda; found '{name}'.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda needs a GPU and a CUDA build of PyTorch, and there is none here; use device=cpu.")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(path: str | Path) -> dict[str, Any]:
    """The fields of a run file."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UsageError(f"Cannot read the run file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not TOML: it is not even text.") from None
    return _parsed(str(path), text)


def _parsed(where: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits
        raise UsageError(f"{where} is not TOML: {said(error)}.") from None


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fedlag.top_k` as a table of its own."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        part, _, field = name.rpartition(".")
        (out.setdefault(part, {}) if part else out)[field] = value
    return out


def flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A table of its own as `fedlag.top_k`."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        out |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return out


def _number(name: str, value: Any) -> float:
    try:
        number = nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = nan
    if not isfinite(number):
        raise UsageError(f"{name} must be a finite number; found {value!r}.")
    return number


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, int) and value.bit_length() > 63:
        raise UsageError(f"{name} must be a whole number below 2**63; found one of {value.bit_length()} bits.")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number >= {least}; found {value!r}.")


def _among(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}; found '{value}'.")
