"""`python -m pipelinerl.launch.kubernetes --settings FILE --run-folder RUN`: a pod of a run, as its Job starts it.

Its node is `--first-node` and `JOB_COMPLETION_INDEX` together. Node 0 makes the run folder, or takes it up again, and begins an attempt;
the others wait for one. SIGTERM: save and end, within the pod's grace period.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import sys
import time
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load_run
from pipelinerl.data.hub import resolved
from pipelinerl.errors import ConfigError, PipelineError
from pipelinerl.launch.attempts import attempt_folder, begin_attempt, code_file
from pipelinerl.launch.node_roles import record_roles
from pipelinerl.launch.preflight import check as preflight
from pipelinerl.launch.run_folder import fill
from pipelinerl.launch.supervisor import DONE, FAILED, LOOK_EVERY_S, UNFINISHED, Supervisor
from pipelinerl.runtime.findings import refuse

BEGUN = "begun"
"""File in the folder of an attempt that other nodes may join."""
VERDICT = "verdict"
"""File in it that says how it ended, once it has: node 0's exit code."""
VERDICT_S = 30.0
"""Longest wait for it by a node that has ended: node 0 gives it as soon as all have."""
FIRST_NODE_S = 3600.0
"""Longest wait for the first pod: the cluster may have no room for it yet, and it looks at the rows before it begins."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.launch.kubernetes", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the resolved settings, as JSON")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--first-node", type=int, default=0, help="of this Job")
    arguments = parser.parse_args()
    node = arguments.first_node + int(os.environ.get("JOB_COMPLETION_INDEX", "0"))
    config = Config.model_validate_json(arguments.settings.read_bytes())
    sys.exit(run_pod(config, arguments.run_folder, node=node))


def run_pod(config: Config, run_folder: Path, *, node: int) -> int:
    """Be the pod of a node; its exit code."""
    title = f"pod {os.environ.get('HOSTNAME', '-')}"
    try:
        attempt = begin(config, run_folder) if node == 0 else join(run_folder, node=node)
    except (PipelineError, OSError) as error:
        print(f"{title}, node {node}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # A volume that fails now may do later; what was refused stays refused.
        return FAILED if node == 0 and isinstance(error, PipelineError) else UNFINISHED
    if attempt is not None:
        config = load_run(run_folder)
        supervisor = Supervisor(run_folder, config, config.kubernetes, attempt=attempt, node=node, title=title, address=_address)
        code = asyncio.run(supervisor.run(until=math.inf))
        if code == DONE and not supervisor.is_finished():
            code = UNFINISHED  # it was told to end: a Job that is to end for good is deleted
        if node == 0:
            draft = attempt_folder(run_folder, attempt) / f"{VERDICT}.draft"
            draft.write_text(f"{code}\n")
            draft.rename(draft.with_suffix(""))
            return code
    end = time.monotonic() + VERDICT_S
    while (verdict := _newest(run_folder)[1]) is None and time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
    return UNFINISHED if verdict is None else verdict


def begin(config: Config, run_folder: Path) -> int:
    """Make the run folder ready for the next attempt, and return its number. Raises `ConfigError`."""
    if not (run_folder / "roles.json").exists():
        if (run_folder / "ledger.sqlite").exists():
            raise ConfigError(
                f"{run_folder} holds a run that was begun otherwise: there is a ledger, but no roles.json. Go on with it as it was begun,"
                " or print manifests anew, which name another folder"
            )
        config = resolved(config)
        refuse(preflight(config))
        shutil.rmtree(run_folder, ignore_errors=True)  # one whose making was interrupted
        fill(run_folder, config)
        record_roles(config, config.kubernetes, run_folder)
    attempt = begin_attempt(run_folder)
    (attempt_folder(run_folder, attempt) / BEGUN).touch()
    return attempt


def join(run_folder: Path, *, node: int, patience_s: float = FIRST_NODE_S) -> int | None:
    """Wait for an attempt that goes on, and return its number; None where the run is over. Raises `ConfigError` after too long."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        attempt, verdict = _newest(run_folder)
        if verdict in (DONE, FAILED):
            return None
        if attempt is not None and verdict is None:
            code_file(run_folder, attempt, node=node).unlink(missing_ok=True)  # of this node's pod before
            return attempt
        time.sleep(LOOK_EVERY_S)  # a shared file system tells nobody of a new file
    raise ConfigError(f"node 0 has begun nothing in {run_folder} for {patience_s:g} s: see the log of its pod")


def _newest(run_folder: Path) -> tuple[int | None, int | None]:
    """The newest attempt that node 0 has begun, and how it ended there: each None where there is none (yet)."""
    numbers = [int(path.parent.name.removeprefix("attempt-")) for path in (run_folder / "logs").glob(f"attempt-*/{BEGUN}")]
    if not numbers:
        return None, None
    code = attempt_folder(run_folder, max(numbers)) / VERDICT
    return max(numbers), int(code.read_text()) if code.exists() else None


def _address() -> str:
    if (address := os.environ.get("POD_IP")) is None:
        raise ConfigError("POD_IP is not set: the manifests of `pipelinerl k8s` set it from the pod's status")
    return address


if __name__ == "__main__":
    main()
