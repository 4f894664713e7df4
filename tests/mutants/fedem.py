"""Mistakes in fedem.py, and what notices them."""

import torch

from checks import CLIENTS, against, apart, found
from idiolect import catalogue
from idiolect.engine.work import Job
from idiolect.tree import Tree

FEDEM, TWO = against("fedem"), against("fedem", {"components": 2})


def own(w, m):
    """A component under the network's names."""
    return w if m == 0 else w.under(f"component{m}")


def answers_are_mixtures(kind):
    one = found(kind())
    task = one.context.task
    for i in range(CLIENTS):
        x, pi = one.context.shards.part("test", i)[0], one.private(i)["pi"]
        mixed = sum(
            p * task.logits(own(w, m), x).softmax(1)
            for m, (p, w) in enumerate(zip(pi, one.server.values(), strict=True))
        )
        torch.testing.assert_close(one.run.method.logits(task, one.personal(i), x).exp(), mixed, rtol=0, atol=1e-12)


def components_begin_apart(kind):
    server = found(kind(), rounds=0).server
    models = [own(w, m) for m, w in enumerate(server.values())]
    assert not any(a.equals(b) for k, a in enumerate(models) for b in models[:k])


def of_one_component_is_fedavg(kind):
    one, fedavg = found(kind(1)), found(catalogue.build("fedavg"))
    for i in range(CLIENTS):
        w = one.personal(i).drop(["pi"])
        assert max(float((w[k] - v).abs().max()) for k, v in fedavg.personal(i).items()) < 1e-12


def more_components_are_not_one(kind):
    one, fedavg = found(kind()), found(catalogue.build("fedavg"))
    one.personal = lambda i, personal=one.personal: Tree(personal(i)).pick(fedavg.personal(0))
    apart(one, fedavg)


def hopeless_samples_have_shares(kind):
    """Their likelihood is 0 under every component."""
    context = found(kind(), rounds=0).context
    down = {k: w.map(lambda v: 1e3 * v) for k, w in context.state.server.items()}
    mine = context.store(CLIENTS).read(0)
    _, mine = kind().local(context.client(Job("local", 0, 0, 0, down, mine)), down, mine)
    assert abs(float(mine["pi"].sum()) - 1) < 1e-12


def a_component_of_no_weight_is_no_danger(kind):
    one = found(kind(), rounds=0)
    w, x = one.personal(0), one.context.shards.part("test", 0)[0]
    w = Tree({k: v.clone().requires_grad_() for k, v in (w | {"pi": torch.eye(3).double()[0]}).items()})
    kind().logits(one.context.task, w, x).sum().backward()
    assert all(v.grad.isfinite().all() for v in w.values())


MUTANTS = [
    ("pi.log() - losses", "pi.log() + losses", FEDEM),
    ("pi.log() - losses", "-losses", FEDEM),  # the E-step without the prior
    ("pi.log() - losses", "pi.log() + 0 * losses", FEDEM),  # no E-step
    ("(pi.log() - losses).softmax(1)", "(pi.log() - losses).softmax(0)", FEDEM),
    (
        "(pi.log() - losses).softmax(1)",
        "(pi * (-losses).exp()) / (pi * (-losses).exp()).sum(1, keepdim=True)",
        hopeless_samples_have_shares,
    ),
    ("me.logits(down[slot], part)", 'me.logits(down["component0"], "")', FEDEM),
    ("beside=q[:, m]", "beside=q[:, 0]", FEDEM),
    ("batch.mean(batch.beside * ", "batch.mean(", FEDEM),
    ("batch.mean(batch.beside * ", "batch.mean(batch.beside / batch.beside.mean() * ", FEDEM),
    ('{"pi": q.mean(0)}', "mine", FEDEM),
    ('{"pi": q.mean(0)}', '{"pi": self.share(me, trained, mine["pi"]).mean(0)}', FEDEM),  # of those just trained
    ("Up(mean=trained)", "Up(mean=trained, weight=1)", TWO),
    ('net.fresh(f"component {m}")', 'net.fresh("component")', components_begin_apart),
    ("found + pi.log()", "found", answers_are_mixtures),
    ("task.logits(w, x, part).log_softmax(1)", "task.logits(w, x, part)", answers_are_mixtures),  # of logits
    ("(found + pi.log()).logsumexp(2)", "(found * pi).sum(2)", answers_are_mixtures),
    (".clamp(min=torch.finfo(found.dtype).tiny)", "", a_component_of_no_weight_is_no_danger),
    ("order=0)", "order=m)", FEDEM),
    ("(pi.log() - losses).softmax(1)", "(pi.log() - losses).softmax(1) / 2", of_one_component_is_fedavg),
    ("(pi.log() - losses).softmax(1)", "torch.eye(len(pi))[0].double().expand_as(losses)", more_components_are_not_one),
]
