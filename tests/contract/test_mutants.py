"""Mutants: a mistake made in a method's file, in memory, has to fail a check that has a name.

Each line says which piece of the file becomes what, and which check (tests/checks.py) then fails. The check passes on the
file as it is. What is not listed is not known to be tested. The lines of a method stand here or in tests/mutants/NAME.py, as
`MUTANTS = [(what stands there, what a mistake would write, check), ...]`; a check takes the method's class and asserts.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

import checks
from checks import against
from idiolect import catalogue
from idiolect.errors import ClientError, ContractError
from idiolect.method import Method

Check = Callable[[type[Method]], None]
PLAIN = {"momentum": 0.0}


LOCAL, AVG, PER, TUNE = against("local"), against("fedavg"), against("fedper"), against("finetune", {"epochs": 2})
PROX, REP = against("fedprox", {"mu": 0.3}), against("fedrep", {"head_epochs": 3})
DITTO, DITTO_SHORT = against("ditto", {"lam": 0.7}), against("ditto", {"lam": 0.7, "personal_epochs": 1})
SCAFFOLD, SCAFFOLD_SLOW = against("scaffold", **PLAIN), against("scaffold", {"server_lr": 0.6}, **PLAIN)
ALA, ALA_SMALL = against("fedala", {"first_epochs": 3}), against("fedala", {"layers": 2, "share": 0.5, "mix_lr": 0.4})
AMP, HEUR = against("fedamp"), against("fedamp", {"attention": "cosine", "lam": 0.4})
TUNE_HEAD = against("finetune", {"epochs": 2, "part": "head"})

XI = checks.rows_of_xi_sum_to_1
HEUR_XI = partial(XI, attention="cosine")
STEP = checks.the_pull_is_the_gradient_of_its_term

MUTANTS: list[tuple[str, str, str, Check]] = [
    # file, what is written there, what a mistake would write, who notices
    ("local", '{"model": me.train(mine["model"])}', "(me.train(mine['model']) and mine)", LOCAL),
    ("local", '{"model": me.train(mine["model"])}', "(me.train(mine['model']) and mine)", checks.local_knows_nobody_else),
    ("local", "return Up(),", 'return Up(mean={"model": me.train(mine["model"])}),', LOCAL),
    ("local", 'me.train(mine["model"])', 'me.train(mine["model"], order=1)', LOCAL),
    #
    ("fedavg", "Up(mean=", "Up(sum=", AVG),
    ("fedavg", 'me.train(down["model"])}', 'me.train(down["model"])}, weight=1', AVG),
    ("fedavg", 'me.train(down["model"])}', 'me.train(down["model"])}, weight=1', checks.the_server_holds_the_mean_by_samples),
    ("fedavg", 'me.train(down["model"])', 'me.train(down["model"], epochs=1)', AVG),
    ("fedavg", 'me.train(down["model"])', 'down["model"]', AVG),
    #
    ("fedprox", "g + self.mu", "g - self.mu", PROX),
    ("fedprox", "g + self.mu", "g - self.mu", checks.fedprox_holds_clients_back),
    ("fedprox", "self.mu * (w - received)", "0.0 * (w - received)", checks.fedprox_holds_clients_back),
    ("fedprox", "(w - received)", "(received - w)", partial(STEP, coefficient=0.7, mu=0.7)),
    ("fedprox", "(w - received)", "w", checks.fedprox_of_one_step_is_fedavg),
    ("fedprox", "self.mu * (w - received)", "(self.mu + 0.01) * (w - received)", checks.fedprox_without_mu_is_fedavg),
    ("fedprox", "mu * (w - received)", "mu / 2 * (w - received)", PROX),
    #
    ("fedper", '{"model": w.pick(head)}', "mine", PER),
    ("fedper", '{"model": w.pick(head)}', "mine", checks.the_head_stays_private),
    ("fedper", '{"model": w.pick(head)}', "mine", checks.fedper_with_all_private_is_local),
    ("fedper", 'mean={"model": w.pick(body)}', 'mean={"model": body}', PER),
    ("fedper", 'mean={"model": w.pick(body)}', 'mean={"model": body}', checks.fedper_with_nothing_private_is_fedavg),
    ("fedper", 'mean={"model": w.pick(body)}', 'mean={"model": w}', PER),
    ("fedper", "Up(mean=", "Up(sum=", PER),
    ("fedper", "me.train(body | head)", "me.train(body | head, only=body) | me.train(body | head, only=head).pick(head)", PER),
    ("fedper", 'State(server={"model": net.body}, client={"model": net.head})', 'State(server={"model": net.weights}, client={"model": net.head})', PER),
    #
    ("fedrep", '{"model": w.pick(head)}', "mine", REP),
    ("fedrep", '{"model": w.pick(head)}', "mine", checks.the_head_stays_private),
    ("fedrep", '{"model": w.pick(head)}', "mine", checks.fedrep_without_a_body_phase_is_a_linear_probe),
    ("fedrep", "me.train(w, only=body", "me.train(body | head, only=body", REP),
    ("fedrep", "only=head, ", "", checks.fedrep_without_a_body_phase_is_a_linear_probe),
    ("fedrep", "me.train(w, only=body, ", "me.train(w, ", REP),
    ("fedrep", "epochs=self.head_epochs", "epochs=max(1, self.head_epochs)", checks.fedrep_without_a_head_phase_keeps_all_heads),
    ("fedrep", "epochs=self.body_epochs", "epochs=self.head_epochs", REP),
    ("fedrep", 'mean={"model": w.pick(body)}', 'mean={"model": body}', REP),
    ("fedrep", "Up(mean=", "Up(sum=", REP),
    #
    ("ditto", "g + self.lam", "g - self.lam", DITTO),
    ("ditto", "g + self.lam", "g - self.lam", checks.ditto_with_a_large_lam_pulls_to_the_received_model),
    ("ditto", "self.lam * (v - received)", "0.0 * (v - received)", checks.ditto_with_a_large_lam_pulls_to_the_received_model),
    ("ditto", "(v - received)", "(received - v)", partial(STEP, coefficient=0.7, lam=0.7)),
    ("ditto", "self.lam * (v", "1.0 * (v", checks.ditto_without_lam_is_local_beside_fedavg),
    ("ditto", "given=(received,)", "given=(w,)", DITTO),
    ("ditto", '{"model": v}', "mine", DITTO),
    ("ditto", '{"model": v}', "mine", checks.ditto_without_lam_is_local_beside_fedavg),
    ("ditto", '{"model": v}', '{"model": w}', DITTO),
    ("ditto", 'mean={"model": w}', 'mean={"model": v}', checks.dittos_server_knows_nothing_of_lam),
    ("ditto", "me.train(mine[\"model\"], correct", "me.train(received, correct", DITTO),
    ("ditto", "epochs=self.personal_epochs", "epochs=None", DITTO_SHORT),
    ("ditto", "epochs=self.personal_epochs, order=0", "epochs=self.personal_epochs, order=1", DITTO),
    #
    ("scaffold", "(c - ci,)", "(ci - c,)", SCAFFOLD),
    ("scaffold", "(c - ci,)", "(ci - c,)", checks.scaffold_finds_the_optimum),
    ("scaffold", "(c - ci,)", "(-ci,)", checks.scaffold_of_one_client_is_fedavg),
    ("scaffold", "(c - ci,)", "(c,)", checks.scaffold_finds_the_optimum),
    ("scaffold", "ci - c + (x.pick(c)", "ci + c + (x.pick(c)", checks.ci_is_the_mean_gradient_along_the_way),
    ("scaffold", "(x.pick(c) - y.pick(c))", "(y.pick(c) - x.pick(c))", checks.ci_is_the_mean_gradient_along_the_way),
    ("scaffold", "(me.steps() * me.lr)", "me.lr", SCAFFOLD),
    ("scaffold", "(me.steps() * me.lr)", "me.steps() / 0.1", SCAFFOLD),  # public code: the rate of the first round
    ("scaffold", "(me.steps() * me.lr)", "(me.epochs * me.lr)", SCAFFOLD),
    ("scaffold", '{"c": new}', "mine", SCAFFOLD),  # public code: c_i is never stored
    ("scaffold", '{"c": new}', "mine", checks.c_is_the_mean_of_all_ci),
    ("scaffold", '{"c": new}', "mine", checks.scaffold_finds_the_optimum),
    ("scaffold", '"dc": new - ci', '"dc": new', checks.c_is_the_mean_of_all_ci),
    ("scaffold", "run.num_clients", "len(run.ids)", checks.c_is_the_mean_of_all_ci),  # public code
    ("scaffold", "run.num_clients", "1", checks.c_is_the_mean_of_all_ci),
    ("scaffold", ", weight=1)", ")", SCAFFOLD),
    ("scaffold", '"c": c + up', '"c": 0 * c + up', checks.c_is_the_mean_of_all_ci),
    ("scaffold", '"c": c + up', '"c": c - up', checks.c_is_the_mean_of_all_ci),
    ("scaffold", "x.lerp(y, self.server_lr)", "y", SCAFFOLD_SLOW),
    ("scaffold", "x.lerp(y, self.server_lr)", "y.lerp(x, self.server_lr)", checks.scaffold_begins_as_the_uniform_fedavg),
    #
    ("fedala", '"model": w, "mix": mix,', '"model": w, "mix": mine["mix"],', ALA),
    ("fedala", '"model": w, "mix": mix,', '"model": w, "mix": mine["mix"],', checks.fedala_learns_a_mixture),
    ("fedala", '{"model": w, "mix"', '{"model": new, "mix"', ALA),
    ("fedala", '{"model": w, "mix"', '{"model": mine["model"], "mix"', checks.fedala_with_mix_held_at_0_is_fedper),
    ("fedala", ', "mixed": mixed}', ', "mixed": mine["mixed"]}', ALA),
    ("fedala", "optimizer=SGD(), project=unit_interval", "optimizer=SGD()", ALA),
    ("fedala", "optimizer=SGD(), ", "", ALA),
    ("fedala", "order=9, share=self.share", "order=9", ALA_SMALL),
    ("fedala", "lr=self.mix_lr", "lr=me.lr", ALA),
    ("fedala", "lr=self.mix_lr", "lr=1.0", checks.fedala_that_never_learns_its_mixture_is_fedavg),
    ("fedala", "1 if mine[\"mixed\"] else self.first_epochs", "self.first_epochs", ALA),
    ("fedala", "old.lerp(new, mix)", "new.pick(mix).lerp(old, mix)", checks.fedala_that_never_learns_its_mixture_is_fedavg),
    ("fedala", "old.lerp(new, mix)", "old.lerp(new, 1 + 0 * mix)", checks.fedala_with_mix_held_at_0_is_fedper),
    ("fedala", "me.train(new if me.round == 0 else blend(new, mine[\"model\"].pick(mix), mix))", "me.train(new)", ALA),
    ("fedala", "net.last(self.layers).ones()", "net.last(self.layers).zeros()", checks.fedala_that_never_learns_its_mixture_is_fedavg),
    ("fedala", "net.last(self.layers)", "net.last(1)", ALA_SMALL),
    ("fedala", "        mix = self.learn(me, new, mine)\n        return blend", "        mix = mine['mix']\n        return blend", ALA),
    #
    ("fedamp", "g + (w - u)", "g - (w - u)", AMP),
    ("fedamp", "g + (w - u)", "g - (w - u)", checks.fedamp_pulls_to_its_cloud_model),
    ("fedamp", "g + (w - u) * (seen * self.lam / self.alpha)", "g", checks.fedamp_pulls_to_its_cloud_model),  # public code
    ("fedamp", "seen * self.lam", "self.lam", AMP),
    ("fedamp", "(seen * self.lam / self.alpha)", "(seen * self.lam * self.alpha)", partial(STEP, coefficient=0.35, given=(1.0,), lam=0.7, alpha=2.0)),
    ("fedamp", "seen * self.lam /", "seen * (self.lam + 1) /", checks.fedamp_without_lam_is_local),
    ("fedamp", 'Up(rows={"model": w.pick(down["cloud"])})', 'Up(rows={"model": mine["model"].pick(down["cloud"])})', checks.clouds_are_the_mixed_uploads),
    ("fedamp", ', {"model": w}', ", mine", checks.fedamp_without_lam_is_local),
    ("fedamp", ', {"model": w}', ", mine", AMP),
    ("fedamp", 'rows = rows.with_(run.ids, model=up.rows["model"])', "rows = rows.with_(run.ids)", checks.clouds_are_the_mixed_uploads),
    ("fedamp", "everyone = list(rows)", "everyone = list(run.ids)", checks.clouds_are_the_mixed_uploads),
    ("fedamp", "+ torch.diag(1 - xi.sum(1))", "", XI),
    ("fedamp", "torch.diag(1 - xi.sum(1))", "torch.diag(1 - xi.sum(0))", partial(XI, attention="cosine", self_weight=0.4)),
    ("fedamp", "* torch.exp(-distance / sigma)", "* torch.exp(distance / sigma)", checks.xi_is_the_paper_s),
    ("fedamp", "min(self.alpha / sigma, 1 / k)", "(self.alpha / sigma)", partial(XI, alpha=50.0)),
    ("fedamp", "min(self.alpha / sigma, 1 / k)", "min(self.alpha, 1 / k)", checks.xi_is_the_paper_s),
    ("fedamp", "- 2 * products", "+ 2 * products", checks.xi_is_the_paper_s),
    ("fedamp", "(1 - own) * torch.softmax", "own * torch.softmax", HEUR),
    ("fedamp", "self.scale * products", "-self.scale * products", HEUR),
    ("fedamp", "apart.quantile(0.5)", "apart.max()", AMP),
    ("fedamp", ".masked_fill(~others, -torch.inf)", "", HEUR),
    #
    ("finetune", "epochs=self.epochs, order=8", "epochs=0, order=8", TUNE),
    ("finetune", "epochs=self.epochs, order=8", "epochs=0, order=8", checks.finetune_fits_each_client_better),
    ("finetune", "epochs=self.epochs", "epochs=max(1, self.epochs)", checks.finetune_of_no_epochs_is_its_inner),
    ("finetune", "only=only, ", "", checks.finetune_of_the_head_leaves_the_body),
    ("finetune", 'if self.part == "head" else', 'if self.part != "head" else', TUNE_HEAD),
    ("finetune", "order=8", "order=0", TUNE),
    ("finetune", "return me.train(w,", "return me.train(me.task.net.weights,", TUNE),
]  # fmt: skip


FOLDER = Path(__file__).parents[1] / "mutants"
MUTANTS += [
    (file.stem, *line)
    for file in sorted(FOLDER.glob("*.py"))
    for line in importlib.import_module(f"mutants.{file.stem}").MUTANTS
]


def source(name: str) -> str:
    return Path(importlib.import_module(catalogue.find(name).__module__).__file__ or "").read_text()


def executed(name: str, text: str) -> type[Method]:
    """The method class of a source text."""
    module = types.ModuleType(catalogue.find(name).__module__)
    exec(compile(text, f"a mutant of {name}", "exec"), module.__dict__)
    return module.__dict__[catalogue.find(name).__name__]


@cache
def passes_unmutated(name: str, number: int) -> bool:
    MUTANTS[number][3](executed(name, source(name)))
    return True


def called(check: Check) -> str:
    inner = getattr(check, "func", check)
    extra = {k: v for k, v in getattr(check, "keywords", {}).items() if v and k != "name"}
    return inner.__name__ + (f" {extra}" if extra else "")


def first_of(check: Check) -> int:
    """Equal checks are tried once on the file as it is."""
    return next(k for k, mutant in enumerate(MUTANTS) if mutant[3] is check)


@pytest.mark.parametrize(
    "number",
    range(len(MUTANTS)),
    ids=[f"{name}: {old!r} to {new!r}: {called(check)}" for name, old, new, check in MUTANTS],
)
def test_a_mutant_is_killed(number):
    name, old, new, check = MUTANTS[number]
    text = source(name)
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}.py"
    assert passes_unmutated(name, first_of(check))
    mutant = executed(name, text.replace(old, new))
    with pytest.raises((AssertionError, ContractError, ClientError)):
        check(mutant)


def test_every_method_has_mutants():
    lines = {name: {(old, new) for file, old, new, _ in MUTANTS if file == name} for name in catalogue.names()}
    print("without mutants:", ", ".join(name for name, own in lines.items() if not own))
    assert {file for file, *_ in MUTANTS} <= lines.keys(), "a file of mutants is named after its method"
    assert {name for name, own in lines.items() if 0 < len(own) < 3} == set()
