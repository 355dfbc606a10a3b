"""A launcher for benches: imports everything once, then forks the processes of each run, so that a run starts in two seconds, not fifteen.

The processes are those of a real run, started at the same entry points with the same command lines; only the imports are shared.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.launch.run_folder import make_run_folder
from scripts.bench import children


def import_roles() -> None:
    """Import what all roles need, without running any torch operation: forks of a process that has are not safe."""
    from pipelinerl.engine.environment import set_environment

    set_environment()
    from pipelinerl.engine.vllm.imports import import_everything

    import_everything()
    for module in ("transformers.models.qwen3.modeling_qwen3", "orchestrator.__main__", "trainer.loop"):
        importlib.import_module(module)


def run(config: Config, *, cores: dict[str, set[int]], deadline_s: float) -> Path:
    """Run to the end and return the run folder. Raises `RuntimeError` with a role's log where it fails or the deadline passes."""
    run_folder = make_run_folder(config)
    (run_folder / "logs").mkdir()
    run = ["--run-folder", str(run_folder)]
    roles = {
        "orchestrator": ("orchestrator", run),
        "engines": ("pipelinerl.engine", run),
        "scorer-0": ("pipelinerl.rewards", [*run, "--index", "0"]),
        "trainer": ("trainer", run),
    }
    running = {
        children.start(functools.partial(_play, name, module, arguments, run_folder), cores=cores.get(name, ())): name
        for name, (module, arguments) in roles.items()
    }
    end = time.monotonic() + deadline_s
    failed = ""
    while running and not failed:
        process_id, status = os.waitpid(-1, os.WNOHANG)
        if process_id:
            name = running.pop(process_id, None)
            failed = name or "" if os.waitstatus_to_exitcode(status) else ""
        elif time.monotonic() > end:
            failed = next(iter(running.values()))
        else:
            time.sleep(0.05)
    for process_id in running:
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    if failed:
        log = (run_folder / "logs" / f"{failed}.log").read_text()[-3000:]
        raise RuntimeError(f"{failed} failed or was too slow in {run_folder}:\n{log}")
    return run_folder


def _play(name: str, module: str, arguments: list[str], run_folder: Path) -> None:
    log = os.open(run_folder / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
