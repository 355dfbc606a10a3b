"""Speculative decoding for the tail: while few sequences run, a forward pass verifies drafts (`engine.drafts`) beside the next token.

The engine hands drafts to vLLM's scheduler between two passes, where a proposer of vLLM's would; whichever rank computes, drafting is done
once, here. vLLM's rejection sampler keeps a drafted token with the probability that the model gives it, and else samples from the rest, so
every token is distributed as without drafts (arXiv:2211.17192). Its log-probability and its version are those of the pass that verified it:
a policy that is swapped in after a draft was made judges the draft by its own weights.

Two things of vLLM 0.32 are replaced in every rank: passes without drafts are sampled as they are without speculation (`Sampler`), and on a
CPU a kernel that loses the temperature of drafted tokens (`repeat_for_drafts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_model_runner

from pipelinerl.config import EngineSection
from pipelinerl.engine.drafts import Drafts


def speculation_options(engine: EngineSection) -> dict[str, Any]:
    """Options of vLLM by which its passes verify drafts; empty where none are made.

    The batch sizes, all with the same number of tokens, keep vLLM from filling passes up with drafts of its own that are always wrong.
    """
    if engine.speculation == "off":
        return {}
    num = engine.speculative_tokens
    config = {
        "method": "custom_class",
        "model": f"{__name__}.NoProposer",
        "num_speculative_tokens": num,
        "num_speculative_tokens_per_batch_size": [(1, engine.max_running, num)],
    }
    return {"speculative_config": config, "async_scheduling": False}


class NoProposer:
    """Proposes nothing: vLLM makes one in each rank, and drafts are made in the engine's own process."""

    def __init__(self, config: Any) -> None:
        gpu_model_runner.RejectionSampler = Sampler  # which the runner makes next
        if config.device_config.device_type == "cpu":
            rejection_sampler.expand_batch_to_tokens = repeat_for_drafts

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """There is none."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *arguments: Any, **options: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class Sampler(rejection_sampler.RejectionSampler):
    """Verifies drafts, and samples a pass without any by vLLM's ordinary sampler: verifying nothing costs time, and with top-k fails."""

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        if metadata.max_spec_len:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits[metadata.bonus_logits_indices], sampling_metadata=sampling_metadata)


def repeat_for_drafts(x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Repeat each sequence's temperature, top-k or top-p, [B], for its drafted tokens, [num_tokens]; another in place of `replace_from`.

    vLLM does so by a kernel that on a CPU writes into a copy of integers (`vllm.utils.cpu_triton_utils._expand_kernel_impl`), which is then
    dropped: logits were divided by whatever the memory held, and log-probabilities said so, without an error.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)


class Speculation:
    """The drafts of one engine. Belongs to the thread of its passes."""

    def __init__(self, core: Any, engine: EngineSection) -> None:
        """`core` is vLLM's client of an engine core in this process."""
        self._scheduler = core.engine_core.scheduler
        core.engine_core.check_for_draft_tokens = False  # nobody has to ask the ranks for theirs
        self._below, self._num_tokens = engine.drafts
        self._drafts = Drafts(num_tokens=self._num_tokens, from_siblings=engine.speculation == "siblings")
        self._requests: dict[str, Any] = {}
        """vLLM's requests by rollout id. They hold what was sampled so far: nothing is copied before it is needed."""
        self._drafted: dict[str, int] = {}
        """Tokens that the next pass verifies, by vLLM's request id."""

    def begin(self, rollout_id: str, request_id: str) -> None:
        self._requests[rollout_id] = self._scheduler.requests[request_id]

    def end(self, rollout_id: str) -> None:
        """Have what was written serve the siblings that go on."""
        if (request := self._requests.pop(rollout_id, None)) is not None:
            self._drafts.end(rollout_id, list(request.output_token_ids))

    def verified(self, outputs: Sequence[EngineCoreOutput]) -> int:
        """Return the number of drafted tokens that the pass of these outputs has verified."""
        drafted, self._drafted = self._drafted, {}
        return sum(drafted.get(output.request_id, 0) for output in outputs)

    def propose(self) -> None:
        """Hand the drafts for the next pass to vLLM, where few sequences are left."""
        if not 0 < len(self._requests) < self._below:
            return
        drafts: dict[str, list[int]] = {}
        for rollout_id, request in self._requests.items():
            if request.status == RequestStatus.RUNNING and request.num_output_tokens:
                self._drafts.extend(rollout_id, request.all_token_ids[self._drafts.num_known(rollout_id) :])
                most = request.max_tokens - request.num_output_tokens - 1
                drafts[request.request_id] = self._drafts.draft(rollout_id, most=most)
        self._scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        # Drafts may have been cut to what a grammar allows.
        self._drafted = {request_id: len(self._scheduler.requests[request_id].spec_token_ids) for request_id in drafts}

    def __str__(self) -> str:
        return f"up to {self._num_tokens} tokens of a sequence are drafted for a pass while fewer than {self._below} sequences run"
