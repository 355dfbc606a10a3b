"""What a script may ask of its run: sample, score, train, publish, evaluate, save. `orchestrator.controller` starts the run.

Rollouts, scores and rows are the messages that the stages of every run pass on (`pipelinerl.messages.rollouts`).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from orchestrator.ledger.rollouts import Counts
from orchestrator.rollouts.trajectories import last_line
from orchestrator.rules.batch import NO_FAILURE, Filtered, Siblings, greedy_of, sample_of, sampled_of, samples_of
from orchestrator.rules.script import ALL_STOPPED, Made
from orchestrator.rules.script_decisions import check_rollouts
from orchestrator.run import Run
from orchestrator.stages.script_replay import decode_columns, encode_columns
from orchestrator.stages.script_waits import ScriptWaits
from orchestrator.stages.streams import Coming, Stream
from pipelinerl.algorithms.step_loss import method_of_loss
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, NobodySends, NotReallocated, PeerRefused, ScriptError
from pipelinerl.messages import (
    Demonstration,
    Float32,
    LogprobModel,
    Prompt,
    Sample,
    ScoredTrajectory,
    StepDone,
    TerminalStatus,
    Trajectory,
)
from pipelinerl.runtime.membership import MAX_DRAIN_S
from pipelinerl.storage.checkpoint_folder import name_of
from pipelinerl.transport.codec import Decoder, encode

OWN_PROMPTS = 1 << 40
"""Number of the first prompt that a script makes itself; prompts of `data.source` have smaller ones."""

Row = Mapping[str, Any]
"""A row as `data.source` would give it: the column of `data.prompt_column`, and what rewards read."""


_Verdict = tuple[list[Sample], list[tuple[int, str, str]]]
_prompts: Decoder[Prompt] = Decoder(Prompt)


class DemonstrationOf(Protocol):
    """Makes a demonstration of a row; an error begins with `where`."""

    def __call__(self, row: Row, *, where: str) -> Demonstration: ...


class ScriptedRun:
    """A run under way, as a script sees it. Calls raise `ScriptError` where they ask for what cannot be, and what has ended the run.

    A `Trajectory` is a rollout that finished, a `ScoredTrajectory` one that is scored, a `Sample` a row to train: a rollout with an
    advantage for each token. Each is used as it came.
    """

    def __init__(
        self,
        run: Run,
        *,
        config: Config,
        folder: Path,
        prompt_of: Callable[[int, Row], Prompt],
        decode: Callable[[list[int]], str],
        demonstration: DemonstrationOf,
    ) -> None:
        """`prompt_of` makes a prompt of a number and a row, `demonstration` one of a row; `decode` the text of a completion's tokens."""
        assert run.pipeline.script is not None, "the run was made for a script"
        self.folder = folder
        """The run's folder: journal, ledger, checkpoints, and in the end `model/`."""
        self._run = run
        self._given = run.parts.given
        self._script = run.pipeline.script
        self._steps = self._script.steps
        self.config = config
        """The settings, resolved: what they leave to a script (`batch.groups_per_step`, `evaluation.every`) is there for it to read."""
        self._prompt_of = prompt_of
        self._decode = decode
        self._demonstration = demonstration
        self._replay = self._script.replay
        self._num_own_prompts = 0 if self._replay.is_kept else run.parts.past.next_group_id

    @property
    def step(self) -> int:
        """The step that comes next: as many are trained, or on their way."""
        return self._script.book.step

    @property
    def num_steps(self) -> int:
        """The most steps of this run, `trainer.steps`, by which the learning rate is planned."""
        return self.config.trainer.steps

    @property
    def version(self) -> int:
        """The policy that was published last; 0 is the model that the run began with."""
        return self._script.book.published

    @property
    def rollouts(self) -> Counts:
        """The rollouts so far by how they ended. `admitted` is the sum of the others, always."""
        return self._given.ledger.counts()

    @property
    def waits(self) -> ScriptWaits:
        """How its calls wait."""
        return self._script.waits

    def holds(self, rollout: Trajectory) -> bool:
        """Return whether the script has read this very rollout of this policy, and it is not over."""
        return self._script.book.holds(rollout)

    def tell_owner(self, whose: Callable[[Trajectory], str]) -> None:
        """Have errors about a rollout that is none of this policy's say whose it is."""
        self._script.book.whose = whose

    # --- rollouts ---

    def prompts(self, count: int) -> list[Prompt]:
        """Draw the next prompts of `data.source`. Raises `DataError`."""
        source = self._given.source

        def decode(body: bytes) -> list[Prompt]:
            position, prompts = msgspec.msgpack.decode(body)
            source.position = max(source.position, tuple(position))
            return [_prompts.decode(one) for one in prompts]

        return self._replay.answer(
            self._replay.begin("prompts", (count,)),
            lambda: [source.next() for _ in range(count)],
            encode=lambda prompts: msgspec.msgpack.encode([source.position, list(map(encode, prompts))]),
            decode=decode,
        )

    def sample(self, prompts: Iterable[Prompt | Row], *, group: int | None = None, step: int | None = None) -> Stream[Trajectory]:
        """Have each prompt answered `group` times (`rollout.group_size`), from this moment on, whether or not anybody reads.

        `async for` gives each rollout as it finishes, `await` all of them. Every one has to be read. A prompt is one of `prompts`, or a row
        of your own. `step` is the one that they are for, by default the next: an engine that is more than `pipeline.max_staleness` versions
        behind it takes none. Raises `NobodySends` where the policy that was published last is too old for it until `publish`, `DataError`
        for a prompt that is too long.
        """
        if group is not None:
            self._check_group(group)
        return self._script.sample([self._prompt(one) for one in prompts], num_siblings=group, step=self.step if step is None else step)

    def score(self, rollouts: Iterable[Trajectory] | AsyncIterable[Trajectory]) -> Stream[ScoredTrajectory]:
        """Have rollouts scored by the rewards of the config; takes a list of them, or what `sample` returned.

        Gives each as its score is there. A reward that fails is an outcome, not a number: `score.reward` is then None. Raises
        `TrainedTwice` for a rollout that was scored before.
        """
        return self._script.score(rollouts)

    def advantages(self, scored: Iterable[ScoredTrajectory]) -> list[Sample]:
        """Return the rows that the method of the config makes of these, siblings together.

        A group that the method filters out, too few of whose siblings have a reward, or that is too old for the step that comes next, gives
        no row, and ends with the next step as filtered, failed or stale. A rule over a whole step (`batch`) takes all that is given here as
        the step.
        """
        self._script.waits.check()
        groups = self._script.book.siblings(scored)

        def decode(body: bytes) -> _Verdict:
            rows, refused = msgspec.msgpack.decode(body)
            members = {member.trajectory.rollout_id: member for siblings in groups for member in siblings}
            return [sample_of(members[name], np.frombuffer(column, np.float32)) for name, column in rows], refused

        samples, refused = self._replay.answer(
            self._replay.begin("advantages", ((one.trajectory.rollout_id, one.score.reward) for siblings in groups for one in siblings)),
            lambda: self._decide(groups),
            encode=lambda found: msgspec.msgpack.encode(
                [[(one.trajectory.rollout_id, one.advantages.tobytes()) for one in found[0]], found[1]]
            ),
            decode=decode,
        )
        for group_id, status, reason in refused:
            self._script.book.refuse(group_id, TerminalStatus(status), reason)
        return samples

    @property
    def has_step_rule(self) -> bool:
        """True where the method has a rule over a whole step: `advantages` is then given all groups of the step at once."""
        rules = self._given.step_rules
        return rules is not None and rules.step_advantages is not None

    def text(self, rollout: Trajectory | ScoredTrajectory) -> str:
        """Return the text of what was sampled, as rewards see it: of an episode that branches, the line that leads to its last turn."""
        return self._decode(last_line(rollout.trajectory if isinstance(rollout, ScoredTrajectory) else rollout)[0].tolist())

    # --- the policy ---

    def train(self, rows: Sequence[Sample], *, loss: str | None = None) -> Coming[StepDone]:
        """Train rows as one step; what is awaited is what the trainer says of it, and `metrics` has its figures.

        The step is decided upon now, and its rows are there for the trainer once it has finished the steps before, whether or not anybody
        awaits this one: a script that has the rows of the next step need not wait for the last.

        The rows of a group go into one step, after all its siblings were read; those left out end as filtered. A group with a token more
        than `pipeline.max_staleness` versions older than this step does not train, and ends as stale. `loss` names the method whose loss
        this step has, where that is not `algorithm.name`: a row of the table of algorithms. Raises `TrainedTwice`, `RolloutsUnread`,
        `NobodySends` after the last step, and `ScriptError` where no row can train, or for a loss that this run has no models for.
        """
        if loss in (None, self.config.algorithm.name):
            return self._steps.train(rows, loss="")
        try:
            method_of_loss(self.config, str(loss))
        except ConfigError as error:
            raise ScriptError(f"train: {error}") from None
        return self._steps.train(rows, loss=str(loss))

    def sft(self, rows: Iterable[Row]) -> Coming[StepDone]:
        """Train demonstrations as one step, as `train` does rollouts: `metrics["loss"]` is in nats per trained token.

        A row has a prompt, in the column of `data.prompt_column`, and what should follow it, in that of `sft.completion_column`. It is a
        step like any other: it makes a version, `trainer.learning_rate` is its learning rate, and rollouts grow older by it. Raises
        `DataError` for a row that lacks a text or is too long, and `NobodySends` after the last step.
        """
        return self._steps.sft([self._demonstration(row, where=f"sft: row {number}") for number, row in enumerate(rows)])

    async def logprobs(
        self, rollouts: Sequence[Trajectory], *, model: LogprobModel | Literal["policy", "reference"] = LogprobModel.REFERENCE
    ) -> list[Float32]:
        """Return how likely the tokens of each rollout are to a model of the trainer: [L] float32, natural log at the temperature of
        rollouts, 0.0 where a token has no loss.

        `reference` is the frozen model of `reference.path`, or each row's own of `reference.teachers`; `policy` the newest one, published
        or not. Steps that were asked for before are trained first. Raises `ScriptError` where the config names no reference.
        """
        check_rollouts("logprobs", rollouts)
        if model not in list(LogprobModel):
            raise ScriptError(f"logprobs: model is {model!r}, expected one of {', '.join(LogprobModel)}")
        if model == LogprobModel.REFERENCE and not self.config.reference.folders:
            raise ScriptError("logprobs: no reference. Set reference.path, to model.path for the model that the run begins with")
        return await self._replay.wait(
            self._replay.begin("logprobs", (str(model), *(one.rollout_id for one in rollouts))),
            lambda: self._steps.logprobs(rollouts, model=LogprobModel(model)),
            encode=encode_columns,
            decode=decode_columns,
        )

    async def publish(self) -> int:
        """Bring the newest policy to the engines, and return its version: that of the last step that was awaited, or where that is
        published of the last that was asked for.

        Waits until the trainer has written it, not until engines hold it: each fetches it while it decodes, and swaps between two forward
        passes. Raises `NothingTrained` where no step was trained since the last time.
        """
        self._script.waits.check()
        self._script.book.published = version = self._script.book.publishes(in_place=self.config.is_colocated)
        call = self._replay.begin("publish")
        return await self._replay.wait(
            call, lambda: self._steps.publish(version), encode=msgspec.msgpack.encode, decode=msgspec.msgpack.decode
        )

    async def evaluate(self) -> float | None:
        """Return the mean reward of the held-out prompts (section `evaluation`) under the policy that was published last.

        Waits until every engine holds it, and keeps them at it. None where the evaluation was given up: the journal says why. The answers
        are no rollouts of the run, and none of them trains. Raises `ScriptError` without `evaluation.source`, and `NobodySends` where a
        step was trained in place of that policy.
        """
        self._script.waits.check()
        if not self._given.held_out:
            raise ScriptError("evaluate: no held-out prompts. Set evaluation.source")
        if self.config.is_colocated and self.version < self.step:
            raise NobodySends(
                f"evaluate: policy {self.version} is gone: step {self.step - 1} was handed to the trainer, which changes the weights in"
                ' place (pipeline.placement is "colocated"). Publish first'
            )
        return await self._replay.wait(
            self._replay.begin("evaluate"), self._evaluate, encode=msgspec.msgpack.encode, decode=msgspec.msgpack.decode
        )

    async def _evaluate(self) -> float | None:
        evaluation = self._run.evaluation

        async def evaluate_it() -> int:
            version = -1
            while version < self.version:  # another task may publish meanwhile
                await self._run.in_force(version := self.version)
            await evaluation.evaluate_pinned(version)
            return version

        version = await self._script.waits.beside(evaluate_it(), f"the evaluation of policy {self.version}")
        return dict(evaluation.results).get(version)

    async def reallocate(self, *, engines: int, drain_s: float = 60.0) -> None:
        """Have the run have so many engines, and return once those that join serve and those that leave have left, as `pipelinerl scale`
        has it do.

        Those that came last leave. What they have not ended after `drain_s` seconds goes on in others, with its tokens where it can. Raises
        `NotReallocated` for a number that this run cannot have, for one of several policies, and where an engine does not come or go.
        """
        self._script.waits.check()
        if not isinstance(engines, int):
            raise ScriptError(f"reallocate: engines is {engines!r}, expected a whole number")
        if not (isinstance(drain_s, int | float) and 0 <= drain_s <= MAX_DRAIN_S):
            raise ScriptError(f"reallocate: drain_s is {drain_s!r}, expected 0 to {MAX_DRAIN_S:g} seconds")

        async def reallocate() -> str:
            if self._given.policy:
                return f"policy {self._given.policy} keeps the engines that it began with, as each of several policies does"
            return await self._run.reallocate(engines=engines, drain_s=drain_s)

        why = await self._replay.wait(
            self._replay.begin("reallocate", (engines, drain_s)),
            lambda: self._script.waits.beside(reallocate(), f"the run to have {engines} engines"),
            encode=msgspec.msgpack.encode,
            decode=msgspec.msgpack.decode,
        )
        if why:
            raise NotReallocated(f"reallocate: engines={engines}: {why}")

    async def save(self) -> Path:
        """Write a checkpoint of the newest policy, and return its folder; `pipelinerl export` makes a model folder of it.

        The run also saves every `checkpoint.every` steps and at its end. Raises `NothingTrained` before the first step, `PeerRefused` where
        it could not be written.
        """
        self._script.waits.check()
        self._script.book.check_save()
        version = self.step
        path = self.folder / "checkpoints" / name_of(version)
        if self._replay.is_recorded(self._replay.begin("save")):
            return path
        await self._steps.save(version, checkpoints=self._run.pipeline.training.session.checkpoints)
        if not path.is_dir():
            raise PeerRefused(f"save: the trainer could not write {path}: see its log. The checkpoint before it is untouched")
        return path

    async def leave(self) -> None:
        """End the run well: drop what the method has refused, and wait until the last policy is saved.

        Raises `RolloutsUnread` where something was not read.
        """
        script, training = self._script, self._run.pipeline.training
        script.check_all_read()
        self._replay.check_over()
        await self._steps.drop_refused()
        if self.step < self.num_steps:
            self._run.stop("the script has ended", evaluates=False)
            return
        self._steps.held.publish(self.step)
        await script.waits.beside(training.finished.wait(), "the trainer to save the last policy")
        self._steps.left.set()

    # --- inside ---

    def _decide(self, groups: Iterable[Siblings]) -> _Verdict:
        """Return the rows that the method makes of groups, and which of them it refuses, and why."""
        rules, kept = self._given.step_rules, list[tuple[Siblings, tuple[Sample, ...]]]()
        refused: list[tuple[int, str, str]] = []
        for siblings in groups:
            usable = tuple(member for member in siblings if member.score.outcome in NO_FAILURE)
            if (why := self._refusal(siblings, usable)) is not None:
                refused.append((siblings[0].trajectory.group_id, *why))
            elif isinstance(made := self._script.book.made_of(usable, self._make), Filtered):
                refused.append((siblings[0].trajectory.group_id, TerminalStatus.FILTERED, made.reason))
            else:
                kept.append((usable, made))
        if kept and rules is not None and rules.step_advantages is not None:
            groups = [usable for usable, _ in kept]
            kept = [(usable, samples_of(usable, columns)) for usable, columns in zip(groups, rules.step_advantages(groups), strict=True)]
        refused += [(usable[0].trajectory.group_id, *ALL_STOPPED) for usable, rows in kept if not rows]
        return [sample for _, rows in kept for sample in rows], refused

    def _make(self, siblings: Siblings) -> Made:
        found = self._given.group_advantages(siblings)
        return found if isinstance(found, Filtered) else samples_of(siblings, found)

    def _prompt(self, prompt: Prompt | Row) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        number, self._num_own_prompts = OWN_PROMPTS + self._num_own_prompts, self._num_own_prompts + 1
        return self._prompt_of(number, prompt)

    def _check_group(self, group: int) -> None:
        most = self.config.rollout.group_size
        if not 1 <= group <= most or (group < most and self._run.parts.adds_greedy):
            expected = f"rollout.group_size, {most}" if self._run.parts.adds_greedy else f"1 to rollout.group_size, {most}"
            raise ScriptError(f"sample: group is {group}, expected {expected}")

    def _refusal(self, siblings: Siblings, usable: Siblings) -> tuple[TerminalStatus, str] | None:
        """Say why a group fails, by the rules of `rules.batch.BatchCut`."""
        fewest = self.config.batch.min_group_size
        if len(sampled_of(usable)) < max(1, min(fewest, len(sampled_of(siblings)))):
            return TerminalStatus.FAILED, f"fewer than {fewest} siblings scored"
        if self._run.parts.adds_greedy and greedy_of(usable) is None:
            return TerminalStatus.FAILED, "its greedy sibling has no reward"
        return self._script.book.too_old if self._script.book.is_too_old(sampled_of(usable)) else None
