from __future__ import annotations

from dataclasses import dataclass

from idiolect.method import Method, UsageError, Wrapper


@dataclass(frozen=True)
class FineTune(Wrapper):
    """FineTune: any method, whose personal model is fine-tuned on the client's own data before it predicts.

    A throw-away copy is tuned; training, messages and state are the inner method's. `part` is "all" or "head".
    Departs from the paper / the public code: none (folklore).
    """

    epochs: int = 5
    part: str = "all"

    def __post_init__(self):
        if self.part not in ("all", "head"):
            raise UsageError(f"FineTune.part must be 'all' or 'head'; found '{self.part}'.")

    def loss(self, task, w, batch):
        return task.criterion(self.inner.logits(task, w, batch.x), batch)

    def personal(self, me, down, mine):
        w = self.inner.personal(me, down, mine)
        only = w.pick(me.task.net.head) if self.part == "head" else None
        plain = type(self.inner).logits is Method.logits  # the run's own loss, of which a frozen body is run once
        return me.train(w, only=only, loss=None if plain else self.loss, epochs=self.epochs, order=8)
