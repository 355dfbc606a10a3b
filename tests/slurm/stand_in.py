"""A run in small, for tests of the mechanics: processes that behave at start, at a wish to save and at the end as those of a run do.

`orchestrator` counts steps, goes on from its checkpoint, journals, and saves on SIGTERM; the others live until the journal ends.
`PACE_S`, `STEPS`, and `BREAK` (role to break at its first start) stand in the run folder's `stand_in.json`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

from pipelinerl.metrics import Journal


def main() -> None:
    run_folder, role = Path(sys.argv[1]), sys.argv[2]
    settings = json.loads((run_folder / "stand_in.json").read_text())
    print(f"{role} started", flush=True)
    broken = run_folder / f"broken-{role}"
    if settings.get("break") == role and not broken.exists():
        broken.touch()
        time.sleep(1.0)
        sys.exit(3)
    if role == "orchestrator":
        orchestrate(run_folder, settings)
    else:
        follow(run_folder)


def orchestrate(run_folder: Path, settings: dict[str, float]) -> None:
    wishes: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: wishes.append(number))
    checkpoint = run_folder / "checkpoint.json"
    step = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
    with contextlib.closing(Journal(run_folder, "orchestrator")) as journal:
        journal.write("run", config={"trainer": {"steps": settings["steps"]}})
        while step < settings["steps"] and not wishes:
            time.sleep(settings["pace_s"])
            journal.write("step", step=step, reward_mean=step / settings["steps"])
            step += 1
        checkpoint.with_suffix(".new").write_text(json.dumps({"step": step}))
        checkpoint.with_suffix(".new").replace(checkpoint)
        journal.write("end", reason="stopped by a signal" if wishes else "finished")


def follow(run_folder: Path) -> None:
    """Live until the orchestrator of this attempt has ended, also where that was before this process began."""
    journal, attempts = run_folder / "journal" / "orchestrator.jsonl", len(list((run_folder / "logs").glob("attempt-*")))
    while True:
        text = journal.read_text() if journal.exists() else ""
        if text.count('"kind": "end"') == attempts:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
