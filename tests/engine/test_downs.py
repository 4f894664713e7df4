"""Downloads are made for several clients at once, where the method offers that, and reach the clients they are for."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from harness import SIZES, experiment, run
from idiolect.method import Method, State, Up, Wrapper
from idiolect.methods.fedsimsup import FedSimSup
from idiolect.wrap.finetune import FineTune

ASKED: list[int] = []


@dataclass(frozen=True)
class Numbered(Method):
    """Every client is sent its own number."""

    def init(self, net):
        return State(client={"model": net.weights}, rows={"number": torch.tensor(-1)})

    def hello(self, me, down, mine):
        return {"number": torch.tensor(me.id)}

    def down(self, server, row):
        return {"number": row["number"]}

    def downs(self, server, rows):
        ASKED.append(len(rows))
        return super().downs(server, rows)

    def local(self, me, down, mine):
        assert down["number"] == me.id
        return Up(), mine

    def personal(self, me, down, mine):
        assert down["number"] == me.id
        return mine["model"]


@dataclass(frozen=True)
class Outer(Wrapper):
    """Changes nothing."""


@dataclass(frozen=True)
class Negative(Wrapper):
    """Sends something else, one by one."""

    inner: Method = field(default_factory=Numbered)

    def down(self, server, row):
        return {"number": -self.inner.down(server, row)["number"]}


@pytest.mark.parametrize("block", [1, 2, 64])
@pytest.mark.parametrize("method", [Numbered(), Outer(Numbered())])
def test_each_client_gets_its_own_a_block_at_a_time(method, block, monkeypatch):
    monkeypatch.setattr("idiolect.engine.turns.BLOCK", block)
    ASKED.clear()
    run(experiment(method, rounds=2, ratio=1.0))
    assert max(ASKED) == min(block, len(SIZES))


def test_a_wrapper_with_a_download_of_its_own_is_asked_for_that():
    method, rows = Negative(), [{"number": torch.tensor(k)} for k in (3, 5)]
    assert [int(down["number"]) for down in method.downs({}, rows)] == [-3, -5]


@pytest.mark.parametrize("method", [FedSimSup(), FineTune(FedSimSup(), epochs=1)])
def test_fedsimsup_evaluates_the_same_in_blocks_and_one_by_one(method, monkeypatch):
    at_once = run(experiment(method))
    monkeypatch.setattr("idiolect.engine.turns.BLOCK", 1)
    one_by_one = run(experiment(method))
    for name, loss in at_once.summary["loss"]["received"].items():
        assert loss == pytest.approx(one_by_one.summary["loss"]["received"][name], abs=1e-12)
