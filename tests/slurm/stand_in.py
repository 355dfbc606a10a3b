"""A run in small, for tests of the mechanics: processes that behave at start, at a wish to save and at the end as those of a run do.

`orchestrator` counts steps, goes on from its checkpoint, journals, and saves on SIGTERM; the others live until the journal ends.
`stand_in.json` in the run folder says: `steps`; `pace_s` of one; `holds`, by attempt: the step before which it waits, for a wish to save or
the file `go-on`; `break`, the role that fails at its first start, once a step is done.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pipelinerl.observe.journal import Journal


def main() -> None:
    run_folder, role = Path(sys.argv[1]), sys.argv[2]
    settings = json.loads((run_folder / "stand_in.json").read_text())
    print(f"{role} started", flush=True)
    broken = run_folder / f"broken-{role}"
    if settings.get("break") == role and not broken.exists():
        broken.touch()
        while '"kind": "step"' not in journaled(run_folder):
            time.sleep(0.05)
        sys.exit(3)
    if role == "orchestrator":
        orchestrate(run_folder, settings)
    else:
        follow(run_folder)


def orchestrate(run_folder: Path, settings: dict[str, Any]) -> None:
    wishes: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: wishes.append(number))
    checkpoint = run_folder / "checkpoint.json"
    step = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
    hold = dict(enumerate(settings["holds"], 1)).get(num_attempts(run_folder))
    with contextlib.closing(Journal(run_folder, "orchestrator")) as journal:
        journal.write("run", config={"trainer": {"steps": settings["steps"]}})
        while step < settings["steps"] and not wishes:
            time.sleep(settings["pace_s"])
            if step != hold or (run_folder / "go-on").exists():
                journal.write("step", step=step, reward_mean=step / settings["steps"])
                step += 1
        checkpoint.with_suffix(".new").write_text(json.dumps({"step": step}))
        checkpoint.with_suffix(".new").replace(checkpoint)
        journal.write("end", reason="stopped by a signal" if wishes else "finished", attempt=num_attempts(run_folder))


def follow(run_folder: Path) -> None:
    """Live until the orchestrator of this attempt has ended, also where that was before this process began."""
    ended = f'"attempt": {num_attempts(run_folder)}'
    while ended not in journaled(run_folder):
        time.sleep(0.1)


def journaled(run_folder: Path) -> str:
    journal = run_folder / "journal" / "orchestrator.jsonl"
    return journal.read_text() if journal.exists() else ""


def num_attempts(run_folder: Path) -> int:
    """Up to the present one."""
    return len(list((run_folder / "logs").glob("attempt-*")))


if __name__ == "__main__":
    main()
