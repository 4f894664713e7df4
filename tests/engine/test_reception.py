"""Replies as the server takes them in: with faults of participation, bad numbers, hostile clients and robust means."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace

import pytest
import torch

from harness import SIZES, experiment, moved, run
from idiolect import Run, catalogue, running
from idiolect.data.sources import quadratics
from idiolect.engine import robust
from idiolect.engine.checkpoint import Checkpoints
from idiolect.engine.finite import bad_numbers
from idiolect.engine.loop import loop, turns
from idiolect.engine.progress import Progress
from idiolect.engine.reception import Reception, misfit
from idiolect.engine.reduce import Reduction
from idiolect.engine.serial import Serial
from idiolect.engine.work import Job, Reply
from idiolect.errors import ClientError, ContractError, UsageError
from idiolect.method import Rows, State, Up
from idiolect.methods.fedavg import FedAvg
from idiolect.running import one_thread

EVERYONE = range(len(SIZES))
ALL = {"ratio": 1.0, "rounds": 3}
EQUAL = {"sizes": (8,) * 8, "momentum": 0.0, "weight_decay": 0.0, **ALL}
NAN, INF = math.nan, math.inf


def advanced(run_, backend=Serial):
    """What a run leaves, and its reports."""
    context, reports = run_.context(), []
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(run_.clients))
    with one_thread():
        loop(run_, context, backend(context), progress, reports.append)
    return progress, reports


# faults of participation


@dataclass(frozen=True)
class Stepping(FedAvg):
    """FedAvg whose clients keep how many steps they were told of, and how many they took."""

    def init(self, net):
        return State(server={"model": net.weights}, client={"told": torch.zeros(3, dtype=torch.int64)})

    def counted(self, task, w, batch, lr, steps):
        steps[0] += 1
        return w

    def local(self, me, down, mine):
        taken = [0]
        me.train(down["model"], step=self.counted, given=(taken,))
        told = torch.tensor([me.steps(), taken[0], me.steps(1)])
        return Up(mean={"model": me.train(down["model"])}), {"told": told}


def test_a_slow_client_takes_a_part_of_its_steps_and_knows_of_it():
    one = run(experiment(Stepping(), slow=0.7, rounds=1, ratio=1.0))
    paces = [one.run.faults.pace(0, i) for i in EVERYONE]
    assert sum(p < 1 for p in paces) > 3
    for i, pace in enumerate(paces):
        an_epoch = {17: 4, 9: 2, 5: 1, 3: 1, 12: 3, 7: 2, 4: 1, 11: 3}[SIZES[i]]  # batches of 4; a last one joins
        steps = math.ceil(pace * 2 * an_epoch)
        assert one.private(i)["told"].tolist() == [steps, steps, math.ceil(pace * an_epoch)]
    full = run(experiment(Stepping(), rounds=1, ratio=1.0))
    assert one.rounds[1]["gradient_passes"] < full.rounds[1]["gradient_passes"]
    assert moved(one.server["model"], full.server["model"]) > 1e-4


def test_who_is_late_or_has_left_takes_no_part_and_is_told_as_absent():
    one = run(experiment(FedAvg(), ratio=1.0, rounds=8, late=0.5, leave=0.5))
    took = [[i in row["participants"] for row in one.rounds[1:]] for i in EVERYONE]
    assert any(not there[0] for there in took)
    assert any(not there[-1] for there in took)
    for there in took:
        spans = [here for k, here in enumerate(there) if k == 0 or here != there[k - 1]]
        assert spans in ([True], [False, True], [True, False], [False, True, False])
        assert any(there[:5])  # joined by the half
    for row in one.rounds[1:]:
        assert sorted(row["participants"] + row["absent"]) == list(EVERYONE)
    assert one.summary["replies"]["absent"] == sum(len(row["absent"]) for row in one.rounds)
    assert len(one.clients) >= 9 * 8  # as received, also those who are away


# bad numbers


@dataclass(frozen=True)
class Odd(FedAvg):
    """FedAvg with something of every kind, of which client 2 sends a number that is none, from round 1 on."""

    where: str = "mean"
    number: float = NAN

    def init(self, net):
        zero = torch.zeros(2, dtype=net.dtype)
        server = {"model": net.weights, "told": zero}
        return State(server=server, client={"own": zero}, rows={"row": zero, "hi": zero})

    def hello(self, me, down, mine):
        return {"hi": self.value(me, "hello")}

    def ask(self, me, down, mine):
        return Up(sum={"asked": self.value(me, "ask")})

    def answered(self, server, rows, up, run):
        return {**server, "told": up.sum["asked"]}, rows

    def value(self, me, where):
        bad = me.id == 2 and self.where == where and (me.round or where == "hello")
        return torch.tensor([1.0, self.number if bad else 1.0], dtype=torch.float64)

    def local(self, me, down, mine):
        up, _ = super().local(me, down, mine)
        sums, rows = {"s": self.value(me, "sum")}, {"row": self.value(me, "rows")}
        model = up.mean["model"].map(lambda v: v * self.value(me, "mean")[1])
        weight = float(self.value(me, "weight")[1])
        return Up(mean={"model": model}, sum=sums, rows=rows, weight=weight), {"own": self.value(me, "mine")}

    def server(self, server, rows, up, run):
        return {**server, "model": up.mean["model"], "told": up.sum["s"]}, rows.with_(run.ids, row=up.rows["row"])


PLACES = {
    "mean": r"NaN or inf in up.mean\['model'\] body.hidden1.linear.weight",
    "sum": r"NaN or inf in up.sum\['s'\]",
    "rows": r"NaN or inf in up.rows\['row'\]",
    "mine": r"NaN or inf in mine\['own'\]",
    "ask": r"NaN or inf in up.sum\['asked'\]",
    "weight": "a weight of (nan|inf|-inf)",
}


@pytest.mark.parametrize("number", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("where", PLACES)
def test_bad_numbers_never_get_in(where, number):
    odd = run(experiment(Odd(where, number), **ALL))
    others = run(experiment(Odd(), ratio=(tuple(EVERYONE), *[tuple(i for i in EVERYONE if i != 2)] * 2), rounds=3))
    assert odd.server["model"].equals(others.server["model"])
    assert torch.equal(odd.server["told"], others.server["told"])
    for i in EVERYONE:
        assert torch.equal(odd.private(i)["own"], others.private(i)["own"])
        assert torch.equal(odd.progress.rows[i]["row"], others.progress.rows[i]["row"])
    assert [len(row["refused"]) for row in odd.rounds] == [0, 0, 1, 1]
    assert re.fullmatch(f"2: {PLACES[where]}", odd.rounds[2]["refused"][0])
    replies = odd.summary["replies"]
    assert (replies["participants"], replies["refused"], replies["refused_of"]) == (24, 2, {"2": 2})
    assert 2 not in {r["client"] for r in odd.clients if r["moment"] == "trained" and r["round"] > 1}


def test_what_is_refused_was_sent_all_the_same():
    odd, sound = run(experiment(Odd("mine"), **ALL)), run(experiment(Odd("none"), **ALL))
    assert [r["bytes_up"] for r in odd.rounds] == [r["bytes_up"] for r in sound.rounds]


def test_a_negative_weight_is_refused():
    assert bad_numbers(Up(weight=-1.0), None) == "a weight of -1"
    assert bad_numbers(Up(weight=0.0), None) is None


@pytest.mark.parametrize("where", PLACES)
def test_a_run_may_stop_at_them_instead(where):
    kind = "ask" if where == "ask" else "local"
    with pytest.raises(ClientError, match=f"odd.{kind}: the reply of client 2 in round 1 has {PLACES[where]}"):
        run(experiment(Odd(where), on_bad_reply="stop", **ALL))


def test_or_take_them_in(tmp_path):
    one = running.run(experiment(Odd("mean"), on_bad_reply="accept", **ALL), tmp_path / "run")
    assert not any(row["refused"] for row in one.rounds)
    assert all(v.isnan().all() for k, v in one.server["model"].items() if v.is_floating_point())
    assert math.isnan(one.rounds[-1]["received_loss"])  # as it is in the record; JSON has no word for it
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["loss"]["received"]["last"] is None


def test_whose_introduction_is_refused_is_a_stranger(tmp_path):
    """It is away in every round, also of a run that is cut off and goes on."""
    run_ = experiment(Odd("hello"), **ALL)
    progress, reports = advanced(run_)
    assert reports[0].refused == {2: "NaN or inf in up.rows['hi']"}
    assert [report.absent for report in reports[1:]] == [(2,)] * 3
    assert not any(report.refused for report in reports[1:])
    assert 2 not in progress.rows.written
    rounds = [{"round": r} for r in range(progress.round + 1)]
    Checkpoints(tmp_path / "checkpoint", {}).save(progress, {"rounds": rounds, "clients": [], "notes": []})
    context = run_.context()
    gone_on = Progress(context.state.server, Rows(context.state.rows), context.store(run_.clients))
    Checkpoints(tmp_path / "checkpoint", {}).load(gone_on)
    assert gone_on.strangers == progress.strangers == {2}


def test_without_any_introduction_there_is_no_run():
    @dataclass(frozen=True)
    class Mute(Odd):
        def hello(self, me, down, mine):
            return {"hi": torch.full((2,), NAN, dtype=torch.float64)}

    with pytest.raises(ClientError, match="every client's introduction was refused"):
        run(experiment(Mute(), **ALL))


def test_feddbe_agrees_on_the_mean_of_those_who_introduced_themselves():
    class Hidden(Serial):
        def do(self, jobs):
            for reply in super().do(jobs):
                if reply.client == 2 and reply.up is not None and "mean" in reply.up.rows:
                    reply = replace(
                        reply, up=Up(rows={**reply.up.rows, "mean": reply.up.rows["mean"] * NAN}), sound=False
                    )
                yield reply

    progress, reports = advanced(experiment(catalogue.build("feddbe", {"kappa": 1.0}), **ALL), Hidden)
    rows = [progress.rows[i] for i in EVERYONE if i != 2]
    sizes = torch.stack([row["size"] for row in rows])
    mean = (sizes * torch.stack([row["mean"] for row in rows])).sum(0) / sizes.sum()
    torch.testing.assert_close(progress.server["mean"], mean, rtol=0, atol=1e-14)
    assert [report.absent for report in reports[1:]] == [(2,)] * 3


@dataclass(frozen=True)
class Huge(FedAvg):
    """Replies that are finite, and too large to add up."""

    def local(self, me, down, mine):
        sign = 1 if me.id % 2 else -1
        return Up(mean={"model": down["model"].map(lambda v: torch.full_like(v, sign * 1.7e308))}), mine


def test_nor_does_the_server_make_them_of_sound_replies():
    with pytest.raises(ClientError, match=r"huge.server made NaN or inf in server\['model'\] .* of round 0"):
        run(experiment(Huge(), **ALL))
    assert run(experiment(Huge(), on_bad_reply="accept", **ALL)).rounds


def test_what_no_reply_may_be_is_told_without_an_error():
    """A network's server refuses one client's reply with it; a simulation stops, as the method is at fault."""
    context = experiment(FedAvg()).context()
    model = context.state.server["model"]
    heard = Reduction("fedavg.local", context.state.server)
    heard.add(0, Up(mean={"model": model}), 1.0)
    told = lambda up, mine=None: misfit("fedavg.local", Reply(3, up, mine), heard, {}, 2)
    assert told(Up(mean={"model": model}), {}) is None
    first = next(iter(model))
    assert "lacking" in told(Up(mean={"model": model.drop([first])}))
    assert f"entry '{first}' as torch.float32" in told(Up(mean={"model": model.map(lambda v: v.float())}))
    assert f"entry '{first}'" in told(Up(mean={"model": model | {first: model[first][..., None]}}))
    assert "with slots other, other clients model" in told(Up(mean={"other": model}))
    assert "with a str; expected a Tensor or a Tree" in told(Up(mean={"model": "model"}))
    assert "which has no mean" in told(Up(mean={"model": model.map(lambda v: v.long())}))
    assert "returned mine with slots own, init declared none" in told(Up(mean={"model": model}), {"own": model})
    assert "returned no Up" in told(None)

    @dataclass(frozen=True)
    class Wrong(FedAvg):
        def local(self, me, down, mine):
            up, mine = super().local(me, down, mine)
            return (replace(up, mean={"model": up.mean["model"].drop([first])}) if me.id == 2 else up), mine

    for reduce in ("mean", "median"):
        with pytest.raises(ContractError, match="lacking"):
            run(experiment(Wrong(), reduce=reduce, **ALL))


# robust means


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "scaffold", "fedexp", "fedpac"])
def test_clipping_at_a_huge_norm_is_the_mean(name):
    fields = {"momentum": 0.0}
    mean, clipped = (run(experiment(catalogue.build(name), reduce=r, **fields)) for r in ("mean", "clip:1e9"))
    assert max(moved(mean.personal(i), clipped.personal(i)) for i in EVERYONE) < 1e-12
    assert mean.rounds[-1]["bytes_up"] == clipped.rounds[-1]["bytes_up"]


def test_trimming_nothing_is_the_plain_mean():
    mean, trimmed = (run(experiment(FedAvg(), reduce=r, **EQUAL)) for r in ("mean", "trimmed:0"))
    assert moved(mean.server["model"], trimmed.server["model"]) < 1e-12
    cut = run(experiment(FedAvg(), reduce="trimmed:0.2", **EQUAL))
    assert moved(mean.server["model"], cut.server["model"]) > 1e-4


def replies_of(run_):
    """What clients send in the first round: their models, flat."""
    context = run_.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(run_.clients))
    with one_thread():
        jobs = turns(context, progress, "local", run_.participants(0))
        return {reply.client: reply.up.mean["model"].clone() for reply in map(context.do, jobs)}, progress.server


@pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
@pytest.mark.parametrize("text", ["median", "trimmed:0.25", "krum:1", "multikrum:2", "clip:0.05", "geometric"])
def test_the_shared_model_is_what_the_rule_says_of_all_replies(text, images):
    """All entries, running statistics too, as one vector of each reply; weighted where the rule is."""
    run_ = experiment(FedAvg(), reduce=text, rounds=1, ratio=1.0, images=images)
    sent, held = replies_of(run_)
    ids = sorted(sent, key=lambda i: (-SIZES[i], i))
    updates = torch.stack([sent[i].flat() - held["model"].flat() for i in ids])
    shares = torch.tensor([SIZES[i] for i in ids], dtype=torch.float64) / sum(SIZES)
    (expected,) = robust.rule(text)([updates], shares)
    found = run(run_).server["model"].flat() - held["model"].flat()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found - shares @ updates).abs().max() > 1e-5


def test_scaffold_s_sum_stays_a_sum():
    plain, median = (
        run(experiment(catalogue.build("scaffold"), reduce=r, rounds=1, ratio=1.0, momentum=0.0))
        for r in ("mean", "median")
    )
    assert moved(plain.server["c"], median.server["c"]) < 1e-15
    assert moved(plain.server["model"], median.server["model"]) > 1e-4


# hostile clients

HOSTILE = {"ratio": 1.0, "rounds": 2, "attack": "sign:0.25,3"}


def test_an_attack_replaces_what_its_clients_send():
    run_ = experiment(FedAvg(), **(HOSTILE | {"rounds": 1}))
    sent, held = replies_of(run_)
    bad = run_.reception.attackers
    assert len(bad) == 2
    lies = {i: held["model"] - (w - held["model"]) * 3 if i in bad else w for i, w in sent.items()}
    mean = sum((lies[i] * (SIZES[i] / sum(SIZES)) for i in EVERYONE), held["model"].zeros())
    assert moved(run(run_).server["model"], mean) < 1e-12


@pytest.mark.parametrize("attack", ["sign:0.25", "labels:0.25"])
def test_attackers_take_part_and_are_never_scored(attack):
    one = run(experiment(FedAvg(), attack=attack, **ALL))
    bad = one.run.reception.attackers
    assert all(bad <= set(row["participants"]) for row in one.rounds[1:])
    assert {row["client"] for row in one.clients} == set(EVERYONE) - bad
    assert "all clients but the 2 that attack" in one.summary["evaluation"]
    few = run(experiment(FedAvg(), attack=attack, evaluate_clients=3, **ALL))
    assert {r["client"] for r in few.clients if r["moment"] == "received"} <= set(EVERYONE) - bad
    assert "3 of 6 clients that do not attack" in few.summary["evaluation"]


@pytest.mark.parametrize("attack", ["sign:0.25", "random:0.25", "little:0.25", "labels:0.25"])
def test_an_attack_is_the_same_bits_from_workers(attack):
    fields = {"attack": attack, "reduce": "trimmed:0.25", "rounds": 2}
    serial, found = (run(experiment(FedAvg(), **fields, **b)) for b in ({}, {"backend": "workers", "workers": 2}))
    assert serial.server["model"].equals(found.server["model"])


def test_labels_are_wrong_in_training_alone():
    run_ = experiment(FedAvg(), attack="labels:0.25", **ALL)
    context, plain = run_.context(), experiment(FedAvg(), **ALL).context()
    assert len(run_.liars) == 2
    for i in EVERYONE:
        own, true = (c.client(Job("local", i, 0, 0, {}, {})).labels for c in (context, plain))
        assert torch.equal(own, 2 - true if i in run_.liars else true)
        assert torch.equal(context.shards.targets("test", i), plain.shards.targets("test", i))
    liar = min(run_.liars)
    w = context.state.server["model"]
    assert context.scores([liar], w) == plain.scores([liar], w)
    honest, lied = run(experiment(FedAvg(), **ALL)), run(run_)
    assert moved(honest.server["model"], lied.server["model"]) > 1e-3


# what is refused


def refused(sentence, **fields):
    with pytest.raises(UsageError, match=sentence) as caught:
        experiment(fields.pop("method", FedAvg()), **fields)
    assert str(caught.value).endswith(".")


WITHOUT = ("cfl", "fedaf", "fedamp", "fedfomo", "fedproto", "fedsimsup", "ifca", "pfedhn")


@pytest.mark.parametrize("name", WITHOUT)
def test_methods_whose_weights_are_not_averaged_refuse(name):
    refused("reduce=median concerns what is averaged", method=catalogue.build(name), reduce="median")
    refused("attack=sign:0.25 concerns what is averaged", method=catalogue.build(name), attack="sign:0.25")
    assert experiment(catalogue.build(name), attack="labels:0.25").liars  # which is in what they train on


@pytest.mark.parametrize("reduce", ["mean", "median", "krum:1", "clip:1", "geometric"])
@pytest.mark.parametrize("attack", ["sign:0.25", "little:0.25"])
def test_local_sends_nothing_and_may_be_compared(reduce, attack):
    plain, hostile = (
        run(experiment(catalogue.build("local"), rounds=2, **f)) for f in ({}, {"attack": attack, "reduce": reduce})
    )
    assert all(plain.personal(i).equals(hostile.personal(i)) for i in EVERYONE)


def test_fedlag_averages_another_way_unless_told():
    uniform, samples = (catalogue.build("fedlag", {"weights": w, "warmup": 0}) for w in ("uniform", "samples"))
    refused("set fedlag.weights=samples", method=uniform, reduce="median")
    refused("which attack=sign:0.25 concerns", method=uniform, attack="sign:0.25")
    plain, median = (run(experiment(samples, reduce=r, **ALL)) for r in ("mean", "median"))
    assert moved(plain.server["model"], median.server["model"]) > 1e-4


@pytest.mark.parametrize(
    ("sentence", "fields"),
    [
        ("secure aggregation hides", {"reduce": "median", "secure": True}),
        ("secure aggregation hides", {"attack": "sign:0.25", "secure": True}),
        ("needs 9 replies, and no round has more than 5 participants", {"reduce": "krum:3"}),
        ("needs 9 replies, and no round has more than 8", {"reduce": "multikrum:3", "ratio": "bernoulli:0.9"}),
        ("needs 10 replies, and no round has more than 3", {"reduce": "trimmed:0.1", "ratio": ((0, 1), (2, 3, 4))}),
        ("makes 0 of 8 clients attackers, which leaves no attacker", {"attack": "sign:0.05"}),
        ("makes 8 of 8 clients attackers, which leaves no honest one", {"attack": "sign:0.95"}),
        ("at most the 6 clients that do not attack; found 7", {"attack": "sign:0.25", "evaluate_clients": 7}),
        ("reduce must be a reduction such as mean or median", {"reduce": 1}),
    ],
)
def test_what_cannot_be_is_refused_at_once(sentence, fields):
    refused(sentence, **fields)


def test_wrong_labels_need_classes():
    data = quadratics.load((4.0, 1.0, 2.0), (1.0, -1.0, 0.5))
    run_ = Run(method="fedavg", data=data, split="given", clients=3, test=0.0, attack="labels:0.4", backend="serial")
    with pytest.raises(UsageError, match=r"attack=labels:0.4 needs classes, and '.*' has numbers"):
        run(run_)


def test_a_round_with_too_few_replies_stops_the_run():
    with pytest.raises(UsageError, match=r"fedavg.local: reduce=krum:1 needs 5 replies, round \d has \d"):
        run(experiment(FedAvg(), reduce="krum:1", drop=0.5, ratio=1.0, rounds=8))


def test_a_plain_reception_keeps_no_replies():
    """Memory stays one model, however many reply, where nobody asks for more."""
    kind = lambda **how: type(Reception(**how).begin("fedavg.local", {}, 0)).__name__
    labels = experiment(FedAvg(), attack="labels:0.25").reception
    assert kind() == kind(attack=labels.attack, attackers=labels.attackers) == "Reduction"
    assert kind(rule=robust.rule("median")) == "Gathered"
