"""Parts of a machine that are not there: NVIDIA's driver that tells of GPUs, and a CUDA device for torch.

NVIDIA's own Python reads the one, and vLLM's copy of it. torch itself takes the other for a device, with tensors that have no memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def build_nvml(folder: Path) -> Path:
    """Build libnvidia-ml.so.1 in `folder`, and return that; processes with it in LD_LIBRARY_PATH see `PRETENDED_GPUS` GPUs."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, which builds the pretended NVML")
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        command = (compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), str(HERE / "nvml.c"))
        subprocess.run(command, check=True, timeout=60)
    return folder


def load_nvml(folder: Path) -> None:
    """Have this process find it: a library is found by its name once it was loaded from anywhere. Without `PRETENDED_GPUS` it has none."""
    ctypes.CDLL(str(build_nvml(folder) / "libnvidia-ml.so.1"))


def build_device(folder: Path) -> Path:
    """Build the library of `device.cpp` in `folder`; in a process with it in LD_PRELOAD torch has a CUDA device, for fake tensors alone."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here, which builds the pretended device")
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.submodule_search_locations
    torch = Path(found.submodule_search_locations[0])
    library = folder / "libpretended_device.so"
    options = ("-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib")
    sources = (str(HERE / "device.cpp"), "-lc10", "-ltorch_cpu")
    subprocess.run((compiler, *options, "-o", str(library), *sources), check=True, timeout=100)
    return library
