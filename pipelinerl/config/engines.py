"""The section of the settings about inference engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pipelinerl.config.base import PositiveFloat, PositiveInt, Section


class EngineSection(Section):
    kind: Literal["vllm", "fake"] = Field("vllm", description="fake: deterministic tokens, no model; for rehearsals")
    count: PositiveInt = Field(1, description="inference engines")
    elsewhere: Annotated[int, Field(ge=0)] = Field(
        0, description="of these, as many are started by `pipelinerl engines RUN`: in other jobs, or on other machines"
    )
    apart: Annotated[int, Field(ge=0)] = Field(
        0,
        description="pipeline.placement = colocated: the last so many engines have devices of their own and go on while the trainer works",
    )
    max_count: PositiveInt | None = Field(
        None, description="engines to which `pipelinerl scale RUN engines=N` may bring a live run; default: twice count, and 8 at least"
    )
    max_running: PositiveInt = Field(64, description="sequences one engine decodes at once")
    kv_cache_bytes: PositiveInt | None = Field(
        None, description="KV cache of each rank of an engine; default: what max_running sequences need, on a GPU what it has left"
    )
    async_scheduling: bool | None = Field(
        None,
        description="schedule the next forward pass while one computes; versions stay those of the weights that sampled. Default: where"
        " vLLM does so by itself, on GPUs",
    )
    speculation: Literal["off", "ngram", "siblings"] = Field(
        "off",
        description="speculative decoding while few sequences run, lossless: drafts come from a sequence's own text (ngram), or from that"
        " and finished completions of its group (siblings)",
    )
    speculate_below: Annotated[int, Field(ge=2)] = Field(16, description="drafts are made while fewer sequences than this run in an engine")
    speculative_tokens: Annotated[int, Field(ge=1, le=32)] = Field(4, description="most tokens drafted for one forward pass of a sequence")
    cores: tuple[int, ...] = Field((), description="CPU core of each engine, one each; empty lets the system choose")
    gpus: tuple[int | str, ...] = Field(
        (), description="indices (as nvidia-smi counts) or UUIDs of their GPUs, dealt in this order, a rank each; empty: the first ones"
    )
    shares_gpus: bool = Field(
        False, description="engines, process reward model and trainer may lie on the same GPUs; kv_cache_bytes then leaves the others room"
    )
    sleep_kv: Literal["drop", "keep"] = Field(
        "drop",
        description="pipeline.placement = colocated: drop gives the KV cache's memory to the trainer, and sequences that go on are computed"
        " anew; keep holds it",
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8: on a CPU, linear layers compute in eight bits, quantised from each policy; the trainer keeps model.dtype"
    )
    options: dict[str, Any] = Field({}, description="further vLLM engine arguments, passed as they are")
    ready_deadline_s: PositiveFloat = Field(600.0, description="longest wait for an engine to load its model")
    silent_after_s: PositiveFloat = Field(60.0, description="an engine not heard of for so long ends the run")

    @property
    def num_ranks(self) -> int:
        """Processes over which each engine spreads its model."""
        return int(self.options.get("tensor_parallel_size", 1)) * self.num_stages

    @property
    def drafts(self) -> tuple[int, int]:
        """Return the number of sequences below which drafts are made, 0 for never, and the most tokens of one."""
        return (0, 0) if self.speculation == "off" else (self.speculate_below, self.speculative_tokens)

    @property
    def num_here(self) -> int:
        """Engines that are started with the run."""
        return self.count - self.elsewhere

    @property
    def most(self) -> int:
        """Engines that a live run may come to have: keys are made for as many. A larger number costs a small file for each."""
        return self.max_count or max(8, 2 * self.count)

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share every matrix of one engine."""
        return self.num_ranks // self.num_stages

    @property
    def num_stages(self) -> int:
        """Return the number of stages of one engine's pipeline."""
        return int(self.options.get("pipeline_parallel_size", 1))
