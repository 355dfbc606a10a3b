"""What every engine promises to the step loop: the real one, and the deterministic one that stands in for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import pytest

from pipelinerl.engine.base import Engine, Sampled, Sleeper
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.errors import EngineError, VersionNotHeld, WeightsError
from pipelinerl.messages import Finish, Generate, Sampling, StageWeights

if TYPE_CHECKING:
    import torch

    from pipelinerl.engine.vllm.engine import VllmEngine

CONTEXT = 64
"""Longest prompt plus completion of the engines under test."""
FORCED = 77
"""Token that the policies published here force."""
END = 2
"""The models' end of a sequence."""


class Bench(Protocol):
    """An engine, and policies for it."""

    engine: Engine
    sleeps: bool
    """It shares its device with a trainer."""

    def publish(self) -> StageWeights:
        """Publish a policy under which other tokens are sampled; the order to stage it."""
        ...

    def corrupt(self) -> StageWeights:
        """Publish a policy whose bytes are not those of its digest."""
        ...

    def reset(self) -> None:
        """Go back to the weights the engine began with, where that can be."""
        ...


class FakeBench:
    sleeps = True

    def __init__(self) -> None:
        self.engine: Engine = FakeEngine(max_model_tokens=CONTEXT, max_running=4, mean_tokens=10**9)

    def publish(self) -> StageWeights:
        return StageWeights(version=1, buffer="buffer-1", digest="digest")

    def corrupt(self) -> StageWeights:
        return StageWeights(version=1, buffer="corrupt", digest="digest")

    def reset(self) -> None:
        """Nothing to do: tokens differ after every commit, but any weights serve as well as the first."""


class VllmBench:
    sleeps = False

    def __init__(self, engine: VllmEngine, tensors: dict[str, torch.Tensor]) -> None:
        from tests import real_engine

        self.engine: Engine = engine
        self.publisher = real_engine.Publisher(engine)
        self._tensors = tensors
        self._published: list[str] = []
        self._version = 0

    def publish(self) -> StageWeights:
        return self.publish_weights(self.forcing(FORCED))

    def forcing(self, token_id: int) -> dict[str, torch.Tensor]:
        """Weights that sample one token, greedily."""
        from tests import tiny_models

        return tiny_models.forcing(self._tensors, token_id)

    def unlike(self) -> dict[str, torch.Tensor]:
        """Other random matrices."""
        import torch

        generator = torch.Generator().manual_seed(7)
        return {
            name: torch.randn(tensor.shape, generator=generator) * tensor.std() if tensor.dim() > 1 else tensor
            for name, tensor in self._tensors.items()
        }

    def corrupt(self) -> StageWeights:
        order = self.publish()
        return StageWeights(version=order.version, buffer=order.buffer, digest=order.digest[::-1])

    def reset(self) -> None:
        if self._published:
            self.engine.stage(self.publish_weights(self._tensors))
            self.engine.commit()
            while len(self._published) > 1:
                self.publisher.release(self._published.pop(0))

    def publish_weights(self, weights: dict[str, torch.Tensor]) -> StageWeights:
        self._version += 1
        buffer, digest = self.publisher.publish(weights, version=self._version)
        self._published.append(buffer)
        return StageWeights(version=self._version, buffer=buffer, digest=digest)


class AdapterBench(VllmBench):
    """Policies are adapters, and sequences go on under each new one."""

    def __init__(self, engine: VllmEngine, tensors: dict[str, torch.Tensor]) -> None:
        import torch

        self._shapes = {tensor.name: tensor.shape for tensor in engine.limits.tensors}
        self._model = tensors
        super().__init__(engine, {name: torch.zeros(shape) for name, shape in self._shapes.items()})

    def forcing(self, token_id: int) -> dict[str, torch.Tensor]:
        from tests import tiny_models

        return tiny_models.forcing_adapter(self._model, self._shapes, token_id)


@pytest.fixture(
    scope="module",
    params=["fake", *(pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm", "int8", "asynchronous", "adapters"))],
)
def whole_bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if request.param == "fake":
        yield FakeBench()
        return
    from tests import real_engine, tiny_models

    folder = tmp_path_factory.mktemp("qwen2")
    if request.param == "adapters":
        from pipelinerl.weights.adapters import AdapterShape

        tensors = tiny_models.make_adaptable(folder, seed=2)
        shape = AdapterShape(rank=2, alpha=2.0, targets=("v_proj", "down_proj"), num_versions=1)
        with real_engine.vllm_engine(folder, max_running=4, max_tokens=CONTEXT, adapters=shape, async_scheduling=True) as engine:
            made = AdapterBench(engine, tensors)
            with contextlib.closing(made.publisher):
                yield made
        return
    tensors = tiny_models.make_qwen2(folder, tied=False, seed=2)  # greedy, it repeats itself less than others
    quantization = "int8" if request.param == "int8" else "none"
    is_asynchronous = request.param == "asynchronous"
    with real_engine.vllm_engine(
        folder,
        max_running=4,
        max_tokens=CONTEXT,
        quantization=quantization,
        async_scheduling=is_asynchronous or None,
        is_colocated=request.param == "vllm",
    ) as engine:
        made = VllmBench(engine, tensors)
        made.sleeps = request.param == "vllm"
        with contextlib.closing(made.publisher):
            yield made


@pytest.fixture
def bench(whole_bench: Bench) -> Iterator[Bench]:
    """The engine with the weights it began with and nothing to do."""
    yield whole_bench
    for name in ("reference", "a", "b", "c", "good", "bad", "other"):
        whole_bench.engine.cancel(name)
    whole_bench.reset()


def request(
    rollout_id: str,
    *,
    prompt: Sequence[int] = (5, 6, 7),
    max_tokens: int = 8,
    temperature: float = 0.0,
    stop: tuple[int, ...] = (),
    **options: Any,
) -> Generate:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop, **options)  # pyright: ignore[reportArgumentType]
    return Generate(rollout_id=rollout_id, attempt=0, token_ids=np.array(prompt, np.int32), sampling=sampling)


@dataclasses.dataclass(slots=True)
class Reply:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int | None] = dataclasses.field(default_factory=list)
    """None: of the policy that was committed last when the token came."""
    finishes: list[Finish] = dataclasses.field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None


def note(passed: Sequence[Sampled], replies: dict[str, Reply]) -> None:
    for sampled in passed:
        assert (sampled.token_ids.dtype, sampled.logprobs.dtype) == (np.int32, np.float32)
        assert len(set(sampled.rollout_ids)) == len(sampled.rollout_ids), "a sequence has one token in a pass"
        versions = np.full(len(sampled.rollout_ids), sampled.versions).tolist()
        columns = zip(sampled.rollout_ids, sampled.token_ids.tolist(), sampled.logprobs.tolist(), versions, strict=True)
        for rollout_id, token_id, logprob, version in columns:
            reply = replies.setdefault(rollout_id, Reply())
            assert not reply.finishes, f"{rollout_id} was finished before"
            reply.token_ids.append(token_id)
            reply.logprobs.append(logprob)
            reply.versions.append(version)
        for rollout_id, judged in sampled.prompt_logprobs.items():
            assert replies[rollout_id].prompt_logprobs is None, f"{rollout_id}: the prompt was judged before"
            replies[rollout_id].prompt_logprobs = judged
        for rollout_id, finish in sampled.finishes.items():
            replies[rollout_id].finishes.append(finish)


def serve(engine: Engine, *requests: Generate) -> dict[str, Reply]:
    """Serve requests to their ends."""
    for one in requests:
        engine.submit(one, version=0)
    replies: dict[str, Reply] = {}
    for _ in range(10 * CONTEXT):
        if sum(bool(reply.finishes) for reply in replies.values()) == len(requests):
            return replies
        note(engine.step(), replies)
    raise AssertionError(f"unfinished after {10 * CONTEXT} forward passes: {replies}")


def advance(engine: Engine, name: str, *, num_tokens: int) -> dict[str, Reply]:
    """What came until a request had so many tokens."""
    replies: dict[str, Reply] = {name: Reply()}
    for _ in range(10 * CONTEXT):
        if len(replies[name].token_ids) >= num_tokens:
            return replies
        note(engine.step(), replies)
    raise AssertionError(f"{num_tokens} tokens of {name} were expected: {replies}")


def reference(bench: Bench, *, max_tokens: int = 8) -> list[int]:
    """What the engine samples greedily under the weights it has now."""
    return serve(bench.engine, request("reference", max_tokens=max_tokens))["reference"].token_ids


@pytest.mark.slow
def test_a_sequence_ends_at_its_longest_with_a_finite_logprob_for_every_token(bench: Bench):
    reply = serve(bench.engine, request("a", max_tokens=8, temperature=1.0))["a"]
    assert reply.finishes == [Finish.LENGTH]
    assert len(reply.token_ids) == len(reply.logprobs) == 8
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in reply.logprobs)


def test_a_step_gives_each_running_sequence_one_token(bench: Bench):
    for name in "abc":
        bench.engine.submit(request(name, max_tokens=5), version=0)
    replies: dict[str, Reply] = {}
    used: list[float | None] = []
    for _ in range(20):
        used.append(bench.engine.kv_used)
        before = {name: len(reply.token_ids) for name, reply in replies.items()}
        note(bench.engine.step(), replies)
        assert all(len(reply.token_ids) - before.get(name, 0) <= 1 for name, reply in replies.items())
        if len(replies) == 3 and all(reply.finishes for reply in replies.values()):
            break
    assert [len(replies[name].token_ids) for name in "abc"] == [5, 5, 5]
    assert set(used) == {None} if isinstance(bench, FakeBench) else 0.0 == used[0] < used[1] < 1.0, used  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]


def test_greedy_tokens_depend_on_the_prompt_alone(bench: Bench):
    alone = reference(bench)
    together = serve(bench.engine, *(request(name) for name in "ab"), request("c", prompt=(9, 8, 7, 6)))
    assert together["a"].token_ids == together["b"].token_ids == alone
    assert together["c"].token_ids != alone


def test_a_stop_token_ends_a_sequence_and_is_its_last_token(bench: Bench):
    tokens = reference(bench)
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    reply = serve(bench.engine, request("a", stop=(stop,)))["a"]
    assert reply.finishes == [Finish.STOP]
    assert reply.token_ids == tokens[: tokens.index(stop) + 1]


def test_a_sequence_that_fills_the_context_is_truncated_there(bench: Bench):
    prompt = list(range(5, 5 + CONTEXT - 6))
    reply = serve(bench.engine, request("a", prompt=prompt, max_tokens=50))["a"]
    assert reply.finishes == [Finish.LENGTH]
    assert len(reply.token_ids) == 6


def test_more_requests_than_run_at_once_are_all_served(bench: Bench):
    names = [f"r{number}" for number in range(3 * bench.engine.limits.max_running)]
    replies = serve(bench.engine, *(request(name, max_tokens=3) for name in names))
    assert sorted(replies) == sorted(names)


def test_what_is_in_no_pass_waits_and_nothing_else_does(bench: Bench):
    """Four run at once. `a` ends with its third token, and the first of those that wait takes its place."""
    for name in ("a", "b", "c", "good", "bad", "other"):
        bench.engine.submit(request(name, max_tokens=3 if name == "a" else 40, ignores_ends=True), version=0)
    replies = advance(bench.engine, "good", num_tokens=1)
    assert sorted(bench.engine.waiting) == ["bad", "other"]
    while not replies.get("bad", Reply()).token_ids:
        note(bench.engine.step(), replies)
    assert replies["a"].finishes == [Finish.LENGTH]
    assert list(bench.engine.waiting) == ["other"]
    bench.engine.cancel("other")
    assert list(bench.engine.waiting) == []


def test_a_cancelled_request_says_no_more_and_the_others_go_on(bench: Bench):
    tokens = reference(bench)
    for name in "ab":
        bench.engine.submit(request(name), version=0)
    replies = advance(bench.engine, "a", num_tokens=3)
    bench.engine.cancel("a")
    bench.engine.cancel("a")
    bench.engine.cancel("never heard of")
    length = len(replies["a"].token_ids)
    while not replies["b"].finishes:
        note(bench.engine.step(), replies)
    assert length == len(replies["a"].token_ids) == 3
    assert replies["a"].finishes == []
    assert replies["b"].token_ids == tokens


def test_an_engine_that_slept_goes_on_with_its_sequences_under_the_policy_that_wakes_it(bench: Bench):
    if not bench.sleeps:
        pytest.skip("only a colocated engine sleeps, and this one would hold its weights twice")
    tokens, engine = reference(bench), bench.engine
    assert isinstance(engine, Sleeper)
    engine.submit(request("a"), version=0)
    replies = advance(engine, "a", num_tokens=3)
    given = engine.sleep()
    engine.submit(request("b"), version=0)
    engine.stage(bench.publish())
    assert list(engine.commit()) == ["a"], "its KV cache was dropped; of b there was none"
    while not all(name in replies and replies[name].finishes for name in "ab"):
        note(engine.step(), replies)
    assert replies["a"].token_ids[:3] == tokens[:3]
    assert replies["a"].token_ids[3:] != tokens[3:]
    assert replies["b"].token_ids != tokens
    if isinstance(bench, VllmBench):
        assert given > 1 << 20, "weights and KV cache"
        assert replies["a"].token_ids[3:] == [FORCED] * 5
        assert replies["b"].token_ids == [FORCED] * 8


def test_a_sequence_goes_on_after_sleep_as_if_nothing_had_been_where_the_policy_is_the_same(bench: Bench):
    if not bench.sleeps or not isinstance(bench, VllmBench):
        pytest.skip("of a real engine that sleeps: the fake one samples something else after each commit")
    tokens, engine = reference(bench), bench.engine
    assert isinstance(engine, Sleeper)
    for name in "ab":
        engine.submit(request(name), version=0)
    replies = advance(engine, "a", num_tokens=3)
    engine.sleep()
    engine.stage(bench.publish_weights(bench._tensors))
    assert sorted(engine.commit()) == ["a", "b"]
    while not all(replies[name].finishes for name in "ab"):
        note(engine.step(), replies)
    assert replies["a"].token_ids == replies["b"].token_ids == tokens


def test_a_cancelled_name_can_be_asked_for_again(bench: Bench):
    tokens = reference(bench)
    bench.engine.submit(request("a"), version=0)
    bench.engine.step()
    bench.engine.cancel("a")
    assert serve(bench.engine, request("a"))["a"].token_ids == tokens


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_that_cannot_be_served_is_refused_and_harms_nobody(bench: Bench, length: int):
    tokens = reference(bench)
    bench.engine.submit(request("good"), version=0)
    with pytest.raises(EngineError):
        bench.engine.submit(request("bad", prompt=[5] * length), version=0)
    replies: dict[str, Reply] = {}
    while "good" not in replies or not replies["good"].finishes:
        note(bench.engine.step(), replies)
    assert replies["good"].token_ids == tokens
    assert list(replies) == ["good"]


def test_a_name_asked_for_twice_is_finished_once_and_the_engine_goes_on(bench: Bench):
    """Whether the second is refused or takes the first one's place: one sequence of that name goes on, and ends once."""
    tokens = reference(bench)
    bench.engine.submit(request("a", max_tokens=6), version=0)
    bench.engine.submit(request("other", max_tokens=20), version=0)
    replies: dict[str, Reply] = {}
    for _ in range(2):
        note(bench.engine.step(), replies)
    with contextlib.suppress(EngineError):
        bench.engine.submit(request("a", max_tokens=6), version=0)
        del replies["a"]
    while not replies["other"].finishes:
        note(bench.engine.step(), replies)
    assert replies["a"].token_ids == tokens[:6]
    assert replies["a"].finishes == [Finish.LENGTH]
    assert reference(bench) == tokens


def test_a_policy_is_taken_in_the_middle_of_a_sequence(bench: Bench):
    """Staging changes nothing; the passes launched after the commit sample under the new weights, and say so; the sequence goes on."""
    tokens = reference(bench)
    assert FORCED not in tokens
    bench.engine.submit(request("a"), version=0)
    replies = advance(bench.engine, "a", num_tokens=3)
    bench.engine.stage(order := bench.publish())
    note(bench.engine.step(), replies)
    bench.engine.commit()
    while not replies["a"].finishes:
        note(bench.engine.step(), replies)
    reply = replies["a"]
    assert len(reply.token_ids) == 8
    num_old = 4 if reply.versions[0] is None else sum(version != order.version for version in reply.versions)
    assert num_old in ((4,) if isinstance(bench, FakeBench) else (4, 5)), "a pass may have been under way"
    assert reply.versions[num_old:] == ([None] * 4 if isinstance(bench, FakeBench) else [order.version] * (8 - num_old))
    assert reply.token_ids[:num_old] == tokens[:num_old]
    assert all(new != old for new, old in zip(reply.token_ids[num_old:], tokens[num_old:], strict=True))


def test_a_policy_with_a_wrong_digest_is_refused_and_the_old_weights_serve_on(bench: Bench):
    tokens = reference(bench)
    order = bench.corrupt()
    bench.engine.submit(request("a"), version=0)
    replies = advance(bench.engine, "a", num_tokens=1)
    with pytest.raises(WeightsError, match="digest"):
        bench.engine.stage(order)
    while not replies["a"].finishes:
        note(bench.engine.step(), replies)
    assert replies["a"].token_ids == tokens
    with pytest.raises(WeightsError, match="nothing is staged"):
        bench.engine.commit()
    assert reference(bench) == tokens


def test_a_commit_without_a_staged_policy_is_refused_and_changes_nothing(bench: Bench):
    tokens = reference(bench)
    with pytest.raises(WeightsError, match="nothing is staged: commit follows stage"):
        bench.engine.commit()
    assert reference(bench) == tokens


def test_a_policy_staged_twice_is_committed_once(bench: Bench):
    order = bench.publish()
    bench.engine.stage(order)
    bench.engine.stage(order)
    bench.engine.commit()
    with pytest.raises(WeightsError, match="nothing is staged"):
        bench.engine.commit()
    serve(bench.engine, request("a"))


# --- the real engine's own ---------------------------------------------------------------------------------------------------------


only_vllm = pytest.mark.parametrize("whole_bench", [pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True, scope="module")


@only_vllm
def test_the_models_own_end_of_sequence_ends_a_sequence_and_is_part_of_it(bench: VllmBench):
    """The tokenizer is not loaded: the engine must know the end of sequence (2) from the model folder."""
    bench.engine.stage(bench.publish_weights(bench.forcing(2)))
    bench.engine.commit()
    reply = serve(bench.engine, request("a"))["a"]
    assert (reply.token_ids, reply.finishes) == ([2], [Finish.STOP])


@only_vllm
def test_logprobs_are_those_of_the_distribution_sampled_from(bench: VllmBench):
    """The forcing weights give the logit 3 sqrt(128) to one token and sqrt(128) to the other 127; halved, and at temperature 2, that is
    8.485 and 2.828: log p(forced) = -log(1 + 127 exp(2.828 - 8.485)) = -0.3672, log p(other) = -0.3672 - 5.6569 = -6.0240.
    """
    weights = bench.forcing(FORCED)
    weights["lm_head.weight"] *= 0.5
    bench.engine.stage(bench.publish_weights(weights))
    bench.engine.commit()
    replies = serve(bench.engine, *(request(f"r{number}", max_tokens=50, temperature=2.0) for number in range(4)))
    seen = {True: 0, False: 0}
    for reply in replies.values():
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True):
            seen[token == FORCED] += 1
            assert logprob == pytest.approx(-0.3672 if token == FORCED else -6.0240, abs=1e-3)
    assert seen[True] > 50
    assert seen[False] > 20


@only_vllm
def test_a_buffer_that_is_not_there_is_refused_by_name(bench: VllmBench):
    with pytest.raises(WeightsError, match="pipelinerl-nowhere-0"):
        bench.engine.stage(StageWeights(version=1, buffer="pipelinerl-nowhere-0", digest="digest"))
    with pytest.raises(WeightsError, match="is not the name of a weight buffer"):
        bench.engine.stage(StageWeights(version=1, buffer="../../etc/passwd", digest="digest"))


def steps_until_done(bench: VllmBench, name: str, replies: dict[str, Reply]) -> list[int]:
    while not replies.get(name, Reply()).finishes:
        note(bench.engine.step(), replies)
    return replies[name].token_ids


@pytest.mark.parametrize(
    "whole_bench", [pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm", "asynchronous")], indirect=True, scope="module"
)
@pytest.mark.parametrize("recomputes", [True, False])
def test_a_recomputed_sequence_goes_on_as_if_the_new_policy_had_read_all_of_it(bench: VllmBench, recomputes: bool):
    """And one that is not goes on over what the old policy made of it, which leads elsewhere: the weights are unlike each other."""
    prompt = list(range(5, 45))
    bench.engine.submit(request("a", prompt=prompt, max_tokens=16), version=0)
    bench.engine.submit(request("b", max_tokens=16), version=0)
    replies: dict[str, Reply] = {}
    for _ in range(6):
        note(bench.engine.step(), replies)
    before = list(replies["a"].token_ids)
    bench.engine.stage(bench.publish_weights(bench.unlike()))
    bench.engine.commit(["a", "never heard of"] if recomputes else [])
    after = steps_until_done(bench, "a", replies)[len(before) :]
    steps_until_done(bench, "b", replies)
    assert (len(before) + len(after), len(replies["b"].token_ids)) == (16, 16), "nothing was aborted, and nothing came twice"
    fresh = serve(bench.engine, request("c", prompt=prompt + before, max_tokens=16 - len(before)))["c"].token_ids
    assert (after == fresh) is recomputes


def test_a_prompt_has_the_log_probabilities_that_its_tokens_were_sampled_with(bench: Bench):
    prompt = [5, 6, 7]
    said = serve(bench.engine, request("a", prompt=prompt, temperature=1.0))["a"]
    assert said.prompt_logprobs is None, "nobody asked"
    asked = request("b", prompt=[*prompt, *said.token_ids], max_tokens=1, has_prompt_logprobs=True)
    judged = serve(bench.engine, asked)["b"].prompt_logprobs
    assert judged is not None
    assert np.isnan(judged).tolist() == [True] + [False] * (len(prompt) + len(said.token_ids) - 1)
    np.testing.assert_allclose(judged[len(prompt) :], said.logprobs, atol=2e-2)


def test_an_end_ends_a_completion_unless_the_request_ignores_ends(bench: Bench):
    if not isinstance(bench, VllmBench):
        pytest.skip("the stand-in has no model, and so no ends")
    bench.engine.stage(bench.publish_weights(bench.forcing(END)))
    bench.engine.commit()
    replies = serve(bench.engine, request("a"), request("b", ignores_ends=True))
    assert (replies["a"].token_ids, replies["a"].finishes) == ([END], [Finish.STOP])
    assert (replies["b"].token_ids, replies["b"].finishes) == ([END] * 8, [Finish.LENGTH])


def test_a_version_that_is_not_held_is_refused_and_one_that_is_serves(bench: Bench):
    if not isinstance(bench, AdapterBench):
        pytest.skip("whole policies are served one at a time")
    order = bench.publish()
    bench.engine.stage(order)
    bench.engine.commit()
    with pytest.raises(VersionNotHeld, match="version 99 is not here"):
        bench.engine.submit(msgspec.structs.replace(request("a"), version=99), version=order.version)
    said = serve(bench.engine, msgspec.structs.replace(request("a"), version=order.version))
    assert set(said["a"].token_ids) == {FORCED}
