"""Small tokenizers of whole words that differ as real ones do: with and without a BOS, with chat templates of several families."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = (*MARKERS, "a", "b", "c", "<s>", "</s>", "[INST]", "[/INST]", "user", "assistant", "system", "x", "y", "z")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As of Qwen and SmolLM2, which have no BOS."""
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""As of Mistral: it writes the BOS itself."""


def make_words(
    folder: Path,
    *,
    template: str | None,
    eos: str | None,
    bos: str | None = None,
    special: Sequence[str] | None = None,
    ends_texts: bool = False,
) -> None:
    """Write a tokenizer of `VOCABULARY`, which puts `bos` before every text (and `eos` behind it, with `ends_texts`).

    `special` are those of its markers that it calls special; default: all.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="z"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    markers = [word for word in VOCABULARY if word[0] in "<["]
    tokenizer.add_tokens([AddedToken(word, special=special is None or word in special, normalized=False) for word in markers])
    if bos or ends_texts:
        single = [*([bos] if bos else []), "$A", *([eos] if ends_texts and eos else [])]
        named = [(word, numbers[word]) for word in (bos, eos) if word]
        tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(single), special_tokens=named)
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    whole.chat_template = template
    whole.save_pretrained(str(folder))


def make_bytes(folder: Path) -> None:
    """Write a byte-level tokenizer: a token for each byte, in which many sequences are no text, and some of several letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "/"), ("</", "a"), (">", "!"), ("e", "n"), ("en", "d")]
    vocabulary = {token: number for number, token in enumerate((*alphabet, *map("".join, merges)))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[-1]).save_pretrained(str(folder))
