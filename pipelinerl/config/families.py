"""Families of models that were run here, those known not to work, and what else config.json tells of a model before it is loaded.

`tests/e2e/test_families.py` takes every family of the table that is not refused through load, agreement, swap and export; docs/models.md
shows the table. A family that is not in it may work: the trainer runs transformers' own code for it, and the first step compares its
log-probabilities with the engine's before anything is updated.

Imports no torch: a head node can refuse a model before anything runs.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError

PAGE = "docs/models.md"
_LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layers whose tokens see others through the trainer's own attention, and through nothing else."""
_MIXES = (
    "attention_chunk_size",
    "conv_kernel",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "mamba_d_state",
    "rwkv_version",
    "ssm_state_size",
)
"""Settings of models in which tokens see others in another way."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that share their code in transformers and in vLLM."""

    title: str
    model_type: str
    """As config.json has it."""
    covers: str
    """What is peculiar to the family and switched on in its test."""
    lora: str = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    """What `lora.targets` may name, beside others."""
    refused: str = ""
    """Why no engine can take its policies; empty where one can."""


_FUSED = "qkv_proj, o_proj, gate_up_proj, down_proj"
_ATTENTION = "q_proj, k_proj, v_proj, o_proj"

FAMILIES = (
    Family(title="Llama 2 and 3, SmolLM2", model_type="llama", covers="biases, heads that do not divide the hidden size"),
    Family(title="Qwen2, Qwen2.5", model_type="qwen2", covers="biases of queries, keys and values"),
    Family(title="Qwen3", model_type="qwen3", covers="norms of queries and keys, tied embeddings"),
    Family(title="Qwen3-MoE", model_type="qwen3_moe", covers="experts, one tensor here and one each in the folder", lora=_ATTENTION),
    Family(
        title="Gemma 2",
        model_type="gemma2",
        covers="soft caps on attention and logits, window in every other layer, scaled embeddings, tied",
    ),
    Family(
        title="Gemma 3 (text)",
        model_type="gemma3_text",
        covers="windows and full layers with a RoPE of their own, norms of queries and keys, scaled embeddings, tied",
    ),
    Family(title="Mistral", model_type="mistral", covers="window in every layer"),
    Family(
        title="Phi-3, Phi-3.5, Phi-4",
        model_type="phi3",
        covers="fused `qkv_proj` and `gate_up_proj`, rotary on a part of a head, window",
        lora=_FUSED,
    ),
    Family(title="SmolLM3", model_type="smollm3", covers="layers without rotary positions, tied embeddings"),
    Family(title="OLMo 2", model_type="olmo2", covers="norms after each part, norms across all heads"),
    Family(title="Granite 3", model_type="granite", covers="factors on embeddings, attention, residuals and logits"),
    Family(
        title="GLM-4 (0414)",
        model_type="glm4",
        covers="fused `gate_up_proj`, rotary on a part of a head, interleaved",
        lora=f"{_ATTENTION}, gate_up_proj, down_proj",
    ),
    Family(
        title="gpt-oss",
        model_type="gpt_oss",
        covers="attention sinks, windows, experts with biases: in the trainer alone",
        lora=_ATTENTION,
        refused="vLLM transposes its experts (gate_up_proj, down_proj) when it loads them, and packs them again on a CPU: a new policy does"
        " not lie in memory as its checkpoint does",
    ),
    Family(
        title="DeepSeek-V2 (MLA)",
        model_type="deepseek_v2",
        covers="latent attention, YaRN, experts shared and routed",
        lora="o_proj",
    ),
    Family(
        title="DeepSeek-V3, R1 (MLA)",
        model_type="deepseek_v3",
        covers="latent attention, YaRN, experts shared and routed by sigmoids",
        lora="o_proj",
    ),
)


def takes_images(folder: Path) -> bool:
    """Say whether the model of a folder takes images in chat messages here: Idefics3 does, of which the first SmolVLM is one."""
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and tree.get("model_type") == "idefics3"


def check_trainable(folder: Path) -> str:
    """Return a sentence to warn with about a model of a family that was never run here; empty for one that was.

    Raises `ConfigError` where something of the model has no counterpart in the trainer.
    """
    tree = _tree(folder)
    model_type = str(tree.get("model_type", ""))
    layers = sorted({str(kind) for kind in tree.get("layer_types") or ()} - set(_LAYERS))
    others = [key for key in _MIXES if tree.get(key)]
    if layers or others:
        named = ", ".join([*(f'layers of kind "{kind}"' for kind in layers), *others])
        raise ConfigError(
            f"model.path {folder}: a {model_type or 'model'} has {named}, in which tokens see others in a way that packed rows do not have:"
            f" samples of a row would see each other. Choose a model of a family in {PAGE}"
        )
    if any(family.model_type == model_type for family in FAMILIES):
        return ""
    return (
        f"model.path {folder} is of the family {model_type!r}, which was never run here ({PAGE} names those that were). The first step"
        " compares trainer and engine before it updates anything, and ends the run where they do not agree"
    )


def check_servable(folder: Path) -> None:
    """Raise `ConfigError` for a model whose engine cannot take new policies, with the reason."""
    tree = _tree(folder)
    model_type = str(tree.get("model_type", ""))
    refused = next((family.refused for family in FAMILIES if family.model_type == model_type), "")
    if not refused and (quantised := tree.get("quantization_config")):
        method = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else quantised
        refused = f"its weights are quantised ({method}), and new ones are not. Save it dequantised first, without quantization_config"
    if refused:
        raise ConfigError(f"model.path {folder}: a {model_type or 'model'} cannot be served to train it: {refused}. See {PAGE}")


def lora_targets(folder: Path) -> tuple[str, ...]:
    """What the table says that `lora.targets` may name, beside others; () for a family that is not in it."""
    model_type = _tree(folder).get("model_type")
    return next((tuple(family.lora.split(", ")) for family in FAMILIES if family.model_type == model_type), ())


def table() -> str:
    """The table of families as Markdown, as docs/models.md has it."""
    rows = ["| family | `model_type` | its test covers | `lora.targets` | trains |", "| --- | --- | --- | --- | --- |"]
    for family in FAMILIES:
        trains = "`sft` alone" if family.refused else "yes"
        rows.append(f"| {family.title} | `{family.model_type}` | {family.covers} | {family.lora} | {trains} |")
    return "\n".join(rows) + "\n"


def _tree(folder: Path) -> dict[str, Any]:
    """The part of config.json that is about text; empty where there is none to read, which whoever loads the folder says."""
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(tree, dict):
        return {}
    inner = tree.get("text_config")
    return {**tree, **inner} if isinstance(inner, dict) else tree
