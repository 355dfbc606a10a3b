"""The memory, cores and devices of this machine, as far as they can be known without torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_CPU_INFO = Path("/proc/cpuinfo")


def machine_id() -> str:
    """Name this machine by its shared memory: equal where two processes see the same `/dev/shm`, also among containers."""
    return f"{boot_id()}:{SHARED_MEMORY.stat().st_dev}"


def boot_id() -> str:
    """Return the kernel's id of this start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def memory_bytes() -> int:
    """Memory that processes here may use together: the machine's, or what the container, or the batch system's job, is limited to."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such controller, or `max`
            found.append(int(path.read_text()))
    return min(found)


def has_amx() -> bool:
    """Return whether the processor multiplies tiles of numbers at once (AMX), which vLLM's FP8 kernels for CPUs are written for."""
    with contextlib.suppress(OSError):
        return " amx_tile" in _CPU_INFO.read_text()
    return False


def has_gpu() -> bool:
    """Return whether processes see an NVIDIA GPU's driver, and are not kept from all of its devices."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def cores_and_devices() -> dict[str, int]:
    """`cores` that this process may use, and `devices` (GPUs) that the driver knows and `CUDA_VISIBLE_DEVICES` does not hide."""
    devices = len(list(_NVIDIA.iterdir())) if _NVIDIA.is_dir() else 0
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        devices = min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cores": cores, "devices": devices}


def say_bytes(count: float) -> str:
    """A size for a person: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
