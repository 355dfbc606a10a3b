"""What the JSON of a request says, by its fields' names on the wire (SDK 0.38). Fields that are not named here are not looked at."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from pipelinerl.gateway.refusal import wrong

Name = Annotated[str, msgspec.Meta(max_length=512)]
Words = Annotated[str, msgspec.Meta(max_length=4096)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""A sequence's own seed is this and its number; what 64 bits do not hold cannot be sent to an engine."""
Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Positive = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Metadata = dict[str, Any]
MAX_SAMPLES, MAX_STOPS = 1024, 64


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request."""


class CreateSession(Ask, frozen=True):
    sdk_version: Name = ""
    display_name: Words | None = None


class OfSession(Ask, frozen=True):
    session_id: Name


class Lora(Ask, frozen=True):
    rank: int
    seed: Seed | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class OptimizerConfig(Ask, frozen=True):
    type: Name = "adamw"


class CreateModel(Ask, frozen=True):
    session_id: Name
    model_seq_id: int
    base_model: Words
    lora_config: Lora | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(Ask, frozen=True):
    model_id: Name


class AdamParams(Ask, frozen=True):
    learning_rate: Positive = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Positive = 1e-12
    weight_decay: Positive = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Ask, frozen=True):
    model_id: Name
    seq_id: int
    adam_params: AdamParams | None = None


class SaveWeights(Ask, frozen=True):
    model_id: Name
    seq_id: int
    path: Name | None = None
    overwrite: bool = False


class SaveForSampler(Ask, frozen=True):
    model_id: Name
    seq_id: int
    path: Name | None = None
    sampling_session_seq_id: int | None = None
    kind: Name = "snapshot"


class LoadWeights(Ask, frozen=True):
    path: Words
    optimizer: bool
    model_id: Name | None = None
    seq_id: int | None = None
    session_id: Name | None = None
    model_seq_id: int | None = None


class CreateSamplingSession(Ask, frozen=True):
    session_id: Name
    sampling_session_seq_id: int
    base_model: Words | None = None
    model_path: Words | None = None


class PromptChunk(Ask, frozen=True):
    type: Name = "encoded_text"
    tokens: Annotated[list[int], msgspec.Meta(max_length=1 << 22)] = []


class Prompt(Ask, frozen=True):
    chunks: list[PromptChunk]


class SamplingParams(Ask, frozen=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: Seed | None = None
    stop: Words | Annotated[list[Words | int], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class Sample(Ask, frozen=True):
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    sampling_session_id: Name | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class RetrieveFuture(Ask, frozen=True):
    request_id: Name
    allow_metadata_only: bool = False


class WeightsPath(Ask, frozen=True):
    tinker_path: Words


A = TypeVar("A", bound=Ask)


def read(body: dict[str, Any], kind: type[A]) -> A:
    """Return the request that a body is. Raises `RequestRefused` naming the field that is missing or wrong."""
    try:
        return msgspec.convert(body, kind, strict=True)
    except msgspec.ValidationError as error:
        raise wrong(f"{kind.__name__}: {error}") from None
