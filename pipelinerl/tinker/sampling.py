"""Sampling for clients: what is asked of the engines for one `asample`, and what the client is told of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pipelinerl.gateway.refusal import wrong
from pipelinerl.messages import Completion, Finish, Float32, Generate, Int32, Sampling
from pipelinerl.tinker import wire
from pipelinerl.tinker.asks import Sample, SamplingParams
from pipelinerl.tinker.backend import Backend, Refusal, Weights
from pipelinerl.tinker.provenance import Provenance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Carries out `asample`."""

    backend: Backend
    provenance: Provenance
    ends: tuple[int, ...]
    """The model's end-of-sequence tokens."""
    vocabulary: int | None
    """Tokens that the model knows; None where its folder does not say."""

    def requests(self, ask: Sample, *, names: Sequence[str]) -> list[Generate]:
        """Return what is asked of the engines, a request for each name. Raises `RequestRefused` for what this server does not do."""
        for field in ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(ask, field):
                raise wrong(f"{field}: this server gives the log-probabilities of the tokens themselves alone", param=field)
        prompt = self._prompt(ask)
        limit, params = self.backend.max_context_tokens, ask.sampling_params
        if (room := limit - len(prompt)) < 1:
            raise wrong(f"prompt: {len(prompt)} tokens, expected at most {limit - 1}, so that one can be sampled", param="prompt")
        last = ask.prompt_logprobs_last_n
        if last is not None and not (ask.prompt_logprobs and 1 <= last < len(prompt)):
            raise wrong(f"prompt_logprobs_last_n is {last}, expected 1 to {len(prompt) - 1}, with prompt_logprobs", param="prompt_logprobs")
        sampling = self._sampling(params, max_tokens=min(params.max_tokens or room, room))
        found = []
        for number, name in enumerate(names):
            own = {"seed": None if params.seed is None else params.seed + number}
            own["has_prompt_logprobs"] = bool(ask.prompt_logprobs) and number == 0
            found.append(Generate(rollout_id=name, attempt=0, token_ids=prompt, sampling=_with(sampling, **own)))
        return found

    async def answer(self, weights: Weights, requests: Sequence[Generate], *, last_n: int | None) -> bytes:
        """Sample, remember what was sampled, and encode it. Raises `Refusal`."""
        completions = await self.backend.sample(weights, requests)
        for completion in completions:
            if completion.finish not in (Finish.STOP, Finish.LENGTH):
                raise Refusal(f"not sampled: {completion.error or completion.finish}", is_asker_wrong=False)
        for completion in completions:
            self.provenance.sampled(completion.rollout_id, tokens=completion.token_ids, versions=completion.versions)
        return wire.sample_response(
            [(wire.STOP if one.finish is Finish.STOP else wire.LENGTH, one.token_ids, one.logprobs) for one in completions],
            prompt_logprobs=_last(completions, last_n),
        )

    def _prompt(self, ask: Sample) -> Int32:
        """[P] of all chunks."""
        tokens: list[int] = []
        for chunk in ask.prompt.chunks:
            if chunk.type != "encoded_text":
                raise wrong(f"prompt holds a chunk of type {chunk.type}: this server takes text alone", param="prompt")
            tokens += chunk.tokens
        limit = self.vocabulary or 1 << 31
        if not tokens or min(tokens) < 0 or max(tokens) >= limit:
            raise wrong(f"prompt: {len(tokens)} tokens, expected ids below {limit}, at least one", param="prompt")
        return np.array(tokens, np.int32)

    def _sampling(self, params: SamplingParams, *, max_tokens: int) -> Sampling:
        """The model's own ends end a completion, too, but where the client says that nothing does, by an empty list."""
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        ids = tuple(one for one in stop or () if isinstance(one, int))
        texts = tuple(one for one in stop or () if isinstance(one, str))
        if any(not 0 <= one < 1 << 31 for one in ids) or "" in texts:
            raise wrong(f"stop is {params.stop!r}, expected texts, none empty, or token ids", param="stop")
        return Sampling(
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            stop_token_ids=() if stop == [] else (*ids, *self.ends),
            stop=texts,
            ignores_ends=stop == [],
        )


def _with(sampling: Sampling, **changes: object) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | changes)  # pyright: ignore[reportArgumentType]


def _last(completions: Sequence[Completion], last_n: int | None) -> Float32 | None:
    """The prompt's log-probabilities, NaN for all but the last `last_n` tokens."""
    found = completions[0].prompt_logprobs
    if found is None or last_n is None:
        return found
    return np.where(np.arange(len(found)) < len(found) - last_n, np.float32(np.nan), found)
