from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import SGD, Method, State, Up, UsageError, unit_interval


@dataclass(frozen=True)
class FedAH(Method):
    """FedAH. Zhou et al., 2024, Algorithm 1: FedRep whose head is shared as well; a round's head training starts from a
    mixture of the client's last head and the shared one, and each client learns its mixing weights.

    Departs from the paper: the mixing weights have their own rate, 1 as in the authors' code; `weight_lr=None` is the
    text's, the rate of the run. From the public code: a client that is only evaluated learns its mixture on the side
    and keeps nothing of it; the frozen body is in eval mode.
    """

    head_epochs: int = 1
    body_epochs: int | None = None
    weight_lr: float | None = 1.0

    def __post_init__(self):
        for name in ("head_epochs", "body_epochs", "weight_lr"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UsageError(f"FedAH.{name} must be 0 or more; found {value}.")

    def init(self, net):
        return State(server={"model": net.weights}, client={"model": net.head, "mix": net.head.ones()})

    def mixture(self, task, mix, batch, new, old):
        return task.loss(aggregated(new, old, mix), batch)

    def learn(self, me, new, mine):
        """The mixing weights of this round."""
        # eq. 4: by the chain rule, d loss / d mix = d loss / d head * (new - old)
        return me.train(
            mine["mix"], loss=self.mixture, given=(new, mine["model"]), features=new, epochs=self.head_epochs,
            lr=self.weight_lr, optimizer=SGD(), project=unit_interval, order=9,
        )  # fmt: skip

    def local(self, me, down, mine):
        new, old = down["model"], mine["model"]
        mix = self.learn(me, new, mine)
        w = me.train(aggregated(new, old, mix), only=old, epochs=self.head_epochs, order=0)  # eq. 5
        w = me.train(w, only=w.drop(old), epochs=self.body_epochs, order=1)  # eq. 6
        return Up(mean={"model": w}), {"model": w.pick(old), "mix": mix}

    def personal(self, me, down, mine):
        new = down["model"]
        return aggregated(new, mine["model"], self.learn(me, new, mine))


def aggregated(new, old, mix):
    return new | (old + (new.pick(old) - old) * mix)  # eq. 3; the body is the received one
