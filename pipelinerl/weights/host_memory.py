"""Memory of the host that is given back to the system while another process needs it, and taken again as it is written."""

from __future__ import annotations

import ctypes
import mmap

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED, _MADV_FREE = 4, 8


def give_back(memory: torch.Tensor) -> int:
    """Give the whole pages of a contiguous CPU tensor back; the tensor stays, and holds zeros there. Returns the bytes of these pages.

    Only for memory that this process owns alone: pages of a file hold again what is in the file. A page is taken anew when it is written,
    or, for zeros, read, which costs about as much as to clear it.
    """
    return _advise(memory, _MADV_DONTNEED)


def offer_zeros(memory: torch.Tensor) -> int:
    """Let the system take the whole pages of a contiguous CPU tensor of zeros whenever it needs them; return their bytes.

    The tensor holds zeros either way. Pages that nobody needed meanwhile are still there, and need not be taken anew: of much memory this
    takes a fraction of the time of `give_back`, and of the next writes.
    """
    return _advise(memory, _MADV_FREE)


def _advise(memory: torch.Tensor, advice: int) -> int:
    assert memory.device.type == "cpu", memory.device
    assert memory.is_contiguous()
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (memory.data_ptr() + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if num_bytes <= 0:
        return 0
    if _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice):
        code = ctypes.get_errno()
        raise OSError(code, f"madvise of {num_bytes} bytes at {start:#x}")
    return num_bytes


def give_back_freed() -> None:
    """Give back what this process has freed and its allocator keeps; where the C library has no call for it, nothing."""
    if (trim := getattr(_LIBC, "malloc_trim", None)) is not None:
        trim(0)
