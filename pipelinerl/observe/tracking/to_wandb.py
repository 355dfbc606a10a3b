"""Weights & Biases: one run per training run, written by this process alone.

The id is made once and kept in the run folder and with every checkpoint, so a resumed or requeued training run goes on in the same W&B
run. W&B's own step is the line's number in the journal: it only grows, and after a resume the server tells which line it has last. What
people look at stands over axes of its own (`names.AXES`). Where there is no key, and `WANDB_MODE` says nothing else, the run is written
offline.

Sample tables are capped: `TABLE_ROWS` rows of text a step, `TABLES` tables a run, `CELL_CHARACTERS` a cell; a column has one type.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import wandb

from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report.samples import ShownSample
from pipelinerl.observe.tracking.identity import id_in_checkpoint
from pipelinerl.observe.tracking.names import AXES, Point

TABLE_ROWS = 8
TABLES = 200
"""Tables of a run at most; steps between them are left out. W&B keeps every table as a file, and the page with all of them loads slowly."""
TABLE_EVERY_S = 60.0
CELL_CHARACTERS = 4000
OPEN_DEADLINE_S = 60.0
"""For the server to answer; W&B's own `WANDB_INIT_TIMEOUT` changes it. It costs the run nothing: this process alone waits."""
COLUMNS = ("step", "rollout", "prompt", "completion", "reward", "advantage", "tokens", "versions", "finish", "step scores")


class WandbRun:
    """A `follow.Destination`."""

    def __init__(self, run_folder: Path, run_line: Line, *, project: str) -> None:
        self._state_file = run_folder / "tracking" / "wandb.json"
        self._state_file.parent.mkdir(exist_ok=True)
        self._state = state = _read_state(self._state_file, known=id_in_checkpoint(run_folder, "wandb"))
        self._is_offline, self._num_lines = True, int(state["num_lines_offline"])
        self._save()  # before W&B hears of it: an id that is forgotten is a second run
        config = run_line.get("config") or {}
        mode, deadline_s = choose_mode(), float(os.environ.get("WANDB_INIT_TIMEOUT", OPEN_DEADLINE_S))
        self._run: Any = wandb.init(
            project=project,
            id=state["id"],
            name=run_folder.name,
            resume="allow",
            mode=mode,
            dir=str(self._state_file.parent),
            config=config,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, init_timeout=deadline_s),
        )
        for axis, prefixes in AXES.items():
            self._run.define_metric(axis, hidden=True)
            for prefix in prefixes:
                self._run.define_metric(f"{prefix}/*", step_metric=axis)
        self._is_offline = bool(self._run.offline)
        self.first_line = int(state["num_lines_offline"] if self._is_offline else self._run.starting_step)
        self._num_lines = self.first_line
        self._num_tables, self._next_table_t = 0, 0.0
        self._state |= {"mode": mode, "url": "" if self._is_offline else self._run.url}
        self._save()

    def take(self, point: Point) -> None:
        self._log(point.line, {point.axis: point.at, **point.values})

    def take_samples(self, line: int, samples: list[ShownSample]) -> None:
        if self._num_tables >= TABLES or samples[0].t < self._next_table_t:
            return
        self._num_tables, self._next_table_t = self._num_tables + 1, samples[0].t + TABLE_EVERY_S
        table = wandb.Table(columns=list(COLUMNS), data=[_row(sample) for sample in samples[:TABLE_ROWS]])
        self._log(line, {"progress/step": samples[0].step, "samples": table})

    def close(self, *, has_ended: bool) -> None:
        self._save()
        self._run.finish(exit_code=0 if has_ended else 1)

    def _log(self, line: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=line)
        self._num_lines = line + 1

    def _save(self) -> None:
        if self._is_offline:
            self._state["num_lines_offline"] = self._num_lines
        unfinished = self._state_file.with_suffix(".new")
        unfinished.write_text(json.dumps(self._state))
        unfinished.replace(self._state_file)


def choose_mode() -> Literal["online", "offline", "shared", "disabled"]:
    """Return what `WANDB_MODE` says; else online where there is a key, offline where there is none."""
    mode = os.environ.get("WANDB_MODE")
    if mode in ("online", "offline", "disabled", "shared"):
        return mode
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _read_state(file: Path, *, known: str | None) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {"id": known or secrets.token_hex(4), "num_lines_offline": 0}  # 32 bits: one project has few runs


def _row(sample: ShownSample) -> list[Any]:
    return [
        sample.step,
        sample.rollout_id,
        sample.prompt[:CELL_CHARACTERS],
        sample.completion[:CELL_CHARACTERS],
        sample.reward,
        sample.advantage,
        sample.num_tokens,
        sample.versions,
        sample.finish,
        sample.step_scores_text[:CELL_CHARACTERS],
    ]
