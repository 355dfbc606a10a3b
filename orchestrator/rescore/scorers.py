"""The scorer of a run by itself: its pools, fork server and workers, asked for one thing after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, PeerGone
from pipelinerl.messages import Outcome, Request, Result, ScorerTask, TraceScores, Trajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.failures import Failures
from pipelinerl.rewards.pool.pools import RewardPools
from pipelinerl.rewards.pool.stats import FunctionStats
from pipelinerl.runtime.function_errors import FunctionError

TELL_S = 5.0
"""Longest wait for the place at which a function hung, once its call has failed: its process writes it down before it is killed."""


@dataclasses.dataclass(slots=True)
class CallReport:
    """Durations and errors of one request."""

    durations_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """By function that was entered: all its tries together."""
    errors: list[tuple[str, FunctionError]] = dataclasses.field(default_factory=list)
    """Each try that failed: the function, and why."""


class Scorers:
    """Asks, waits, and keeps how long each function took and why it failed."""

    def __init__(self, config: Config, journal: Journal) -> None:
        self._request_ids = itertools.count()
        self._reports: dict[str, CallReport] = {}
        """By rollout, of its newest task."""
        self._pools = RewardPools(
            config,
            journal=journal,
            name="scorer-0",
            stats=FunctionStats(on_call=self._took),
            failures=Failures(say=lambda text: None, on_failure=self._failed),
        )

    def __enter__(self) -> Scorers:
        """Start the workers. Raises `ConfigError` where a function cannot be loaded."""
        try:
            self._pools.start()
        except BaseException:
            self._pools.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._pools.close()

    def request(self, task: ScorerTask) -> tuple[Result, CallReport]:
        """Have a task done, and tell what came of each function."""
        report = self._reports[task.rollout_id] = CallReport()
        self._pools.submit(Request(request_id=next(self._request_ids), task=task))
        while not (results := self._pools.advance()):
            self._pools.wait(1.0)
        (result,) = results
        end = time.monotonic() + TELL_S
        while result.outcome in (Outcome.ERROR, Outcome.TIMEOUT) and not report.errors and time.monotonic() < end:
            self._pools.wait(0.1)
            self._pools.advance()
        return result, report

    def end(self, rollout_id: str) -> None:
        """Have the environment of an episode closed."""
        self._pools.end_episode(rollout_id)
        self._pools.advance()

    def _took(self, rollout_id: str, durations_s: Any) -> None:
        known = self._reports[rollout_id].durations_s
        known |= {name: known.get(name, 0.0) + duration_s for name, duration_s in durations_s.items()}

    def _failed(self, rollout_id: str, function: str, error: FunctionError) -> None:
        self._reports[rollout_id].errors.append((function, error))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """The process reward model's scores of a trajectory."""

    steps: tuple[tuple[int, str, float | None, str], ...]
    """Position of the last token, text, score, and why there is none."""
    version: str

    @property
    def scores(self) -> TraceScores | None:
        """The scores in the form that a run keeps; None where a step has no score."""
        scores = [score for _, _, score, _ in self.steps if score is not None]
        if not self.steps or len(scores) < len(self.steps):
            return None
        ends = np.array([end for end, *_ in self.steps], np.int32)
        return TraceScores(ends=ends, scores=np.array(scores, np.float32), version=self.version)


def score_steps(config: Config, trajectories: list[Trajectory]) -> list[StepScores]:
    """Have the process reward model, or its judge, score the steps of these. Raises `ConfigError` where it cannot be loaded."""
    traces = [
        {"prompt": one.prompt.token_ids.tolist(), "tokens": one.token_ids[len(one.prompt.token_ids) :].tolist()}
        | ({} if one.turns is None else {"turn_ends": one.turns.ends.tolist()})
        for one in trajectories
    ]
    with settings_file(config) as settings:
        (settings.parent / "traces.json").write_text(json.dumps(traces))
        output = settings.parent / "scores.json"
        command = [sys.executable, "-m", "pipelinerl.rewards.prm.once", "--config", str(settings)]
        command += ["--traces", str(settings.parent / "traces.json"), "--output", str(output)]
        code = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
        if code:
            raise PeerGone(f"the process reward model's process ended with code {code}; its last words stand above")
        answer = json.loads(output.read_text())
    if "error" in answer:
        raise ConfigError(answer["error"])
    return [StepScores(steps=tuple(map(tuple, one["steps"])), version=one["version"]) for one in answer["traces"]]


@contextlib.contextmanager
def settings_file(config: Config) -> Iterator[Path]:
    """Write the settings to a file in a folder of its own, for a process to read."""
    with tempfile.TemporaryDirectory(prefix="pipelinerl-try-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(config.model_dump_json())
        yield path
