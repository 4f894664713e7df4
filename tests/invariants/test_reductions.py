"""Reductions to both sides: with its knob at one end a method is another, to the bit; with it on, it does something."""

import pytest
import torch

import checks
from checks import EQUAL, PLAIN, apart, close_shared, found, known, named, same_personal, same_shared
from harness import experiment, federation, moved
from idiolect import catalogue
from idiolect.data import Federation
from idiolect.engine import orders

ALA, AMP, DITTO = catalogue.find("fedala"), catalogue.find("fedamp"), catalogue.find("ditto")
PER, REP, PROX = catalogue.find("fedper"), catalogue.find("fedrep"), catalogue.find("fedprox")
SCAFFOLD, TUNE, LOCAL = catalogue.find("scaffold"), catalogue.find("finetune"), catalogue.find("local")

# FedAvg


@pytest.mark.parametrize("images", [False, True], ids=["mlp", "convnet with BatchNorm"])
def test_fedavg_of_one_client_is_centralised_to_the_bit(images):
    """A plain loop of torch, whose optimiser begins anew in every round."""
    fields = {"federation": federation((11,), images), "images": images, "ratio": 1.0, "rounds": 2}
    result = found(named("fedavg"), **fields)
    run_, context = result.run, result.context
    module = run_.module().double()
    x, y = context.shards.part("train", 0)
    for round in range(2):
        lr = run_.lr * run_.decay**round
        sgd = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5, weight_decay=0.01)
        for epoch in range(2):
            for batch in orders.batches(11, 4, run_.seed, round, 0, 0, epoch):
                sgd.zero_grad()
                torch.nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
                sgd.step()
    state = {k: v for k, v in module.state_dict().items() if "num_batches" not in k}
    shared = result.server["model"]
    assert set(state) == set(shared)
    apart = {k: float((state[k] - v).abs().max()) for k, v in shared.items() if not torch.equal(state[k], v)}
    assert not apart or (images and max(apart.values()) < 1e-12)  # convolutions: another memory layout


def alike(count, size=6):
    """Clients of the same data, all samples of which are one and the same, so that no order matters."""
    fed = federation((size,))
    row = fed.train[0][:1]
    return Federation(
        fed.dataset, (row.repeat(size),) * count, (row[:0],) * count, tuple(fed.test) * count, "alike", "alike"
    )


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_identical_clients_are_one_client(name):
    fields = PLAIN | {"ratio": 1.0}
    one, many = found(named(name), federation=alike(1), **fields), found(named(name), federation=alike(5), **fields)
    if name == "scaffold":
        close_shared(one, many)
        close_shared(many, found(named("fedavg"), federation=alike(5), **fields))
    else:
        same_shared(one, many)
    assert moved(one.server["model"], one.context.net.weights) > 1e-2


RATES_OF_THEIR_OWN = (
    *("scaffold", "fedala", "fedah", "fedpam", "fedaims", "fedsimsup"),
    *("fedas", "pfedme", "fedpac", "pfedfda", "fedaf"),
)
DRAWN_APART = ("ifca", "pfedhn")  # clients begin with other models than the network's first


@pytest.mark.parametrize("name", [n for n in catalogue.names() if n not in RATES_OF_THEIR_OWN + DRAWN_APART])
def test_without_a_learning_rate_nothing_moves(name):
    result = found(named(name), lr=0.0, **(PLAIN if name == "perfedavg" else {}))
    initial = result.context.net.weights
    for i in range(8):
        personal = result.personal(i)
        own = personal.pick(k for k in personal if k in initial)  # beside which FedProto has prototypes
        assert own.equals(initial.pick(own))


@pytest.mark.parametrize(
    ("kind", "hyper"),
    [(catalogue.find("fedavg"), {}), (PROX, {}), (PER, {}), (REP, {"head_epochs": 1}), (DITTO, {}), (ALA, {})],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_the_server_holds_the_mean_by_samples(kind, hyper):
    checks.the_server_holds_the_mean_by_samples(kind, **hyper)


# Local


def test_local_knows_nobody_else():
    checks.local_knows_nobody_else(LOCAL)


def test_four_ways_to_be_local():
    """Local, FedPer without a shared part, Ditto's private model and FedAMP without a pull: the same bits."""
    for other in (checks.all_private(PER)(), DITTO(lam=0.0), AMP(lam=0.0)):
        same_personal(found(other), known("local"))
    apart(known("local"), known("fedavg"))


# FedProx


def test_fedprox_without_mu_is_fedavg():
    checks.fedprox_without_mu_is_fedavg(PROX)


def test_fedprox_of_one_step_is_fedavg_whatever_mu():
    checks.fedprox_of_one_step_is_fedavg(PROX)


def test_fedprox_holds_clients_back():
    checks.fedprox_holds_clients_back(PROX)
    apart(known("fedprox", {"mu": 0.5}), known("fedavg"))


def landed(result, start, anchor, i, round, steps_from):
    """Plain steps with lr * strength = 1: every step lands on `anchor` minus lr times the gradient."""
    context, w = result.context, start
    x, y = context.shards.part("train", i)
    for epoch in range(result.run.epochs):
        for batch in orders.batches(len(y), 4, 3, round, i, 0, epoch):
            leaf = w.map(lambda v: v.clone().requires_grad_())
            logits = torch.func.functional_call(context.net.module, dict(leaf), (x[batch],))
            loss = torch.nn.functional.cross_entropy(logits, y[batch])
            grads = torch.autograd.grad(loss, list(leaf.values()))
            w = type(w)({k: anchor[k] - steps_from * g for k, g in zip(leaf, grads, strict=True)})
    return w


def test_fedprox_with_lr_times_mu_1_lands_a_step_from_the_received_model():
    result = found(PROX(mu=10.0), **PLAIN, rounds=1, ratio=((0,),), lr=0.1)
    start = result.context.net.weights
    assert moved(result.server["model"], landed(result, start, start, 0, 0, 0.1)) < 1e-12


# FedPer, FedRep


def test_fedper_with_nothing_private_is_fedavg():
    checks.fedper_with_nothing_private_is_fedavg(PER)


def test_fedper_with_all_private_is_local():
    checks.fedper_with_all_private_is_local(PER)


@pytest.mark.parametrize("kind", [PER, REP], ids=lambda k: k.__name__)
def test_the_head_stays_private(kind):
    checks.the_head_stays_private(kind)


def test_fedper_is_neither():
    for name in ("fedavg", "local"):
        apart(known("fedper"), known(name))


def test_fedrep_with_nothing_private_and_no_head_phase_is_fedavg():
    checks.fedrep_with_nothing_private_and_no_head_phase_is_fedavg(REP)


def test_fedrep_without_a_head_phase_keeps_all_heads():
    checks.fedrep_without_a_head_phase_keeps_all_heads(REP)


def test_fedrep_without_a_body_phase_is_a_linear_probe():
    checks.fedrep_without_a_body_phase_is_a_linear_probe(REP)


def test_fedrep_is_not_fedper():
    apart(known("fedrep", {"head_epochs": 2}), known("fedper"))


# Ditto


def test_ditto_without_lam_is_local_beside_fedavg():
    checks.ditto_without_lam_is_local_beside_fedavg(DITTO)


def test_ditto_s_server_knows_nothing_of_lam():
    checks.dittos_server_knows_nothing_of_lam(DITTO)


def test_ditto_with_a_large_lam_pulls_to_the_received_model():
    checks.ditto_with_a_large_lam_pulls_to_the_received_model(DITTO)


def test_ditto_with_lr_times_lam_1_lands_a_step_from_the_received_model():
    result = found(DITTO(lam=10.0), **PLAIN, rounds=1, ratio=1.0, lr=0.1)
    start = result.context.net.weights
    for i in range(8):
        assert moved(result.personal(i), landed(result, start, start, i, 0, 0.1)) < 1e-12


# SCAFFOLD


def test_scaffold_begins_as_the_uniform_fedavg_and_then_leaves_it():
    checks.scaffold_begins_as_the_uniform_fedavg(SCAFFOLD)


def test_scaffold_with_c_held_at_0_is_fedavg():
    checks.scaffold_with_c_held_at_0_is_fedavg(SCAFFOLD)


def test_scaffold_of_one_client_is_fedavg():
    checks.scaffold_of_one_client_is_fedavg(SCAFFOLD)


def test_scaffold_with_server_lr_0_stays_where_it_is():
    result = found(SCAFFOLD(server_lr=0.0), **PLAIN)
    assert result.server["model"].equals(result.context.net.weights)
    half, whole = (found(SCAFFOLD(server_lr=s), **PLAIN, rounds=1) for s in (0.5, 1.0))
    start = half.context.net.weights
    assert moved(half.server["model"] - start, (whole.server["model"] - start) * 0.5) < 1e-12


def test_scaffold_weighs_clients_alike():
    """Not by samples."""
    fields = PLAIN | {"ratio": 1.0, "rounds": 1}
    whole = found(named("scaffold"), **fields).server["model"]
    alone = [found(named("scaffold"), **(fields | {"ratio": ((i,),)})).server["model"] for i in range(8)]
    for name, value in whole.items():
        torch.testing.assert_close(value, sum(w[name] for w in alone) / 8, rtol=0, atol=1e-12)


# FedALA


def test_fedala_that_never_learns_its_mixture_is_fedavg():
    checks.fedala_that_never_learns_its_mixture_is_fedavg(ALA)


def test_fedala_with_mix_held_at_0_is_fedper():
    checks.fedala_with_mix_held_at_0_is_fedper(ALA)


def test_fedala_learns_a_mixture():
    checks.fedala_learns_a_mixture(ALA)
    apart(known("fedala"), known("fedper"))


def test_fedala_of_one_client_has_nothing_to_mix():
    checks.fedala_of_one_client_has_nothing_to_mix(ALA)


def test_fedala_s_mixture_is_exact_at_both_ends():
    from idiolect.methods.fedala import blend

    new, old = ({k: v[i] for k, v in checks.models(2).items()} for i in range(2))
    new, old = type(checks.models(1))(new), type(checks.models(1))(old)
    assert blend(new, old, old.ones()).equals(new)
    assert blend(new, old, old.zeros()).equals(old)
    assert blend(new, new, old.zeros() + 0.3).equals(new)
    part = old.pick(["a"])
    assert torch.equal(blend(new, part, part.zeros())["b"], new["b"])  # lower layers are taken whole


# FedAMP


def test_fedamp_without_lam_is_local():
    checks.fedamp_without_lam_is_local(AMP)
    same_personal(found(AMP(lam=0.0, attention="cosine")), known("local"))


@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_fedamp_pulls_to_its_cloud_model(attention):
    checks.fedamp_pulls_to_its_cloud_model(AMP, attention=attention)
    apart(known("fedamp", {"attention": attention}), known("local"))


def test_fedamp_of_a_deep_network_does_not_fade_into_local():
    """With sigma = 1 the weights of far models underflow; the median distance keeps them."""
    fields = {"images": True, "rounds": 2, "ratio": 1.0, "epochs": 1}
    run_, _, states = checks.history(AMP(), **fields)
    xi = AMP().weights(checks.stack([states[-1].rows[i]["model"] for i in range(run_.clients)]))
    assert float(xi.diagonal().max()) < 0.95
    assert float((xi - torch.diag(xi.diagonal())).max()) > 0.01


# FineTune


@pytest.mark.parametrize("inner", ["fedavg", "fedper", "ditto"])
def test_finetune_of_no_epochs_is_its_inner(inner):
    checks.finetune_of_no_epochs_is_its_inner(TUNE, inner)


@pytest.mark.parametrize("inner", ["fedavg", "fedper"])
def test_finetune_changes_no_training(inner):
    if inner == "fedper":
        checks.finetune_changes_no_training(TUNE, inner)
    else:
        same_shared(found(named("finetune")), known("fedavg"))


def test_finetune_of_the_head_leaves_the_body():
    checks.finetune_of_the_head_leaves_the_body(TUNE)


def test_finetune_fits_each_client_better():
    checks.finetune_fits_each_client_better(TUNE)


def test_equal_sizes_are_equal_weights():
    assert experiment(named("fedavg"), **EQUAL).federation.clients == 8
