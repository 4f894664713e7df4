from __future__ import annotations

from dataclasses import dataclass

import torch

from idiolect.method import SGD, Method, State, Tree, Up, UsageError

TINY = 1e-8  # of a probability in a logarithm
LEAST_OF = {"ipc": 1, "averaged": 1} | dict.fromkeys(
    ("iterations", "image_lr", "image_momentum", "gamma", "lam_loc", "lam_glob", "server_epochs"), 0
)


@dataclass(frozen=True)
class FedAF(Method):
    """FedAF. Wang et al., CVPR 2024, Algorithm 1: clients send no models but a few images per class, to which they
    condense their data, guided by the mean logits that their peers give the classes (a first exchange in the round);
    the server trains the shared model on all of them, held to soft labels of the real data.

    Departs from the paper: of which not every detail is at hand; the page says what rests on what. Real features are
    means over all of a client's samples of a class; the sliced Wasserstein distance is of order 2, squared, over all
    directions at once; the server trains by the run's optimiser, rate and batches. From the public code: both guiding
    terms have gradients, and soft labels are of real samples.
    """

    ipc: int = 50
    iterations: int = 1000
    image_lr: float = 1.0
    image_momentum: float = 0.5
    gamma: float = 0.9
    lam_loc: float = 0.8
    lam_glob: float = 0.8
    temperature: float = 2.0
    server_epochs: int = 500
    averaged: int = 10
    restart: bool = False

    def __post_init__(self):
        for field, least in LEAST_OF.items():
            if (value := getattr(self, field)) < least:
                raise UsageError(f"FedAF.{field} must be at least {least}; found {value}.")
        if self.gamma > 1:
            raise UsageError(f"FedAF.gamma must be at most 1; found {self.gamma}.")
        if self.temperature <= 0:
            raise UsageError(f"FedAF.temperature must be above 0; found {self.temperature}.")

    def init(self, net):
        images = torch.zeros(net.classes * self.ipc, *net.shape, dtype=net.dtype)  # class after class
        return State(server={"model": net.weights, "peers": Tree()}, client={"images": images})

    # the first exchange: what each client's network of this round says of its classes

    def resampled(self, me, w):
        """The received network, moved towards another initialisation; the same in both exchanges."""
        random = me.fresh("resampled").drop(me.task.net.buffers)
        return w | random.lerp(w.pick(random), self.gamma)

    def ask(self, me, down, mine):
        logits = me.logits(self.resampled(me, down["model"]))
        return Up(sum={"logits": class_means(me, logits), "held": held(me)})

    def answered(self, server, rows, up, run):
        peers = up.sum["logits"] / up.sum["held"].clamp(min=1)[:, None]  # V_c
        return {**server, "peers": Tree({"logits": peers})}, rows

    # the second: condensed images

    def local(self, me, down, mine):
        if not me.inputs.is_floating_point():
            raise UsageError("FedAF condenses samples that are real numbers; found integers. Use other data.")
        w, classes = self.resampled(me, down["model"]), me.task.classes
        images = mine["images"] if me.visits and not self.restart else self.begun(me)
        view = me.over(images, torch.arange(classes, device=images.device).repeat_interleave(self.ipc), len(images))
        images = view.train(
            w | {"images": images}, only=["images"], loss=self.condensing,
            given=(class_means(me, me.features(w)), down["peers"]["logits"], held(me)),
            epochs=self.iterations, lr=self.image_lr, optimizer=SGD(self.image_momentum),
        )["images"]  # fmt: skip
        soft = class_means(me, (me.logits(down["model"]) / self.temperature).softmax(1))  # R_kc
        return Up(sum={"soft": soft}, rows={"images": images, "held": held(me)}), {"images": images}

    def begun(self, me):
        """Each image begins as the mean of some samples of its class; those of classes not held are 0."""
        draw, x = me.draw("condensed"), me.inputs
        found = []
        for c in range(me.task.classes):
            own = x[me.labels == c]
            if len(own):
                chosen = torch.from_numpy(draw.integers(len(own), size=(self.ipc, self.averaged)))
                found.append(own[chosen.to(x.device)].mean(1))
            else:
                found.append(x.new_zeros(self.ipc, *x.shape[1:]))
        return torch.cat(found)

    def condensing(self, task, w, batch, real, peers, own):
        """Distribution matching and, by lam_loc, collaboration, over the classes that the client has."""
        z = task.features(w, w["images"])
        logits, z = (v.unflatten(0, (task.classes, self.ipc)).mean(1) for v in (task.head(w, z), z))  # [C, C], [C, d]
        return (own * ((z - real).square().sum(1) + self.lam_loc * sliced(logits - peers))).sum()

    # the server

    def server(self, server, rows, up, run):
        own = up.rows["held"] > 0  # [K, C]
        soft = up.sum["soft"] / own.sum(0).clamp(min=1)[:, None]  # R_c
        images = up.rows["images"].unflatten(1, (-1, self.ipc))[own].flatten(0, 1)
        classes = own.nonzero()[:, 1].repeat_interleave(self.ipc)
        view = run.over(images, classes)
        w = view.train(server["model"], loss=self.teaching, given=(soft,), epochs=self.server_epochs)
        return {"model": w, "peers": Tree()}, rows

    def teaching(self, task, w, batch, soft):
        """Cross-entropy and, by lam_glob, local-global knowledge matching, over the batch's classes."""
        logits = task.logits(w, batch.x)
        said = (logits / self.temperature).softmax(1)
        count = batch.by_class(torch.ones_like(said[:, :1]), task.classes)
        said = batch.by_class(said, task.classes) / count.clamp(min=1)  # T_c
        apart = torch.where(count[:, 0] > 0, diverging(soft, said), 0.0)
        return task.criterion(logits, batch) + self.lam_glob * apart.mean()


def held(me):
    """1 for each class of which the client has samples. [C]"""
    return (me.counts > 0).to(me.counts.dtype)


def class_means(me, values):
    """The mean of per-sample values over the client's samples of each class; 0 where it has none. [C, ...]"""
    member = (me.labels[:, None] == torch.arange(me.task.classes, device=values.device)).to(values.dtype)
    return member.T @ values / me.counts.clamp(min=1)[:, None]


def sliced(apart):
    """The sliced Wasserstein distance of two point masses, so far apart: the mean square in all directions."""
    return apart.square().mean(1)


def diverging(p, q):
    """The mean of KL(p || q) and KL(q || p), row by row."""
    return (p - q).mul(p.clamp(min=TINY).log() - q.clamp(min=TINY).log()).sum(1) / 2
