"""Parts of a machine that are not there: a library of NVIDIA's driver that tells of GPUs. NVIDIA's own Python reads it, and vLLM's copy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")


def build_nvml(folder: Path) -> Path:
    """Build libnvidia-ml.so.1 in `folder`, and return that; processes with it in LD_LIBRARY_PATH see `PRETENDED_GPUS` GPUs."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, which builds the pretended NVML")
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        command = (compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), str(SOURCE))
        subprocess.run(command, check=True, timeout=60)
    return folder


def load_nvml(folder: Path) -> None:
    """Have this process find it: a library is found by its name once it was loaded from anywhere. Without `PRETENDED_GPUS` it has none."""
    ctypes.CDLL(str(build_nvml(folder) / "libnvidia-ml.so.1"))
