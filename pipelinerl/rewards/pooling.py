"""vLLM's engine for models that score what they read, in this process; process reward models and outcome reward models both run on it.

Prompts are shared by the rollouts of a group, and traces by their own continuations, so the prefix cache is read for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipelinerl.engine.kv import LEAST_CPU_BYTES, sequence_bytes_of
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.imports import of_large_packages

with of_large_packages():
    from vllm import LLM, PoolingParams
    from vllm.config import PoolerConfig
    from vllm.platforms import current_platform

BLOCK_TOKENS = 32
"""Block size of the prefix cache: a new step computes at most this many tokens again. It is the smallest that vLLM's CPU attention takes;
the default there, 128, would cost more than most steps."""
_POOLERS = {"token_classify": PoolerConfig(tok_pooling_type="ALL"), "classify": PoolerConfig(seq_pooling_type="LAST")}
"""STEP pooling is not used, because vLLM turns the prefix cache off with it."""


class PoolingModel:
    """One model in this process, which gives raw values: of every token, or of the last one."""

    def __init__(
        self,
        folder: Path,
        *,
        task: Literal["token_classify", "classify"],
        dtype: str = "bfloat16",
        max_tokens: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Load a folder; `task` is vLLM's: values of every token, or of the last. Raises `ConfigError` where vLLM cannot serve it."""
        on_cpu = (
            {"enforce_eager": True, "kv_cache_memory_bytes": _cache_bytes(folder, dtype, max_tokens)} if current_platform.is_cpu() else {}
        )
        try:
            self._llm = LLM(
                model=str(folder),
                runner="pooling",
                dtype=dtype,  # pyright: ignore[reportArgumentType]
                max_model_len=max_tokens,
                enable_prefix_caching=True,
                block_size=BLOCK_TOKENS,
                pooler_config=_POOLERS[task],
                disable_log_stats=True,
                **on_cpu | (options or {}),
            )
        except Exception as error:  # vLLM raises many kinds for a model it cannot serve; each becomes one message with its cause
            raise ConfigError(f"vLLM cannot serve {folder} as a model that scores: {type(error).__name__}: {error}") from error
        self._task = task
        self.tokenizer: Any = self._llm.get_tokenizer()
        self.max_tokens: int = self._llm.model_config.max_model_len
        """Longest text that it takes, in its own tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the model's tokens of a text, without any around it."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str, reads_cache: bool = True) -> list[npt.NDArray[np.float32]]:
        """Return the raw values of each request: [tokens computed, columns] of its last tokens, or [columns] of its last token.

        All requests are one batch. `salt`, the name and version of the model, keeps cache entries of different weights apart.
        """
        prompts = [{"prompt_token_ids": list(token_ids), "cache_salt": salt} for token_ids in requests]
        parameters = PoolingParams(use_activation=False, skip_reading_prefix_cache=not reads_cache)
        outputs = self._llm.encode(prompts, pooling_params=parameters, pooling_task=self._task, use_tqdm=False)  # pyright: ignore[reportArgumentType]
        return [np.asarray(output.outputs.data.float()) for output in outputs]


def _cache_bytes(folder: Path, dtype: str, max_tokens: int | None) -> int:
    """KV cache on a CPU: the least, or two sequences as long as the context; filling vLLM's default with zeros takes seconds there."""
    return max(LEAST_CPU_BYTES, 2 * (sequence_bytes_of(folder, dtype=dtype, max_tokens=max_tokens) or 0))
