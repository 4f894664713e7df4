"""bfloat16 as an option: networks compute in it, everything else stays as it is; refused where it cannot be."""

from __future__ import annotations

import pytest
import torch

from harness import SIZES, experiment, moved, run
from idiolect import Run, precision
from idiolect.engine.wire import tensors
from idiolect.errors import UsageError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedproto import FedProto
from idiolect.methods.fedrep import FedRep


@pytest.fixture
def able(monkeypatch):
    """Any processor can imitate it."""
    monkeypatch.setattr(precision, "supported", lambda device: True)


BOTH = {"dtype": "float32", "rounds": 3}


@pytest.mark.parametrize("method", [FedAvg(), FedRep(), FedProto()])
def test_it_is_near_float32_and_something_else(method, able):
    plain, half = (run(experiment(method, **BOTH, autocast=how)) for how in (None, "bfloat16"))
    apart = [moved(plain.personal(i), half.personal(i)) for i in range(len(SIZES))]
    assert 1e-5 < max(apart) < 0.1
    losses = [one.summary["loss"]["received"]["last"] for one in (plain, half)]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)


def test_networks_compute_in_bfloat16_and_weights_losses_and_features_stay_float32(able):
    found = run(experiment(FedAvg(), images=True, **BOTH, autocast="bfloat16"))
    context, seen = found.context, []
    for m in context.task.live.modules():
        m.register_forward_hook(lambda m, x, y: seen.append((type(m).__name__, y.dtype)))
    me = context.client(next(iter(jobs(found))))
    w = me.train(found.server["model"])
    assert ("Conv2d", torch.bfloat16) in seen
    assert ("Linear", torch.bfloat16) in seen
    assert {t.dtype for t in tensors([w, found.server, me.features(w), me.logits(w), me.loss(w)])} == {torch.float32}


def jobs(found):
    from idiolect.engine.turns import turns

    return turns(found.context, found.progress, "local", [0])


def test_workers_give_the_same_bits(able):
    serial, workers = (
        run(experiment(FedAvg(), images=True, **BOTH, autocast="bfloat16", backend=how))
        for how in ("serial", "workers")
    )
    assert serial.server["model"].equals(workers.server["model"])


def test_stacked_clients_compute_in_it_too(able):
    plain, half, serial = (
        run(experiment(FedAvg(), **BOTH, autocast=how, backend=backend))
        for how, backend in ((None, "stacked"), ("bfloat16", "stacked"), ("bfloat16", "serial"))
    )
    model = "model"
    assert moved(half.server[model], plain.server[model]) > 1e-5
    assert moved(half.server[model], serial.server[model]) < 0.1


def test_it_is_off_by_default_and_recorded(able):
    assert Run(method="fedavg").autocast is None
    chosen = Run(method="fedavg", autocast="bfloat16")
    assert 'autocast = "bfloat16"' in chosen.to_toml()
    assert Run.from_toml(chosen.to_toml()) == chosen


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"autocast": "float16"}, "autocast must be one of bfloat16; found 'float16'."),
        ({"autocast": "bfloat16", "dtype": "float64"}, "weights of float32; found dtype=float64"),
    ],
)
def test_what_it_cannot_go_with_is_refused(fields, said, able):
    with pytest.raises(UsageError, match=said):
        Run(method="fedavg", **fields)


@pytest.mark.parametrize(("flags", "supported"), [("avx2 avx512f", False), ("avx512f avx512_bf16", True), ("", False)])
def test_a_processor_without_it_is_refused(flags, supported, monkeypatch):
    monkeypatch.setattr(precision, "_flags", lambda: set(flags.split()))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    if supported:
        assert Run(method="fedavg", autocast="bfloat16").autocast == "bfloat16"
    else:
        with pytest.raises(UsageError, match="needs a processor with its instructions, which cpu lacks; leave it out"):
            Run(method="fedavg", autocast="bfloat16")
