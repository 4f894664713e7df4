"""Tensors of a .safetensors file, as `safetensors.torch.save_file({"x": ..., "y": ...}, file)` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from idiolect.data import arrays
from idiolect.data.dataset import Dataset
from idiolect.errors import UsageError, said

FORM = "a .safetensors file with the same tensors"


def reads(path: Path) -> bool:
    return path.suffix.lower() == ".safetensors" and path.is_file()


def load(file: Path, **options: Unpack[arrays.Options]) -> Dataset:
    """As of an .npz file: `x`, `y`, maybe `group`, or these for training and testing (`arrays.dataset`)."""
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UsageError(f"Expected tensors in '{file}', found something else: {said(error)}.") from None
    held = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
    return arrays.dataset(file, held, **options)
