"""The canary: weights that force a token each, swapped into a running vLLM engine; every token tells which weights sampled it.

Sequences run on across all swaps. What they sampled is compared with the version that each token carries, and afterwards, on ordinary
weights, with an engine that was started on these weights and never swapped.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest

from pipelinerl.engine.base import Engine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.messages import Completion, Finish, Generate, Sampling, StageWeights, WeightsCommitted, WeightsStaged

if TYPE_CHECKING:
    import torch

    from pipelinerl.engine.vllm.engine import VllmEngine
    from tests.real_engine import Publisher

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

_Versions = TypeVar("_Versions", int, np.ndarray)

NUM_SEQUENCES = 48
NUM_TOKENS = 200
NUM_TOKENS_WITH_DRAFTS = 600
"""Where a pass keeps up to four: as many passes."""
NUM_POLICIES = 20
STEPS_BETWEEN = 6
"""Forward passes from one publication to the next, at least. A staging that takes longer is waited for: the 200 must hold all of them."""


def forced_token(version: _Versions) -> _Versions:
    """The token that policy `version` forces; another one for each."""
    return 3 + version


@dataclasses.dataclass(slots=True)
class Swapped:
    """What came of sequences that ran while policies were swapped under them."""

    completions: list[Completion]
    commits: list[WeightsCommitted]


def prompts(seed: int, *, count: int) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    return [chance.integers(3, 120, size=chance.integers(2, 30), dtype=np.int32) for _ in range(count)]


def ask(loop: EngineLoop, seed: int, *, count: int, max_tokens: int) -> None:
    for number, token_ids in enumerate(prompts(seed, count=count)):
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        loop.handle(Generate(rollout_id=f"{seed}/{number}", attempt=0, token_ids=token_ids, sampling=sampling))


def swap_under_way(
    engine: Engine, loop: EngineLoop, publisher: Publisher, tensors: dict[str, torch.Tensor], *, num_tokens: int = NUM_TOKENS
) -> Swapped:
    """Run `NUM_SEQUENCES` to their ends and publish policy after policy meanwhile, each when the last is in force."""
    from tests import tiny_models

    ask(loop, 0, count=NUM_SEQUENCES, max_tokens=num_tokens)
    found = Swapped(completions=[], commits=[])
    buffers: list[str] = []
    wait = STEPS_BETWEEN
    while loop.has_work:
        wait -= 1
        if wait <= 0 and loop._staging is not None:
            concurrent.futures.wait([loop._staging.future])
        elif wait <= 0 and loop.version < NUM_POLICIES:
            version = loop.version + 1
            buffer, digest = publisher.publish(tiny_models.forcing(tensors, forced_token(version)), version=version)
            buffers.append(buffer)
            loop.handle(StageWeights(version=version, buffer=buffer, digest=digest))
            wait = STEPS_BETWEEN
        loop.advance()
        for message in loop.outbox:
            if isinstance(message, Completion):
                found.completions.append(message)
            else:
                if isinstance(message, WeightsStaged):
                    continue
                assert isinstance(message, WeightsCommitted), message
                found.commits.append(message)
                wait = max(wait, STEPS_BETWEEN // 2)  # with a full queue of passes none is launched at once, and each policy is to sample
                if len(buffers) > 1:
                    publisher.release(buffers.pop(0))
        loop.outbox.clear()
    return found


def num_wrong(completions: list[Completion]) -> int:
    """Tokens that are not the one which the weights of their version force."""
    return sum(int(np.count_nonzero(completion.token_ids != forced_token(completion.versions))) for completion in completions)


def shifted(completion: Completion, *, by: int) -> Completion:
    """The completion with every version on the token `by` places later: what a loop that stamps too late (or too early) would say."""
    versions = np.roll(completion.versions, by)
    if by > 0:
        versions[:by] = completion.versions[0]
    else:
        versions[by:] = completion.versions[-1]
    return Completion(
        rollout_id=completion.rollout_id,
        attempt=completion.attempt,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=versions,
        finish=completion.finish,
    )


@contextlib.contextmanager
def loop_around(engine: Engine) -> Iterator[EngineLoop]:
    """The product's own loop, staging in a thread of its own as the engine process does."""
    with concurrent.futures.ThreadPoolExecutor(1) as stager:
        yield EngineLoop(engine, engine_id=0, stager=lambda order: stager.submit(engine.stage, order))


def greedy(loop: EngineLoop, seed: int) -> dict[str, list[int]]:
    """Greedy completions of fresh prompts by what the engine holds now."""
    ask(loop, seed, count=16, max_tokens=40)
    while loop.has_work:
        loop.advance()
    replies = {message.rollout_id: message.token_ids.tolist() for message in loop.outbox if isinstance(message, Completion)}
    loop.outbox.clear()
    return replies


@pytest.mark.parametrize(
    ("tied", "is_packed", "is_asynchronous", "speculation"),
    [(True, False, False, "siblings"), (False, False, True, "off"), (True, True, False, "off")],
    ids=["tied, with drafts", "untied, scheduled asynchronously", "packed"],
)
def test_every_token_is_sampled_by_the_weights_whose_version_it_carries(
    tmp_path: Path, tied: bool, is_packed: bool, is_asynchronous: bool, speculation: Any, monkeypatch: pytest.MonkeyPatch
):
    from safetensors.torch import save_file

    from pipelinerl.engine.vllm import packed
    from tests import real_engine, tiny_models

    if is_packed:
        monkeypatch.setattr(packed, "PACK_FROM_BYTES", 0)
    tensors = tiny_models.make_qwen2(tmp_path / "first", tied=tied, seed=0)
    save_file(tiny_models.forcing(tensors, forced_token(0)), tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
    last = tiny_models.make_qwen2(tmp_path / "last", tied=tied, seed=2)
    num_tokens = NUM_TOKENS if speculation == "off" else NUM_TOKENS_WITH_DRAFTS
    with (
        real_engine.vllm_engine(tmp_path / "first", async_scheduling=is_asynchronous or None, speculation=speculation) as engine,
        loop_around(engine) as loop,
    ):
        assert (engine._core.engine_core.batch_queue is not None) == is_asynchronous
        assert ("matrices are packed" in engine.limits.choices[-1]) == is_packed
        publisher = real_engine.Publisher(engine)
        with contextlib.closing(publisher):
            swapped = swap_under_way(engine, loop, publisher, tensors, num_tokens=num_tokens)
            judge(swapped, num_tokens=num_tokens)
            if speculation != "off":
                judge_drafts(loop)
            buffer, digest = publisher.publish(last, version=NUM_POLICIES + 1)
            loop.handle(StageWeights(version=NUM_POLICIES + 1, buffer=buffer, digest=digest))
            while loop.is_swapping:
                loop.advance()
            assert loop.version == NUM_POLICIES + 1
            loop.outbox.clear()
            after_swaps = greedy(loop, seed=1)
    with real_engine.vllm_engine(tmp_path / "last") as fresh, loop_around(fresh) as loop:
        never_swapped = greedy(loop, seed=1)
    assert after_swaps == never_swapped
    assert len({tuple(tokens) for tokens in never_swapped.values()}) > 4, "the prompts must not all lead to the same tokens"


NUM_EPISODES = 4
NUM_SAID = 120
"""Tokens of each turn of an agent."""


def play(base_url: str, token: str) -> None:
    """An agent's episode: two answers to one question, a conversation that goes on from the first, a sub-agent whose two questions go on
    beside it, and what is left after a compaction."""
    from concurrent.futures import ThreadPoolExecutor

    import openai

    with openai.OpenAI(base_url=base_url, api_key=token, max_retries=0) as model, ThreadPoolExecutor(1) as beside:

        def say(*messages: Any, num: int = 1) -> list[Any]:
            answer = model.chat.completions.create(model="m", messages=messages, n=num, max_tokens=NUM_SAID)
            return [choice.message.model_dump(include={"role", "content"}) for choice in answer.choices]

        def user(text: str) -> Any:
            return {"role": "user", "content": text}

        def sub_agent() -> None:
            found = say(user("look it up"))
            say(user("look it up"), *found, user("and then?"))

        first, other = say(user("hello"), num=2)
        aside = beside.submit(sub_agent)
        then = say(user("hello"), first, user("go on"))
        say(user("hello"), first, user("go on"), *then, user("more"))
        say(user("hello"), other, user("go on"))
        say(user("in short: hello"))
        aside.result()


def test_every_node_of_an_episode_that_branches_carries_the_versions_that_sampled_it(tmp_path: Path) -> None:
    """Agents with OpenAI's SDK at a real gateway, engine and leasing stage, while policies are swapped in under their turns."""
    from safetensors.torch import save_file

    from tests import real_engine, tiny_models
    from tests.gateway.serving import serving

    tensors = tiny_models.make_qwen2(tmp_path, tied=False, vocabulary=320, seed=0)
    save_file(tiny_models.forcing(tensors, forced_token(0)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with real_engine.vllm_engine(tmp_path) as engine, concurrent.futures.ThreadPoolExecutor(NUM_EPISODES + 1) as threads:
        folder = tmp_path / "bytes"
        folder.mkdir()
        publisher = real_engine.Publisher(engine)
        stager = threads.submit
        with contextlib.closing(publisher), serving(folder, engine=engine, stager=lambda order: stager(engine.stage, order)) as desk:
            with desk.client() as client:
                lent = [desk.lend(client, name=f"0/{number}") for number in range(NUM_EPISODES)]
            playing = [threads.submit(play, one["base_url"], one["token"]) for one in lent]
            version, buffer = 0, ""
            while not all(each.done() for each in playing):
                version += 1
                passes = desk.engine_loop._num_steps + STEPS_BETWEEN
                desk.until(lambda passes=passes: desk.engine_loop._num_steps >= passes or all(each.done() for each in playing))
                before, (buffer, digest) = buffer, publisher.publish(tiny_models.forcing(tensors, forced_token(version)), version=version)
                desk.publish(buffer=buffer, digest=digest)
                if before:
                    publisher.release(before)
            for each in playing:
                each.result()
            with desk.client() as client:
                for one in lent:
                    headers = {"authorization": f"Bearer {one['token']}"}
                    client.post(f"/episodes/{one['episode_id']}/finish", json={"reward": 1.0}, headers=headers).raise_for_status()
            desk.until(lambda: len(desk.trajectories) == NUM_EPISODES)
    num_swapped = num_wrong_by_one = 0
    for trajectory in desk.trajectories:
        assert trajectory.nodes is not None
        ends = np.cumsum(trajectory.nodes.lengths).tolist()
        spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        sampled = [span for span in spans if trajectory.loss_mask[span].all()]
        assert [span.stop - span.start for span in sampled] == [NUM_SAID] * 8
        for span in sampled:
            token_ids, versions = trajectory.token_ids[span], trajectory.versions[span]
            assert np.array_equal(token_ids, forced_token(versions)), "the weights that sampled it have another version than it says"
            num_swapped += len(set(versions.tolist())) > 1
            num_wrong_by_one += np.count_nonzero(token_ids[1:] != forced_token(versions[:-1]))
    print(f"{version} policies under {8 * NUM_EPISODES} nodes of {NUM_EPISODES} episodes, {num_swapped} of them sampled under several")
    assert num_swapped >= 4 * NUM_EPISODES, "weights were swapped in the middle of turns"
    assert num_wrong_by_one >= num_swapped, "the canary must notice a stamp that is off by one"


class Device:
    """Stands for the devices along a pipeline: passes compute in the order in which they are launched, and are asked for later.

    What a pass samples is the token that the weights force at that point of the order, read from the model's own parameters.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._model: Any = engine.model
        core = engine._core.engine_core
        self._executor = core.model_executor
        core.model_executor = self
        self._computed: list[tuple[list[str], int]] = []
        self.most_under_way = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute_model(self, scheduled: Any, non_block: bool) -> Future[Any]:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        done: Future[Any] = Future()
        done.set_result(None if scheduled.num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT)
        if scheduled.num_scheduled_tokens:
            head = self._model.lm_head.weight
            self._computed.append((list(scheduled.num_scheduled_tokens), int(head.square().sum(1).argmax())))
        return done

    def sample_tokens(self, grammar: Any, non_block: bool) -> Any:
        self.most_under_way = max(self.most_under_way, len(self._computed))
        return SimpleNamespace(result=self._end_oldest)

    def _end_oldest(self) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names, token_id = self._computed.pop(0)
        token_ids = np.full((len(names), 1), token_id, np.int32)
        logprobs = LogprobsLists(token_ids, np.zeros((len(names), 1), np.float32), np.zeros(len(names), np.int32))
        rows = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=token_ids.tolist(), logprobs=logprobs)


def test_versions_are_exact_where_vllm_schedules_a_pipeline_asynchronously(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its second model runner does so, for which there is no device here: vLLM's own core and scheduler run, with its settings."""
    from safetensors.torch import save_file
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from tests import real_engine, tiny_models

    tensors = tiny_models.make_qwen2(tmp_path, tied=False, seed=0)
    save_file(tiny_models.forcing(tensors, forced_token(0)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with real_engine.vllm_engine(tmp_path, async_scheduling=True) as engine, loop_around(engine) as loop:
        core, device = engine._core.engine_core, Device(engine)
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
        monkeypatch.setattr(core.vllm_config.parallel_config, "pipeline_parallel_size", 2)
        before = core.scheduler
        core.scheduler = AsyncScheduler(
            vllm_config=core.vllm_config,
            kv_cache_config=before.kv_cache_config,
            structured_output_manager=core.structured_output_manager,
            block_size=before.block_size,
            hash_block_size=before.hash_block_size,
        )
        assert core.scheduler.use_v2_model_runner
        core.batch_queue_size = core.vllm_config.max_concurrent_batches
        core.batch_queue = collections.deque(core.batch_queue, maxlen=core.batch_queue_size)
        with contextlib.closing(real_engine.Publisher(engine)) as publisher:
            judge(swap_under_way(engine, loop, publisher, tensors))
    assert (core.batch_queue_size, device.most_under_way) == (3, 2), (
        "of three in the queue one is empty: every sequence waits for its last token"
    )


def judge_drafts(loop: EngineLoop) -> None:
    """Most drafts repeat the token that the weights force; those that a swap overtook repeat the one before."""
    load = loop.load(idle_s=0.0)
    print(f"{load.num_accepted} of {load.num_drafted} drafted tokens accepted")
    assert load.num_accepted > 0.5 * NUM_SEQUENCES * NUM_TOKENS_WITH_DRAFTS
    assert load.num_drafted - load.num_accepted >= NUM_SEQUENCES * NUM_POLICIES


def judge(swapped: Swapped, *, num_tokens: int = NUM_TOKENS) -> None:
    versions = {version for completion in swapped.completions for version in completion.versions.tolist()}
    print(f"{len(swapped.commits)} swaps, pauses up to {1e3 * max(commit.pause_s for commit in swapped.commits):.3f} ms")
    assert [commit.version for commit in swapped.commits] == list(range(1, len(swapped.commits) + 1))
    assert len(swapped.commits) == NUM_POLICIES
    assert all(commit.num_running == NUM_SEQUENCES for commit in swapped.commits), "no sequence ended before its time"
    assert versions == set(range(len(swapped.commits) + 1))
    finishes = [(completion.finish, len(completion.token_ids)) for completion in swapped.completions]
    assert finishes == [(Finish.LENGTH, num_tokens)] * NUM_SEQUENCES, "a swap aborts nothing"
    assert num_wrong(swapped.completions) == 0
    for by in (-1, 1):
        stamped_wrongly = num_wrong([shifted(completion, by=by) for completion in swapped.completions])
        assert stamped_wrongly >= NUM_SEQUENCES * (len(swapped.commits) - 1), "the canary must notice a stamp that is off by one"
