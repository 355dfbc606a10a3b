"""A model of the demo's size that reads bytes: Qwen3 of 1.1 M random parameters, and a tokenizer made of what a game says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

VOCABULARY = 512
"""A size that no engine pads."""


def make_model(folder: Path, *, texts: Sequence[str], context: int) -> None:
    """Write model and tokenizer. Digits and marks are tokens of their own: what a game says is cut alike wherever it stands."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

    tokenizer = Tokenizer(models.BPE())
    parts = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for text in texts for _ in range(8)], trainer)
    set_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=None,
            dtype="float32",
        )
    )
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", model_max_length=context).save_pretrained(str(folder))
