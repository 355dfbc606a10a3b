"""A policy that nothing trains: an opponent, a judge or a teacher. It is engines that answer a script, and nothing else of a run.

What it samples is no rollout of a ledger: nothing becomes of it but what the script does with it, and no token of it can be trained.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orchestrator.ledger.answers import Kind
from orchestrator.observe.status import EVERY_S
from orchestrator.peers.asking import answer_of
from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.rollouts.rollout import unanswered
from orchestrator.rollouts.trajectories import end_to_end
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.stages.agent_turns import AgentTurns
from orchestrator.stages.leasing import Leasing, Seat
from orchestrator.stages.script_replay import ScriptRecord, ScriptReplay, decode_columns, encode_columns
from orchestrator.stages.script_streams import ScriptStreams
from orchestrator.stages.script_waits import ScriptWaits
from orchestrator.stages.streams import Intake, Room, Stream
from pipelinerl.config import Config
from pipelinerl.errors import PeerRefused, ScriptError
from pipelinerl.messages import Completion, Finish, Float32, Generate, Prompt, Sampling, Stop, Trajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch, wait_for
from pipelinerl.transport.base import Hub
from pipelinerl.transport.codec import Decoder, encode

MAX_ATTEMPTS = 5
"""Times that a sequence is asked for: again where its engine is lost, or gives an impossible answer. More only repeats what fails."""
_trajectories: Decoder[Trajectory] = Decoder(Trajectory)
VERSION = 0
"""The only version of a policy that nothing trains."""


class FrozenPolicy:
    """Engines that hold one model for good, as a script sees them."""

    version = VERSION

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        folder: Path,
        hub: Hub,
        journal: Journal,
        prompt_of: Callable[[int, Mapping[str, Any]], Prompt],
        decode: Callable[[list[int]], str],
        stop_token_ids: tuple[int, ...] = (),
        vocabulary: int | None = None,
        replace: Callable[[str], None] | None = None,
        record: ScriptRecord | None = None,
    ) -> None:
        """`prompt_of` makes a prompt of a number and a row, `decode` the text of a completion's tokens; `replace`: see `Peers`. `record` is
        that of the script's calls, where it is led through them: no ledger has what a frozen policy said.
        """
        self.name = name
        self.config = config
        self.folder = folder
        """Its own folder, in that of the run: journal, logs, settings."""
        self.ready = asyncio.Event()
        """Set once every engine is there."""
        self._journal = journal
        self._prompt_of = prompt_of
        self._decode = decode
        self._vocabulary = vocabulary
        self._watch = Watch(stall_limit_s=config.pipeline.stall_limit_s)
        self.waits = ScriptWaits(watch=self._watch, owner=f"policy {name}")
        """How calls of the script wait."""
        self._streams = ScriptStreams(waits=self.waits)
        self._replay = ScriptReplay(record, policy=name, waits=self.waits)
        peers = Peers(
            hub,
            role="engine",
            expected=config.engine.count,
            ready_deadline_s=config.engine.ready_deadline_s,
            silent_after_s=config.engine.silent_after_s,
            replace=replace,
            tell=self._report,
            has_spares=True,
            max_processes=None if replace is None else 2 * config.run.restarts + 10,  # as in `orchestrator.parts`
        )
        num_turns = 0 if config.gateway is None else config.gateway.max_episodes * config.gateway.max_parallel
        self._engines = Engines(
            peers,
            expected=config.engine.count,
            watch=self._watch,
            credits=Signal(),
            completion_check=CompletionCheck(vocabulary=vocabulary),
            announcement_check=AnnouncementCheck(max_outstanding=config.max_running_rollouts + num_turns, num_steps=VERSION),
        )
        self._sampling = Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            stop_token_ids=stop_token_ids,
            stop=config.rollout.stop,
        )
        self._slots = asyncio.Semaphore(config.max_running_rollouts)
        self._room = Room(what=f"what policy {name} sampled", bound_bytes=config.pipeline.queue_bytes)
        self._numbers = itertools.count()
        self._longest = 0
        """Tokens that its engines judge, as they said when they were there: they may be gone for a moment."""
        self._stopped = asyncio.Event()
        self._reason = "the script has ended"

    # --- what the script calls ---

    def sample(self, prompts: Iterable[Prompt | Mapping[str, Any]], *, group: int | None = None) -> Stream[Trajectory]:
        """Have each prompt answered `group` times (`rollout.group_size`), from this moment on; see `ScriptedRun.sample`.

        Every answer has to be read. One that could not be had is a rollout whose `finish` is `ERROR`, as everywhere.
        """
        self.waits.check()
        size = self.config.rollout.group_size if group is None else group
        if size < 1:
            raise ScriptError(f"sample: group is {group}, expected 1 or more")
        asked = [one if isinstance(one, Prompt) else self._prompt_of(next(self._numbers), one) for one in prompts]
        call = self._replay.begin("sample", (*((one.prompt_id, one.token_ids.tobytes()) for one in asked), size))
        what = f"sample of policy {self.name} ({len(asked)} prompts, {len(asked) * size} answers)"
        intake: Intake[Trajectory] = self._streams.begin(what, call=call, room=self._room, num_bytes=_num_bytes)
        intake.num_left = len(asked) * size
        assert self.waits.tasks is not None, "calls come once the engines are there"
        said = {event.words for event in self._replay.results(call)}
        groups = [next(self._numbers) for _ in asked]
        for place, (number, prompt) in enumerate(zip(groups, asked, strict=True)):
            for sibling in range(size):
                if _place(place, sibling) not in said:
                    self.waits.tasks.create_task(self._play(intake, prompt, number, sibling))
        places = {number: place for place, number in enumerate(groups)}
        return Stream(intake, take=functools.partial(self._take, places), abandon=self._streams.abandon)

    async def logprobs(self, rollouts: Sequence[Trajectory]) -> list[Float32]:
        """Return how likely the tokens of each rollout are to this policy, whoever sampled them: [L] float32, natural log, 0.0 where a
        token has no loss.

        The tokens are taken as they are: the model has to have the vocabulary of the one that sampled them. Raises `ScriptError` for a
        rollout that is longer than engines take or has tokens that the model does not know, and where rollouts are not sampled at
        temperature 1, which is that of an engine's figures.
        """
        self.waits.check()
        if (temperature := self.config.rollout.temperature) != 1.0:
            raise ScriptError(
                f"logprobs: policy {self.name} has rollout.temperature = {temperature:g}, and engines give log-probabilities at 1 alone."
                " Set rollout.temperature = 1, or ask the trainer of a trained policy: its `logprobs(model=...)`"
            )
        for one in rollouts:
            self._check_length(one)
        names = [f"{self.name}:{next(self._numbers)}" for _ in rollouts]
        return await self._replay.wait(
            self._replay.begin("logprobs", (one.rollout_id for one in rollouts)),
            lambda: self._judge(names, rollouts),
            encode=encode_columns,
            decode=decode_columns,
        )

    def seat(self, leasing: Leasing) -> Seat:
        """Return what lets agents ask for its turns, which are in no rollout and train nowhere."""
        config = self.config
        longest = min(config.batch.max_tokens, config.model.max_tokens or config.batch.max_tokens)
        turns = AgentTurns(
            gateway=leasing.gateway,
            engines=self._engines,
            watch=self._watch,
            section=leasing.section,
            sampling=self._sampling,
            max_context_tokens=longest,
            max_tokens=config.batch.max_tokens,
            vocabulary=self._vocabulary,
        )
        return Seat(turns=turns, watch=self._watch, ledger=None)

    def text(self, rollout: Trajectory) -> str:
        """Return the text of what was sampled, in this policy's tokens."""
        return self._decode(rollout.token_ids[len(rollout.prompt.token_ids) :].tolist())

    # --- what drives it ---

    async def run(self) -> None:
        """Serve until `stop`. Raises the first error of an engine that cannot be gone on without."""
        loop, peers = asyncio.get_running_loop(), self._engines.peers
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            service = [group.create_task(peers.run()), group.create_task(self._tell(began_s))]
            main, stop = group.create_task(self._main()), group.create_task(self._stopped.wait())
            await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
            peers.dismiss(Stop(reason=self._reason))
            for task in (main, stop, *service):
                task.cancel()
        self._journal.write("end", reason=self._reason, rollouts={}, elapsed_s=loop.time() - began_s)

    def stop(self, reason: str, *, evaluates: bool = True) -> None:
        """End it: there is nothing to save or to evaluate."""
        self._reason = reason
        self._stopped.set()

    async def leave(self) -> None:
        """End it well."""
        self._streams.check_all_read()
        self._replay.check_over()
        self.stop(self._reason)

    # --- inside ---

    async def _main(self) -> None:
        deadline_s = self.config.engine.ready_deadline_s
        await wait_for(self._engines.wait_until_ready(), peer=f"engines of policy {self.name}", what="to load", deadline_s=deadline_s)
        self._longest = self._engines.max_model_tokens - 1
        async with asyncio.TaskGroup() as self.waits.tasks:
            self.ready.set()
            await self._watch.run()

    async def _play(self, intake: Intake[Trajectory], prompt: Prompt, number: int, sibling: int) -> None:
        loop = asyncio.get_running_loop()
        rollout_id, began_s = f"{self.name}:{number}/{sibling}", loop.time()
        request = Generate(rollout_id=rollout_id, attempt=0, token_ids=prompt.token_ids, sampling=self._sampling, images=prompt.images)
        async with self._slots:  # also while there is no room: so many answers are held beside it, at most
            completion = await self._answer(request)
            while self._room.is_full and not intake.is_abandoned:
                await self.waits.changed.wait()
        intake.put(
            end_to_end(
                prompt,
                completion,
                rollout_id=rollout_id,
                group_id=number,
                sibling=sibling,
                attempt=completion.attempt,
                finish=completion.finish,
                error=completion.error,
                admitted_at=began_s,
                finished_at=loop.time(),
            )
        )
        self.waits.changed.set()

    async def _judge(self, names: Sequence[str], rollouts: Sequence[Trajectory]) -> list[Float32]:
        what, reader = f"engines of policy {self.name} to judge {len(rollouts)} rollouts", asyncio.current_task()

        def check() -> None:
            self._streams.check_room(f"logprobs of policy {self.name}", (self._room,), reader=reader)

        return await self.waits.beside(_all([self._judged(*one) for one in zip(names, rollouts, strict=True)]), what, check=check)

    async def _judged(self, name: str, rollout: Trajectory) -> Float32:
        sampling = Sampling(max_tokens=1, has_prompt_logprobs=True)
        request = Generate(rollout_id=name, attempt=0, token_ids=rollout.token_ids, sampling=sampling, images=rollout.prompt.images)
        async with self._slots:
            said = await self._answer(request)
        if said.prompt_logprobs is None:
            raise PeerRefused(f"policy {self.name}: no log-probabilities of rollout {rollout.rollout_id}: {said.error or said.finish}")
        return np.where(rollout.loss_mask, said.prompt_logprobs, 0.0).astype(np.float32)

    async def _answer(self, request: Generate) -> Completion:
        """Ask until an engine answers; what stands for an answer after `MAX_ATTEMPTS`."""
        words = f"engines were lost, or gave impossible answers, {MAX_ATTEMPTS} times over"
        for attempt in range(MAX_ATTEMPTS):
            completion = await answer_of(self._engines, msgspec.structs.replace(request, attempt=attempt))
            if completion is not None and completion.finish is not Finish.ERROR:
                self._watch.moved()
                return completion
            words = words if completion is None else completion.error
        return unanswered(request.rollout_id, attempt=MAX_ATTEMPTS - 1, error=words)

    async def _take(self, places: Mapping[int, int], intake: Intake[Trajectory]) -> list[Trajectory]:
        """Wait until answers of a stream are due; `places` are those of its groups among the prompts that were asked for."""
        intake.reader = asyncio.current_task()
        if (event := await self._replay.take(intake.call)) is not None:
            intake.num_left -= 1
            return [_trajectories.decode(self._replay.body(event))]
        with self.waits.waiting(intake.what):
            while not (intake.is_due and self._replay.live.is_set()):
                if intake.is_over:
                    return []
                self.waits.check()
                self._replay.check_turn()
                self._streams.check_room(intake.what, (self._room,), reader=intake.reader)
                await self.waits.changed.wait()
        taken = intake.take()
        for one in taken if self._replay.is_recording else ():
            self._replay.note(intake.call, Kind.RESULT, words=_place(places[one.group_id], one.sibling), body=encode(one))
        self.waits.changed.set()  # there is room
        return taken

    def _check_length(self, rollout: Trajectory) -> None:
        longest, known = self._longest, self._vocabulary
        if rollout.nodes is not None:
            raise ScriptError(f"logprobs: rollout {rollout.rollout_id} branches, and engines judge one sequence: ask for those that do not")
        if rollout.num_tokens > longest:
            raise ScriptError(
                f"logprobs: rollout {rollout.rollout_id} has {rollout.num_tokens} tokens, and engines of policy {self.name} judge at most"
                f" {longest}. Raise policies.{self.name}.model.max_tokens, or shorten rollouts"
            )
        if known is not None and int(rollout.token_ids.max(initial=0)) >= known:
            raise ScriptError(
                f"logprobs: rollout {rollout.rollout_id} has token {int(rollout.token_ids.max())}, and the model of policy {self.name}"
                f" knows {known}: it has to have the vocabulary of the one that sampled them"
            )

    async def _tell(self, began_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            loads = [engine.load for engine in self._engines if engine.load]
            self._journal.write(
                "status",
                version=VERSION,
                generated_tokens=sum(load.num_tokens for load in loads),
                engines=[msgspec.to_builtins(load) for load in loads],
                waits=[{"stage": wait.stage, "what": wait.what, "seconds": loop.time() - wait.since} for wait in self._watch.waits()],
                waited_s=self._watch.all_waited_s(),
                refused=dict(self._engines.peers.refused),
                elapsed_s=loop.time() - began_s,
            )
            await asyncio.sleep(EVERY_S)

    def _report(self, peer: str, kind: str, words: str, count: int) -> None:
        self._journal.write("violation", peer=peer, what=kind, words=words, count=count)
        print(f"policy {self.name}, {peer}: {kind}, {count} so far: {words}", flush=True)


async def _all(asking: Sequence[Any]) -> list[Float32]:
    return list(await asyncio.gather(*asking))


def _place(place: int, sibling: int) -> str:
    """Name an answer in the record: its number is another one where tasks of the script have called in another order."""
    return f"{place}/{sibling}"


def _num_bytes(trajectory: Trajectory) -> int:
    return trajectory.num_bytes
