"""The one shape that every network has: a body made of blocks, and a linear head on its features."""

from __future__ import annotations

from torch import Tensor, nn


class Network(nn.Module):
    """A classifier `head(body(x))`: methods share, keep or supervise its parts by these two names.

    `body(x)` is the feature `[B, d]`; `head` is linear. Nothing else owns parameters.
    """

    body: nn.Sequential
    head: nn.Linear

    def __init__(self, body: nn.Sequential, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits

    @property
    def blocks(self) -> list[str]:
        """Names of the body's children that own parameters, in order (pooling and the like own none)."""
        return [name for name, child in self.body.named_children() if any(True for _ in child.parameters())]
