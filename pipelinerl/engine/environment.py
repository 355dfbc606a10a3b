"""The environment variables that vLLM reads, set before it is imported."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from pipelinerl.runtime.network import device_of


def set_environment(*, num_ranks: int = 1, is_of_run: bool = False, makes_folder: bool = True) -> None:
    """Set what vLLM reads from the environment, before it is imported; values that the user has set stand.

    `num_ranks` of one engine: on CPUs each has a core of its own, where there are as many. `is_of_run`: it takes policies, perhaps from
    another machine by NCCL, whose interface is then known only once the orchestrator listens (`weights.network.nccl_settings`).
    `makes_folder`: as `make_private_folder`, which may also be called later, before any engine is made.
    """
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # One engine is on one machine: its ranks look for each other there alone, by sockets that nobody else may enter.
        "GLOO_SOCKET_IFNAME": device_of("127.0.0.1"),
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if not is_of_run:
        settings["NCCL_SOCKET_IFNAME"] = settings["GLOO_SOCKET_IFNAME"]
    if makes_folder:
        make_private_folder()
    if not Path("/dev/nvidiactl").exists():
        settings |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        if num_ranks > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            settings["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # of a process that has imported everything, as engines are
            cores = sorted(os.sched_getaffinity(0))
            settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[:num_ranks])) if len(cores) >= num_ranks else "nobind"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def make_private_folder() -> None:
    """Keep the sockets of this process and its children in a folder of their own, unless the user has named one."""
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = _private_folder()


@functools.cache
def _private_folder() -> str:
    """A folder of mode 0700 for the sockets of this process and its children, gone when it ends. A socket's path has 107 bytes at most."""
    found = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="pipelinerl-", dir=found if len(found) < 50 else "/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
