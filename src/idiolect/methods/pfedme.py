from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up, UsageError, gradient


@dataclass(frozen=True)
class PFedMe(Method):
    """pFedMe. T Dinh et al., NeurIPS 2020, Algorithm 1: a client's own model theta minimises
    F(theta) + lam/2 |theta - w|^2, and the shared w, which never sees the data, follows theta.

    Departs from the paper: the local iterations are the batches of the run's epochs, and theta goes on from batch to
    batch; each client takes the server's step of beta before it sends, which gives the same mean; `weights="samples"`
    weighs clients by samples. From the public code: beta is not 0; a client keeps theta and predicts with it, not with
    w or with what is received next; participants alone train; theta has no weight decay but the run's.
    """

    lam: float = 15.0
    inner_steps: int = 5
    personal_lr: float = 0.01
    beta: float = 1.0
    weights: str = "uniform"

    def __post_init__(self):
        if self.weights not in ("uniform", "samples"):
            raise UsageError(f"PFedMe.weights must be 'uniform' or 'samples'; found '{self.weights}'.")
        if self.inner_steps < 1:
            raise UsageError(f"PFedMe.inner_steps must be 1 or more; found {self.inner_steps}.")
        for name in ("lam", "personal_lr", "beta"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"PFedMe.{name} must be 0 or more; found {getattr(self, name)}.")

    def init(self, net):
        return State(server={"model": net.weights}, client={"model": net.weights})

    def iterate(self, task, both, batch, lr, decay):
        """One local iteration of theta, under the network's names, and of w, under names of its own."""
        w = both.under("w")
        theta = both.pick(w)
        for _ in range(self.inner_steps):  # line 7: towards the proximal point of w on this batch
            g = gradient(lambda v: task.loss(both | v, batch), theta) + decay * theta
            theta = theta - self.personal_lr * (g + self.lam * (theta - w))
        return theta | (w - lr * self.lam * (w - theta)).prefixed("w")  # line 8

    def local(self, me, down, mine):
        received = down["model"]
        x = received.drop(me.task.net.buffers)
        both = me.train(
            received | x.prefixed("w"), step=self.iterate, given=(me.weight_decay,), gradients=self.inner_steps
        )
        theta = both.pick(received)
        sent = theta | x.lerp(both.under("w"), self.beta)  # with theta's normalisation statistics
        return Up(mean={"model": sent}, weight=1 if self.weights == "uniform" else None), {"model": theta}

    def personal(self, me, down, mine):
        return mine["model"]

    def check(self, run):
        unfit = {run.optimizer: run.optimizer != "sgd", "momentum": run.momentum, "clipping": run.clip is not None}
        if any(unfit.values()):
            raise UsageError(
                "PFedMe's steps are plain ones, of theta with a rate of its own; found "
                f"{' and '.join(k for k, on in unfit.items() if on)}. Set momentum=0, no clip, optimizer sgd."
            )
        if max(run.lr, self.personal_lr) * self.lam >= 2:
            raise UsageError(
                "PFedMe needs lr * lam and personal_lr * lam below 2, or w and theta drive each other apart; found "
                f"lr={run.lr}, personal_lr={self.personal_lr}, lam={self.lam}. Lower one of them."
            )
