"""Second forms of weights: vLLM's own attention classes and hooks, on the CPU, as a model that was just loaded has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelinerl.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
HEADS, LATENT, PLAIN, VALUE = 2, 8, 4, 6


class Model(torch.nn.Module):
    """Holds one attention layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.attention = layer


def latent(dtype: torch.dtype, *, computes_in: torch.dtype, impl: type | None = None) -> Any:
    """vLLM's MLAAttention around a kv_b_proj, its hook run once; made without its constructor, which wants a whole engine."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    layer: Any = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.kv_b_proj = torch.nn.Linear(LATENT, HEADS * (PLAIN + VALUE), bias=False, dtype=dtype).requires_grad_(False)
    vars(layer.kv_b_proj).update(quant_method=None)
    sizes = {"kv_lora_rank": LATENT, "num_heads": HEADS, "qk_nope_head_dim": PLAIN, "v_head_dim": VALUE}
    is_packed = impl is not None
    kind: Any = impl or CPUMLAImpl
    layer.impl = kind.__new__(kind)
    vars(layer.impl).update(sizes, kv_b_proj=layer.kv_b_proj)
    absent = {"dcp_q_replicate": False, "is_aiter_triton_fp4_bmm_enabled": False, "is_aiter_triton_fp8_bmm_enabled": False}
    vars(layer).update(sizes, **absent, is_amx_bmm_enabled=is_packed, quant_config=None)
    return _loaded(layer, computes_in)


def with_sinks(dtype: torch.dtype) -> Any:
    """vLLM's Attention whose implementation keeps attention sinks in float32, as FlashInfer's does by the same lines."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.b12x import B12xPagedAttentionImpl

    layer: Any = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.sinks_parameter = torch.nn.Parameter(torch.randn(HEADS, dtype=dtype), requires_grad=False)
    layer.impl = B12xPagedAttentionImpl.__new__(B12xPagedAttentionImpl)
    vars(layer.impl).update(_sinks_source=layer.sinks_parameter, sinks=None)
    vars(layer).update(quant_config=None)
    return _loaded(layer, dtype)


def _loaded(layer: Any, dtype: torch.dtype) -> Any:
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    set_default_quant_scales(layer, register_buffer=True)
    with torch.no_grad():
        layer.process_weights_after_loading(dtype)
    return layer


def parts_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(W_UK_T [heads, plain, latent], W_UV [heads, latent, value]) of kv_b_proj: arXiv 2405.04434, as vLLM lays them out."""
    each = weight.view(HEADS, PLAIN + VALUE, LATENT)
    return each[:, :PLAIN], each[:, PLAIN:].transpose(1, 2)


def test_latent_attention_in_the_dtype_of_its_weights_keeps_views_of_them() -> None:
    from pipelinerl.engine.vllm.derived import Derived

    layer = latent(torch.float32, computes_in=torch.float32)
    derived = Derived(Model(layer), dtype=torch.float32)
    assert derived.names == set(), "nothing is to be made: the views move with the weight"
    layer.kv_b_proj.weight.normal_()
    for found, expected in zip((layer.W_UK_T, layer.W_UV), parts_of(layer.kv_b_proj.weight), strict=True):
        assert found.equal(expected)


def test_a_second_form_in_memory_of_its_own_follows_the_weight_in_every_commit() -> None:
    from pipelinerl.engine.vllm.derived import Derived

    layer = latent(torch.float32, computes_in=torch.bfloat16)
    derived = Derived(Model(layer), dtype=torch.bfloat16)
    assert derived.names == {"attention.W_UK_T", "attention.W_UV"}
    addresses = layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()
    layer.kv_b_proj.weight.normal_()
    expected = [part.to(torch.bfloat16) for part in parts_of(layer.kv_b_proj.weight)]
    assert not layer.W_UV.equal(expected[1]), "by itself it shows the old weights"
    derived.make_anew()
    assert layer.W_UK_T.equal(expected[0])
    assert layer.W_UV.equal(expected[1])
    assert (layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) == addresses, "where captured graphs have them"


def test_attention_sinks_in_float32_follow_the_weight_in_every_commit() -> None:
    from pipelinerl.engine.vllm.derived import Derived

    layer = with_sinks(torch.bfloat16)
    derived = Derived(Model(layer), dtype=torch.bfloat16)
    assert derived.names == set(), "they are no parameter"
    layer.sinks_parameter.normal_()
    assert not layer.impl.sinks.equal(layer.sinks_parameter.float())
    derived.make_anew()
    assert layer.impl.sinks.equal(layer.sinks_parameter.float())


def test_an_engine_makes_them_anew_once_a_policy_is_in_force() -> None:
    from pipelinerl.engine.vllm.engine import VllmEngine

    done: list[str] = []
    engine = VllmEngine.__new__(VllmEngine)
    parts = {"_weights": SimpleNamespace(commit=lambda: done.append("commit")), "_is_pipelined": True, "_ordered": 3, "_sleep_mode": None}
    parts["_prompts"] = SimpleNamespace(forget_features=lambda: None)
    vars(engine).update(parts, _derived=SimpleNamespace(make_anew=lambda: done.append("made anew")))
    engine.commit()
    assert done == ["commit", "made anew"]


def test_weights_that_were_packed_and_let_go_of_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX, which this machine need not have: packing is left out, and the rest of vLLM's hook runs."""
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl

    from pipelinerl.engine.vllm.derived import Derived

    monkeypatch.setattr(torch.ops._C, "convert_weight_packed", torch.clone, raising=False)
    layer = latent(torch.bfloat16, computes_in=torch.bfloat16, impl=AMXMLAImpl)
    with pytest.raises(ConfigError, match=r"second form of the weights of attention \(MLAAttention, AMXMLAImpl\) again: .*CPU_MLA"):
        Derived(Model(layer), dtype=torch.bfloat16)


def test_a_model_with_a_hook_of_its_own_is_refused_by_name() -> None:
    from pipelinerl.engine.vllm.derived import Derived

    model = Model(torch.nn.Identity())
    vars(model).update(process_weights_after_loading=lambda: None)
    with pytest.raises(ConfigError, match=r"vLLM's Model changes its weights once they are loaded, by a hook of its own"):
        Derived(model, dtype=torch.float32)


def test_ordinary_attention_is_left_alone() -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from pipelinerl.engine.vllm.derived import Derived

    layer: Any = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    assert Derived(Model(layer), dtype=torch.float32).names == set(), "its hook would fail here: it was not run"
