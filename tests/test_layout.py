"""Which layouts are valid, and what is proposed instead of one that is not."""

import json
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.layout import Layout, ModelShape, check_layout, nearest, problems_of

SHAPE = ModelShape(model_type="qwen3_moe", num_heads=8, num_key_heads=2, intermediate_size=48, num_experts=6, expert_size=30)


def test_what_the_other_kinds_leave_of_the_ranks_are_copies() -> None:
    layout = Layout(ranks=24, shard=2, context=3, tensor=2)
    assert (layout.ranks_per_replica, layout.replicas, layout.copies) == (6, 4, 2)
    assert str(layout) == "ranks = 24, parallel.shard = 2, parallel.context = 3, parallel.tensor = 2"


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout(ranks=6, tensor=4), "one replica takes 4 ranks (context x tensor x pipeline), which do not divide 6"),
        (Layout(ranks=6, tensor=2, shard=2), "parallel.shard = 2 does not divide the 3 replicas that 6 ranks make"),
        (Layout(ranks=6, expert=4), "parallel.expert = 4 does not divide the 6 ranks"),
        (Layout(ranks=4, tensor=4), "parallel.tensor = 4 does not divide the model's 2 heads of keys"),
        (Layout(ranks=4, expert=4), "parallel.expert = 4 does not divide the model's 6 experts"),
        (
            Layout(ranks=8, pipeline=8),
            "parallel.pipeline = 8: the layers of a model cannot be spread over ranks yet, only every layer's matrices",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_reason(layout: Layout, problem: str) -> None:
    assert problem in problems_of(layout, shape=SHAPE)


def test_experts_of_a_width_that_tensor_parallelism_does_not_divide_may_be_kept_whole() -> None:
    shape = ModelShape(model_type="qwen3_moe", num_heads=8, num_key_heads=4, intermediate_size=48, num_experts=8, expert_size=30)
    assert problems_of(Layout(ranks=4, tensor=4), shape=shape) == [
        "parallel.tensor = 4 does not divide the model's 30 columns of an expert"
    ]
    assert problems_of(Layout(ranks=4, tensor=4, expert=4), shape=shape) == []


def test_a_dense_model_has_no_experts_to_share() -> None:
    shape = ModelShape(model_type="gemma", num_heads=8, num_key_heads=4, intermediate_size=48)
    assert problems_of(Layout(ranks=2, expert=2), shape=shape) == ["parallel.expert = 2, but a gemma has no experts"]


def test_the_nearest_layout_of_as_many_ranks_is_proposed() -> None:
    assert nearest(Layout(ranks=6, tensor=4)) == Layout(ranks=6, tensor=3)
    assert nearest(Layout(ranks=8, tensor=4), shape=SHAPE) == Layout(ranks=8, tensor=2)
    assert nearest(Layout(ranks=7, shard=2, tensor=2)) == Layout(ranks=7)


def test_a_layout_that_does_not_fit_the_model_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    tree = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    check_layout(Layout(ranks=4, tensor=2), tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 4, parallel\.tensor = 4: .* that works: ranks = 4, parallel\.tensor = 2$"):
        check_layout(Layout(ranks=4, tensor=4), tmp_path)
    check_layout(Layout(ranks=4), tmp_path / "nothing to cut, so nothing is read")


def test_the_shape_is_read_from_the_model_folder(tmp_path: Path) -> None:
    tree = {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert ModelShape.read(tmp_path) == ModelShape(model_type="llama", num_heads=4, num_key_heads=4, intermediate_size=8)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="KeyError 'num_attention_heads'"):
        ModelShape.read(tmp_path)
