"""Our requests and endings in vLLM's words."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason

from pipelinerl.messages import Finish, Sampling

FINISHES = {
    FinishReason.STOP: Finish.STOP,
    FinishReason.LENGTH: Finish.LENGTH,
    FinishReason.REPETITION: Finish.STOP,
    FinishReason.ABORT: Finish.CANCELLED,
    FinishReason.ERROR: Finish.ERROR,
}


def sampling_params(sampling: Sampling) -> SamplingParams:
    """The parameters of one completion."""
    constraint = next(iter(sampling.structured_outputs), None)
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=0,
        prompt_logprobs=0 if sampling.has_prompt_logprobs else None,
        ignore_eos=sampling.ignores_ends,
        structured_outputs=StructuredOutputsParams(**constraint) if constraint else None,
        detokenize=False,
    )
