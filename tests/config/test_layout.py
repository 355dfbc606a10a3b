"""Which layouts are valid, and what is proposed instead of one that is not."""

import json
from pathlib import Path

import pytest

from pipelinerl.config.layout import Layout, ModelShape, ParallelSection, Schedule, check_layout, nearest, problems_of
from pipelinerl.errors import ConfigError

SHAPE = ModelShape(model_type="qwen3_moe", num_heads=8, num_key_heads=2, intermediate_size=48, num_layers=6, num_experts=6, expert_size=30)


def test_what_the_other_kinds_leave_of_the_ranks_are_copies() -> None:
    layout = Layout(ranks=24, shard=2, context=3, tensor=2)
    assert (layout.ranks_per_replica, layout.replicas, layout.copies) == (6, 4, 2)
    assert str(layout) == "ranks = 24, parallel.shard = 2, parallel.context = 3, parallel.tensor = 2"


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout(ranks=6, tensor=4), "one replica takes 4 ranks (context x tensor x pipeline), which do not divide 6"),
        (
            Layout(ranks=6, tensor=2, shard=2),
            'parallel.shard = 2 does not divide the 3 replicas that 6 ranks make ("all" takes as many as there are)',
        ),
        (Layout(ranks=6, expert=4), "parallel.expert = 4 does not divide the 6 ranks"),
        (Layout(ranks=4, tensor=4), "parallel.tensor = 4 does not divide the model's 2 heads of keys"),
        (Layout(ranks=4, expert=4), "parallel.expert = 4 does not divide the model's 6 experts"),
        (
            Layout(ranks=4, pipeline=4, schedule=Schedule.INTERLEAVED),
            'parallel.pipeline = 4 with schedule = "interleaved" makes 8 stages, and the model has 6 layers',
        ),
        (Layout(ranks=8, pipeline=2, expert=3), "parallel.expert = 3 does not divide the 4 ranks of one of 2 places in the pipeline"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_reason(layout: Layout, problem: str) -> None:
    assert problem in problems_of(layout, shape=SHAPE)


def test_experts_of_a_width_that_tensor_parallelism_does_not_divide_may_be_kept_whole() -> None:
    shape = ModelShape(
        model_type="qwen3_moe", num_heads=8, num_key_heads=4, intermediate_size=48, num_layers=6, num_experts=8, expert_size=30
    )
    assert problems_of(Layout(ranks=4, tensor=4), shape=shape) == [
        "parallel.tensor = 4 does not divide the model's 30 columns of an expert"
    ]
    assert problems_of(Layout(ranks=4, tensor=4, expert=4), shape=shape) == []


def test_a_dense_model_has_no_experts_to_share() -> None:
    shape = ModelShape(model_type="gemma", num_heads=8, num_key_heads=4, intermediate_size=48, num_layers=6)
    assert problems_of(Layout(ranks=2, expert=2), shape=shape) == ["parallel.expert = 2, but a gemma has no experts"]


def test_the_nearest_layout_of_as_many_ranks_is_proposed() -> None:
    assert nearest(Layout(ranks=6, tensor=4)) == Layout(ranks=6, tensor=3)
    assert nearest(Layout(ranks=8, tensor=4), shape=SHAPE) == Layout(ranks=8, tensor=2)
    assert nearest(Layout(ranks=7, shard=2, tensor=2)) == Layout(ranks=7)
    assert nearest(Layout(ranks=8, pipeline=8), shape=SHAPE) == Layout(ranks=8, pipeline=4)


def test_a_pipeline_too_fine_for_the_model_is_offered_the_plain_schedule() -> None:
    assert nearest(Layout(ranks=4, pipeline=4, schedule=Schedule.ZERO_BUBBLE), shape=SHAPE) == Layout(ranks=4, pipeline=4)


def test_a_finer_schedule_makes_two_stages_per_rank() -> None:
    layout = Layout(ranks=4, pipeline=2, tensor=2, schedule=Schedule.INTERLEAVED)
    assert (layout.num_stages, layout.replicas, layout.copies) == (4, 1, 1)
    assert str(layout) == 'ranks = 4, parallel.tensor = 2, parallel.pipeline = 2, parallel.schedule = "interleaved"'


def test_a_layout_that_does_not_fit_the_model_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    tree = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    check_layout(Layout(ranks=4, tensor=2), tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 4, parallel\.tensor = 4: .* that works: ranks = 4, parallel\.tensor = 2$"):
        check_layout(Layout(ranks=4, tensor=4), tmp_path)
    check_layout(Layout(ranks=4), tmp_path / "nothing to cut, so nothing is read")


def test_the_shape_is_read_from_the_model_folder(tmp_path: Path) -> None:
    tree = {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert ModelShape.read(tmp_path) == ModelShape(model_type="llama", num_heads=4, num_key_heads=4, intermediate_size=8, num_layers=2)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="KeyError 'num_attention_heads'"):
        ModelShape.read(tmp_path)


def test_a_copy_that_all_ranks_share_grows_and_shrinks_with_them():
    pairs = ParallelSection(shard="all", context=2)  # pyright: ignore[reportCallIssue]
    found = [pairs.layout(ranks) for ranks in (2, 4, 6)]
    assert [(one.shard, one.copies, one.ranks_per_change) for one in found] == [(1, 1, 2), (2, 1, 2), (3, 1, 2)]
    assert not any(problems_of(one) for one in found)
    assert "2 ranks (context x tensor x pipeline), which do not divide 5" in "".join(problems_of(pairs.layout(5)))
    two = ParallelSection(shard=2, context=2).layout(8)  # pyright: ignore[reportCallIssue]
    assert (two.shard, two.copies, two.ranks_per_change) == (2, 2, 4)


@pytest.mark.parametrize("value", ["every", 0, True, 1.5])
def test_what_is_neither_a_number_nor_all_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.parallel\.shard is {value!r}: expected an integer above 0, or \"all\""):
        ParallelSection.model_validate({"shard": value})
