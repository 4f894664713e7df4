"""FedSimSup: its reference, what it becomes, the two phases, eqs. 7 to 10, lazy mixing, other supervisors, odd clients."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import checks
from harness import CLASSES, SIZES, build, experiment, federation, moved, run
from idiolect import Result
from idiolect.data import Dataset, Federation
from idiolect.engine import stacked
from idiolect.engine.work import Job
from idiolect.errors import UsageError
from idiolect.method import Facts, Rows, Up
from idiolect.methods.fedrep import FedRep
from idiolect.methods.fedsimsup import FedSimSup
from idiolect.methods.local import Local
from idiolect.nets import names
from idiolect.task import Batch, Net
from idiolect.tree import Tree, stack

IMAGES = pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
BOTH = pytest.mark.parametrize("structure", ["parallel", "serial"])
MIXED = "lenet5,cnn4,tinyvit"
EVERYONE = range(len(SIZES))
FALLING = {"C": 0.5, "gamma": 0.3, "T": 20}  # beta falls from the second round on


@cache
def pictures(classes: int = CLASSES, least: int = 1) -> Federation:
    """Eight clients with images of 16 x 16, which a LeNet-5 takes."""
    fed = federation((7, 5, least, 4, 9, 3, 6, 5), images=True)
    x = functional.interpolate(fed.dataset.x, scale_factor=2)
    return dataclasses.replace(fed, dataset=Dataset("small", x, fed.dataset.y, classes, "lenet5"))


def labelled(*labels: list[int]) -> Federation:
    """Clients with these labels, one after another, and as many samples."""
    fed = federation(tuple(map(len, labels)))
    y = fed.dataset.y.clone()
    for rows, own in zip(fed.train, labels, strict=True):
        y[rows] = torch.tensor(own)
    return dataclasses.replace(fed, dataset=Dataset("small", fed.dataset.x, y, CLASSES, "mlp"))


def theta(found: Result, client: int) -> Tree:
    return found.personal(client).pick(found.context.state.rows["theta"])


# the reference


@IMAGES
@pytest.mark.parametrize(
    "hyper",
    [
        {}, {"tau_s": 2, "tau_theta": 3}, FALLING, FALLING | {"mixing": "eager"}, FALLING | {"similarity": False},
        {"share": 0.5, "tau_s": 0}, {"structure": "serial"}, FALLING | {"structure": "serial", "mixing": "eager"},
    ],
    ids=str,
)  # fmt: skip
def test_engine_equals_reference(hyper, images):
    checks.fedsimsup_is_its_reference(FedSimSup, hyper, images=images)


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": (6, 1, 1, 3, 9)},
        {"sizes": (1, 1, 1, 1)},
        {"batch_size": 1},
        {"federation": labelled([0, 0, 0], [1, 1, 1, 1, 1], [2], [0, 1, 2, 2])},
        {"federation": pictures(CLASSES + 2), "network": "lenet5", "epochs": 1},
    ],
    ids=["clients of one sample", "nobody has two", "batches of one", "clients of one class", "classes nobody has"],
)
def test_odd_clients(fields, structure):
    checks.fedsimsup_is_its_reference(FedSimSup, FALLING | {"structure": structure}, **fields)


# what it becomes


@BOTH
def test_when_all_take_part_every_client_is_alone(structure):
    checks.fedsimsup_never_mixes_when_all_take_part(FedSimSup, structure=structure)


@IMAGES
def test_serial_and_alone_it_is_fedrep(images):
    fields = {"sizes": (9,), "ratio": 1.0, "images": images}
    serial = FedSimSup(structure="serial", tau_s=3, tau_theta=2)
    found, fedrep = (run(experiment(m, **fields)) for m in (serial, FedRep(head_epochs=3, body_epochs=2)))
    assert moved(found.personal(0), fedrep.personal(0)) < 1e-12
    assert moved(found.personal(0), found.context.net.weights) > 1e-2


def test_serial_among_others_is_not_fedrep():
    """Bodies are never averaged into one."""
    serial = FedSimSup(structure="serial", tau_s=3, tau_theta=2)
    found, fedrep = (run(experiment(m)) for m in (serial, FedRep(head_epochs=3, body_epochs=2)))
    assert min(moved(found.personal(i), fedrep.personal(i)) for i in EVERYONE) > 1e-3
    assert min(moved(theta(found, i), theta(found, j)) for i in EVERYONE for j in range(i)) > 1e-5


@dataclass(frozen=True)
class Silent(FedSimSup):
    """A supervisor that says 0 to everything."""

    def init(self, net):
        state = super().init(net)
        return dataclasses.replace(state, client=[{"supervisor": kind["supervisor"].zeros()} for kind in state.client])


def test_with_a_silent_supervisor_and_everybody_there_it_is_local():
    fields = {"ratio": 1.0, "batch_size": 64}  # whole batches: theta's phase has another order of samples than Local
    silent, local, heard = (
        run(experiment(m, **fields)) for m in (Silent(tau_s=0, tau_theta=2), Local(), FedSimSup(tau_s=0, tau_theta=2))
    )
    assert max(moved(theta(silent, i), local.personal(i)) for i in EVERYONE) < 1e-12
    assert max(moved(theta(heard, i), local.personal(i)) for i in EVERYONE) > 1e-3


def test_without_c_nobody_learns_from_another():
    found = run(experiment(FedSimSup(C=0.0), ratio=((0, 1), (1, 2), (1, 4), (0, 2))))
    initial = found.context.state.rows["theta"]
    assert all(theta(found, i).equals(initial) for i in (3, 5, 6, 7))
    later = run(experiment(FedSimSup(C=0.0), ratio=((3,), (5,), (4,), (6,))))
    assert theta(found, 4).equals(theta(later, 4))
    mixing = run(experiment(FedSimSup(), ratio=((0, 1), (1, 2), (1, 4), (0, 2))))
    assert min(moved(theta(mixing, i), initial) for i in (3, 5, 6, 7)) > 1e-3


# the client


def laid() -> tuple[FedSimSup, Any, Tree, Tree, Batch]:
    """A method, its task, both networks' weights and a batch with the other network's logits."""
    method = FedSimSup(share=0.5)
    context = experiment(method).context()
    draw = torch.Generator().manual_seed(0)
    x, y = context.shards.part("train", 0)
    other = torch.randn(len(y), CLASSES, generator=draw, dtype=torch.float64)
    return method, context.task, context.net.weights, context.state.client[0]["supervisor"], Batch(x, y, None, other)


@pytest.mark.parametrize("part", ["", "supervisor"])
def test_the_loss_s_gradient_is_that_of_finite_differences(part):
    method, task, theta, s, batch = laid()
    w = s if part else theta

    def loss(*values: Tensor) -> Tensor:
        return method.beside(task, Tree(zip(w, values, strict=True)), batch, part)

    assert torch.autograd.gradcheck(loss, [v.clone().requires_grad_() for v in w.values()])


def test_the_loss_is_the_cross_entropy_of_the_sum_and_leaves_padding_out():
    method, task, theta, s, batch = laid()
    for w, part, module in ((theta, "", task.net.module), (s, "supervisor", task.net.others["supervisor"])):
        expected = functional.cross_entropy(module(batch.x) + batch.beside, batch.y)
        torch.testing.assert_close(method.beside(task, w, batch, part), expected, rtol=0, atol=1e-14)
    longer = [torch.cat([v, v[:2]]) for v in (batch.x, batch.y, 9 * batch.beside)]
    longer[2][: len(batch.y)] = batch.beside
    padded = Batch(longer[0], longer[1], torch.tensor([1.0] * len(batch.y) + [0.0] * 2), longer[2])
    value = method.beside(task, theta, padded, "")
    torch.testing.assert_close(value, method.beside(task, theta, batch, ""), rtol=0, atol=1e-14)


def phases(method: FedSimSup, client: int = 0, **fields: Any) -> tuple[Any, list[Any], Any]:
    """The phases of a client's round, and its reply."""
    context, seen = experiment(method, **fields).context(), []

    def trainer(task, phase):
        seen.append((phase, context.trainer(task, phase)))
        return seen[-1][1]

    row, kind = context.state.rows, context.store(len(SIZES)).template(client)
    listening = dataclasses.replace(context, trainer=trainer)
    reply = listening.do(Job("local", client, 0, 0, method.down(context.state.server, row), kind))
    return listening, seen, reply


@IMAGES
def test_the_supervisor_learns_beside_the_received_theta_and_theta_beside_the_trained_supervisor(images):
    """The one that stands still is asked once for the logits of all samples, in eval mode."""
    context, seen, reply = phases(FedSimSup(tau_s=2, tau_theta=3), images=images)
    (first, s), (second, theta) = seen
    n = context.shards.size("train", 0)
    x = context.shards.part("train", 0)[0]
    assert {k.partition(".")[0] for k in first.trained} == {"supervisor"}
    assert set(second.trained) == set(context.net.trainable) - set(first.trained)
    assert [sum(len(b) for group in p.indices for b in group) for p in (first, second)] == [2 * n, 3 * n]
    with torch.no_grad():
        torch.testing.assert_close(first.beside, context.task.logits(context.net.weights, x), rtol=0, atol=1e-12)
        torch.testing.assert_close(second.beside, context.task.logits(s, x, "supervisor"), rtol=0, atol=1e-12)
    assert reply.mine["supervisor"].equals(s)
    assert reply.up.rows["model"].equals(theta)
    assert moved(s, context.state.client[0]["supervisor"]) > 1e-3
    assert moved(theta, context.net.weights) > 1e-3


def test_prediction_is_the_sum_of_two_networks():
    checks.fedsimsup_predicts_with_the_sum_of_two_networks(FedSimSup)


@BOTH
def test_the_supervisor_never_leaves_its_client(structure):
    _, seen, reply = phases(FedSimSup(structure=structure))
    assert not reply.up.mean
    assert not reply.up.sum
    assert set(reply.up.rows) == {"model"}
    private = set(reply.mine["supervisor"])
    assert private & set(seen[0][0].trained)
    assert not private & set(reply.up.rows["model"])


# the server, eqs. 7 to 10


@pytest.mark.parametrize("mixing", ["lazy", "eager"])
@pytest.mark.parametrize("similarity", [True, False])
def test_who_was_away_learns_from_the_participants_as_eq_7_says(similarity, mixing):
    here = (0, 1, 5)
    method = FedSimSup(similarity=similarity, mixing=mixing, C=0.5, T=1, gamma=0.0)
    found = run(experiment(method, ratio=(here,), rounds=1))
    labels = [found.context.shards.part("train", i)[1].numpy() for i in EVERYONE]
    shares = [np.bincount(y, minlength=CLASSES) / len(y) for y in labels]
    start = found.context.state.rows["theta"]
    M = sum(SIZES[j] for j in here)
    for i in set(EVERYONE) - set(here):
        alike = [
            shares[i] @ shares[j] / math.sqrt(shares[i] @ shares[i] * (shares[j] @ shares[j])) if similarity else 1.0
            for j in here
        ]
        a = M / (M + len(here) * SIZES[i]) * 0.5**2  # beta of round 1 is (C / 1)^2
        for name, value in theta(found, i).items():
            mean = sum(s / sum(alike) * theta(found, j)[name] for s, j in zip(alike, here, strict=True))
            torch.testing.assert_close(value, (1 - a) * start[name] + a * mean, rtol=0, atol=1e-14)


def test_nobody_alike_teaches_nothing():
    fed = labelled([0, 0, 0, 0], [1, 1, 1], [0, 0, 1])
    for mixing in ("lazy", "eager"):
        found = run(experiment(FedSimSup(mixing=mixing), federation=fed, ratio=((0,),) * 3, rounds=3))
        assert theta(found, 1).equals(found.context.state.rows["theta"])
        assert moved(theta(found, 2), found.context.state.rows["theta"]) > 1e-3
    alike = run(experiment(FedSimSup(similarity=False), federation=fed, ratio=((0,),) * 3, rounds=3))
    assert moved(theta(alike, 1), alike.context.state.rows["theta"]) > 1e-3


def test_equal_labels_need_no_similarity_and_equal_sizes_meet_half_way():
    fed = labelled(*[[0, 1, 2, 2, 1, 0]] * 8)
    one, two = (run(experiment(FedSimSup(similarity=s), federation=fed)) for s in (True, False))
    assert max(moved(one.personal(i), two.personal(i)) for i in EVERYONE) < 1e-12
    other = [run(experiment(FedSimSup(similarity=s))) for s in (True, False)]
    assert max(moved(other[0].personal(i), other[1].personal(i)) for i in EVERYONE) > 1e-3
    half = FedSimSup().rate(torch.tensor(1.0), torch.tensor(5 * 6.0), torch.tensor(5), torch.tensor([6.0]))
    assert float(half) == 0.5


def test_beta_is_1_up_to_its_bound_and_continuous_there():
    method, bound = FedSimSup(), 40 * 1000 ** (3 / 7)
    assert 772 < bound < 773
    values = [float(method.beta(t, 1000)) for t in range(1, 1001)]
    assert values[:772] == [1.0] * 772
    assert values[772:] == sorted(values[772:], reverse=True)
    assert values[-1] == pytest.approx((bound / 1000) ** 2, rel=1e-14)
    assert float(FedSimSup(C=20.0, gamma=0.0).beta(20, 1000)) == 1.0
    assert float(FedSimSup(C=20.0, gamma=0.0).beta(21, 1000)) == pytest.approx((20 / 21) ** 2, rel=1e-14)


def test_t_is_the_run_s_rounds_unless_given():
    free, given, other = (run(experiment(FedSimSup(C=0.5, T=t))) for t in (None, 4, 400))
    assert all(free.personal(i).equals(given.personal(i)) for i in EVERYONE)
    assert max(moved(free.personal(i), other.personal(i)) for i in EVERYONE) > 1e-4


def test_clients_say_their_label_proportions_once():
    checks.fedsimsup_clients_say_their_labels_once(FedSimSup)


def test_passes_are_those_of_both_phases_whatever_the_run_s_epochs():
    found = run(experiment(FedSimSup(tau_s=2, tau_theta=3), epochs=7))
    assert [r["gradient_passes"] for r in found.rounds] == [0, *[pytest.approx(5)] * 4]


# lazy mixing


@pytest.mark.parametrize(
    "fields", [{}, {"drop": 0.4}, {"ratio": "bernoulli:0.1"}, {"images": True, "rounds": 6}], ids=str
)
def test_lazy_is_eager_in_a_run(fields):
    checks.fedsimsup_mixes_lazily_as_eagerly(FedSimSup, **fields)


class Server:
    """The server's side of a run of many rounds, in which some clients never take part; replies are drawn."""

    participants, classes = 4, 3

    def __init__(self, method: FedSimSup, clients: int, dtype: torch.dtype, alike: bool = False) -> None:
        self.method, self.clients, self.dtype = method, clients, dtype
        torch.manual_seed(0)
        net = Net(build("mlp", (3,), self.classes, hidden=(3,)), (3,), self.classes, 0, dtype, "mlp", {"hidden": (3,)})
        state, draw = method.init(net), np.random.default_rng(0)
        self.state, self.template, self.rows = state.server, state.rows["theta"], Rows(state.rows)
        for i in range(clients):
            labels = draw.dirichlet([0.3] * 3) * (draw.random(3) < 0.6) + [1e-3 * (i % 3 == c) for c in range(3)]
            labels, size = ([1 / 3] * 3, 20.0) if alike else (labels / labels.sum(), float(draw.integers(1, 40)))
            self.rows = self.rows.with_([i], size=[self.tensor([size])], labels=[self.tensor(labels)])

    def tensor(self, values: Any) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=self.dtype)

    def play(self, rounds: int) -> Server:
        for r in range(rounds):
            draw = np.random.default_rng((1, r))
            ids = tuple(sorted(draw.choice(self.clients - 5, self.participants, replace=False).tolist()))
            known = Facts(r, self.clients, ids, (1.0,) * len(ids), 0.1, rounds, 0)
            self.state, self.rows = self.method.plan(self.state, self.rows, known)
            replies = [self.template.map(lambda v, g=draw: self.tensor(g.normal(size=v.shape))) for _ in ids]
            self.state, self.rows = self.method.server(self.state, self.rows, Up(rows={"model": stack(replies)}), known)
        return self

    def sent(self, client: int) -> Tree:
        return self.method.down(self.state, self.rows[client])["model"]

    @property
    def logged(self) -> int:
        return sum(k.endswith(".beta") for k in self.state["log"])


@pytest.mark.parametrize("similarity", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_lazy_is_eager_over_many_rounds(dtype, tolerance, similarity):
    lazy, eager = (
        Server(FedSimSup(mixing=how, similarity=similarity, C=10.0, T=300), 40, dtype).play(250)
        for how in ("lazy", "eager")
    )
    assert max(moved(lazy.sent(i), eager.sent(i)) for i in range(40)) < tolerance
    assert moved(lazy.sent(39), lazy.template) > 0.1  # who never took part has learnt
    assert eager.logged == 0
    assert lazy.logged < 250


def test_many_thetas_at_once_are_those_one_by_one():
    server = Server(FedSimSup(C=10.0, T=100), 30, torch.float64).play(60)
    rows = [server.rows[i] for i in range(30)]
    at_once = [down["model"] for down in server.method.downs(server.state, rows)]
    assert max(moved(at_once[i], server.sent(i)) for i in range(30)) < 1e-14
    assert moved(at_once[29], server.template) > 0.1


@dataclass(frozen=True)
class Counting(FedSimSup):
    """Counts the thetas that are brought up to date."""

    done: ClassVar[list[int]] = []

    def current(self, log, rows):
        self.done.append(len(rows))
        return super().current(log, rows)


def test_a_round_of_lazy_mixing_costs_the_same_however_many_clients_there_are():
    work, logged, held = {}, {}, {}
    for clients in (200, 800):
        Counting.done.clear()
        server = Server(Counting(), clients, torch.float64, alike=True).play(100)
        work[clients], logged[clients] = sum(Counting.done), server.logged
        held[clients] = sum(server.rows[i]["theta"] is not server.template for i in range(clients))
    assert work == {200: 100 * 4, 800: 100 * 4}  # the participants, and nobody else
    # everybody goes half of the way: after 57 rounds less is left than rounding takes
    assert logged == {200: 57, 800: 57}
    assert max(held.values()) <= 4 * 57
    Counting.done.clear()
    Server(Counting(mixing="eager"), 200, torch.float64, alike=True).play(10)
    assert sum(Counting.done) == 10 * 200


def test_a_round_since_which_everybody_took_part_is_forgotten():
    found = run(experiment(FedSimSup(), ratio=((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)), rounds=3))
    assert {k.partition(".")[0] for k in found.server["log"]} == {"3"}


# supervisors


def sizes_of(network: str, shape: tuple[int, ...], classes: int) -> tuple[int, int]:
    net = Net(build(network, shape, classes), shape, classes, 0, torch.float32, network)
    state = FedSimSup().init(net)
    return state.rows["theta"].drop(net.buffers).size, state.client[0]["supervisor"].drop(net.buffers).size


@pytest.mark.parametrize("classes", [10, 62, 100])
@pytest.mark.parametrize("network", ["lenet5", "cnn4", "convnet3", "mlp"])
def test_the_supervisor_has_about_a_sixth_of_theta_s_parameters(network, classes):
    whole, small = sizes_of(network, (3, 32, 32), classes)
    assert small / whole == pytest.approx(1 / 6, abs=0.012)


def test_what_cannot_be_scaled_says_what_can():
    with pytest.raises(
        UsageError, match=r"tinyvit has no option 'width' to scale it by; networks that have one: .*lenet5"
    ):
        sizes_of("tinyvit", (3, 32, 32), 10)
    assert "tinyvit" in names()


@pytest.mark.parametrize("mixing", ["lazy", "eager"])
def test_clients_draw_from_several_architectures(mixing):
    fields = {"federation": pictures(), "network": "lenet5", "epochs": 1}
    one = checks.fedsimsup_is_its_reference(FedSimSup, {"supervisor": MIXED, "mixing": mixing}, **fields)
    kinds = Counter(next(iter(one.private(i)["supervisor"])).partition(".")[0] for i in EVERYONE)
    assert set(kinds) == {"supervisor-lenet5", "supervisor-cnn4", "supervisor-tinyvit"}
    again = run(experiment(FedSimSup(supervisor=MIXED, mixing=mixing), backend="workers", workers=2, **fields))
    assert all(again.personal(i).equals(one.personal(i)) for i in EVERYONE)


def test_clients_of_one_architecture_are_trained_together(monkeypatch):
    fields = {"federation": pictures(), "network": "lenet5", "epochs": 1, "ratio": 1.0, "rounds": 2}
    groups, train = [], stacked.train

    def watched(task, phases):
        groups.append([p.given[0] for p in phases])
        return train(task, phases)

    monkeypatch.setattr(stacked, "train", watched)
    method = FedSimSup(supervisor=MIXED)
    serial, found = (run(experiment(method, backend=b, **fields)) for b in ("serial", "stacked"))
    assert max(moved(serial.personal(i), found.personal(i)) for i in EVERYONE) < 1e-10
    several = [i for i in EVERYONE if found.context.shards.size("train", i) > 1]  # one alone is trained alone
    drawn = Counter(next(iter(found.private(i)["supervisor"])).partition(".")[0] for i in several)
    seen = Counter((part, len(group)) for group in groups for part in set(group) if len(group) > 1)
    assert all(len(set(group)) == 1 for group in groups)
    assert seen == {("", 7): 2} | {(part, count): 2 for part, count in drawn.items() if count > 1}


def test_supervisors_with_batchnorm_are_refused_where_clients_are_stacked():
    with pytest.raises(UsageError, match=r"cannot run BatchNorm \(layer supervisor-convnet3.body.block1.norm\)"):
        run(experiment(FedSimSup(supervisor="convnet3"), federation=pictures(), network="lenet5", backend="stacked"))


def test_a_supervisor_s_statistics_stay_its_own():
    fields = {"federation": pictures(least=2), "network": "lenet5", "epochs": 1}
    found = checks.fedsimsup_is_its_reference(FedSimSup, {"supervisor": "convnet3"}, **fields)
    name = "supervisor-convnet3.body.block1.norm.running_mean"
    own = [found.private(i)["supervisor"][name] for i in EVERYONE if found.progress.store.visits[i]]
    assert min(float((a - b).abs().max()) for k, a in enumerate(own) for b in own[:k]) > 1e-4


# the rest


@pytest.mark.parametrize(
    ("hyper", "sentence"),
    [
        ({"tau_s": -1}, "FedSimSup.tau_s must be at least 0; found -1."),
        ({"tau_theta": -2}, "FedSimSup.tau_theta must be at least 0; found -2."),
        ({"C": -0.5}, "FedSimSup.C must be at least 0; found -0.5."),
        ({"C": math.nan}, "FedSimSup.C must be at least 0; found nan."),
        ({"gamma": -0.1}, "FedSimSup.gamma must be at least 0; found -0.1."),
        ({"T": 0}, "FedSimSup.T must be at least 1; found 0."),
        ({"share": 0.0}, "FedSimSup.share must be above 0 and at most 1; found 0.0."),
        ({"share": 1.5}, "FedSimSup.share must be above 0 and at most 1; found 1.5."),
        ({"structure": "both"}, "FedSimSup.structure must be parallel or serial; found 'both'."),
        ({"mixing": "never"}, "FedSimSup.mixing must be lazy or eager; found 'never'."),
        ({"supervisor": ""}, "FedSimSup.supervisor must be 'scaled' or names of networks; found ''."),
        ({"supervisor": "mlp,"}, "FedSimSup.supervisor must be 'scaled' or names of networks; found 'mlp,'."),
    ],
    ids=str,
)
def test_impossible_values_are_refused(hyper, sentence):
    with pytest.raises(UsageError) as error:
        FedSimSup(**hyper)
    assert str(error.value) == sentence


def test_a_serial_structure_has_no_other_supervisor_and_needs_a_body():
    with pytest.raises(UsageError, match="has its own head for a supervisor"):
        FedSimSup(structure="serial", supervisor="mlp")
    with pytest.raises(UsageError, match="structure=serial shares the body; found a network without one"):
        run(experiment(FedSimSup(structure="serial"), network="logistic", network_options={}))


def test_defaults_are_the_paper_s():
    assert FedSimSup() == FedSimSup(
        tau_s=1, tau_theta=1, C=40.0, gamma=3 / 7, T=None, similarity=True, structure="parallel", supervisor="scaled",
        share=1 / 6, mixing="lazy",
    )  # fmt: skip
