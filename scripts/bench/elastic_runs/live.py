"""One live run whose rule of elastic roles is watched from outside: answers become long once devices have changed roles, and the run is
ended once they have changed back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

from pipelinerl.observe.lines import JournalTail
from scripts.bench.beside import systems
from scripts.bench.elastic_runs.loads import LONG, TAG, make_scorer

Line = dict[str, Any]
STALENESS = 3
MOST_RANKS = 2
"""Of the trainer: the rule would go on to three, and leave a single engine."""
FUNCTION = '{{function="scripts.bench.elastic_runs.loads:{}"}}'
SIZE = 2
"""`tensor_parallel_size` that engines may get."""
AT_ONCE = 4
"""Rollouts in engines, from which on no further group is sent, where engines may get other ranks: few, so that a pass is mostly reading
weights, which one wide engine does once for all of them."""
BLOCK_TOKENS, TOKEN_BYTES = 32, 5120
"""Tokens of a block of the KV cache, and bytes of a token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an engine's device becomes, and with which models and engines."""

    role: str
    """As lines of the journal name it."""
    engines: int = 3
    lengths: tuple[Literal["short", "long"], ...] = ("short", "long")
    """Of answers: those at the beginning and, where there are two, those once roles have changed and a window was measured."""
    width: int
    """Of the policy's feed-forward layers."""
    hidden_size: int = 0
    """Of the model that scores."""
    group_size: int = 8
    groups: int = 8
    """Of a step. With one alone the optimizer's step is a large part of a step of short answers."""
    slots: int
    blocks: int
    """Of an engine's KV cache. It has room for all slots of short answers, and for a few long ones."""


PARTS = {
    "trainer": Part(role="trainer", lengths=("short",), width=1536, groups=1, slots=16, blocks=9),
    "prm": Part(role="scorers", width=1536, hidden_size=640, slots=8, blocks=11),
    "reward": Part(role="scorers", width=384, hidden_size=768, slots=8, blocks=11),
    "ranks": Part(role="tensor_parallel_size", engines=2, lengths=("long",), width=24_576, group_size=2, slots=8, blocks=32),
}
"""Chosen by trying, so that the role's part of the run is the slower one for short answers, and the engines' for long ones. In `ranks` they
are, and most of their passes is reading weights, for which the rule takes wide ones to be quicker."""
LOOK_S = 1.0
END_S = 60.0
"""Until a run that was told to end has done so."""


def settings_of(part: str, models: Path) -> dict[str, str]:
    """Return what a part's run has beside the task's settings, as overrides of a command."""
    told = {
        "engine.count": f"{PARTS[part].engines}",
        "engine.max_running": f"{PARTS[part].slots}",
        "engine.kv_cache_bytes": f"{PARTS[part].blocks * BLOCK_TOKENS * TOKEN_BYTES}",
        "engine.options": f"{{block_size={BLOCK_TOKENS}}}",
        "engine.cores": "[]",
        "trainer.cores": "[]",
        "trainer.max_ranks": f"{MOST_RANKS}",
        "checkpoint.every": "100000",
        "pipeline.elastic": "true",
        "pipeline.max_staleness": f"{STALENESS}",
        "reward": f"[{FUNCTION.format('reward')}]",
        "data.source": '"scripts.bench.elastic_runs.loads:prompts"',
    }
    hidden_size = PARTS[part].hidden_size
    if part == "prm":
        model = make_scorer(models / "prm", hidden_size=hidden_size, of_steps=True).absolute()
        told |= {"prm.path": f'"{model}"', "prm.tag": f'"{TAG}"', "prm.dtype": '"float32"'}
        return told | {"algorithm.name": '"process_grpo"'}  # and no migration, which is refused beside such a model
    told["pipeline.migration"] = '"waiting"'
    if part == "reward":
        model = make_scorer(models / "reward", hidden_size=hidden_size, of_steps=False).absolute()
        told["reward"] = f'[{FUNCTION.format("reward")}, {{model="{model}", weight=0.01, dtype="float32"}}]'
    if part == "ranks":
        sizes = {"pipeline.elastic_tensor_parallel_sizes": f"[{SIZE}]", "pipeline.max_running": f"{AT_ONCE}"}
        told |= sizes | {"reward": f"[{FUNCTION.format('alike')}]"}
    return told


def command_of(part: str, task: systems.Task, *, folder: Path, models: Path) -> list[str]:
    """Return the command of a part's run. Settings that are given twice are those that come last."""
    own = [f"{key}={value}" for key, value in settings_of(part, models).items()]
    return [*systems.ours("streaming", task, seed=0, folder=folder), *own]


class Watched:
    """What the lines of a run's journal have said so far."""

    def __init__(self, part: str) -> None:
        self._part = PARTS[part]
        self.went = self.came_back = self.is_over = False
        """A device has changed; it has changed back; and a whole window was seen after that."""
        self.is_measured = False
        """A whole window was seen after the first change, or the last one before answers became long."""

    def take(self, line: Line) -> None:
        """Take the next line."""
        if line["kind"] != "roles":
            return
        if line["word"] == "taken":
            self._changed(line)
        elif line["word"] in ("stays", "begins"):
            self.is_measured |= self.went and line["word"] == "stays"
            self.is_over |= self.came_back

    def _changed(self, line: Line) -> None:
        part = self._part
        if line[f"{part.role}_then"] > line[part.role] and line["engines_then"] < line["engines"]:
            self.went = True
        elif (self.is_measured or len(part.lengths) == 1) and line["engines_then"] == part.engines:
            self.came_back = True


def run(part: str, task: systems.Task, *, folder: Path, models: Path, limit_s: float) -> Path:
    """Have a run go there and back, or as far as it comes within its limit; return its folder. Raises `RuntimeError` where it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    long, log = (folder / "long").absolute(), folder / "log"
    environment = {**os.environ, "PYTHONPATH": str(systems.ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", LONG: str(long)}
    command = command_of(part, task, folder=folder, models=models)
    if PARTS[part].lengths[0] == "long":
        long.touch()
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=systems.ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            code = _watch(process, part, folder, long, end=time.monotonic() + limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise RuntimeError(f"{' '.join(command)}: {code}; the end of {log}:\n{log.read_text()[-3000:]}")
    (found,) = folder.glob("run-2*")
    return found


def _watch(process: subprocess.Popen[bytes], part: str, folder: Path, long: Path, *, end: float) -> int:
    watched, tail = Watched(part), None
    while process.poll() is None and time.monotonic() < end and not watched.is_over:
        time.sleep(LOOK_S)
        found = None if tail is not None else next(folder.glob("run-2*"), None)
        tail = JournalTail(found) if found is not None else tail
        for line in tail.new_lines() if tail is not None else ():
            watched.take(line)
        if watched.is_measured and PARTS[part].lengths[-1] == "long" and not long.exists():
            long.touch()
            print(f"elastic, {part}: answers are long from now on", flush=True)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    return process.wait(END_S)
