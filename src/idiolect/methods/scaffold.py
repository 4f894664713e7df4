from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, State, Up, UsageError


@dataclass(frozen=True)
class Scaffold(Method):
    """SCAFFOLD. Karimireddy et al., ICML 2020, Algorithm 1, option II: FedAvg whose local steps are corrected by
    control variates. x, y, c, ci as in the paper: ci estimates the client's gradient, c the mean of all.

    Departs from the paper: none; clients send y for y - x, the same to the server. From the public code: ci is kept by
    its client, divided by the rate and the steps of this round, and c moves by the sum over N, not by the number
    sampled.
    """

    server_lr: float = 1.0

    def init(self, net):
        zero = net.trainable.zeros()  # normalisation buffers have no gradient to correct
        return State(server={"model": net.weights, "c": zero}, client={"c": zero})

    def steer(self, g, w, drift):
        return g + drift  # eq. 4

    def local(self, me, down, mine):
        x, c, ci = down["model"], down["c"], mine["c"]
        y = me.train(x, correct=self.steer, given=(c - ci,))
        new = ci - c + (x.pick(c) - y.pick(c)) / (me.steps() * me.lr)  # line 12, option II
        return Up(mean={"model": y}, sum={"dc": new - ci}, weight=1), {"c": new}

    def server(self, server, rows, up, run):
        c, y = server["c"], up.mean["model"]
        x = server["model"].pick(c)
        moved = y | x.lerp(y, self.server_lr)  # line 17; buffers are plainly averaged
        return {"model": moved, "c": c + up.sum["dc"] / run.num_clients}, rows  # N, not the number sampled

    def check(self, run):
        unfit = {run.optimizer: run.optimizer != "sgd", "momentum": run.momentum, "clipping": run.clip is not None}
        if any(unfit.values()):
            raise UsageError(
                "SCAFFOLD reads the mean gradient off the distance moved, which holds for plain SGD alone; found "
                f"{' and '.join(k for k, on in unfit.items() if on)}. Set momentum=0, no clip, optimizer sgd."
            )
        if not run.lr:
            raise UsageError("SCAFFOLD divides the distance moved by the learning rate; found lr=0.")
