"""Adapters as policies: when they travel alone, how many are served side by side, and how they are laid out."""

from __future__ import annotations

import pytest

from pipelinerl.config import LoraSection, WeightsSection
from pipelinerl.errors import ConfigError
from pipelinerl.weights.adapters import AdapterShape, adapter_layout, are_adapters, choose_adapters
from pipelinerl.weights.base import plan_layout

SHAPE = AdapterShape(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))


@pytest.mark.parametrize(
    ("rank", "wanted", "has_device", "max_staleness", "versions", "said"),
    [
        (0, "auto", True, 4, None, ()),
        (8, "auto", False, 4, None, ("adapters are merged before they travel: on a CPU a forward pass with separate adapters takes",)),
        (8, "auto", True, 4, 5, ("adapters are served separately, 5 versions side by side: megabytes travel in place of a model",)),
        (8, "auto", True, 40, 8, ("adapters are served separately, 8 versions side by side",)),
        (8, "separate", False, 0, 1, ("adapters are served separately, 1 versions side by side: weights.adapters says so",)),
        (8, "merged", True, 4, None, ("adapters are merged before they travel: weights.adapters says so",)),
    ],
)
def test_adapters_travel_alone_where_that_is_cheaper_and_the_reason_is_said(
    rank: int, wanted: str, has_device: bool, max_staleness: int, versions: int | None, said: tuple[str, ...]
):
    lora = LoraSection(rank=rank, alpha=4.0, targets=("q_proj",))
    weights = WeightsSection(adapters=wanted)  # pyright: ignore
    shape, choices = choose_adapters(lora, weights, max_staleness=max_staleness, has_device=has_device)
    assert (shape.num_versions if shape else None) == versions
    assert len(choices) == len(said)
    assert all(found.startswith(expected) for found, expected in zip(choices, said, strict=True)), choices


def test_a_number_of_versions_that_is_set_is_taken():
    weights = WeightsSection(adapters="separate", adapter_versions=1)  # pyright: ignore[reportCallIssue]
    shape, _ = choose_adapters(LoraSection.model_validate({"rank": 8, "alpha": 4.0}), weights, max_staleness=4)
    assert shape is not None
    assert shape.num_versions == 1


def test_an_engine_with_a_pipeline_gets_adapters_merged():
    shape, choices = choose_adapters(
        LoraSection.model_validate({"rank": 8, "alpha": 4.0}),
        WeightsSection(),  # pyright: ignore[reportCallIssue]
        max_staleness=4,
        is_pipelined=True,
        has_device=True,
    )
    assert (shape, choices) == (None, ("adapters are merged before they travel: along a pipeline whole policies are taken",))


def test_matrices_of_the_targets_have_adapters_and_experts_and_vectors_do_not():
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (6, 4),
        "model.layers.0.self_attn.q_proj.bias": (6,),
        "model.layers.0.self_attn.k_proj.weight": (2, 4),
        "model.layers.0.mlp.experts.3.down_proj.weight": (4, 8),
    }
    layout = adapter_layout(shapes, SHAPE, dtype="bfloat16")
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    assert [(tensor.name, tuple(tensor.shape), tensor.dtype) for tensor in layout] == [
        (f"{stem}.lora_A.weight", (2, 4), "bfloat16"),
        (f"{stem}.lora_B.weight", (6, 2), "bfloat16"),
    ]
    assert are_adapters(layout)
    assert not are_adapters(plan_layout({}))
    with pytest.raises(ConfigError, match=r"the model has no matrix named q_proj, down_proj: an adapter would have nothing to change"):
        adapter_layout({"model.norm.weight": (4,)}, SHAPE, dtype="float32")
