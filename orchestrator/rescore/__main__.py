"""`python -m orchestrator.rescore CONFIG`: see `orchestrator.rescore` and `pipelinerl try --help`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from orchestrator.advantages import MethodAdvantages
from orchestrator.data.encoder import encoder_of
from orchestrator.data.sources import longest_prompt
from orchestrator.rescore.completions import (
    RescoredRow,
    SampledCompletions,
    TypedCompletions,
    column_of,
    play,
    read_prompts,
    recorded,
    typed_texts,
)
from orchestrator.rescore.printing import print_advantages, print_member, print_prompt, print_step_scores
from orchestrator.rescore.scorers import CallReport, Scorers, StepScores, score_steps
from orchestrator.rollouts.scorer_tasks import ENVIRONMENT, failed_score, group_reward_task, reward_task, score_of
from orchestrator.rules.group_rewards import join_comparison, plan_comparison
from pipelinerl.algorithms.method import Method
from pipelinerl.algorithms.methods import method_of
from pipelinerl.algorithms.rules import makes_advantages_in_trainer
from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.data.hub import resolved
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import decoder, load_tokenizer
from pipelinerl.errors import ConfigError, PipelineError
from pipelinerl.messages import Group, Outcome, ScoredTrajectory, Trajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.calls import reward_weights


def main(words: Sequence[str] | None = None) -> None:
    """Try rows, and exit with 1 where a function failed, or nothing could be tried."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.rescore", description=__doc__)
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--completion", action="append", default=[])
    parser.add_argument("--column")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--sample", type=int, default=0)
    arguments = parser.parse_args(words)
    sys.path.insert(0, os.getcwd())  # as in the processes of a run, modules of the working directory can be imported
    try:
        config = resolved(load(arguments.config, overrides=arguments.overrides))
        with tempfile.TemporaryDirectory(prefix="pipelinerl-try-") as folder, contextlib.ExitStack() as open_ones:
            rescoring = Rescoring(config, Path(folder), open_ones)
            for row in rescoring.rows(arguments):
                rescoring.show(row)
            rescoring.say_end()
        sys.exit(1 if rescoring.num_failed else 0)
    except PipelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


class Rescoring:
    """Tries rows, and prints what was said of each."""

    def __init__(self, config: Config, folder: Path, open_ones: contextlib.ExitStack) -> None:
        self.num_failed = 0
        """Completions of which a function said nothing."""
        self._num_shown = 0
        self._config = config
        tokenizer = load_tokenizer(config.model.path)
        self._stop_tokens = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids)
        self._encoder = encoder_of(config, tokenizer)
        self._decode = decoder(tokenizer, ends=self._stop_tokens.of_model)
        self._longest = longest_prompt(config)
        self._method = _method(config)
        journal = open_ones.enter_context(contextlib.closing(Journal(folder, "scorer-0")))
        self._scorers = open_ones.enter_context(Scorers(config, journal))
        self._open = open_ones
        self._weights = reward_weights(config.reward) | ({ENVIRONMENT: 1.0} if config.environment.cls is not None else {})

    def rows(self, arguments: argparse.Namespace) -> Iterator[RescoredRow]:
        """Yield rows to try, one after the other."""
        if arguments.run is not None:
            yield from recorded(arguments.run, num=arguments.rows)
            return
        prompts = read_prompts(self._config, encoder=self._encoder, first=arguments.first, num=arguments.rows)
        engine = (
            self._open.enter_context(SampledCompletions(self._config, stop_token_ids=self._stop_tokens.ids)) if arguments.sample else None
        )
        for group_id, (where, prompt) in enumerate(prompts):
            num, texts, is_announced = 1, iter(()), False
            if engine is not None:
                num = arguments.sample
            elif arguments.column is not None:
                texts = iter([column_of(prompt, arguments.column, where=where)])
            elif arguments.completion:
                texts = iter(arguments.completion)
                num = 1 if self._config.environment.is_used else len(arguments.completion)
            else:
                self._print(print_prompt(RescoredRow(where=where, prompt=prompt, members=()), longest=self._longest))
                sys.stdout.flush()
                texts = typed_texts("completion (ended by an empty line; nothing: the next row)> ")
                if (first := next(texts, None)) is None:
                    continue
                texts, is_announced = itertools.chain([first], texts), True
            write = engine or TypedCompletions(texts, encoder=self._encoder)
            row = play(
                self._config,
                prompt,
                where=where,
                group_id=group_id,
                num=num,
                write=write,
                reply=self._scorers.request,
                end=self._scorers.end,
            )
            yield dataclasses.replace(row, is_announced=is_announced)

    def show(self, row: RescoredRow) -> None:
        """Score all members, and print the row's block."""
        if not row.is_announced:
            self._print(print_prompt(row, longest=self._longest))
        members, reports = (list(each) for each in zip(*map(self._score, row.members), strict=True)) if row.members else ([], [])
        steps = score_steps(self._config, list(row.members)) if self._config.prm.is_used else []
        members = [self._with_steps(member, said) for member, said in zip(members, steps, strict=True)] if steps else members
        members, compared, who = self._compare(members)
        for number, member in enumerate(members):
            asked = [reports[number], *(row.replies[number] if row.replies else ())]
            shown = [*asked, compared] if member.trajectory.rollout_id in who else asked
            weights, num = self._weights, len(members)
            self._print(print_member(member, number=number + 1, num=num, weights=weights, asked=shown, decode=self._decode))
            if steps:
                self._print(print_step_scores(steps[number]))
            has_steps = not steps or all(score is not None for _, _, score, _ in steps[number].steps)
            self._num_shown += 1
            self.num_failed += member.score.outcome is not Outcome.OK or not has_steps
        self._credit(members)
        print(flush=True)

    def say_end(self) -> None:
        """Print how many completions were tried, and how many have no reward."""
        failed = f"{self.num_failed:,} without a reward, see FAILED above" if self.num_failed else "every function answered"
        print(f"{self._num_shown:,} completions tried: {failed}")

    def _score(self, trajectory: Trajectory) -> tuple[ScoredTrajectory, CallReport]:
        if (failed := failed_score(trajectory)) is not None:
            return ScoredTrajectory(trajectory=trajectory, score=failed), CallReport()
        result, report = self._scorers.request(reward_task(trajectory))
        return ScoredTrajectory(trajectory=trajectory, score=score_of(trajectory, result)), report

    def _with_steps(self, member: ScoredTrajectory, said: StepScores) -> ScoredTrajectory:
        return msgspec.structs.replace(member, steps=said.scores)

    def _compare(self, members: list[ScoredTrajectory]) -> tuple[list[ScoredTrajectory], CallReport, set[str]]:
        """Have rewards with `per = "group"` compare the siblings, as the run does; also what became of that, and who was compared."""
        if not self._config.compares_siblings or not members:
            return members, CallReport(), set()
        plan = plan_comparison(
            Group(group_id=members[0].trajectory.group_id, members=tuple(members)), min_group_size=self._config.batch.min_group_size
        )
        if not plan.compared:
            done = {member.trajectory.rollout_id: member for member in plan.done}
            return [done[member.trajectory.rollout_id] for member in members], CallReport(), set()
        result, report = self._scorers.request(group_reward_task([member.trajectory for member in plan.compared]))
        joined = {member.trajectory.rollout_id: member for member in (*plan.done, *join_comparison(plan.compared, result))}
        compared = {member.trajectory.rollout_id for member in plan.compared}
        return [joined[member.trajectory.rollout_id] for member in members], report, compared

    def _credit(self, members: list[ScoredTrajectory]) -> None:
        """Say what the method makes of a group, where enough of it has a reward."""
        survivors = tuple(member for member in members if member.score.outcome is Outcome.OK)
        least = max(2, self._config.batch.min_group_size)
        if self._method is None or len(members) < 2:
            return
        if len(survivors) < least:
            have = f"{len(survivors)} of {len(members)} siblings have a reward"
            print(f"-- {self._method.name}: the group would fail, because {have}, and {least} are needed")
            return
        credit = MethodAdvantages(self._method, self._config.reward, correct_reward=self._config.algorithm.correct_reward)
        in_trainer = makes_advantages_in_trainer(self._method)
        name = f"{self._method.name} over {len(survivors)} of {len(members)} siblings"
        self._print(print_advantages(credit(survivors), survivors, method=name, in_trainer=in_trainer))

    def _print(self, lines: Iterator[str]) -> None:
        for line in lines:
            print(line.encode(errors="backslashreplace").decode())


def _method(config: Config) -> Method | None:
    try:
        return method_of(config)
    except ConfigError as error:
        print(f"no advantages are shown: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    main()
