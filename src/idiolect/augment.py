"""Augmentation: random crops and flips of images in training, each a function of (sample, key) and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from idiolect.errors import UsageError

FORMS = "'none', 'crop:4' (a random crop of the image with 4 pixels around it), 'flip', or 'crop:4,flip'"
GOLDEN, FIRST, SECOND = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # of splitmix64, as signed numbers


@dataclass(frozen=True)
class Augment:
    """crop: pixels of 0, the mean colour of normalised images, on each side, of which a random window of the image's
    own size is kept. flip: every other image, by chance, is mirrored from left to right."""

    crop: int = 0
    flip: bool = False

    def __call__(self, x: Tensor, rows: Tensor, key: int | Tensor) -> Tensor:
        """Images [B, C, H, W] of these row numbers, augmented; one key for all, or one each. channels_last."""
        drawn = scattered(rows, key)
        height, width = x.shape[2:]
        places = 2 * self.crop + 1
        down = (drawn & 0xFFFFF) % places  # [B]
        across = (drawn >> 20 & 0xFFFFF) % places
        ys = down[:, None] + torch.arange(height, device=x.device)  # [B, H]
        xs = across[:, None] + torch.arange(width, device=x.device)  # [B, W]
        if self.flip:
            xs = torch.where((drawn >> 40 & 1).bool()[:, None], xs.flip(1), xs)
        padded = functional.pad(x, (self.crop,) * 4).permute(0, 2, 3, 1)
        each = torch.arange(len(x), device=x.device)[:, None, None]
        return padded[each, ys[:, :, None], xs[:, None, :]].permute(0, 3, 1, 2)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse samples that are no images, or smaller than what is put around them."""
        if len(shape) != 3:
            raise UsageError(
                f"augment changes images [channels, height, width]; found samples of the shape {list(shape)} in "
                f"'{name}'. Use augment=none."
            )
        if self.crop >= min(shape[1:]):
            raise UsageError(
                f"augment=crop:{self.crop} needs images larger than that; found {shape[1]}x{shape[2]} in '{name}'. "
                "Use fewer pixels."
            )


def scattered(rows: Tensor, key: int | Tensor) -> Tensor:
    """64 random bits for each row under a key (Steele, Lea and Flood, OOPSLA 2014, Figure 16), as signed numbers."""
    z = (rows + 1) * GOLDEN + key
    for shift, factor in ((30, FIRST), (27, SECOND)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    return z ^ (z >> 31 & (1 << 33) - 1)


def parse(text: str) -> Augment | None:
    """What a text such as 'crop:4,flip' stands for."""
    if text == "none":
        return None
    found: dict[str, int] = {}
    for part in str(text).split(","):
        word, colon, pixels = part.strip().partition(":")
        fits = pixels.isdecimal() and int(pixels) > 0 if word == "crop" else word == "flip" and not colon
        if not fits or word in found:
            raise UsageError(f"augment must be {FORMS}; found '{text}'.")
        found[word] = int(pixels or 1)
    return Augment(found.get("crop", 0), "flip" in found)
