"""The model folder's own tokenizer, loaded without torch where the folder allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError


def load_tokenizer(folder: Path) -> Any:
    """A Hugging Face tokenizer with its chat template.

    `AutoTokenizer` reads every tokenizer but imports torch: 5.4 s of CPU and 335 MB, against 1.2 s and 65 MB for the class that reads
    `tokenizer.json`, which encodes and decodes alike. So it serves only folders without that file. Raises `ConfigError`.
    """
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as TokenizerClass
    else:
        from transformers import AutoTokenizer as TokenizerClass
    try:
        return TokenizerClass.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain `Exception` for a damaged file
        raise ConfigError(f"model.path: the tokenizer of {folder} cannot be loaded: {error}") from error


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """What turns a completion's tokens into the text that is scored: without an end of sequence, or other special tokens."""
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
