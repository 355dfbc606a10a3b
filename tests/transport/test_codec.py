"""The wire format: strict on the way in, plain msgpack for anyone else, and no bytes that raise anything but `WireError`."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipelinerl import messages
from pipelinerl.errors import WireError
from pipelinerl.messages import (
    AgentTurn,
    Alive,
    Asleep,
    Cancel,
    CancelRequest,
    CheckpointFailed,
    CheckpointSaved,
    CloseModel,
    Completion,
    ComputeLogprobs,
    Demonstration,
    EarlyStopDecision,
    EndEpisode,
    EndTraining,
    EngineLoad,
    EngineMismatch,
    EngineReady,
    EngineSequences,
    EpisodeEnded,
    EpisodeExtended,
    EpisodeFinished,
    EpisodeLent,
    EpisodeReturned,
    EpisodeUnwanted,
    EpisodeWanted,
    Failed,
    Finish,
    ForwardBackward,
    ForwardBackwardDone,
    FromEngine,
    FunctionFailed,
    FunctionKind,
    FunctionLoad,
    GatewayLoad,
    GatewayReady,
    Generate,
    Group,
    LayoutFixed,
    LeaseEnd,
    Lent,
    LoadModel,
    LogprobModel,
    LogprobsComputed,
    Message,
    MicroBatch,
    Nodes,
    Observation,
    OpenModel,
    OptimizerStep,
    OptimizerStepDone,
    Outcome,
    PolicyHeld,
    PolicyPublished,
    Posted,
    PrmLoad,
    PrmReady,
    Prompt,
    PublishModel,
    Reattach,
    Request,
    RequestDone,
    RequestFailed,
    RequestKind,
    Result,
    RewardModelLoad,
    RewardProcess,
    Routes,
    Sample,
    Sampling,
    SaveCheckpoint,
    SaveModel,
    Score,
    ScoredTrajectory,
    ScorerLoad,
    ScorerReady,
    ScorerTask,
    ServingTrainerReady,
    Sleep,
    StageWeights,
    Starting,
    StepClosed,
    StepDone,
    StepsScored,
    Stop,
    TakeMicroBatch,
    Tensor,
    ToEngine,
    Tokens,
    TraceScores,
    TraceTokens,
    TrainerReady,
    TrainingEnded,
    Trajectory,
    Turns,
    TurnSampled,
    TurnTokens,
    Unread,
    WeightBufferReleased,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.transport import codec
from pipelinerl.transport.codec import DTYPES, Decoder, encode

IDS = np.array([3, 1, 2], np.int32)
LOGPROBS = np.array([-0.5, -1.5, 0.0], np.float32)
MASK = np.array([False, True, True])
PROMPT = Prompt(prompt_id="0:1", text="2 1", token_ids=IDS, columns={"answer": 12, "tags": ["a", None, 0.5], "nested": {"ok": True}})
COMPLETION = Completion(
    rollout_id="4/1",
    attempt=2,
    token_ids=IDS,
    logprobs=LOGPROBS,
    versions=np.array([1, 1, 2], np.int32),
    finish=Finish.LENGTH,
    recomputed=(0, 2, 2, 3),
    started_at=1.5,
    finished_at=2.5,
)
TRAJECTORY = Trajectory(
    rollout_id="4/1",
    group_id=4,
    sibling=1,
    attempt=0,
    prompt=PROMPT,
    token_ids=IDS,
    loss_mask=MASK,
    logprobs=LOGPROBS,
    versions=np.array([-1, 1, 2], np.int32),
    finish=Finish.STOP,
)
TASK = ScorerTask(
    kind=RequestKind.REWARD, rollout_id="4/1", attempt=0, prompt=PROMPT, completions=(IDS,), finishes=(Finish.STOP,), turns=(None,)
)
SCORED = Score(rollout_id="4/1", attempt=0, outcome=Outcome.OK, reward=0.5, components={"right": 0.5}, duration_s=0.25)
TURNS = Turns(starts=np.array([0, 2], np.int32), ends=np.array([0, 2], np.int32), states=("prompt", "said:ff"))
TENSOR = Tensor(name="model.norm.weight", shape=(4, 2), dtype="float32", offset_bytes=256, num_bytes=32)
ENGINE_MISMATCH = EngineMismatch(engine_id=1, num_sequences=2, num_tokens=40, kl_sum=3.5)
MICRO_BATCH = MicroBatch(
    step=3,
    index=1,
    token_ids=IDS,
    loss_mask=MASK,
    logprobs=LOGPROBS,
    versions=np.array([-1, 1, 2], np.int32),
    advantages=np.array([0.0, 0.5, -0.5], np.float32),
    lengths=np.array([1, 2], np.int32),
    rollout_ids=("4/0", "4/1"),
)
NODES = Nodes(parents=np.array([-1, -1, 1], np.int32), lengths=np.array([1, 1, 1], np.int32))
MODEL_LOAD = RewardModelLoad(processes={0: RewardProcess(brought_by="0", is_loaded=True, num_held=3)}, busy_s=0.5)
EXAMPLES: tuple[Message, ...] = (
    PROMPT,
    ServingTrainerReady(process_id=7, machine="m", transports=("cuda_ipc",)),
    OpenModel(request_id=1, model_id="s:train:0", seed=3),
    CloseModel(model_id="s:train:0"),
    ForwardBackward(
        request_id=2,
        model_id="s:train:0",
        loss="ppo",
        options={"clip_low_threshold": 0.8},
        token_ids=IDS,
        targets=IDS,
        wanted=MASK,
        lengths=np.array([1, 2], np.int32),
        columns={"advantages": LOGPROBS},
    ),
    OptimizerStep(
        request_id=3, model_id="s:train:0", learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0
    ),
    SaveModel(request_id=4, model_id="s:train:0", folder="/saved/a", has_optimizer=True, has_gradient=True, save_id="s:train:0/7"),
    LoadModel(request_id=5, model_id="s:train:0", folder="/saved/a", has_optimizer=False),
    PublishModel(request_id=6, version=2, model_id="s:train:0"),
    ForwardBackwardDone(request_id=2, logprobs=LOGPROBS, loss=1.5, num_computed=3),
    OptimizerStepDone(request_id=3, grad_norm=0.5, learning_rate=1e-4),
    RequestDone(request_id=4),
    RequestFailed(request_id=5, error="no such folder", is_asker_wrong=True),
    Routes(num_layers=1, top_k=2, width=1, experts=np.array([3, 1, 0, 2], np.uint8)),
    Sampling(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, stop_token_ids=(7, 8), seed=1),
    Generate(rollout_id="4/1", attempt=0, token_ids=IDS, sampling=Sampling(max_tokens=5)),
    Generate(rollout_id="4/1", attempt=0, token_ids=IDS, sampling=Sampling(max_tokens=5), images=(b"\x89PNG", b"")),
    Generate(
        rollout_id="4/1",
        attempt=0,
        token_ids=IDS,
        sampling=Sampling(max_tokens=5),
        images=(b"",),
        image_digests=(b"0123456789abcdef",),
    ),
    msgspec.structs.replace(PROMPT, images=(b"\x89PNG",)),
    msgspec.structs.replace(MICRO_BATCH, images=(b"\x89PNG",), images_of=((0,), ())),
    Tokens(rollout_id="4/1", attempt=0, start=8, token_ids=IDS),
    Cancel(rollout_id="4/1", attempt=0),
    TraceTokens(rollout_id="4/1", attempt=0, start=0, token_ids=IDS, is_last=False, prompt_token_ids=IDS),
    TraceTokens(rollout_id="4/1", attempt=0, start=0, token_ids=IDS, is_last=True, prompt_token_ids=IDS, turn_ends=IDS),
    StepsScored(
        rollout_id="4/1",
        attempt=0,
        num_taken=3,
        first=0,
        ends=np.array([2], np.int32),
        scores=np.array([0.5], np.float32),
        is_last=True,
        version="prm",
    ),
    TraceScores(ends=np.array([2], np.int32), scores=np.array([0.5], np.float32), version="prm"),
    PrmReady(prm_id=1, process_id=7, version="prm"),
    PrmLoad(prm_id=1, num_traces=1, num_steps=2, num_trace_tokens=3, num_computed=4, num_uncached_tokens=5, busy_s=0.5),
    COMPLETION,
    TENSOR,
    EngineReady(engine_id=1, process_id=2, max_model_tokens=3, max_running=4, tensors=(TENSOR,), running={"1/0": 2}),
    Reattach(rollouts={"1/0": 2}),
    EngineLoad(engine_id=1, version=2, num_running=3, num_waiting=4, num_tokens=5, num_steps=6, busy_s=0.5, idle_s=1.5),
    EngineSequences(engine_id=1, written={"0/0": 5, "0/1": 0}, waiting={"0/1": 2.5}),
    StageWeights(version=3, buffer="pipelinerl-ab-0", digest="ff", when_idle=True),
    WeightsCommitted(engine_id=1, version=3, pause_s=0.001, stage_s=0.5, num_running=7),
    Sleep(phase_id=5),
    Asleep(engine_id=1, phase_id=5, sleep_s=0.01, num_bytes=1 << 30, num_running=7),
    WeightsRefused(engine_id=1, version=3, error="WeightsError: no"),
    WeightsStaged(engine_id=1, version=3, stage_s=0.5),
    ScorerReady(scorer_id=0, process_id=1, num_slots=2),
    FunctionFailed(function="verify", kind=FunctionKind.REWARD, outcome=Outcome.ERROR, cause='ValueError("x")', where="rewards.py:12"),
    ScorerLoad(scorer_id=0, num_running=1, num_scored=2, busy_s=0.5, models={"reward.1": MODEL_LOAD}),
    MODEL_LOAD,
    *MODEL_LOAD.processes.values(),
    TURNS,
    TASK,
    Request(request_id=3, task=TASK),
    CancelRequest(request_id=3),
    EndEpisode(rollout_id="4/1"),
    Observation(token_ids=IDS, state="said:ff"),
    Result(request_id=3, outcome=Outcome.OK, rewards=(0.5,), components=({"best": 0.5},)),
    SCORED,
    FunctionLoad(num_calls=3, num_failed={"error": 1}, num_retries=1, p50_s=0.1, p95_s=0.2, max_s=0.5, slowest="4/1", breaker="closed"),
    TRAJECTORY,
    EarlyStopDecision(step=1, predicted=0.1, probability=0.2, stops=False),
    ScoredTrajectory(trajectory=TRAJECTORY, score=SCORED),
    Group(group_id=4, members=(ScoredTrajectory(trajectory=TRAJECTORY, score=SCORED),)),
    Sample(trajectory=TRAJECTORY, reward=0.5, advantages=LOGPROBS),
    GatewayReady(process_id=3, address="http://127.0.0.1:1"),
    GatewayLoad(num_open=1, num_requests=2),
    EpisodeWanted(request_id=1),
    EpisodeUnwanted(request_id=1),
    EpisodeLent(request_id=1, lease="ab", rollout_id="4/1", attempt=2, prompt=PROMPT, deadline_s=60.0, max_context_tokens=99),
    EpisodeReturned(lease="ab"),
    AgentTurn(lease="ab", request_id=2, parent=-1, token_ids=IDS, max_tokens=5, stop=("x",)),
    TurnTokens(request_id=2, start=0, token_ids=IDS),
    TurnSampled(request_id=2, node=1, token_ids=IDS, logprobs=LOGPROBS, versions=IDS, finish=Finish.STOP),
    EpisodeFinished(lease="ab", reward=0.5, nodes=(1,), rewards=(0.5,)),
    EpisodeExtended(lease="ab", by_s=2.5),
    Posted(model="alice", reward=0.5, nodes=(1,), rewards=(0.5,)),
    EpisodeEnded(lease="ab", end=LeaseEnd.FINISHED),
    Lent(prompt_token_ids=IDS, reward=0.5),
    TrainerReady(replica=0, num_replicas=1, process_id=2, version=3),
    LayoutFixed(tensors=(TENSOR, TENSOR)),
    LayoutFixed(tensors=(TENSOR,), transport="sharded+gloo", shards=({"w": (((0, 2), (0, 3)),)}, {})),
    TakeMicroBatch(replica=0, step=1, index=2),
    MICRO_BATCH,
    NODES,
    StepClosed(step=1, num_micro_batches=2, num_tokens=3, num_samples=4),
    SaveCheckpoint(version=2),
    ComputeLogprobs(request_id=1, model=LogprobModel.REFERENCE, rows=(MICRO_BATCH,)),
    LogprobsComputed(request_id=1, logprobs=LOGPROBS),
    Demonstration(token_ids=np.array([1, 2, 3], np.int32), num_prompt=2),
    StepDone(step=1, metrics={"loss": -0.5}, engines=(ENGINE_MISMATCH,)),
    ENGINE_MISMATCH,
    PolicyPublished(version=1, buffer="a", digest="ff", num_bytes=8, publish_s=0.5),
    WeightBufferReleased(buffer="a"),
    PolicyHeld(version=None),
    Alive(busy_with="saving"),
    Starting(process_id=7),
    CheckpointSaved(version=3, commit="1:9", num_bytes=100, save_s=0.5),
    Unread(reason="malformed", words="no message", rollout_id="3/1", attempt=2, turn=1),
    CheckpointFailed(version=3, error="OSError: no room"),
    EndTraining(reason="stopped by a signal"),
    TrainingEnded(version=3),
    Stop(reason="finished"),
    Failed(error="EngineError: out of memory"),
)
ANY = Decoder(Completion | Generate | Request | Result | MicroBatch | EngineReady | StepDone | Stop)
"""Accepts a message of every shape: columns, nested messages, dictionaries, tuples, optional fields."""


def plain(value: Any) -> Any:
    """A message as plain values, columns as (dtype, list), so that two can be compared."""
    if isinstance(value, Message):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        return {"type": value.__struct_config__.tag} | {encoded: plain(getattr(value, name)) for name, encoded in names}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def rewritten(message: Message, **changes: Any) -> bytes:
    """The frame of a message, with fields changed by somebody who does not use our encoder."""
    tree = msgpack.unpackb(encode(message), ext_hook=msgpack.ExtType)
    tree.update(changes)
    return packed({name: value for name, value in tree.items() if value is not ...})


def packed(value: Any) -> bytes:
    """Any value as msgpack, by somebody else's library."""
    frame = msgpack.packb(value)
    assert isinstance(frame, bytes)
    return frame


def column(values: Any, dtype: str) -> msgpack.ExtType:
    array = np.asarray(values, dtype)
    (code,) = [code for code, known in DTYPES.items() if known == array.dtype]
    return msgpack.ExtType(code, array.tobytes())


def test_there_is_an_example_of_every_message():
    known = {name for name, cls in vars(messages).items() if isinstance(cls, type) and issubclass(cls, Message) and cls is not Message}
    assert {type(example).__name__ for example in EXAMPLES} == known


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_encoded_is_decoded(message: Message):
    assert plain(Decoder(type(message)).decode(encode(message))) == plain(message)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_any_msgpack_library_reads_a_frame(message: Message):
    def read(code: int, data: bytes) -> tuple[str, list[Any]]:
        array = np.frombuffer(data, DTYPES[code])
        return str(array.dtype), array.tolist()

    tree = msgpack.unpackb(encode(message), ext_hook=read, strict_map_key=False)
    assert tree["type"] == type(message).__struct_config__.tag
    expected = plain(message)
    assert tree == msgspec.to_builtins(expected, builtin_types=(tuple,)) or tree == expected


def test_columns_come_back_as_read_only_views_of_the_frame():
    frame = encode(COMPLETION)
    decoded: Completion = Decoder(Completion).decode(frame)
    with pytest.raises(ValueError, match="read-only"):
        decoded.token_ids[0] = 9
    assert np.shares_memory(decoded.token_ids, np.frombuffer(frame, np.uint8))


def test_a_strided_column_is_sent_by_value():
    every_other = np.arange(6, dtype=np.int32)[::2]
    decoded: Prompt = Decoder(Prompt).decode(encode(Prompt(prompt_id="", text="", token_ids=every_other)))
    assert decoded.token_ids.tolist() == [0, 2, 4]


@pytest.mark.parametrize("values", [np.zeros(2, np.float16), np.zeros((2, 2), np.int32), np.zeros(2, ">i4"), np.array(3, np.int32)])
def test_a_column_that_cannot_travel_is_our_own_mistake(values: np.ndarray):
    with pytest.raises(TypeError, match="cannot travel"):
        encode(Prompt(prompt_id="", text="", token_ids=values))


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated"),
    "noise": (b"\xc1", "malformed"),
    "no message": (packed([1, 2, 3]), "Expected"),
    "no tag": (rewritten(COMPLETION, type=...), "type"),
    "unknown tag": (rewritten(COMPLETION, type="Order66"), "Order66"),
    "a message of somebody else": (encode(Stop(reason="no")), "'Stop'"),
    "unknown field": (rewritten(COMPLETION, reward=1.0), "reward"),
    "missing field": (rewritten(COMPLETION, versions=...), "versions"),
    "wrong dtype": (rewritten(COMPLETION, token_ids=column([1, 2, 3], "<i8")), "expected a column of int32, got int64"),
    "a list for a column": (rewritten(COMPLETION, token_ids=[1, 2, 3]), "expected a column of int32, got list"),
    "a list of another length": (rewritten(COMPLETION, token_ids=column([1, 2], "<i4")), "columns differ in length"),
    "falling versions": (rewritten(COMPLETION, versions=column([2, 2, 1], "<i4")), r"versions fall along the sequence: \[2, 2, 1\]"),
    "places that fall": (rewritten(COMPLETION, recomputed=[2, 1]), r"anew after \[2, 1\] of 3 tokens: expected places that rise"),
    "a place behind the end": (rewritten(COMPLETION, recomputed=[1, 4]), r"anew after \[1, 4\] of 3 tokens: .* from 0 to 3"),
    "a place before the start": (rewritten(COMPLETION, recomputed=[-1]), r"anew after \[-1\] of 3 tokens"),
    "a ragged column": (rewritten(COMPLETION, token_ids=msgpack.ExtType(1, b"12345")), "buffer size"),
    "an unknown extension": (rewritten(COMPLETION, token_ids=msgpack.ExtType(77, b"1234")), "unknown extension type 77"),
    "an unknown ending": (rewritten(COMPLETION, finish="exploded"), "exploded"),
    "a text for a number": (rewritten(COMPLETION, attempt="2"), "int"),
    "a pickle": (pickle.dumps(COMPLETION.rollout_id), "Completion"),
    "a huge length": (b"\xdd\xff\xff\xff\xff", "Completion"),
    "something behind it": (encode(COMPLETION) + b"\x00", "trailing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_an_accepted_message_is_refused_with_the_reason(name: str):
    frame, reason = REFUSED[name]
    with pytest.raises(WireError, match=reason):
        Decoder(FromEngine).decode(frame)


def test_a_refusal_says_what_would_have_been_accepted():
    with pytest.raises(WireError, match=r"1 bytes are not one of Cancel, Generate, Reattach, Sleep, StageWeights, Stop: "):
        Decoder(ToEngine).decode(b"\xc1")


def test_more_bytes_than_the_limit_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch):
    frame = encode(Failed(error="x" * 1000))
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(frame))
    assert Decoder(FromEngine).decode(frame) == Failed(error="x" * 1000)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(frame) - 1)
    with pytest.raises(WireError, match=f"message of {len(frame)} bytes exceeds the limit of {len(frame) - 1} bytes"):
        Decoder(FromEngine).decode(frame)


def test_values_nested_without_end_are_refused():
    """A value of a prompt's columns may be anything, also a list in a list in a list."""
    frame = rewritten(PROMPT, columns={"deep": 7}).replace(b"\xa4deep\x07", b"\xa4deep" + b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(WireError, match="Prompt: maximum recursion depth"):
        Decoder(Prompt).decode(frame)


def test_samples_of_a_row_must_cover_it_and_be_named():
    with pytest.raises(WireError, match=r"MicroBatch 3/1: lengths \[1, 3\] must sum to 3 tokens and name 2 samples"):
        Decoder(MicroBatch).decode(rewritten(MICRO_BATCH, lengths=column([1, 3], "<i4")))
    with pytest.raises(WireError, match="name 1 samples"):
        Decoder(MicroBatch).decode(rewritten(MICRO_BATCH, rollout_ids=["4/0"]))


@pytest.mark.parametrize(
    ("starts", "ends"), [([], []), ([-1], [2]), ([0, 1], [0, 1]), ([0, 3], [1, 2]), ([0, 4], [3, 3]), ([0], [-1])], ids=str
)
def test_turns_begin_at_the_prompt_and_have_the_environment_between_them(starts: list[int], ends: list[int]):
    changes = {"starts": column(starts, "<i4"), "ends": column(ends, "<i4"), "states": ["a"] * len(starts)}
    with pytest.raises(WireError, match="Turns: from"):
        Decoder(Turns).decode(rewritten(TURNS, **changes))


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_an_ok_score_has_a_finite_reward(reward: float | None):
    """Otherwise a failure would have to become a number somewhere behind."""
    with pytest.raises(WireError):
        Decoder(Score).decode(rewritten(SCORED, reward=reward))


@given(frame=st.binary(max_size=300))
@example(frame=b"\x81\xa4type\xa4Stop")
def test_no_bytes_raise_anything_but_a_wire_error(frame: bytes):
    with pytest.raises(WireError):
        ANY.decode(frame)


TARGETS = [example for example in EXAMPLES if type(example).__name__ in ANY.names]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid frame with a few bytes changed, cut out, doubled or put in."""
    frame = bytearray(encode(draw(st.sampled_from(TARGETS))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        until = min(len(frame), at + draw(st.integers(1, 6)))
        match draw(st.sampled_from(["change", "cut", "double", "insert", "truncate"])):
            case "change":
                frame[at:until] = draw(st.binary(min_size=until - at, max_size=until - at))
            case "cut":
                del frame[at:until]
            case "double":
                frame[at:at] = frame[at:until]
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=4))
            case _:
                del frame[at:]
    return bytes(frame)


@given(frame=mutated())
def test_a_damaged_frame_is_an_accepted_message_or_a_wire_error(frame: bytes):
    try:
        message = ANY.decode(frame)
    except WireError:
        return
    assert type(message).__name__ in ANY.names
    if isinstance(message, Completion):
        assert len(message.token_ids) == len(message.logprobs) == len(message.versions)


@pytest.mark.parametrize(
    ("parents", "lengths", "said"),
    [
        ([-1, 1], [1, 2], r"Nodes: parents \[-1, 1\] of \[1, 2\] tokens"),
        ([-2, 0], [1, 2], "expected earlier nodes or -1"),
        ([-1, -1], [0, 3], "no empty one"),
        ([-1, -1], [1, 1], r"nodes of \[1, 1\] tokens, expected them to make up samples of \[1, 2\]"),
        ([-1, -1], [2, 1], r"nodes of \[2, 1\] tokens, expected them to make up"),
        ([-1, 0], [1, 2], r"parents \[-1, 0\], expected each in the sample of its parent"),
    ],
)
def test_nodes_of_a_row_make_up_its_samples(parents: list[int], lengths: list[int], said: str):
    whole = msgspec.structs.replace(MICRO_BATCH, nodes=NODES)
    assert plain(Decoder(MicroBatch).decode(encode(whole))) == plain(whole)
    nodes = {"type": "Nodes", "parents": column(parents, "<i4"), "lengths": column(lengths, "<i4")}
    with pytest.raises(WireError, match=said):
        Decoder(MicroBatch).decode(rewritten(MICRO_BATCH, nodes=nodes))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e308, -1e13])
def test_a_gateway_brings_no_reward_that_would_spoil_a_step(reward: float):
    said: list[dict[str, Any]] = [{"reward": reward}, {"nodes": (1,), "rewards": (reward,)}]
    for rewards in said:
        with pytest.raises(ValueError, match=r"expected up to 1e\+12 in size"):
            EpisodeFinished(lease="a", **rewards)
