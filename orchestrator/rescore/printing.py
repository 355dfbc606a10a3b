"""Prints scored completions for a person: one block for each row."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from orchestrator.rescore.completions import RescoredRow
from orchestrator.rescore.scorers import CallReport, StepScores
from orchestrator.rules.batch import Filtered
from pipelinerl.messages import Float32, Int32, Outcome, ScoredTrajectory, Trajectory

PROMPT_CHARACTERS = 4000
"""Characters of a prompt or a completion that are printed; the rest is counted."""
Decode = Callable[[list[int]], str]


def print_prompt(row: RescoredRow, *, longest: int) -> Iterator[str]:
    """Yield the row's head: where it stands, the rendered prompt, its columns."""
    num_tokens = len(row.prompt.token_ids)
    room = "" if num_tokens <= longest else f", more than the {longest:,} that rollout.max_tokens leaves: a run passes over it"
    yield f"== {row.where}: prompt of {_count(num_tokens, 'token')}{room}{', rendered by the chat template' if row.prompt.chat else ''}"
    yield _block(row.prompt.text)
    for name, value in row.prompt.columns.items():
        yield f"   {name} = {textwrap.shorten(repr(value), 200, placeholder=' ...')}"


def print_member(
    scored: ScoredTrajectory, *, number: int, num: int, weights: Mapping[str, float], asked: Sequence[CallReport], decode: Decode
) -> Iterator[str]:
    """Yield one completion, and what each function said of it."""
    trajectory, score = scored.trajectory, scored.score
    yield f"-- completion {number} of {num}: {_count(trajectory.num_trained_tokens, 'token')}, finish {trajectory.finish}"
    yield from _said(trajectory, decode)
    durations_s = {name: duration_s for one in asked for name, duration_s in one.durations_s.items()}
    errors = [error for one in asked for error in one.errors]
    for name, weight in weights.items():
        took = f"   {durations_s[name] * 1000:,.1f} ms" if name in durations_s else ""
        if name in score.components:
            value = score.components[name]
            yield f"   {name:<24} {value:>10.4g} x {weight:g} = {value * weight:.4g}{took}"
        elif not any(function == name for function, _ in errors):
            yield f"   {name:<24} {_silence(score.outcome, name in durations_s)}{took}"
    for function, error in errors:
        yield f"   {function:<24} FAILED: {error}"
        if error.traceback:
            yield textwrap.indent(error.traceback.rstrip(), "      ")
    if score.outcome is Outcome.OK:
        yield f"   reward                   {score.reward:>10.4g}"
    else:
        yield f"   no reward: {score.outcome}: {score.error}"


def print_step_scores(said: StepScores) -> Iterator[str]:
    """Yield the process reward model's scores of one completion."""
    yield f"   steps, by {said.version}:"
    for end, text, score, error in said.steps:
        verdict = f"{score:.4g}" if score is not None else f"FAILED: {error}"
        yield f"   {'':>4}{verdict:>8}  (to token {end}) {textwrap.shorten(text, 100, placeholder=' ...')}"
    if not said.steps:
        yield "       none: the completion has no text"


def print_advantages(
    credit: Sequence[Float32] | Filtered, members: Sequence[ScoredTrajectory], *, method: str, in_trainer: bool
) -> Iterator[str]:
    """Yield the advantages that the method gives the group."""
    if in_trainer:
        yield f"-- {method}: the trainer makes the advantages, from its reference or critic"
        return
    columns = credit.advantages if isinstance(credit, Filtered) else credit
    yield f"-- {method}"
    for member, column in zip(members, columns, strict=True):
        trained = column[member.trajectory.loss_mask]
        yield f"   reward {member.score.reward or 0.0:>10.4g}   advantage {_range(trained)}"
    if isinstance(credit, Filtered):
        yield f"   the group would be set aside: {credit.reason}"
    elif not any(np.any(column) for column in columns):
        yield "   no gradient: every advantage is 0, because the rewards are all the same"


def _count(num: int, what: str) -> str:
    return f"{num:,} {what}" + ("" if num == 1 else "s")


def _range(trained: Float32) -> str:
    if not len(trained):
        return "none: it has no tokens"
    low, high = float(trained.min()), float(trained.max())
    return f"{low:+.4g}" if np.isclose(low, high) else f"{low:+.4g} to {high:+.4g} over its tokens"


def _silence(outcome: Outcome, was_entered: bool) -> str:
    if outcome is Outcome.OK:
        return "does not apply (None)"
    return "its value is dropped: another function failed" if was_entered else "not asked: another function failed"


def _said(trajectory: Trajectory, decode: Decode) -> Iterator[str]:
    tokens: Int32 = trajectory.token_ids[len(trajectory.prompt.token_ids) :]
    if trajectory.turns is None:
        yield _block(decode(tokens.tolist()))
        return
    last = 0
    for turn, (start, end) in enumerate(zip(trajectory.turns.starts.tolist(), trajectory.turns.ends.tolist(), strict=True)):
        if start > last:
            yield _block(decode(tokens[last:start].tolist()), head=f"environment {turn}")
        yield _block(decode(tokens[start : end + 1].tolist()), head=f"turn {turn + 1}")
        last = end + 1


def _block(text: str, *, head: str = "") -> str:
    shown = text[:PROMPT_CHARACTERS]
    more = f"\n... {len(text) - len(shown):,} characters more" if len(text) > len(shown) else ""
    return (f"   [{head}]\n" if head else "") + textwrap.indent(shown + more or "(nothing)", "   | ", lambda line: True)
