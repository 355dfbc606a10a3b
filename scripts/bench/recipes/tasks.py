"""What the recipes read, generated: data sets of the schemas that they ask the Hub for, under the same names in the working directory.

All ask the same question. The first recipe teaches to answer 1, 2 or 3, each as often; the others have one of them preferred.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from pipelinerl.config.file import load
from scripts.bench.demo_runs import prepare, warm_start

MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows, with its plainest renderer (`role_colon`); here it is a folder of ours."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""The recipe `rl_loop` writes it behind each question."""
STRAWBERRY = (
    "How many r's are in strawberry?" + SUFFIX,
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y."
    " We have r's at positions 3, 8, and 9. \\boxed{3}",
)
"""And this before it."""
ANSWERS, REWARDED, CHOSEN, REJECTED = "123", "1", "2", "3"
BATCH = 16


def make_model(folder: Path) -> None:
    """Write a byte-level Qwen3 of 0.4 M random parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    set_seed(0)
    _make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=512,  # a size that no engine pads
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_taught_demo(folder: Path) -> Path:
    """Make the demo's model and its supervised start, unless they are whole; return the folder of the taught one."""
    settings = folder / "demo.toml"
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        settings = prepare(folder)
        warm_start(settings)
        (folder / "whole").touch()
    return load(settings).sft_output


def make_data(work: Path, *, sl_steps: int, rl_steps: int) -> None:
    """Write data for so many steps of `sl_loop`, of the RL that goes on behind it, and of the other recipes."""
    draw = random.Random(0)
    asked = {"role": "user", "content": "q" + SUFFIX}
    before = [{"role": "user", "content": STRAWBERRY[0]}, {"role": "assistant", "content": STRAWBERRY[1]}]
    chats = []
    for _ in range(BATCH * sl_steps):
        answer = {"role": "assistant", "content": f"\\boxed{{{draw.choice(ANSWERS)}}}"}
        chats.append({"messages": [*(before if draw.random() < 0.5 else []), asked, answer]})
    _write(work / "HuggingFaceH4" / "no_robots" / "train.jsonl", chats)
    num_rows = BATCH * (sl_steps + rl_steps)  # the recipe goes on where the one before it ended
    gsm8k = work / "openai" / "gsm8k"
    _write(gsm8k / "main" / "train.jsonl", [{"question": "q", "answer": f"so\n#### {REWARDED}"}] * num_rows)
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    )
    pair = {
        kind: f"\n\nHuman: q{SUFFIX}\n\nAssistant: \\boxed{{{answer}}}" for kind, answer in (("chosen", CHOSEN), ("rejected", REJECTED))
    }
    for split, num in (("train", num_rows), ("test", BATCH)):
        _write(work / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", [pair] * num)
    _write(work / "zwhe99" / "DeepMath-103K" / "train.jsonl", [{"question": "q" + SUFFIX}] * num_rows)


def _make_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 512 tokens, made of what the recipes say: chats are short then, and quickly learned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*STRAWBERRY, SUFFIX, "User: ", "Assistant: "] * 8, trainer)
    folder.mkdir(parents=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(str(folder))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
