"""The results of a replay beside the recorded ones: for a person, and as JSON lines with every rollout."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.replay.recorded import BatchingResult, RecordedGroup
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.messages import Outcome, Score, ScoredTrajectory

SHOWN = 10
"""Differences that are printed; the file holds all of them."""
TOLERANCE = 1e-6
"""Two numbers closer than this are the same: advantages are float32."""


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write objects as lines of JSON."""
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def compare_scores(groups: list[RecordedGroup], again: Mapping[str, ScoredTrajectory], *, path: Path, model_path: Path) -> Iterator[str]:
    """Write old and new scores of every rollout to `path`; yield the summary, line by line."""
    tokenizer = load_tokenizer(model_path)
    pairs = [(group, member, again[member.trajectory.rollout_id].score) for group in groups for member in group.members]
    changed = [pair for pair in pairs if not same_score(pair[1].score, pair[2])]
    write_lines(path, (_score_line(group, member, new, tokenizer) for group, member, new in pairs))
    yield f"scoring: {len(pairs):,} rollouts, {len(pairs) - len(changed):,} as recorded, {len(changed):,} differ"
    if not pairs:
        return
    yield from _means([member.score for _, member, _ in pairs], [new for _, _, new in pairs])
    moves = collections.Counter((str(member.score.outcome), str(new.outcome)) for _, member, new in pairs)
    for (old, new), count in sorted(moves.items()):
        if old != new:
            yield f"  outcome {old} -> {new}: {count:,}"
    for group, member, new in sorted(changed, key=_size_of_change, reverse=True)[:SHOWN]:
        text = tokenizer.decode(member.trajectory.token_ids[len(group.prompt.token_ids) :])
        name = f"rollout {member.trajectory.rollout_id}, prompt {group.prompt.prompt_id}"
        yield f"  {name}: {_said(member.score)} -> {_said(new)}   {text[-60:]!r}"


def compare_batches(groups: list[RecordedGroup], again: list[RecordedGroup], *, path: Path) -> Iterator[str]:
    """Write old and new statuses and advantages of every rollout to `path`; yield the summary, line by line."""
    new_ones = {name: result for group in again for name, result in group.results.items()}
    pairs = [(group, name, old, new_ones[name]) for group in groups for name, old in group.results.items()]
    write_lines(
        path,
        (
            {"rollout_id": name, "prompt_id": group.prompt.prompt_id, "old": _result_line(old), "new": _result_line(new)}
            for group, name, old, new in pairs
        ),
    )
    moved = [pair for pair in pairs if pair[2].status != pair[3].status]
    credited = [pair for pair in pairs if _gap(pair[2], pair[3]) > TOLERANCE]
    rows = sum(old.row != new.row for _, _, old, new in pairs)
    first = f"from step {groups[0].step} on" if groups else "no whole step is recorded"
    yield f"batching: {len(pairs):,} rollouts, {first}: {len(moved):,} end otherwise, {len(credited):,} with other advantages"
    statuses = collections.Counter((_kind(old.status), _kind(new.status)) for _, _, old, new in moved)
    for (old, new), count in statuses.most_common():
        yield f"  {old} -> {new if new != old else 'another ' + new}: {count:,}"
    for group, name, old, new in sorted(credited, key=lambda pair: _gap(pair[2], pair[3]), reverse=True)[:SHOWN]:
        yield f"  rollout {name}, prompt {group.prompt.prompt_id}: advantage {_mean(old)} -> {_mean(new)}"
    if rows and not moved:
        yield f"  {rows:,} in another row, or place of it, of the same step"


def same_score(old: Score, new: Score) -> bool:
    """Return whether two scores say the same."""
    if old.outcome is not new.outcome or old.components.keys() != new.components.keys():
        return False
    numbers = [(old.reward or 0.0, new.reward or 0.0), *((old.components[name], new.components[name]) for name in old.components)]
    return all(abs(before - after) <= TOLERANCE for before, after in numbers)


def _means(old: list[Score], new: list[Score]) -> Iterator[str]:
    def mean(values: list[float]) -> str:
        return f"{np.mean(values):.4g}" if values else "none"

    yield f"  reward, mean: {mean(_rewards(old))} -> {mean(_rewards(new))}"
    for name in dict.fromkeys(name for score in (*old, *new) for name in score.components):
        before, after = ([score.components[name] for score in side if name in score.components] for side in (old, new))
        yield f"  component {name}, mean: {mean(before)} -> {mean(after)}"
    yield f"  ms for one, mean: {np.mean([s.duration_s for s in old]) * 1e3:.3g} -> {np.mean([s.duration_s for s in new]) * 1e3:.3g}"


def _rewards(scores: list[Score]) -> list[float]:
    return [score.reward for score in scores if score.reward is not None]


def _size_of_change(pair: tuple[RecordedGroup, ScoredTrajectory, Score]) -> float:
    _, member, new = pair
    if member.score.reward is None or new.reward is None:
        return float("inf")
    return abs(member.score.reward - new.reward)


def _said(score: Score) -> str:
    return f"{score.reward:.4g}" if score.outcome is Outcome.OK else f"{score.outcome} ({score.error[:80]})"


def _score_line(group: RecordedGroup, member: ScoredTrajectory, new: Score, tokenizer: Any) -> dict[str, Any]:
    completion = tokenizer.decode(member.trajectory.token_ids[len(group.prompt.token_ids) :])
    return {
        "rollout_id": member.trajectory.rollout_id,
        "prompt_id": group.prompt.prompt_id,
        "step": group.step,
        "is_same": same_score(member.score, new),
        "old": _score(member.score),
        "new": _score(new),
        "prompt": group.prompt.text,
        "completion": completion,
    }


def _score(score: Score) -> dict[str, Any]:
    return {"outcome": str(score.outcome), "reward": score.reward, "components": score.components, "error": score.error}


def _result_line(result: BatchingResult) -> dict[str, Any]:
    trained = None if result.advantages is None else float(result.advantages[result.advantages != 0].sum())
    return {"status": result.status, "row": result.row, "advantage_sum": trained}


def _gap(old: BatchingResult, new: BatchingResult) -> float:
    if old.advantages is None or new.advantages is None:
        return 0.0
    return float(np.abs(old.advantages - new.advantages).max())


def _mean(result: BatchingResult) -> str:
    assert result.advantages is not None
    told = result.advantages[result.advantages != 0]
    return f"{told.mean():.4g}" if len(told) else "0"


def _kind(status: str) -> str:
    return "step" if status.startswith("step ") else status
