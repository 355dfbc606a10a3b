"""A vLLM pooling engine as the engine of a process reward model: token-wise rows, all of them raw, with a prefix cache that is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.platforms import current_platform

from pipelinerl.rewards.prm.scorer import Rows

BLOCK_TOKENS = 32
"""Block size of the prefix cache: a new step computes at most this many tokens again. It is the smallest that vLLM's CPU attention takes;
the default there, 128, would cost more than most steps."""

_ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
"""Options on CPUs: filling vLLM's default cache with zeros takes seconds there."""


class VllmPrm:
    """A `PrmEngine`: one model in this process. STEP pooling is not used, because vLLM turns the prefix cache off with it."""

    def __init__(
        self, folder: Path, *, dtype: str = "bfloat16", max_tokens: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self._llm = LLM(
            model=str(folder),
            runner="pooling",
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=max_tokens,
            enable_prefix_caching=True,
            block_size=BLOCK_TOKENS,
            pooler_config=PoolerConfig(tok_pooling_type="ALL"),
            disable_log_stats=True,
            **(_ON_CPU if current_platform.is_cpu() else {}) | (options or {}),
        )
        self._tokenizer = self._llm.get_tokenizer()
        self.max_tokens: int = self._llm.model_config.max_model_len

    def encode(self, text: str) -> list[int]:
        """Return the model's tokens of a text, without any around it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str, reads_cache: bool) -> list[Rows]:
        """See `PrmEngine`."""
        prompts = [{"prompt_token_ids": list(token_ids), "cache_salt": salt} for token_ids in requests]
        parameters = PoolingParams(use_activation=False, skip_reading_prefix_cache=not reads_cache)
        outputs = self._llm.encode(prompts, pooling_params=parameters, pooling_task="token_classify", use_tqdm=False)  # pyright: ignore[reportArgumentType]
        return [np.asarray(output.outputs.data.float()) for output in outputs]
