"""A small vision transformer, written out so that it runs stacked (vmap) and from named weights."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from idiolect.errors import UsageError
from idiolect.nets.network import Network
from idiolect.nets.refusals import UnfitError, image, positive


def tinyvit(
    shape: tuple[int, ...], classes: int, patch: int = 4, dim: int = 64, depth: int = 2, heads: int = 4
) -> Network:
    """Vision transformer on patches of 4x4: two encoder blocks of width 64, mean of the tokens, linear.

    For FedSimSup's mix of supervisors, whose paper says only "a Transformer", pre-trained. Chosen: the
    blocks of Dosovitskiy et al. (2021), normalisation first, with learnt positions, an inner width of
    2*dim and no dropout; the mean of the tokens instead of a class token; no pre-training. Its blocks are
    the patches' embedding and the encoder blocks; they hand on `[B, dim, tokens]`, channels second as in the
    convolutional networks, so that a block's feature is its mean over all that comes after the channels.
    """
    positive("tinyvit", patch=patch, dim=dim, depth=depth, heads=heads)
    if dim % heads:
        raise UsageError(f"tinyvit: 'dim' must be a multiple of 'heads', found dim={dim} and heads={heads}.")
    channels, height, width = image("tinyvit", shape, patch, "one patch")
    if height % patch or width % patch:
        raise UnfitError(
            f"tinyvit needs images whose sides are multiples of the patch's, {patch}, "
            f"found {height}x{width}. Option 'patch' sets it."
        )
    tokens = (height // patch) * (width // patch)
    body: OrderedDict[str, nn.Module] = OrderedDict(patches=Patches(channels, patch, tokens, dim))
    for block in range(1, depth + 1):
        body[f"encoder{block}"] = Encoder(dim, heads, last=block == depth)
    body["pool"] = TokenMean()
    return Network(nn.Sequential(body), nn.Linear(dim, classes))


class Patches(nn.Module):
    """Cuts an image into patches, each a linear map of its pixels plus a learnt position."""

    def __init__(self, channels: int, patch: int, tokens: int, dim: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, dim, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(dim, tokens))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.project(x).flatten(2)  # [B, dim, T]
        return tokens + self.position


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, d]
        query, key, value = split.transpose(1, 3).unbind(2)  # [B, H, T, d]
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # [B, H, T, T]
        mixed: Tensor = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return mixed


class Encoder(nn.Module):
    """x + attention, then x + MLP, each of normalised input; the last block normalises its output too."""

    def __init__(self, dim: int, heads: int, last: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.inner = nn.Linear(dim, 2 * dim)
        self.outer = nn.Linear(2 * dim, dim)
        self.norm3: nn.Module = nn.LayerNorm(dim) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)  # [B, T, dim]
        x = x + self.attention(self.norm1(x))
        x = x + self.outer(nn.functional.gelu(self.inner(self.norm2(x))))
        closed: Tensor = self.norm3(x)
        return closed.transpose(1, 2)  # [B, dim, T]


class TokenMean(nn.Module):
    """The mean over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(2)


NETWORKS = {"tinyvit": tinyvit}
