"""Engines, a scorer and a trainer as coroutines on simulated time, with seeded latencies and failures.

The engine is the product's own `EngineLoop` around its own `FakeEngine`; scorer and trainer speak the product's messages. Each of the
coroutines can be exchanged for one that misbehaves, see `run.Cast`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import math
import random
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from pipelinerl.config import Config
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.errors import EngineError, WeightsError
from pipelinerl.messages import (
    Alive,
    Cancel,
    CancelRequest,
    CheckpointSaved,
    Command,
    ComputeLogprobs,
    EndEpisode,
    EndTraining,
    EngineMismatch,
    FunctionFailed,
    FunctionKind,
    FunctionLoad,
    LayoutFixed,
    LogprobModel,
    LogprobsComputed,
    Message,
    MicroBatch,
    Observation,
    Outcome,
    PolicyPublished,
    PrmLoad,
    PrmReady,
    Request,
    RequestKind,
    Result,
    SaveCheckpoint,
    ScorerLoad,
    ScorerReady,
    StageWeights,
    StepClosed,
    StepDone,
    StepsScored,
    Stop,
    TakeMicroBatch,
    TraceTokens,
    TrainerReady,
    TrainingEnded,
    WeightBufferReleased,
)
from tests.sim.clock import later
from tests.sim.memory import MemoryLink

REWARD_LOAD = FunctionLoad(
    num_calls=3, num_failed={"error": 1}, num_retries=0, p50_s=0.1, p95_s=0.2, max_s=0.2, slowest="0/1", breaker="closed"
)
"""What a scorer says of its one function."""


@dataclasses.dataclass(slots=True)
class Device:
    """What colocated engines and trainer share: the buffer that the one changes in place and the others read."""

    changing: str = ""
    """The buffer that a trainer trains on now."""
    versions: dict[str, int] = dataclasses.field(default_factory=dict)
    """The policy that a trainer has published last in each buffer."""
    num_passes: int = 0
    """Of engines that read a trainer's buffer."""
    num_beside: int = 0
    """Of these, while a trainer changed another one."""
    problems: list[str] = dataclasses.field(default_factory=list)

    def read(self, buffer: str, version: int) -> None:
        """Note a forward pass over the weights in a buffer, which an engine takes for a policy."""
        self.num_passes += bool(buffer)
        self.num_beside += bool(buffer and self.changing)
        if buffer and self.versions[buffer] != version:
            self.problems.append(f"a forward pass read policy {self.versions[buffer]} in {buffer} as policy {version}")
        if buffer and buffer == self.changing:
            self.problems.append(f"a forward pass read {buffer} while it was being changed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How fast and how faulty everybody is."""

    seed: int = 0
    step_s: float = 0.01
    """One forward pass of an engine."""
    context_s: float = 0.0
    """How much longer it takes for each token that it reads of the sequences that it samples for."""
    doubled: float = 1.0
    """Times by which it is quicker in an engine of twice the ranks."""
    length_factors: tuple[float, ...] = (1.0,)
    """By how much longer answers are than `mean_tokens`, by the version that the engine has when it is asked; the last holds on."""
    stage_s: float = 0.05
    score_s: float = 0.02
    prm_s: float = 0.01
    """One batch of the process reward model."""
    prm_token_s: float = 0.0
    """How much longer it takes for each token."""
    token_s: float = 2e-5
    """Training one token."""
    mean_tokens: int = 24
    engine_error_fraction: float = 0.0
    """Of forward passes that fail, losing all running sequences."""
    refused_fraction: float = 0.0
    """Of policies that an engine fails to stage."""
    bad_score_fraction: float = 0.0
    """Of scores that are a timeout, an error or invalid."""
    reply_s: float = 0.05
    """Of an environment."""
    num_environments: int | None = None
    """Environments with state that may live at once; None for a function, which has none."""
    lost_environment_fraction: float = 0.0
    """Of turns over which the process of an environment with state is lost."""
    bad_reply_fraction: float = 0.0
    """Of an environment's replies that are a timeout, after ten times as long, an error or invalid."""
    think_s: float = 0.02
    """What an agent outside of the run needs before a turn."""
    vanish_fraction: float = 0.0
    """Of turns before which an agent is not heard of any more."""
    give_up_fraction: float = 0.0
    """Of turns before which an agent gives its attempt up."""
    sub_agent_fraction: float = 0.0
    """Of turns before which an agent asks in a context of its own."""
    kv_tokens: int | None = None
    """Tokens that an engine's KV cache holds; None: as many as come."""
    prefill_s: float = 2e-5
    """Computing a token of a KV cache anew, where one is bounded."""
    device: Device | None = None
    """Of a colocated run."""
    tells_sequences: bool = False
    """Engines say what they have, and what of it waits for room."""
    start_s: float = 0.0
    """What everybody needs to load before announcing itself."""


def world_of(settings: Config, world: World) -> World:
    """With the device that engines and trainer share, where they do."""
    world = dataclasses.replace(world, tells_sequences=settings.pipeline.migration != "off")
    return dataclasses.replace(world, device=world.device or Device()) if settings.is_colocated else world


process_ids = itertools.count(1000)
"""Of every simulated process, so that one that takes over a name is told from the one before."""


class SimulatedEngine(FakeEngine):
    """Fails a seeded fraction of forward passes; its tokens tell the version that sampled them, also where it skipped some."""

    def __init__(self, *, fraction: float, seed: int, kv_tokens: int | None = None, device: Device | None = None, **options: int) -> None:
        super().__init__(**options)
        self._usual_tokens = self._mean_tokens
        self.staged_version = 0
        self.buffer = self.staged_buffer = ""
        """Where its policy lies, and the one that is staged; empty for what it has loaded from the disk."""
        self._device = device
        self.num_pushed_out = 0
        """Sequences whose KV cache was taken away."""
        self.num_computed = 0
        """Tokens of prompts and of what was pushed out that the last pass computed."""
        self._kv_tokens = kv_tokens
        self.limits = dataclasses.replace(self.limits, kv_tokens=kv_tokens)
        self._held: dict[str, int] = {}
        """Sequences that run, in the order in which they began to, with the tokens of their KV caches."""
        self._fraction = fraction
        self._random = random.Random(seed)

    def step(self):
        if self._random.random() < self._fraction:
            for rollout_id in list(self._requests):
                self.cancel(rollout_id)
            raise EngineError("simulated failure of a forward pass")
        if self._device is not None:
            self._device.read(self.buffer, self._num_commits)
        if self._kv_tokens is not None:
            self._make_room(self._kv_tokens)
        return super().step()

    @property
    def num_context(self) -> int:
        """Tokens of the sequences that the next pass samples for, their prompts among them."""
        return sum(len(request.token_ids) - request.num_written + self._positions[name] for name, (request, _, _) in self._running())

    def _running(self):
        return [(name, self._requests[name]) for name in self.running() if name in self._requests]  # what was cancelled holds its room yet

    def stretch(self, factors: Sequence[float]) -> None:
        """Have answers to what is asked from now on be so much longer, by the version that it has."""
        self._mean_tokens = round(self._usual_tokens * factors[min(self._num_commits, len(factors) - 1)])

    @property
    def kv_used(self) -> float | None:
        return None if self._kv_tokens is None else sum(self._held.values()) / self._kv_tokens

    def _make_room(self, kv_tokens: int) -> None:
        """As vLLM does: running sequences grow by a token, the youngest give way where that does not fit, waiting ones fill the rest."""
        self.num_computed = 0
        self._held = {name: 1 + held for name, held in self._held.items() if name in self._requests}
        while sum(self._held.values()) > kv_tokens:
            self._held.popitem()
            self.num_pushed_out += 1
        for name, (request, _, _) in self._requests.items():
            size = len(request.token_ids) + self._positions[name] + 1
            if name in self._held or len(self._held) >= self.limits.max_running:
                continue
            if sum(self._held.values()) + size > kv_tokens:
                break
            self._held[name] = size
            self.num_computed += size

    def running(self) -> list[str]:
        return super().running() if self._kv_tokens is None else list(self._held)

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        recomputed = super().commit(recompute)
        self._num_commits, self.buffer = self.staged_version, self.staged_buffer
        return recomputed


def token(prompt: np.ndarray, *, position: int, version: int, images: bytes = b"") -> int:
    """What a simulated engine samples at a position (from 1) under a version: the formula of `FakeEngine`, written a second time."""
    return (zlib.crc32(np.asarray(prompt, np.int32).tobytes() + images) + 7919 * position + 104729 * version) % 1000


def reply(token_ids: np.ndarray) -> list[int] | None:
    """What the simulated environment says to an episode of these tokens after the prompt: one to three tokens, or that it is over."""
    digest = zlib.crc32(np.asarray(token_ids, np.int32).tobytes())
    return None if digest % 4 == 0 else [(digest >> 2 * place) % 1000 for place in range(1 + digest % 3)]


OPENING = [7, 8]
"""What the simulated environment with state says before the first turn."""


def turn_reward(number: int) -> float:
    """What the simulated environment with state gives a turn, from 1; nothing to a reset."""
    return 0.25 * number


async def engine(
    link: MemoryLink, *, engine_id: int, max_running: int, world: World, tensor_parallel_size: int = 1, request_id: int = 0
) -> None:
    """Serve until told to stop, like `pipelinerl.engine.server`."""
    fake = SimulatedEngine(
        fraction=world.engine_error_fraction,
        seed=world.seed + engine_id,
        max_model_tokens=1 << 16,
        max_running=max_running,
        mean_tokens=world.mean_tokens,
        tensor_parallel_size=tensor_parallel_size,
        kv_tokens=world.kv_tokens,
        device=world.device,
    )
    clock = asyncio.get_running_loop().time
    chance = random.Random(world.seed + engine_id)

    def stage(order: StageWeights):
        try:
            if chance.random() < world.refused_fraction:
                raise WeightsError("simulated failure of a staging")
            fake.stage(order)
        except WeightsError as error:
            return later(world.stage_s, error)
        fake.staged_version, fake.staged_buffer = order.version, order.buffer
        return later(world.stage_s)

    loop = EngineLoop(fake, engine_id=engine_id, stager=stage, clock=clock)
    await asyncio.sleep(world.start_s)
    process_id = next(process_ids)
    link.introduce(lambda kept: [loop.introduce(kept, process_id=process_id, request_id=request_id)])
    next_load = busy_s = idle_s = 0.0
    slow = (1 + 0.1 * engine_id) * world.doubled ** -math.log2(tensor_parallel_size)
    while True:
        began = clock()
        message = await _message_within(link, seconds=1.0) if not loop.has_work and not loop.is_swapping else link.receive(0)
        idle_s += clock() - began
        fake.stretch(world.length_factors)
        while message is not None:
            if isinstance(message, Stop):
                return
            loop.handle(message)
            message = link.receive(0)
        began, has_work = clock(), loop.has_work
        await asyncio.sleep((world.step_s + world.context_s * fake.num_context) * slow)
        loop.advance()
        if world.kv_tokens is not None:
            await asyncio.sleep(world.prefill_s * fake.num_computed)
        busy_s, idle_s = busy_s + (clock() - began) * has_work, idle_s + (clock() - began) * (not has_work)
        for answer in loop.outbox:
            link.send(answer)
        loop.outbox.clear()
        if clock() >= next_load:
            next_load = clock() + 1.0
            link.send(msgspec.structs.replace(loop.load(idle_s=idle_s), busy_s=busy_s))
            if world.tells_sequences:
                link.send(loop.sequences())


async def _message_within(link: MemoryLink, *, seconds: float) -> Message | None:
    try:
        async with asyncio.timeout(seconds):
            return await link.wait()
    except TimeoutError:
        return None


async def scorer(link: MemoryLink, *, num_slots: int, world: World) -> None:
    """Score until told to stop: 1 for an odd sum of tokens, 0 for an even one; siblings compared get their place among them."""
    loop = asyncio.get_running_loop()
    chance = random.Random(world.seed)
    await asyncio.sleep(world.start_s)
    ready = ScorerReady(scorer_id=0, process_id=next(process_ids), num_slots=num_slots)
    calls: list[asyncio.TimerHandle] = []
    held: dict[str, int] = {}
    """Turns that each environment with state has heard, by episode."""

    def introduce(kept: Sequence[bytes]) -> list[Message]:
        for call in calls:
            call.cancel()
        calls.clear()
        held.clear()
        return [ready]

    link.introduce(introduce)
    heartbeat = loop.create_task(beat(link))
    bad = (Outcome.TIMEOUT, Outcome.ERROR, Outcome.INVALID)
    while not isinstance(message := await link.wait(), Stop):
        if isinstance(message, CancelRequest):
            continue
        if isinstance(message, EndEpisode):
            held.pop(message.rollout_id, None)
            continue
        assert isinstance(message, Request)
        task, environment = message.task, message.task.kind is RequestKind.ENVIRONMENT
        is_bad = chance.random() < (world.bad_reply_fraction if environment else world.bad_score_fraction)
        outcome = chance.choice(bad) if is_bad else Outcome.OK
        seconds, observation, rewards, name = world.score_s, None, (), "reward"
        is_lost, own_reward = False, 0.0
        if environment and world.num_environments is not None:
            num_turns = 0 if task.turns[0] is None else len(task.turns[0].starts)
            is_here = not num_turns or held.get(task.rollout_id) in (num_turns - 1, num_turns)
            is_lost = not is_here or chance.random() < world.lost_environment_fraction
            if is_lost:
                held.pop(task.rollout_id, None)
                outcome = Outcome.ERROR
            else:
                held[task.rollout_id] = num_turns
                own_reward = turn_reward(num_turns) if outcome is Outcome.OK else 0.0
                assert len(held) <= world.num_environments, "more environments live than may"
        if environment and not is_lost:
            seconds = world.reply_s * (10 if outcome is Outcome.TIMEOUT else 1)
            spoken = OPENING if task.turns[0] is None else reply(task.completions[0][task.turns[0].starts[0] :])
            if outcome is Outcome.OK and (said := spoken) is not None:
                observation = Observation(token_ids=np.array(said, np.int32), state=f"state {said[-1] % 3}")
        elif task.kind is RequestKind.GROUP_REWARD:
            rewards, name = tuple(map(float, range(len(task.completions)))), "rank"
        else:
            rewards = (float(task.completions[0].sum() % 2),)
            if outcome is not Outcome.OK:
                cause = 'ValueError("my verifier broke")'
                link.send(FunctionFailed(function="reward", kind=FunctionKind.REWARD, outcome=outcome, cause=cause, where="rewards.py:12"))
        rewards = rewards if outcome is Outcome.OK else ()
        result = Result(
            request_id=message.request_id,
            outcome=outcome,
            rewards=rewards,
            components=tuple({name: reward} for reward in rewards),
            observation=observation,
            reward=own_reward,
            is_lost=is_lost,
            error="" if outcome is Outcome.OK else "simulated",
            duration_s=world.score_s,
        )
        calls.append(loop.call_later(seconds * (0.5 + chance.random()), link.send, result))
    heartbeat.cancel()


STEP_TOKENS = 5
"""Every so many tokens the simulated process reward model sees a step end; the last one may be shorter."""


def step_scores(token_ids: np.ndarray, *, turn_ends: Sequence[int] | None = None) -> tuple[list[int], list[float]]:
    """(ends, scores) of a whole completion: what the simulated model must have said of it, chunk by chunk, of an episode by its turns."""
    if turn_ends is not None:
        ends = list(turn_ends)
    else:
        ends = [min(start + STEP_TOKENS, len(token_ids)) - 1 for start in range(0, len(token_ids), STEP_TOKENS)]
    return ends, [float(token_ids[: end + 1].sum() % 97) / 97 for end in ends]


async def prm(link: MemoryLink, *, world: World, prm_id: int = 1, request_id: int = 0) -> None:
    """Follow traces until told to stop, all that has come in one batch of `score_s` seconds; a trace's scores depend on all before."""
    traces: dict[str, list[int]] = {}
    attempts: dict[str, int] = {}
    told: dict[str, int] = {}
    turns: dict[str, list[int] | None] = {}
    busy_s = 0.0
    ready = PrmReady(prm_id=prm_id, process_id=next(process_ids), version="simulated", request_id=request_id)

    def introduce(kept: Sequence[bytes]) -> list[Message]:
        for known in (traces, attempts, told):
            known.clear()
        return [ready]

    await asyncio.sleep(world.start_s)
    link.introduce(introduce)
    while True:
        link.send(
            PrmLoad(
                prm_id=prm_id, num_traces=len(traces), num_steps=0, num_trace_tokens=0, num_computed=0, num_uncached_tokens=0, busy_s=busy_s
            )
        )
        message = await _message_within(link, seconds=1.0)
        touched: dict[str, bool] = {}
        batch_s = world.prm_s
        while message is not None:
            if isinstance(message, Stop):
                return
            if isinstance(message, Cancel) and attempts.get(message.rollout_id, message.attempt + 1) <= message.attempt:
                touched.pop(message.rollout_id, None)
                del traces[message.rollout_id], attempts[message.rollout_id]
            if isinstance(message, TraceTokens):
                if message.prompt_token_ids is not None:
                    traces[message.rollout_id], told[message.rollout_id] = [], 0
                    attempts[message.rollout_id] = message.attempt
                    turns[message.rollout_id] = None if message.turn_ends is None else message.turn_ends.tolist()
                if attempts.get(message.rollout_id) == message.attempt:
                    assert message.start == len(traces[message.rollout_id]), "a gap, or tokens told twice"
                    traces[message.rollout_id] += message.token_ids.tolist()
                    touched[message.rollout_id] = message.is_last
                    batch_s += len(message.token_ids) * world.prm_token_s
            message = link.receive(0)
        if touched:
            await asyncio.sleep(batch_s)
            busy_s += batch_s
        for rollout_id, is_last in touched.items():
            if rollout_id not in traces:
                continue  # what an orchestrator sent that is gone
            ends, scores = step_scores(np.array(traces[rollout_id]), turn_ends=turns[rollout_id])
            num_whole = len(ends) if is_last else len(traces[rollout_id]) // STEP_TOKENS
            first, told[rollout_id] = told[rollout_id], num_whole
            link.send(
                StepsScored(
                    rollout_id=rollout_id,
                    attempt=attempts[rollout_id],
                    num_taken=len(traces[rollout_id]),
                    first=first,
                    ends=np.array(ends[first:num_whole], np.int32),
                    scores=np.array(scores[first:num_whole], np.float32),
                    is_last=is_last,
                    version="simulated",
                )
            )
            if is_last:
                del traces[rollout_id], attempts[rollout_id]


async def beat(link: MemoryLink) -> None:
    """A scorer's sign of life, every second."""
    while True:
        await asyncio.sleep(1.0)
        link.send(ScorerLoad(scorer_id=0, num_running=0, num_scored=0, busy_s=0.0, functions={"reward": REWARD_LOAD}))


@dataclasses.dataclass(slots=True)
class TrainerRecord:
    """What the trainer saw, for the checker."""

    trained: dict[str, int] = dataclasses.field(default_factory=dict)
    """Step of every rollout trained."""
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    """In the loss, of every rollout trained."""
    oldest: dict[str, int] = dataclasses.field(default_factory=dict)
    """Version of its oldest token."""
    num_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    """Tokens with a loss, of every rollout trained."""
    branching: list[str] = dataclasses.field(default_factory=list)
    """Rollouts that are no single sequence."""
    tokens: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Tokens with a loss, by step."""
    sealed: dict[int, StepClosed] = dataclasses.field(default_factory=dict)
    samples: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Samples, by step."""
    losses: dict[int, set[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    """What rows say of the loss of their step."""
    micro_batches: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Rows, by step."""
    longest_row: int = 0
    """Tokens."""
    turns: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of every rollout trained."""
    repeated: list[str] = dataclasses.field(default_factory=list)
    """Rollouts that came twice."""
    mislabelled: list[str] = dataclasses.field(default_factory=list)
    """Rollouts with a token that its version cannot have sampled."""
    engines: collections.defaultdict[int, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(lambda: [0, 0, 0.0])
    )
    """Sequences, tokens and k3 of each engine in the step being trained."""
    last_version: int | None = None
    """What it ended at; None where it was stopped without a word of its own."""
    stopped_for: str = ""
    """Reason of the `Stop` that ended it."""


async def trainer(link: MemoryLink, *, num_steps: int, world: World, record: TrainerRecord, num_buffers: int = 3) -> None:
    """Pull, train and publish every step, then wait to be told to stop; with a sign of life every ten seconds."""
    heartbeat = asyncio.get_running_loop().create_task(live_on(link, every_s=10.0))
    try:
        await asyncio.sleep(world.start_s)
        await _train(link, num_steps=num_steps, world=world, record=record, free=[f"buffer-{number}" for number in range(num_buffers)])
    finally:
        heartbeat.cancel()


async def live_on(link: MemoryLink, *, every_s: float = 1.0) -> None:
    """Send a trainer's signs of life, and do nothing else."""
    while True:
        link.send(Alive(busy_with="nothing"))
        await asyncio.sleep(every_s)


async def _train(link: MemoryLink, *, num_steps: int, world: World, record: TrainerRecord, free: list[str]) -> None:
    link.send(TrainerReady(replica=0, num_replicas=1, process_id=0, version=0))
    layout = await link.wait()
    assert isinstance(layout, LayoutFixed)
    if world.device is not None:
        free = [f"copy-{number}" for number in range(3)] if layout.num_apart else []
        link.send(in_place(world.device, IN_PLACE, version=0, free=free))
    for step in range(num_steps):
        index = 0
        while True:
            link.send(TakeMicroBatch(replica=0, step=step, index=index))
            while isinstance(answer := await _next(link, free), Command):
                if isinstance(answer, ComputeLogprobs):
                    with changed(world.device, IN_PLACE):  # it takes the device as much as training does
                        await asyncio.sleep(10 * world.step_s)
                    link.send(logprobs_of(answer, version=step))
                else:
                    link.send(CheckpointSaved(version=step, commit=record.sealed[step - 1].commit, num_bytes=0, save_s=0.0))
            if isinstance(answer, EndTraining):
                return await _end(link, free, version=step, record=record)
            if isinstance(answer, Stop):
                record.stopped_for = answer.reason
                return
            if isinstance(answer, StepClosed):
                record.sealed[step] = answer
                note_demonstrations(answer, record)
                break
            assert isinstance(answer, MicroBatch)
            note(answer, record)
            with changed(world.device, IN_PLACE):
                await asyncio.sleep(world.token_s * len(answer.token_ids))
            index += 1
        is_ending = False
        while not free and (world.device is None or layout.num_apart):
            is_ending |= isinstance(await _next(link, free, wanted=(WeightBufferReleased, EndTraining)), EndTraining)
        link.send(StepDone(step=step, metrics={"loss": 0.0}, engines=_engines(record)))
        if world.device is not None:
            link.send(in_place(world.device, IN_PLACE, version=step + 1, free=free))
        else:
            link.send(PolicyPublished(version=step + 1, buffer=free.pop(0), digest="", num_bytes=0, publish_s=0.0))
        if is_ending:
            return await _end(link, free, version=step + 1, record=record)
    await _end(link, free, version=num_steps, record=record)


IN_PLACE = "in-place"
"""The one buffer of a colocated trainer."""


def in_place(device: Device, buffer: str, *, version: int, free: list[str]) -> PolicyPublished:
    """A policy where it is trained, and in one of the `free` buffers, if there are any, for engines apart."""
    copy = free.pop(0) if free else ""
    device.versions |= {buffer: version, copy: version}
    return PolicyPublished(version=version, buffer=buffer, digest="", num_bytes=0, publish_s=0.0, copy=copy)


@contextlib.contextmanager
def changed(device: Device | None, buffer: str) -> Iterator[None]:
    """Inside it a trainer changes the weights in a buffer, where it shares its device."""
    if device is not None:
        device.changing = buffer
    try:
        yield
    finally:
        if device is not None:
            device.changing = ""


def _engines(record: TrainerRecord) -> tuple[EngineMismatch, ...]:
    """How far the engines of a step were from this trainer, for which all tokens are as likely."""
    found = tuple(
        EngineMismatch(engine_id=engine_id, num_sequences=int(sequences), num_tokens=int(tokens), kl_sum=kl_sum)
        for engine_id, (sequences, tokens, kl_sum) in record.engines.items()
    )
    record.engines.clear()
    return found


async def _end(link: MemoryLink, free: list[str], *, version: int, record: TrainerRecord) -> None:
    """Save, say that this is all, and wait to be told to stop."""
    if version:
        link.send(CheckpointSaved(version=version, commit=record.sealed[version - 1].commit, num_bytes=0, save_s=0.0))
    record.last_version = version
    link.send(TrainingEnded(version=version))
    stop = await _next(link, free, wanted=Stop)
    record.stopped_for = stop.reason


def logprobs_of(asked: ComputeLogprobs, *, version: int) -> LogprobsComputed:
    """A token is less likely to each later policy, and the reference is version 0."""
    age = version if asked.model is LogprobModel.POLICY else 0
    found = [-(row.token_ids[row.loss_mask] + 1.0 + 1000.0 * age) for row in asked.rows]
    return LogprobsComputed(request_id=asked.request_id, logprobs=np.concatenate(found).astype(np.float32))


class Waits(Protocol):
    """Of a link, what a trainer waits by."""

    async def wait(self) -> Message: ...


async def _next(
    link: Waits,
    free: list[str],
    *,
    wanted: type | tuple[type, ...] = (MicroBatch, StepClosed, SaveCheckpoint, ComputeLogprobs, EndTraining, Stop),
) -> Any:
    while True:
        message = await link.wait()
        if isinstance(message, WeightBufferReleased):
            assert message.buffer not in free, "released twice"
            free.append(message.buffer)
        if isinstance(message, wanted):
            return message


def note_demonstrations(sealed: StepClosed, record: TrainerRecord) -> None:
    """Write down what a step of demonstrations holds."""
    record.tokens[sealed.step] += sum(one.num_trained for one in sealed.demonstrations)
    record.samples[sealed.step] += len(sealed.demonstrations)
    record.losses[sealed.step].add(sealed.loss)


def note(batch: MicroBatch, record: TrainerRecord) -> None:
    """Write down what a row holds."""
    record.micro_batches[batch.step] += 1
    record.losses[batch.step].add(batch.loss)
    record.longest_row = max(record.longest_row, len(batch.token_ids))
    start = 0
    for place, (rollout_id, length) in enumerate(zip(batch.rollout_ids, batch.lengths.tolist(), strict=True)):
        part = slice(start, start + length)
        _note_sample(
            rollout_id,
            step=batch.step,
            token_ids=batch.token_ids[part],
            loss_mask=batch.loss_mask[part],
            versions=batch.versions[part],
            paths=_paths(batch, start=start, end=start + length),
            images=b"".join(batch.images[number] for number in batch.images_of[place]) if batch.images_of else b"",
            record=record,
        )
        assert batch.engine_ids is not None
        sums = record.engines[int(batch.engine_ids[batch.rollout_ids.index(rollout_id)])]
        gaps = -math.log(1000) - batch.logprobs[part][batch.loss_mask[part]]
        sums[0], sums[1], sums[2] = sums[0] + 1, sums[1] + len(gaps), sums[2] + float((np.expm1(gaps) - gaps).sum())
        record.weights[rollout_id] = 1.0 if batch.weights is None else float(batch.weights[batch.rollout_ids.index(rollout_id)])
        start += length


def _paths(batch: MicroBatch, *, start: int, end: int) -> list[list[tuple[int, int]]]:
    """The spans of each node of a sample and of those it continues, the last its own; none for a sample that is one sequence."""
    if batch.nodes is None:
        return []
    paths: list[list[tuple[int, int]]] = []
    at = 0
    for parent, length in zip(batch.nodes.parents.tolist(), batch.nodes.lengths.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), (at - start, at - start + length)])
        at += length
    found = [path for path in paths if path[-1][0] >= 0 and path[-1][1] <= end - start]
    return found if len(found) > 1 else []


def _note_sample(
    rollout_id: str,
    *,
    step: int,
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    versions: np.ndarray,
    paths: list[list[tuple[int, int]]],
    images: bytes,
    record: TrainerRecord,
) -> None:
    if rollout_id in record.trained:
        record.repeated.append(rollout_id)
    sampled = versions[loss_mask].tolist()
    lines = [np.concatenate([np.arange(start, end) for start, end in path]) for path in paths]
    rising = all(_rises(versions[line][loss_mask[line]]) for line in lines or [np.arange(len(versions))])
    if lines:
        is_right = all(_is_node_as_sampled(line, path[-1], token_ids, loss_mask, versions) for line, path in zip(lines, paths, strict=True))
        record.branching.append(rollout_id)
        record.turns[rollout_id] = sum(bool(loss_mask[path[-1][0]]) for path in paths)
    else:
        is_right = _is_as_sampled(token_ids, loss_mask=loss_mask, versions=versions, images=images)
        record.turns[rollout_id] = int(np.count_nonzero(np.diff(loss_mask, append=False) & loss_mask))
    if not rising or not is_right:
        record.mislabelled.append(rollout_id)
    record.trained[rollout_id] = step
    record.oldest[rollout_id] = min(sampled)
    record.num_tokens[rollout_id] = len(sampled)
    record.tokens[step] += len(sampled)
    record.samples[step] += 1


def _rises(versions: np.ndarray) -> bool:
    return versions.tolist() == sorted(versions.tolist())


def _is_node_as_sampled(line: np.ndarray, own: tuple[int, int], token_ids: np.ndarray, loss_mask: np.ndarray, versions: np.ndarray) -> bool:
    """True where a node is given, or is what an engine samples after the path to it."""
    mask = loss_mask[slice(*own)]
    if not mask.all():
        return not mask.any()
    before = token_ids[line[: len(line) - len(mask)]]
    said = [token(before, position=at, version=version) for at, version in enumerate(versions[slice(*own)].tolist(), start=1)]
    return token_ids[slice(*own)].tolist() == said


def _is_as_sampled(token_ids: np.ndarray, *, loss_mask: np.ndarray, versions: np.ndarray, images: bytes) -> bool:
    """True where each turn is what an engine samples after all that was before it, and between two stands what the environment says."""
    borders = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    num_prompt = end = borders[0][0]
    for start, until in borders:
        if start > end and token_ids[end:start].tolist() != reply(token_ids[num_prompt:end]):
            return False
        own = enumerate(versions[start:until].tolist(), start=1)
        said = [token(token_ids[:start], position=at, version=version, images=images) for at, version in own]
        if token_ids[start:until].tolist() != said:
            return False
        end = until
    return True
