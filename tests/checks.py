"""What each method has to be, as checks of a class: the reference, its reductions, its invariants. The tests run them on
the methods (tests/invariants), and on mutants of their files, which have to fail one (tests/contract/test_mutants.py)."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch

from harness import agree, experiment, federation, moved, world
from idiolect import Result, Run, catalogue, run
from idiolect.data import Dataset, Federation, federate
from idiolect.data.federated import split_hash
from idiolect.data.sources import quadratics
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.method import Method, Rows, State, Up
from idiolect.running import one_thread
from idiolect.tree import Tree, stack

CLIENTS = 8
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
EQUAL = {"sizes": (8,) * CLIENTS, "ratio": 1.0}  # every client counts alike


def named(name: str, **settings: Any) -> Method:
    return catalogue.build(name, settings)


def found(method: Method, **fields: Any) -> Result:
    return run(experiment(method, **fields))


@lru_cache(maxsize=256)
def _kept(name: str, settings: tuple, fields: tuple) -> Result:
    return found(named(name, **dict(settings)), **dict(fields))


def known(name: str, settings: dict[str, Any] | None = None, **fields: Any) -> Result:
    """The run of a method that nobody changes, once for all checks that compare with it."""
    return _kept(name, tuple((settings or {}).items()), tuple(fields.items()))


def same_shared(one: Result, two: Result) -> None:
    assert one.server["model"].equals(two.server["model"]), "the shared models differ"


def same_personal(one: Result, two: Result) -> None:
    for i in range(one.run.clients):
        assert one.personal(i).equals(two.personal(i)), f"client {i}'s models differ"


def close_shared(one: Result, two: Result, tolerance: float = 1e-12) -> None:
    assert moved(one.server["model"], two.server["model"]) < tolerance


def apart(one: Result, two: Result, least: float = 1e-3) -> None:
    """Some client's models differ: the method does something."""
    far = max(moved(one.personal(i), two.personal(i)) for i in range(one.run.clients))
    assert far > least, f"no more than {far} apart"


def history(method: Method, **fields: Any) -> tuple[Run, Any, list[Progress]]:
    """What the homes hold after 0, 1, 2, ... rounds."""
    run_ = experiment(method, **fields)
    context, kept = run_.context(), []
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(run_.clients))

    def watch(report):
        store = context.store(run_.clients)
        store.buffer.copy_(progress.store.buffer)
        store.visits[:] = progress.store.visits
        kept.append(Progress(progress.server, progress.rows, store, progress.round))

    with one_thread():
        loop(run_, context, Serial(context), progress, watch)
    return run_, context, kept


# the reference


@cache
def _reference(name: str, hyper: tuple, fields: tuple) -> tuple[Any, Any]:
    run_ = experiment(named(name, **dict(hyper)), **dict(fields))
    return importlib.import_module(f"reference.{name}").run(world(run_), **dict(hyper))


def reference(kind: type[Method], name: str, hyper: dict[str, Any] | None = None, **fields: Any) -> None:
    """Four rounds, 5 of 8 unequal clients, float64: the slow reference to 1e-10."""
    hyper = hyper or {}
    wrapped = {"inner": named("fedavg")} if catalogue.wraps(name) else {}
    agree(found(kind(**wrapped, **hyper), **fields), _reference(name, tuple(hyper.items()), tuple(fields.items())))


def against(name: str, hyper: dict[str, Any] | None = None, **fields: Any) -> Callable[[type[Method]], None]:
    """The check against the reference, for a table of mutants."""
    return partial(reference, name=name, hyper=hyper, **fields)


# FedAvg, FedProx


def fedprox_without_mu_is_fedavg(kind: type[Method]) -> None:
    same_shared(found(kind(mu=0.0)), known("fedavg"))


def fedprox_of_one_step_is_fedavg(kind: type[Method]) -> None:
    """The first step starts at the received model, where nothing pulls."""
    one_step = {"epochs": 1, "batch_size": 64}
    same_shared(found(kind(mu=3.0), **one_step), known("fedavg", **one_step))


def fedprox_holds_clients_back(kind: type[Method]) -> None:
    """The larger mu, the less a client moves in a round, down to not at all."""
    fields = PLAIN | {"rounds": 1, "ratio": ((0,),), "epochs": 4, "lr": 0.05}
    _, context, _ = history(kind(mu=0.0), **fields)
    start = context.net.weights
    far = [float((found(kind(mu=mu), **fields).server["model"] - start).norm()) for mu in (0.0, 1.0, 10.0)]
    assert far[0] > 1.1 * far[1] > 1.5 * far[2] > 0


# FedPer, FedRep


def all_shared(kind: type[Method]) -> type[Method]:
    return _homes(kind, lambda net: State(server={"model": net.weights}, client={"model": Tree()}))


def all_private(kind: type[Method]) -> type[Method]:
    return _homes(kind, lambda net: State(server={"model": Tree()}, client={"model": net.weights}))


def _homes(kind: type[Method], init: Any) -> type[Method]:
    return type(kind.__name__, (kind,), {"init": lambda self, net: init(net), "__module__": kind.__module__})


def fedper_with_nothing_private_is_fedavg(kind: type[Method]) -> None:
    one = found(all_shared(kind)())
    same_shared(one, known("fedavg"))
    same_personal(one, known("fedavg"))


def fedper_with_all_private_is_local(kind: type[Method]) -> None:
    same_personal(found(all_private(kind)()), known("local"))


def fedrep_with_nothing_private_and_no_head_phase_is_fedavg(kind: type[Method]) -> None:
    same_shared(found(all_shared(kind)(head_epochs=0)), known("fedavg"))


def fedrep_without_a_head_phase_keeps_all_heads(kind: type[Method]) -> None:
    one = found(kind(head_epochs=0))
    initial = one.context.net.head
    assert all(one.personal(i).pick(initial).equals(initial) for i in range(CLIENTS))
    assert moved(one.server["model"], one.context.net.body) > 1e-2


def fedrep_without_a_body_phase_is_a_linear_probe(kind: type[Method]) -> None:
    one = found(kind(head_epochs=2, body_epochs=0))
    assert one.server["model"].equals(one.context.net.body)
    for i in range(CLIENTS):
        visited = int(one.progress.store.visits[i]) > 0
        head = one.personal(i).pick(one.context.net.head)
        assert (moved(head, one.context.net.head) > 1e-2) == visited


def the_head_stays_private(kind: type[Method]) -> None:
    """No head is ever sent, and every client's is another."""
    one = found(kind(), ratio=1.0)
    assert set(one.server["model"]) == set(one.context.net.body)
    heads = [one.personal(i)["head.weight"] for i in range(CLIENTS)]
    assert min(float((a - b).abs().max()) for k, a in enumerate(heads) for b in heads[:k]) > 1e-4


def the_server_holds_the_mean_by_samples(kind: type[Method], **hyper: Any) -> None:
    """After a round of all: what each client alone would have left at the server, weighted by its samples."""
    whole = found(kind(**hyper), ratio=1.0, rounds=1).server["model"]
    alone = [found(kind(**hyper), ratio=((i,),), rounds=1).server["model"] for i in range(CLIENTS)]
    sizes = [len(rows) for rows in federation().train]
    for name, value in whole.items():
        mean = sum(n / sum(sizes) * w[name] for n, w in zip(sizes, alone, strict=True))
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-12)
    assert max(moved(w, whole) for w in alone) > 1e-2


# Ditto


def ditto_without_lam_is_local_beside_fedavg(kind: type[Method]) -> None:
    one = found(kind(lam=0.0))
    same_shared(one, known("fedavg"))
    same_personal(one, known("local"))


def dittos_server_knows_nothing_of_lam(kind: type[Method]) -> None:
    same_shared(found(kind(lam=2.0)), known("fedavg"))


def ditto_with_a_large_lam_pulls_to_the_received_model(kind: type[Method]) -> None:
    fields = PLAIN | {"ratio": 1.0, "lr": 0.02, "epochs": 6, "schedule": "constant"}
    received = known("fedavg", **(fields | {"rounds": 3})).server["model"]
    far = []
    for lam in (0.0, 2.0, 20.0):
        one = found(kind(lam=lam), **fields)
        far.append(sum(float((one.personal(i) - received).norm()) for i in range(CLIENTS)))
    assert far[0] > 1.2 * far[1] > 2.0 * far[2]


# SCAFFOLD


def scaffold_begins_as_the_uniform_fedavg(kind: type[Method]) -> None:
    """In round 0 all c are 0."""
    fields = PLAIN | EQUAL | {"rounds": 1}
    same_shared(found(kind(), **fields), known("fedavg", **fields))
    later = PLAIN | EQUAL | {"rounds": 3}
    assert moved(found(kind(), **later).server["model"], known("fedavg", **later).server["model"]) > 1e-3


def scaffold_with_c_held_at_0_is_fedavg(kind: type[Method]) -> None:
    def local(self, me, down, mine):
        up, _ = kind.local(self, me, down, mine)
        return dataclasses.replace(up, sum={"dc": mine["c"]}), mine

    held = type(kind.__name__, (kind,), {"local": local, "__module__": kind.__module__})
    fields = PLAIN | EQUAL
    same_shared(found(held(), **fields), known("fedavg", **fields))


def c_is_the_mean_of_all_ci(kind: type[Method], **fields: Any) -> None:
    """After every round, whether all or some took part: c moves by the sum over the participants divided by all N."""
    run_, _, states = history(kind(), **({"momentum": 0.0} | fields))
    for state in states:
        mean = stack([state.store.read(i)["c"] for i in range(run_.clients)]).map(lambda v: v.mean(0))
        assert moved(state.server["c"], mean) < 1e-12
    assert float(states[-1].server["c"].norm()) > 1e-2


def ci_is_the_mean_gradient_along_the_way(kind: type[Method]) -> None:
    """One step a round: c_i is the client's gradient where it began, of its last participation."""
    fields = PLAIN | {"epochs": 1, "batch_size": 64, "rounds": 3, "schedule": "exponential"}
    run_, context, states = history(kind(), **fields)
    for round in range(3):
        for i in run_.participants(round):
            x, y = context.shards.part("train", i)
            w = states[round].server["model"].map(lambda v: v.clone().requires_grad_())
            logits = torch.func.functional_call(context.net.module, dict(w), (x,))
            loss = torch.nn.functional.cross_entropy(logits, y)
            grads = Tree(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
            assert moved(states[round + 1].store.read(i)["c"], grads) < 1e-10


def scaffold_of_one_client_is_fedavg(kind: type[Method]) -> None:
    """c and its only c_i cancel."""
    fields = PLAIN | {"sizes": (9,), "ratio": 1.0}
    close_shared(found(kind(), **fields), known("fedavg", **fields))


def scaffold_finds_the_optimum(kind: type[Method]) -> None:
    """0.6 on the two quadratics on which FedAvg stops at 0.38."""
    one = on_quadratics(kind(), rounds=60)
    assert abs(float(one.server["model"]["head.weight"]) - 0.6) < 1e-6
    for i, (a, b) in enumerate(((4, 1), (1, -1))):
        assert abs(float(one.private(i)["c"]["head.weight"]) - a * (0.6 - b)) < 1e-5


# FedALA


def fedala_that_never_learns_its_mixture_is_fedavg(kind: type[Method]) -> None:
    one = found(kind(mix_lr=0.0))
    same_shared(one, known("fedavg"))
    same_personal(one, known("fedavg"))


def fedala_with_mix_held_at_0_is_fedper(kind: type[Method]) -> None:
    def init(self, net):
        state = kind.init(self, net)
        return dataclasses.replace(state, client={**state.client, "mix": state.client["mix"].zeros()})

    held = type(kind.__name__, (kind,), {"init": init, "__module__": kind.__module__})
    one, per = found(held(mix_lr=0.0, layers=1)), known("fedper")
    same_personal(one, per)
    body = per.server["model"]
    assert one.server["model"].pick(body).equals(body)


def fedala_learns_a_mixture(kind: type[Method]) -> None:
    """Between 0 and 1, kept from round to round, and predicted with."""
    one = found(kind(first_epochs=3))
    apart(one, known("fedavg"))
    mixes = [one.private(i)["mix"] for i in range(CLIENTS)]
    assert all(float(v.min()) >= 0 and float(v.max()) <= 1 for mix in mixes for v in mix.values())
    assert sum(moved(mix, mix.ones()) > 1e-2 for mix in mixes) > 3
    assert any(0 < float(v.min()) < 1 for mix in mixes for v in mix.values())


def fedala_of_one_client_has_nothing_to_mix(kind: type[Method]) -> None:
    """Its own model is the received one: nothing for the mixture to change, and no gradient to learn it by."""
    fields = {"sizes": (9,), "ratio": 1.0}
    one = found(kind(), **fields)
    same_shared(one, known("fedavg", **fields))
    assert moved(one.private(0)["mix"], one.private(0)["mix"].ones()) == 0


# FedAMP


def fedamp_without_lam_is_local(kind: type[Method]) -> None:
    same_personal(found(kind(lam=0.0)), known("local"))


def fedamp_pulls_to_its_cloud_model(kind: type[Method], **hyper: Any) -> None:
    """The larger lam, the nearer a client stays to its cloud model, though it trains on its own data."""
    fields = PLAIN | {"ratio": 1.0, "lr": 0.02, "epochs": 6, "schedule": "constant"}
    far = []
    for lam in (0.0, 2.0, 20.0):
        _, _, states = history(kind(lam=lam, **hyper), **fields)
        before, after = states[-2], states[-1]
        clouds = [before.rows[i]["cloud"] for i in range(CLIENTS)]
        far.append(sum(float((after.store.read(i)["model"] - u).norm()) for i, u in enumerate(clouds)))
    assert far[0] > 1.2 * far[1] > 2.0 * far[2]


def models(count: int, spread: float = 1.0) -> Tree:
    draw = torch.Generator().manual_seed(3)
    return Tree(
        {
            "a": spread * torch.randn(count, 4, 2, generator=draw).double(),
            "b": torch.randn(count, 3, generator=draw).double(),
        }
    )


def rows_of_xi_sum_to_1(kind: type[Method], **hyper: Any) -> None:
    for count in (1, 2, 7):
        for spread in (0.1, 1.0, 30.0):
            xi = kind(**hyper).weights(models(count, spread))
            assert xi.shape == (count, count)
            torch.testing.assert_close(xi.sum(1), torch.ones(count).double(), rtol=0, atol=1e-12)
            assert float(xi.min()) >= 0
            if hyper.get("attention", "distance") == "distance":
                torch.testing.assert_close(xi, xi.T, rtol=0, atol=1e-12)
            if count > 1 and spread <= 1 and "sigma" not in hyper:  # nobody is left alone
                assert float((xi - torch.diag(xi.diagonal())).sum()) > 0.02


def xi_is_the_paper_s(kind: type[Method]) -> None:
    """alpha A'(d) with A'(d) = exp(-d / sigma) / sigma, where the step is small enough not to be capped."""
    w, sigma, alpha = models(4), 30.0, 0.7
    xi = kind(sigma=sigma, alpha=alpha).weights(w)
    for i in range(4):
        for j in range(4):
            if i != j:
                d = sum(float((v[i] - v[j]).square().sum()) for v in w.values())
                assert abs(float(xi[i, j]) - alpha * np.exp(-d / sigma) / sigma) < 1e-12
    near = kind().weights(stack([Tree({"a": torch.tensor([v]).double()}) for v in (0.0, 0.1, 3.0)]))
    assert near[0, 1] > 2 * near[0, 2]  # similar models mix more


def clouds_are_the_mixed_uploads(kind: type[Method], **hyper: Any) -> None:
    _, _, states = history(kind(**hyper), rounds=3)
    for state in states[1:]:
        seen = list(state.rows)
        uploads = stack([state.rows[i]["model"] for i in seen])
        xi = kind(**hyper).weights(uploads)
        for a, i in enumerate(seen):
            cloud = uploads.map(partial(torch.einsum, "k,k...->...", xi[a]))
            assert moved(state.rows[i]["cloud"], cloud) < 1e-12
            upload = state.store.read(i)["model"].pick(cloud)
            assert state.rows[i]["model"].equals(upload)  # the last one, however long ago
        assert seen == [i for i in range(CLIENTS) if state.store.visits[i]]
        assert all(float(state.rows[i]["seen"]) == (i in seen) for i in range(CLIENTS))


def equal_models_are_their_own_cloud(kind: type[Method], **hyper: Any) -> None:
    one = Tree({k: v[:1].repeat(5, *[1] * (v.dim() - 1)) for k, v in models(5).items()})
    xi = kind(**hyper).weights(one)
    assert moved(one.map(lambda v: torch.einsum("ij,j...->i...", xi, v)), one) < 1e-12
    fields = {"sizes": (9,), "ratio": 1.0}
    _, _, states = history(kind(**hyper), **fields)
    assert all(moved(s.rows[0]["cloud"], s.rows[0]["model"]) < 1e-12 for s in states)


def the_pull_is_the_gradient_of_its_term(
    kind: type[Method], coefficient: float, given: tuple = (), **hyper: Any
) -> None:
    """coefficient / 2 |w - u|^2, by autograd."""
    w, u, g = (Tree({k: v[i] for k, v in models(3).items()}) for i in range(3))
    leaf = w.map(lambda v: v.clone().requires_grad_())
    term = coefficient / 2 * (leaf - u).dot(leaf - u)
    grads = Tree(zip(leaf, torch.autograd.grad(term, list(leaf.values())), strict=True))
    assert moved(kind(**hyper).pull(g, w, u, *given), g + grads) < 1e-12


# FineTune


def finetune_of_no_epochs_is_its_inner(kind: type[Method], inner: str = "fedavg") -> None:
    same_personal(found(kind(inner=named(inner), epochs=0)), known(inner))


def finetune_changes_no_training(kind: type[Method], inner: str = "fedper") -> None:
    one = found(kind(inner=named(inner), epochs=2))
    same_shared(one, known(inner))
    apart(one, known(inner))
    for i in range(CLIENTS):
        assert one.private(i)["model"].equals(known(inner).private(i)["model"])
    assert [r["gradient_passes"] for r in one.rounds] == [r["gradient_passes"] for r in known(inner).rounds]


def finetune_of_the_head_leaves_the_body(kind: type[Method]) -> None:
    one, plain = found(kind(inner=named("fedavg"), part="head")), known("fedavg")
    body = one.context.net.body
    for i in range(CLIENTS):
        assert one.personal(i).pick(body).equals(plain.personal(i).pick(body))
        assert moved(one.personal(i), plain.personal(i)) > 1e-3


def finetune_fits_each_client_better(kind: type[Method]) -> None:
    one, plain = found(kind(inner=named("fedavg"), epochs=10)), known("fedavg")
    for i in range(CLIENTS):
        x, y = one.context.shards.part("train", i)
        task = one.context.task
        tuned, shared = (float(task.losses(task.logits(r.personal(i), x), y).mean()) for r in (one, plain))
        assert tuned < shared


# Local


def local_knows_nobody_else(kind: type[Method]) -> None:
    """With all other clients' data replaced, a client's model is the same to the bit."""
    fed, others = federation(), federation(seed=9)
    mixed = _joined(fed, others, 1)
    one, two = found(kind(), federation=fed), found(kind(), federation=mixed)
    assert one.personal(1).equals(two.personal(1))
    assert moved(one.personal(1), one.context.net.weights) > 1e-2
    assert not one.personal(0).equals(two.personal(0))
    assert sum(r["bytes_up"] + r["bytes_down"] for r in one.rounds) == 0


def _joined(fed: Federation, others: Federation, keep: int) -> Federation:
    """`others`, with one client's rows from `fed`."""
    at = len(others.dataset)
    data = Dataset(
        "small",
        torch.cat([others.dataset.x, fed.dataset.x]),
        torch.cat([others.dataset.y, fed.dataset.y]),
        fed.dataset.classes,
        "mlp",
    )
    parts = [
        tuple(
            (getattr(fed, split)[i] + at) if i == keep else getattr(others, split)[i]
            for split in ("train", "validation", "test")
        )
        for i in range(fed.clients)
    ]
    return Federation(data, *zip(*parts, strict=True), split_hash(*zip(*parts, strict=True)), "joined")


# quadratics

A, B = (4.0, 1.0), (1.0, -1.0)


def on_quadratics(method: Method, rounds: int = 50, steps: int = 10, lr: float = 0.05, a=A, b=B) -> Result:
    """F_i(w) = a_i / 2 (w - b_i)^2: every step is an epoch of the one sample."""
    data = quadratics.load(a, b)
    fed = federate(data, "given", len(a), 0, test=0.0)
    return run(
        Run(
            method=method, data=data, split=fed, clients=len(a), rounds=rounds, epochs=steps, lr=lr, batch_size=1,
            dtype="float64", backend="serial", evaluate_every=10_000,
        )
    )  # fmt: skip


def points(result: Result) -> list[float]:
    return [float(result.personal(i)["head.weight"]) for i in range(result.run.clients)]


# FedSimSup


def both_networks(result: Result, client: int) -> Tree:
    """What a client predicts with, by the reference's names: theta and its supervisor."""
    w, net = result.personal(client), result.context.net
    theta = w.pick(net.body if result.run.method.structure == "serial" else net.weights)
    own = {f"supervisor.{k.partition('.')[2]}": v for k, v in w.drop(theta).items()}
    return theta.prefixed("theta") | (w.drop(theta).prefixed("supervisor") if not net.others else own)


@cache
def _simsup_reference(hyper: tuple, fields: tuple) -> Any:
    """The reference, each client with a copy of the supervisor network that it drew."""
    run_ = experiment(named("fedsimsup", **dict(hyper)), **dict(fields))
    context = run_.context()
    drawn, networks = context.store(run_.clients).drawn, list(context.net.others.values())
    makers = [partial(copy.deepcopy, networks[kind]) for kind in drawn] if networks else None
    known = {k: v for k, v in hyper if k not in ("supervisor", "share", "mixing")}
    return importlib.import_module("reference.fedsimsup").run(world(run_), supervisor=makers, **known)


def fedsimsup_is_its_reference(kind: type[Method], hyper: dict[str, Any] | None = None, **fields: Any) -> Result:
    """Four rounds, 5 of 8 unequal clients, float64: every client's two networks to 1e-10."""
    hyper = hyper or {}
    one, expected = found(kind(**hyper), **fields), _simsup_reference(tuple(hyper.items()), tuple(fields.items()))
    assert not one.server.get("model")
    for i, w in enumerate(expected.clients):
        assert moved(both_networks(one, i), Tree(w)) < 1e-10, f"client {i}"
    return one


def fedsimsup_never_mixes_when_all_take_part(kind: type[Method], **hyper: Any) -> None:
    """Each client's networks are those that it would have alone."""
    whole = found(kind(**hyper), ratio=1.0)
    for i in (0, 3, 6):
        assert whole.personal(i).equals(found(kind(**hyper), ratio=((i,),) * 4).personal(i))
    alone = found(kind(**hyper), ratio=((0,),) * 4)
    assert moved(alone.personal(6), alone.context.state.rows["theta"] | alone.private(6)["supervisor"]) > 1e-3


def fedsimsup_mixes_lazily_as_eagerly(kind: type[Method], **fields: Any) -> None:
    """To rounding, whoever takes part and whatever is lost."""
    fields = {"rounds": 12, "ratio": 0.3} | fields
    lazy, eager = (found(kind(mixing=how, C=0.5, T=40), **fields) for how in ("lazy", "eager"))
    for i in range(CLIENTS):
        assert moved(lazy.personal(i), eager.personal(i)) < 1e-12
    assert lazy.server["log"]
    assert not eager.server["log"]


def fedsimsup_clients_say_their_labels_once(kind: type[Method]) -> None:
    one = found(kind())
    shards, sent = one.context.shards, one.context.state.rows["theta"].nbytes
    for i in range(CLIENTS):
        counts = torch.bincount(shards.part("train", i)[1], minlength=3).double()
        torch.testing.assert_close(one.progress.rows[i]["labels"], counts / counts.sum(), rtol=0, atol=1e-15)
        assert float(one.progress.rows[i]["size"]) == counts.sum()
    assert one.rounds[0]["bytes_up"] == CLIENTS * 8 * (3 + 1)
    assert [r["bytes_up"] for r in one.rounds[1:]] == [5 * sent] * 4
    assert [r["bytes_down"] for r in one.rounds] == [0] + [5 * sent] * 4


def fedsimsup_predicts_with_the_sum_of_two_networks(kind: type[Method]) -> None:
    one = found(kind(share=0.5))
    net, w, x = one.context.net, one.personal(0), one.context.shards.part("test", 0)[0]
    theta, s = copy.deepcopy(net.module), copy.deepcopy(net.others["supervisor"])
    theta.load_state_dict(dict(w.pick(net.weights)))
    s.load_state_dict(dict(w.under("supervisor")))
    with torch.no_grad():
        q = one.run.method.logits(one.context.task, w, x)
        torch.testing.assert_close(q, theta(x) + s(x), rtol=0, atol=1e-14)


# FedAdam, FedYogi


def stepped(method: Method, updates: list[list[float]]):
    """What the server holds after each of these mean updates, of parameters w and statistics b."""
    zero = torch.zeros(2, dtype=torch.float64)
    first = method.init(experiment(method).context().net).server
    v = next(iter(first["v"].values())).flatten()[:2].clone()
    server = {"model": Tree({"w": zero, "b": zero}), "m": Tree({"w": zero}), "v": Tree({"w": v})}
    states = [server]
    for d in updates:
        mean = server["model"] + torch.tensor(d, dtype=torch.float64)
        server, _ = method.server(server, Rows({}), Up(mean={"model": mean}), None)
        states.append(server)
    return states
