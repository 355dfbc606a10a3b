"""What is free on a CUDA device for this process."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device | None = None) -> int:
    """Bytes free on a device (by default the present one), with those that torch holds in reserve for whoever asks next."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
