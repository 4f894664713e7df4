"""Forward passes in bfloat16: half the bits of float32, the same range, and three digits."""

from __future__ import annotations

from pathlib import Path

import torch

from idiolect.errors import UsageError

AUTOCAST = {"bfloat16": torch.bfloat16}
FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # a processor's own names for the instructions, x86 and ARM


def refuse(autocast: str, dtype: str, device: str) -> None:
    """Refuse (UsageError) what autocast cannot go with, and processors that would only imitate it."""
    if dtype != "float32":
        raise UsageError(f"autocast={autocast} is for weights of float32; found dtype={dtype}. Leave one of them out.")
    if not supported(device):
        raise UsageError(
            f"autocast={autocast} needs a processor with its instructions, which {device} lacks; leave it out."
        )


def supported(device: str) -> bool:
    """Whether the device has instructions for bfloat16, and PyTorch uses them."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.mkldnn.is_available() and not _flags().isdisjoint(FLAGS)


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    named = (line.partition(":") for line in lines)
    return {flag for name, _, flags in named if name.strip() in ("flags", "Features") for flag in flags.split()}
