"""The policy's tokenizer, as rewards, environments and process reward models use it."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import Codec, codec_of, load_tokenizer


def load_codec(folder: Path) -> Codec:
    """Load the tokenizer of a model folder; it decodes without special tokens and the model's stop tokens. Raises `ConfigError`."""
    tokenizer = load_tokenizer(folder)
    return codec_of(tokenizer, ends=stop_tokens_of(folder, tokenizer=tokenizer).of_model)
