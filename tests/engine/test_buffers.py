"""Norm layers' running statistics under each policy: averaged with the weights, kept by each client, or absent."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from harness import SIZES, experiment, federation, moved, run
from idiolect.engine.loop import loop
from idiolect.engine.progress import Progress
from idiolect.engine.serial import Serial
from idiolect.errors import UsageError
from idiolect.method import Method, Rows, State, Up
from idiolect.nets import Network

FEDERATION = federation(SIZES, images=True)


def small():
    """A convolutional network with BatchNorm that trains in no time."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Network(body, nn.Linear(3, 3))


def prepared(method="fedavg", **fields):
    return experiment(method, federation=FEDERATION, **({"network": small(), "rounds": 3} | fields))


MEAN, VARIANCE = "body.1.running_mean", "body.1.running_var"


@dataclass(frozen=True)
class Watched(Method):
    """FedAvg that writes down what arrives and what it leaves."""

    seen: ClassVar[list] = []

    def init(self, net):
        return State(server={"model": net.weights})

    def local(self, me, down, mine):
        w = me.train(down["model"])
        self.seen.append((me.round, me.id, me.visits, down["model"].clone(), w.clone()))
        return Up(mean={"model": w}), mine


def watched(**fields):
    """The run, and what arrived and left at every client: [(round, client, visits, arrived, left)]."""
    Watched.seen.clear()
    servers = []
    run_ = prepared(Watched(), **fields)
    context = run_.context()
    progress = Progress(context.state.server, Rows(context.state.rows), context.store(8))
    with torch.random.fork_rng(devices=[]):
        loop(run_, context, Serial(context), progress, lambda report: servers.append(progress.server["model"].clone()))
    return run_, servers, list(Watched.seen)


def test_the_counter_is_no_weight():
    context = prepared().context()
    assert set(context.net.buffers) == {MEAN, VARIANCE}
    assert all(v.is_floating_point() for v in context.net.weights.values())
    assert not set(context.net.trainable) & context.net.buffers


def test_average_statistics_arrive_and_are_averaged_as_weights_are():
    _, servers, seen = watched(buffers="average")
    for round in range(3):
        mine = [s for s in seen if s[0] == round]
        assert all(arrived.equals(servers[round]) for _, _, _, arrived, _ in mine)
        total = sum(SIZES[i] for _, i, *_ in mine)
        for name in servers[0]:
            mean = sum(left[name] * SIZES[i] / total for _, i, _, _, left in mine)
            torch.testing.assert_close(servers[round + 1][name], mean, rtol=0, atol=1e-12)


def test_local_statistics_come_back_to_their_client_and_to_nobody_else():
    run_, servers, seen = watched(buffers="local", ratio=0.65, rounds=4)
    buffers = run_.context().net.buffers
    left = {}
    again = 0
    for round, i, visits, arrived, trained in seen:
        expected = left[i] if visits else servers[round]
        assert arrived.pick(buffers).equals(expected.pick(buffers))
        assert arrived.drop(buffers).equals(servers[round].drop(buffers))  # the rest is shared
        again += visits > 0 and not trained.pick(buffers).equals(servers[round].pick(buffers))
        left[i] = trained
    assert again > 3


def test_a_client_predicts_with_its_own_statistics():
    found = run(prepared(buffers="local", rounds=2, ratio=[[0, 1, 2], [1, 2, 4]]))
    buffers = found.context.net.buffers
    personal = [found.personal(i) for i in range(8)]
    shared = found.server["model"]
    assert all(w.drop(buffers).equals(shared.drop(buffers)) for w in personal)
    for i in (0, 1, 2, 4):
        assert not personal[i].pick(buffers).equals(shared.pick(buffers))
        assert personal[i].pick(buffers).equals(found.private(i)["own buffers"])
    assert all(personal[i].equals(shared) for i in (3, 5, 6, 7))  # never took part: what it would receive
    assert len({float(personal[i][MEAN][0]) for i in (0, 1, 2, 4)}) == 4


def test_statistics_are_followed_through_training_on_a_part_of_the_samples():
    @dataclass(frozen=True)
    class Parted(Method):
        def init(self, net):
            return State(server={"model": net.weights})

        def local(self, me, down, mine):
            return Up(mean={"model": me.split(0.5)[0].train(down["model"])}), mine

    found = run(prepared(Parted(), buffers="local", rounds=1, ratio=((2,),)))
    trained = found.server["model"].pick(found.context.net.buffers)
    assert found.private(2)["own buffers"].equals(trained)
    assert not trained.equals(found.context.net.weights.pick(trained))


def test_a_dropped_reply_leaves_a_client_its_old_statistics():
    lists = [[0, 1, 2, 3, 4, 5, 6, 7]]
    before = run(prepared(buffers="local", rounds=1, ratio=lists, seed=5))
    after = run(prepared(buffers="local", rounds=2, ratio=lists, seed=5))
    lost = run(prepared(buffers="local", rounds=2, ratio=lists, seed=5, drop=0.4))
    dropped = [set(r["dropped"]) for r in lost.rounds]
    once = [i for i in range(8) if i not in dropped[1] and i in dropped[2]]
    assert once
    for i in once:
        own = lost.private(i)["own buffers"]
        assert own.equals(before.private(i)["own buffers"])
        assert not own.equals(after.private(i)["own buffers"])


@pytest.mark.parametrize("method", ["fedper", "fedrep", "ditto", "fedala", "fedamp", "scaffold"])
@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_every_policy_gives_the_same_bits_in_workers(method, policy):
    fields = {"buffers": policy, "momentum": 0.0}
    one, two = run(prepared(method, **fields)), run(prepared(method, backend="workers", workers=2, **fields))
    assert all(one.personal(i).equals(two.personal(i)) for i in range(8))
    assert one.clients == two.clients
    assert all(v.isfinite().all() for i in range(8) for v in one.personal(i).values())


def test_dropped_statistics_are_nowhere_and_batches_have_their_own():
    found = run(prepared(buffers="drop"))
    assert not found.context.net.buffers
    assert not [k for k in found.server["model"] if "running" in k]
    w, task = found.personal(0), found.context.task
    x, _ = found.context.shards.part("test", 0)
    live = task.lay(w, ())
    with torch.no_grad():
        logits = task.logits(live, x)
        pixels = nn.functional.conv2d(x, w["body.0.weight"], w["body.0.bias"], stride=2)
        mean, var = pixels.mean((0, 2, 3), keepdim=True), pixels.var((0, 2, 3), unbiased=False, keepdim=True)
        normal = (pixels - mean) / (var + 1e-5).sqrt() * w["body.1.weight"][:, None, None] + w["body.1.bias"][
            :, None, None
        ]
        expected = normal.relu().mean((2, 3)) @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_a_network_given_as_an_object_follows_the_policy_and_stays_as_it_was():
    network = small()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    for policy in ("average", "local", "drop"):
        found = run(prepared(network=network, buffers=policy, rounds=1))
        assert bool(found.context.net.buffers) == (policy != "drop")
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert network.body[1].track_running_stats


def test_statistics_that_need_the_counter_are_refused():
    network = small()
    network.body[1].momentum = None
    with pytest.raises(UsageError) as refused:
        run(prepared(network=network))
    assert str(refused.value) == "BatchNorm with momentum=None averages by its counter; give it a fixed momentum."


def test_weights_are_shared_under_every_policy():
    shared = {p: run(prepared(buffers=p, ratio=1.0, rounds=1)).server["model"] for p in ("average", "local", "drop")}
    names = list(shared["drop"])
    # in the first round everyone trains on batch statistics, whatever becomes of the running ones
    assert moved(shared["average"].pick(names), shared["local"].pick(names)) == 0
    assert moved(shared["average"].pick(names), shared["drop"]) < 1e-12
