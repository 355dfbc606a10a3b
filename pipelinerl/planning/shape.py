"""The dimensions of a model and its exact number of parameters, from its config.json alone, or from the table of public models.

What is counted is what transformers makes of the same config.json: without a multi-token-prediction module, and without buffers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from pathlib import Path
from typing import Any

from pipelinerl.config.layout import ModelShape
from pipelinerl.errors import ConfigError

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2")
_MODELS = Path(__file__).with_name("models.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A language model, as far as memory and speed depend on it. All widths are numbers per token."""

    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    key_heads: int
    is_latent: bool
    """Multi-head latent attention (arXiv 2405.04434): one compressed vector per token in place of keys and values of each head."""
    query_width: int
    """Numbers of a layer's queries."""
    value_width: int
    """Numbers of a layer's attention output, before its projection."""
    normed_width: int
    """Numbers of a layer's attention that are normalised on their way: queries and keys (Qwen3), or latent vectors."""
    cache_width: int
    """Numbers that a layer's KV cache keeps of a token: all keys and values, or the latent vector and the rotary part of the key."""
    intermediate: int
    """Inner size of a dense feed-forward layer."""
    inner_width: float
    """Inner numbers of a feed-forward layer that a token computes, the layers' mean; a mixture's are those of chosen and shared experts."""
    sparse_layers: int
    experts: int
    """Of a layer; 0 for a dense model."""
    experts_per_token: int
    expert_size: int
    """Inner size of one expert."""
    parameters: int
    expert_parameters: int
    """Of all routed experts."""
    embedding_parameters: int
    """Of one table of embeddings."""
    is_tied: bool
    """Input and output embeddings are one tensor."""
    positions: int | None
    """Longest sequence the model was made for; None where its config.json does not say."""

    @property
    def matmul_parameters(self) -> float:
        """Parameters that multiply each token: without the input embeddings and the experts a token does not choose."""
        chosen = self.expert_parameters * self.experts_per_token / self.experts if self.experts else 0.0
        return self.parameters - self.expert_parameters + chosen - (0 if self.is_tied else self.embedding_parameters)

    def inputs(self) -> dict[str, float]:
        """The numbers that the planner's formulas read."""
        return {
            "parameters": self.parameters,
            "expert_parameters": self.expert_parameters,
            "embedding_parameters": self.embedding_parameters,
            "embedding_tables": 1 if self.is_tied else 2,
            "matmul_parameters": self.matmul_parameters,
            "layers": self.layers,
            "hidden": self.hidden,
            "vocabulary": self.vocabulary,
            "key_heads": self.key_heads,
            "is_latent": float(self.is_latent),
            "query_width": self.query_width,
            "value_width": self.value_width,
            "normed_width": self.normed_width,
            "cache_width": self.cache_width,
            "inner_width": self.inner_width,
            "intermediate": self.intermediate,
            "expert_size": self.expert_size,
            "experts": self.experts,
            "experts_per_token": self.experts_per_token,
        }

    def cut(self) -> ModelShape:
        """The dimensions that decide over how many ranks it may be spread."""
        return ModelShape(
            model_type=self.model_type,
            num_heads=self.heads,
            num_key_heads=self.key_heads,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_experts=self.experts or None,
            expert_size=self.expert_size or None,
        )


def read_shape(model: Path) -> Shape:
    """The shape of a Hugging Face folder, or of a model of the table where no folder has that name. Raises `ConfigError`."""
    path = model / "config.json"
    if path.is_file():
        try:
            tree = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {path} cannot be read: {error}") from None
        return shape_of(tree | (tree.get("text_config") or {}), origin=str(path))
    known = known_models()
    found = next((name for name in known if str(model).lower() in (name.lower(), name.split("/")[1].lower())), None)
    if found is None:
        near = difflib.get_close_matches(str(model).lower(), {each: each for name in known for each in (name, name.split("/")[1])}, 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ConfigError(
            f"model.path is {model}: no folder with a config.json (looked from {Path.cwd()}) and no model of the table{hint}"
            f" The table has {', '.join(known)}"
        )
    return shape_of(known[found], origin=found)


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """The part of the config.json of public models that decides their shape, by name on the Hub."""
    return json.loads(_MODELS.read_text())


def shape_of(tree: dict[str, Any], *, origin: str, parameters: int | None = None) -> Shape:
    """Work out a shape from what a config.json says. Raises `ConfigError` for a family whose parameters are not known here.

    Where the weights themselves tell how many `parameters` there are, any family will do, and what config.json leaves out is 0 or usual.
    """
    kind = str(tree.get("model_type"))
    if parameters is not None:
        hidden, heads = int(tree.get("hidden_size") or 0), int(tree.get("num_attention_heads") or 1)
        usual = {
            "hidden_size": hidden,
            "num_hidden_layers": 1,
            "vocab_size": 0,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
        }
        found = _shape_of(kind, usual | {key: value for key, value in tree.items() if value is not None})
        return dataclasses.replace(found, parameters=parameters, expert_parameters=min(found.expert_parameters, parameters))
    if kind not in DENSE + MIXTURES:
        raise ConfigError(
            f"{origin}: model_type {kind!r} is not one whose parameters are counted here ({', '.join(DENSE + MIXTURES)}); name a model of"
            " one of these families and of about its size in model.path: memory and time hang on sizes alone"
        )
    try:
        return _shape_of(kind, tree)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{origin} does not describe a {kind}: {type(error).__name__} {error}") from None


def _shape_of(kind: str, tree: dict[str, Any]) -> Shape:
    hidden, layers, vocabulary = int(tree["hidden_size"]), int(tree["num_hidden_layers"]), int(tree["vocab_size"])
    heads, intermediate = int(tree["num_attention_heads"]), int(tree["intermediate_size"])
    is_tied = bool(tree.get("tie_word_embeddings", False))
    is_latent = bool(tree.get("kv_lora_rank"))
    key_heads = int(tree.get("num_key_value_heads") or heads)
    attention = _latent_attention(tree) if is_latent else _attention(kind, tree, key_heads=key_heads)
    sparse = [index for index in range(layers) if _is_sparse(kind, tree, index)]
    experts = int(tree.get("num_local_experts") or tree.get("num_experts") or tree.get("n_routed_experts") or 0) if sparse else 0
    chosen = int(tree.get("num_experts_per_tok") or 0) if sparse else 0
    expert_size = int(tree.get("moe_intermediate_size") or intermediate) if sparse else 0
    shared_size = int(tree.get("shared_expert_intermediate_size") or 0) if kind == "qwen2_moe" else 0
    shared_size += expert_size * int(tree.get("n_shared_experts") or 0)
    routed = len(sparse) * experts * 3 * hidden * expert_size
    shared_gate = hidden if kind == "qwen2_moe" else 0
    per_sparse = hidden * experts + 3 * hidden * shared_size + shared_gate
    dense_bias = 2 * intermediate + hidden if tree.get("mlp_bias") else 0
    feed_forward = len(sparse) * per_sparse + (layers - len(sparse)) * (3 * hidden * intermediate + dense_bias)
    body = layers * (attention.parameters + 2 * hidden) + feed_forward + routed + hidden
    inner = len(sparse) * (chosen * expert_size + shared_size) + (layers - len(sparse)) * intermediate
    return Shape(
        model_type=kind,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        key_heads=key_heads,
        is_latent=is_latent,
        query_width=attention.query_width,
        value_width=attention.value_width,
        normed_width=attention.normed_width,
        cache_width=attention.cache_width,
        intermediate=intermediate,
        inner_width=inner / layers,
        sparse_layers=len(sparse),
        experts=experts,
        experts_per_token=chosen,
        expert_size=expert_size,
        parameters=body + vocabulary * hidden * (1 if is_tied else 2),
        expert_parameters=routed,
        embedding_parameters=vocabulary * hidden,
        is_tied=is_tied,
        positions=int(tree["max_position_embeddings"]) if tree.get("max_position_embeddings") else None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """One layer's."""

    parameters: int
    query_width: int
    value_width: int
    normed_width: int
    cache_width: int


def _attention(kind: str, tree: dict[str, Any], *, key_heads: int) -> _Attention:
    """Grouped-query attention (arXiv 2305.13245)."""
    hidden, heads = int(tree["hidden_size"]), int(tree["num_attention_heads"])
    head = int(tree.get("head_dim") or hidden // heads)
    queries, keys = heads * head, key_heads * head
    bias = queries + 2 * keys if kind in ("qwen2", "qwen2_moe") or tree.get("attention_bias") else 0
    bias += hidden if tree.get("attention_bias") and kind in ("llama", "qwen3", "qwen3_moe") else 0
    is_normed = kind in ("qwen3", "qwen3_moe")
    matrices = hidden * (queries + 2 * keys) + queries * hidden
    return _Attention(
        parameters=matrices + bias + (2 * head if is_normed else 0),
        query_width=queries,
        value_width=queries,
        normed_width=queries + keys if is_normed else 0,
        cache_width=2 * keys,
    )


def _latent_attention(tree: dict[str, Any]) -> _Attention:
    """Multi-head latent attention (arXiv 2405.04434)."""
    hidden, heads, latent = int(tree["hidden_size"]), int(tree["num_attention_heads"]), int(tree["kv_lora_rank"])
    plain, rotary, value = int(tree["qk_nope_head_dim"]), int(tree["qk_rope_head_dim"]), int(tree["v_head_dim"])
    queries, low = heads * (plain + rotary), int(tree.get("q_lora_rank") or 0)
    by_query = hidden * low + low + low * queries if low else hidden * queries
    by_key = hidden * (latent + rotary) + latent + latent * heads * (plain + value)
    bias = (low + latent + rotary + hidden) if tree.get("attention_bias") else 0
    parameters = by_query + by_key + heads * value * hidden + bias
    return _Attention(
        parameters=parameters, query_width=queries, value_width=heads * value, normed_width=low + latent, cache_width=latent + rotary
    )


def _is_sparse(kind: str, tree: dict[str, Any], index: int) -> bool:
    """Whether a layer is a mixture of experts, by its family's own rule."""
    if kind not in MIXTURES:
        return False
    if kind in ("qwen2_moe", "qwen3_moe"):
        return index not in (tree.get("mlp_only_layers") or ()) and (index + 1) % int(tree.get("decoder_sparse_step") or 1) == 0
    return index >= int(tree.get("first_k_dense_replace") or 0)
