from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import Method, State, Tree, Up, UsageError


@dataclass(frozen=True)
class FedEM(Method):
    """FedEM. Marfoq et al., NeurIPS 2021, Algorithm 1: several shared models, the components; a client predicts with a
    mixture of all of them, whose weights pi are its own. It trains each of them on its samples by how much they are
    that component's.

    Departs from the paper: a round's means are over those who take part; all components see the same batches. From the
    public code: who is away from a round has no part in its means.
    """

    components: int = 3

    def __post_init__(self):
        if self.components < 1:
            raise UsageError(f"FedEM.components must be at least 1; found {self.components}.")

    @property
    def parts(self):
        """The components' slots and networks: the first is the run's own network, the others stand beside it."""
        return {f"component{m}": f"component{m}" if m else "" for m in range(self.components)}

    def init(self, net):
        server = {"component0": net.weights}
        for m, part in enumerate(self.parts):
            if m:
                server[part] = net.twin(part) | net.fresh(f"component {m}").prefixed(part)
                if server[part].under(part).equals(net.weights):
                    raise UsageError("FedEM's components begin apart; this network begins alike however it is drawn.")
        return State(server=server, client={"pi": torch.full((self.components,), 1 / self.components, dtype=net.dtype)})

    def share(self, me, down, pi):
        """The E-step: q(z = m) of every training sample, which is as pi_m exp(-loss under m). [n, M]"""
        logits = [me.logits(down[slot], part) for slot, part in self.parts.items()]
        losses = torch.stack([me.task.losses(found, me.labels) for found in logits], dim=1)
        return (pi.log() - losses).softmax(1)

    def loss(self, task, w, batch, part):
        return batch.mean(batch.beside * task.losses(task.logits(w, batch.x, part), batch.y))

    def local(self, me, down, mine):
        q = self.share(me, down, mine["pi"])
        trained = {
            slot: me.train(down[slot], loss=self.loss, given=(part,), beside=q[:, m], order=0)
            for m, (slot, part) in enumerate(self.parts.items())
        }
        return Up(mean=trained), {"pi": q.mean(0)}  # the M-step

    def personal(self, me, down, mine):
        w = Tree({"pi": mine["pi"]})
        for slot in self.parts:
            w |= down[slot]
        return w

    def logits(self, task, w, x):
        """The logarithm of the sum over m of pi_m softmax(logits of m)."""
        found = torch.stack([task.logits(w, x, part).log_softmax(1) for part in self.parts.values()], dim=2)
        pi = w["pi"].clamp(min=torch.finfo(found.dtype).tiny)  # the gradient at 0 would be no number
        return (found + pi.log()).logsumexp(2)
