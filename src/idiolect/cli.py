"""The command line: `idiolect run`, `compare`, `split`, `methods` and `show`. Options come from the fields of `Run`."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
import typing
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

import click

from idiolect import __version__
from idiolect.errors import ClientError, ContractError, UsageError

if TYPE_CHECKING:  # torch takes seconds to import, and `--help` does without
    from idiolect.engine.progress import Report
    from idiolect.experiment import Run

BASICS = "local,fedavg,fedavg+finetune,fedper,fedrep,ditto"
MISUSED, INTERRUPTED = 2, 130


class Idiolect(click.Group):
    """A mistake ends in one sentence and exit code 2, an interruption in one word and 130; a warning is a sentence."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> NoReturn:
        args = sys.argv[1:] if args is None else list(args)
        warnings.showwarning = lambda message, *_: click.echo(message, err=True)
        try:
            done = super().main(args, *more, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(MISUSED)
        except click.Abort:
            _fail("Interrupted.", INTERRUPTED)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except (UsageError, ContractError, ClientError, OSError) as error:
            if "--debug" in args:
                raise
            _fail(_sentence(error), MISUSED)
        sys.exit(done if isinstance(done, int) else 0)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'A file'}: {error.strerror or error}."
    first = str(error).partition("\n")[0]  # a worker's trace comes below
    return f"{first} ('idiolect --debug ...' shows where.)" if isinstance(error, ClientError) else first


def _fail(sentence: str, code: int) -> NoReturn:
    click.echo(sentence, err=True)
    sys.exit(code)


class Experiment(click.Command):
    """A command with an option for each field of `Run` that can be written in a word. It asks for them when it is
    called, not when this file is imported."""

    skipped: frozenset[str] = frozenset()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        there = {p.name for p in self.params} | self.skipped
        self.params += [option for option in field_options() if option.name not in there]
        return super().get_params(ctx)


class Comparison(Experiment):
    skipped = frozenset({"seed"})


class Division(Experiment):
    @property
    def skipped(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(run_fields()) - {"data_options", "split", "clients", "seed", "test", "validation", "test_from"}


def field_options() -> Iterator[click.Option]:
    for name, (kind, default, text) in run_fields().items():
        flag = _flag(name)
        mapping = kind.startswith("Mapping")
        shown = "" if default is None or mapping else f"  [{_word(default)}]"
        if kind == "bool":
            yield click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=text + shown)
        else:
            several = {"multiple": True, "metavar": "NAME=VALUE"} if mapping else {"metavar": "VALUE"}
            yield click.Option([flag], help=text + shown, **several)  # type: ignore[arg-type]


@cache
def run_fields() -> dict[str, tuple[str, Any, str]]:
    """The fields of `Run` that an option can set: type as written, default, help text."""
    from idiolect.fields import DIVISION, Fields

    known = [f for f in dataclasses.fields(Fields) if f.metadata]
    return {f.name: (str(f.type), DIVISION.get(f.name, f.default), f.metadata["help"]) for f in known}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@click.group(cls=Idiolect, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="idiolect")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the whole trace of an error.")
def main() -> None:
    """Personalized federated learning: many clients learn together, and each ends with a model of its own.

    \b
    idiolect compare                          six methods on the digits, and a table of how they do
    idiolect compare --methods local,fedrep --seeds 0,1,2 --clients 50 --ratio 0.2
    idiolect run fedrep --set head_epochs=5   one method, its curves, its models
    idiolect split digits --clients 50        who gets which rows, as a table, a picture and a file
    idiolect methods                          what there is
    idiolect show fedrep                      one method: paper, settings, what it keeps and sends
    """


@main.command(cls=Experiment, short_help="Train with one METHOD.")
@click.argument("method", required=False)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A hyper-parameter; may be repeated.")
@click.option("--config", metavar="FILE", help="A run file (run.toml); options win over it.")
@click.option("--out", metavar="DIR", help="Where to write; never over something else.  [runs/<method>-<data>-<n>]")
@click.option("--resume", metavar="DIR", help="Go on with the run that was cut off there; takes --workers at most.")
@click.option("--models/--no-models", default=True, help="Whether to save each client's weights.  [models]")
def run(
    method: str | None,
    settings: Sequence[str],
    config: str | None,
    out: str | None,
    resume: str | None,
    models: bool,
    **options: Any,
) -> None:
    """Train with one METHOD, and keep its metrics, its models and the run itself.

    \b
    idiolect run fedrep
    idiolect run fedrep --data digits --split dirichlet:0.1 --clients 50 --ratio 0.2 --rounds 100
    idiolect run fedavg+finetune --set finetune.epochs=3 --lr 0.02 --momentum 0.9
    idiolect run --config runs/fedrep-digits-1/run.toml --seed 1
    idiolect run --resume runs/fedrep-digits-1            (after Ctrl-C, a crash, a power cut)

    METHOD is a name of `idiolect methods`; wrappers are added with a plus: fedrep+finetune. --split takes a file of
    'idiolect split' as well, which brings its own number of clients and shares; run.toml keeps its hash.
    """
    _begin_workers(config, options)
    from idiolect import running
    from idiolect.experiment import Run
    from idiolect.report import tables

    if resume is not None:
        _alone({"METHOD": method, "--set": settings, "--config": config, "--out": out}, options, {"workers"})
        config = str(Path(resume) / "run.toml")
    fields = _fields(config, options)
    experiment = Run.from_table({**fields, "method": _method(method, fields.pop("method", None), _settings(settings))})
    assert not isinstance(experiment.method, str)
    path = Path(resume or out or _free(f"{experiment.method.name}-{Path(str(experiment.data)).name}"))
    try:
        with progress(experiment, 1) as advance:
            watch = lambda report: advance(experiment.method.name, report)  # type: ignore[union-attr]
            result = running.run(experiment, path, watch, models, resume=resume is not None)
    except KeyboardInterrupt:
        if running.begun(path):
            click.echo(f"What is finished is kept; 'idiolect run --resume {path}' goes on.", err=True)
        raise
    click.echo(tables.run(result.summary))
    click.echo(path)
    for sentence in tables.lacking(result.summary):
        click.echo(sentence, err=True)


@main.command(cls=Comparison, short_help="Train with several methods; one table, one figure.")
@click.option("--methods", default=BASICS, metavar="NAMES", help=f"Which ones, with commas.  [{BASICS}]")
@click.option("--seeds", metavar="NUMBERS", help="Each method runs once with each.  [0]")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="One for the methods that have it.")
@click.option("--config", metavar="FILE", help="A run file, for all but the method.")
@click.option("--out", metavar="DIR", help="Where to write, or to go on.  [runs/compare-<n>]")
@click.option("--resume", metavar="DIR", help="Finish the comparison that was cut off there; takes --workers at most.")
def compare(
    methods: str,
    seeds: str | None,
    settings: Sequence[str],
    config: str | None,
    out: str | None,
    resume: str | None,
    **options: Any,
) -> None:
    """Train with several methods on the same clients, and make one table and one figure of them.

    \b
    idiolect compare
    idiolect compare --methods local,fedavg,fedrep,fedrep+finetune --seeds 0,1,2
    idiolect compare --methods local,ditto,fedamp --set ditto.lam=0.1 --set fedamp.lam=0.5
    idiolect compare --out runs/mine --seeds 0,1,2
    idiolect compare --resume runs/mine                (finishes only what is missing, with the same bits)

    All methods see the same clients, participants, batches and initial weights for a seed.
    """
    _begin_workers(config, options)
    from idiolect import catalogue, comparing
    from idiolect.experiment import Run

    fields = _fields(config, options)
    if resume is not None:
        given = {"--methods": methods != BASICS, "--seeds": seeds, "--set": settings, "--config": config, "--out": out}
        _alone(given, options, {"workers"})
        chosen, planned = comparing.planned(Path(resume))
        fields, found = {**planned, **fields}, planned.pop("seeds")
        fields.pop("seeds")
    else:
        names = [name.strip() for name in methods.split(",")]
        shared = catalogue.share_out(names, _settings(settings))
        fields.pop("method", None)
        found = [fields.pop("seed", 0)] if seeds is None else _whole_numbers(seeds)
        fields.pop("seed", None)
        chosen = [catalogue.build(name, shared[name]) for name in names]
    path = Path(resume or out or _free("compare"))
    first = chosen[0][1] if isinstance(chosen[0], tuple) else chosen[0]
    try:
        with progress(Run.from_table({**fields, "method": first}), len(chosen) * len(found)) as advance:
            watch = lambda label, seed, report: advance(f"{label}, seed {seed}", report)
            comparison = comparing.compare(chosen, seeds=found, out=path, watch=watch, **fields)
    except KeyboardInterrupt:
        if path.exists():
            click.echo(f"What is finished is kept; 'idiolect compare --resume {path}' goes on.", err=True)
        raise
    _show_table(comparison)
    click.echo(path / "comparison.md")


@main.command(cls=Division, short_help="Divide DATA over clients: table, picture, file.")
@click.argument("data", default="digits")
@click.option("--out", metavar="FILE", help="The .parquet file to write; beside it FILE's name with .png, .svg, .json.")
def split(data: str, out: str | None, **options: Any) -> None:
    """Divide the rows of DATA over clients, and show what each has and how much they differ. With --out the split is
    kept as a file, which 'idiolect run' and 'compare' take as --split FILE, whatever their seeds; without, nothing is
    written.

    \b
    idiolect split digits
    idiolect split digits --split dirichlet:0.1 --clients 20 --seed 1 --out skewed.parquet
    idiolect split images/ --split given --data-options group=writer --clients 100 --test 0.2 --validation 0.1
    idiolect split images/ --split pathological:2 --test-from official --out two.parquet
    idiolect split digits --split skewed.parquet      (shows one that is there)

    DATA is a data set's name or the path of one. The table has a line for each client, or the first ones and how all
    are spread. The picture has a bubble for each client and class; of more than 50 clients, each column is the mean of
    some with the same most frequent class. Measured are the clients' label entropy, the mean total variation of all
    pairs of clients, and the Gini coefficient of their sizes: on the terminal, and in the .json file.
    """
    from idiolect import dividing

    made = dividing.divide({**_fields(None, options), "data": data}, out, doing)
    click.echo(made.text)
    if made.files:
        click.echo("\n" + "\n".join(map(str, made.files)))


@main.command(short_help="List the methods.")
@click.option("--json", "as_json", is_flag=True, help="All that is known of each, for programs.")
@click.option("--markdown", "as_page", is_flag=True, help="What each can do, as docs/methods/capabilities.md has it.")
def methods(as_json: bool, as_page: bool) -> None:
    """List the methods, and what each of them does.

    \b
    idiolect methods
    idiolect methods --json     what each keeps, sends, needs and can do as well
    """
    if as_json or as_page:
        from idiolect import catalogue, describing

        if as_page:
            click.echo(describing.markdown(), nl=False)
        else:
            click.echo(json.dumps([describing.describe(name) for name in catalogue.names()], indent=1))
        return
    from idiolect import listing

    lines = listing.lines()
    width = max(len(line.name) for line in lines)
    for line, before in zip(lines, [lines[0], *lines], strict=False):
        if line.wraps > before.wraps:
            click.echo("\nWrappers, written after what they wrap, as in fedrep+finetune:")
        click.echo(f"{line.name:<{width}}  {line.title}" + (f" [{line.paper}]" if line.paper else ""))


@main.command(short_help="Show one METHOD.")
@click.argument("method")
def show(method: str) -> None:
    """Show one METHOD: its paper, its settings, what it keeps, sends and needs.

    \b
    idiolect show fedrep
    idiolect show fedrep+fedlag
    """
    from idiolect import describing

    click.echo(describing.page(method))


# what is given


def _alone(given: Mapping[str, Any], options: Mapping[str, Any], free: Container[str]) -> None:
    """What goes on is what was begun: nothing else can be asked with --resume."""
    named = [name for name, value in given.items() if value]
    named += [_flag(name) for name, value in options.items() if value not in (None, ()) and name not in free]
    if named:
        raise UsageError(f"--resume goes on with what was begun, as its files say; leave out {', '.join(named)}.")


def _begin_workers(config: str | None, options: Mapping[str, Any]) -> None:
    """Where there will be workers, what they are forks of starts before torch is imported here."""
    if config is None and options["backend"] in (None, "workers"):
        from idiolect.engine import forking

        forking.begin()


def _fields(config: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a run: those of the file, and over them those given as options."""
    from idiolect import experiment
    from idiolect.catalogue import convert

    kinds = typing.get_type_hints(experiment.Run, localns=vars(experiment))
    fields = experiment.read(config) if config is not None else {}
    for name, value in options.items():
        if isinstance(value, tuple):  # NAME=VALUE, any number of times
            fields[name] = {**fields.get(name, {}), **{k: _literal(v) for k, v in _pairs(value, _flag(name))}}
        elif value is not None:
            fields[name] = convert(value, kinds[name], name)
    return fields


def _method(name: str | None, filed: Any, settings: Mapping[str, str]) -> Any:
    """The method asked for. The file's hyper-parameters hold for the file's method."""
    from idiolect import catalogue
    from idiolect.experiment import flat

    table = dict(filed) if isinstance(filed, Mapping) else {"name": filed} if filed is not None else {}
    known = table.pop("name", None)
    if name is None and known is None:
        raise UsageError("A run needs a method, as in 'idiolect run fedrep'; 'idiolect methods' lists them.")
    if name is not None and (known is None or catalogue.split(name) != catalogue.split(str(known))):
        table = {}
    return catalogue.build(str(known) if name is None else name, {**flat(table), **settings})


def _settings(given: Sequence[str]) -> dict[str, str]:
    return dict(_pairs(given, "--set"))


def _pairs(given: Sequence[str], option: str) -> Iterator[tuple[str, str]]:
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals or not value:
            raise UsageError(f"{option} takes NAME=VALUE; found '{text}'.")
        yield name, value


def _literal(text: str) -> Any:
    """A number, a list, true or false, as TOML writes them; anything else is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds takes whole numbers with commas, as in 0,1,2; found '{text}'.") from None


def _free(name: str) -> Path:
    return next(path for n in count(1) if not (path := Path("runs", f"{name}-{n}")).exists())


# what is shown

Advance = Callable[[str, "Report | None"], None]


@contextmanager
def progress(experiment: Run, runs: int) -> Iterator[Advance]:
    """A bar of all rounds of so many runs on a terminal, nothing elsewhere. A report of None stands for a whole run."""
    if not sys.stderr.isatty():
        yield lambda name, report: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = TextColumn("rounds, {task.fields[clients]} clients, accuracy {task.fields[accuracy]}")
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), shown, TimeRemainingColumn()]
    with Progress(*columns, TextColumn("left"), console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=runs * experiment.rounds, clients=experiment.clients, accuracy="–")

        def advance(name: str, report: Report | None) -> None:
            received = report.received.values() if report is not None else []
            scores = [s for of in received for s in of if s.split == "test"]
            accuracy = {"accuracy": f"{100 * fmean(s.correct / s.total for s in scores):.1f} %"} if scores else {}
            step = experiment.rounds if report is None else min(report.round, 1)  # round 0 only evaluates
            bar.update(task, description=name, advance=step, **accuracy)  # type: ignore[arg-type]

        yield advance


@contextmanager
def doing(what: str) -> Iterator[None]:
    """What takes its time, and how long by now, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(what, total=None)
        yield


def _show_table(comparison: Any) -> None:
    """As Markdown, or as a table on a terminal."""
    if not sys.stdout.isatty():
        click.echo(comparison)
        return
    from rich.console import Console
    from rich.table import Table

    from idiolect.report import tables

    header, rows = tables.table(comparison.summary)
    shown = Table(caption=tables.headline(comparison.summary), caption_justify="left")
    for k, name in enumerate(header):
        shown.add_column(name, justify="left" if k == 0 else "right", no_wrap=k == 0)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
