"""The layout of a packed row, on rows worked out by hand."""

import numpy as np
import pytest

from pipelinerl.errors import DataError
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import ContextShard, PackedRow


def _arrange(samples: list[tuple[list[int], list[int]]], *, context_shard: ContextShard | None = None) -> PackedRow | None:
    """Arrange samples given as (prompt, completion)."""
    return arrange(
        np.array([token for prompt, completion in samples for token in prompt + completion], np.int32),
        loss_mask=np.array(
            [is_completion for prompt, completion in samples for is_completion in [False] * len(prompt) + [True] * len(completion)], bool
        ),
        lengths=np.array([len(prompt) + len(completion) for prompt, completion in samples], np.int32),
        names=[f"rollout-{number}" for number in range(len(samples))],
        context_shard=context_shard or ContextShard(),
    )


def test_samples_of_equal_length_stand_together_and_lose_their_last_token() -> None:
    row = _arrange([([1, 2], [3, 4]), ([5], [6]), ([7, 8, 9], [10])])
    assert row is not None
    assert row.token_ids.tolist() == [5, 1, 2, 3, 7, 8, 9]
    assert row.positions.tolist() == [0, 0, 1, 2, 0, 1, 2]
    assert [(block.start, block.num, block.length) for block in row.blocks] == [(0, 1, 1), (1, 2, 3)]
    assert row.targets.tolist() == [3, 4, 6, 10]
    assert row.token_ids[row.sources].tolist() == [2, 3, 5, 9]
    assert row.trained.tolist() == [2, 3, 5, 9]


def test_samples_of_one_prompt_compute_it_once() -> None:
    row = _arrange([([1, 2, 3], [4, 5, 6]), ([9], [8]), ([1, 2, 3], [7, 5, 6]), ([1, 2, 3], [4])])
    assert row is not None
    assert row.token_ids.tolist() == [9, 1, 2, 3, 4, 5, 7, 5]
    assert row.positions.tolist() == [0, 0, 1, 2, 3, 4, 3, 4]
    branches = row.blocks[-1]
    assert (branches.start, branches.num, branches.length, branches.prefix_length) == (4, 2, 2, 3)
    assert branches.prefix is not None
    assert row.token_ids[branches.prefix].tolist() == [1, 2, 3, 1, 2, 3]
    assert row.targets.tolist() == [4, 5, 6, 8, 7, 5, 6, 4]
    assert row.sources.tolist() == [3, 4, 5, 0, 3, 6, 7, 3]


def test_a_sample_without_a_loss_is_not_computed() -> None:
    row = _arrange([([1, 2, 3], []), ([4], [5])])
    assert row is not None
    assert row.token_ids.tolist() == [4]


def test_a_row_without_a_loss_is_no_row() -> None:
    assert _arrange([]) is None
    assert _arrange([([1, 2], [])]) is None


def test_a_first_token_with_a_loss_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="rollout-1"):
        _arrange([([1], [2]), ([], [3, 4])])


def test_two_ranks_share_a_row_from_both_ends_and_see_what_the_other_has() -> None:
    """Samples 9 8 and 1 2 3 4 5 6: 1 + 5 tokens to compute, in four stretches of 2: [9 1] [2 3] [4 5] [], the first and last to rank 0."""
    samples = [([9], [8]), ([1, 2, 3], [4, 5, 6])]
    first, second = (_arrange(samples, context_shard=ContextShard(index=index, num=2)) for index in range(2))
    assert first is not None
    assert second is not None
    assert first.token_ids.tolist() == [9, 1, 0, 0]
    assert second.token_ids.tolist() == [2, 3, 4, 5]
    assert second.positions.tolist() == [1, 2, 3, 4]
    assert [(block.num, block.length, block.prefix_length) for block in first.blocks] == [(2, 1, 0), (2, 1, 0)]
    assert [(block.num, block.length, block.prefix_length) for block in second.blocks] == [(1, 2, 1), (1, 2, 3)]
    seen = [block.prefix.tolist() for block in second.blocks if block.prefix is not None]
    assert seen == [[1], [1, 4, 5]], "token 1 is the other rank's second, tokens 2 and 3 are the first two of this one"
    # Targets 8 | 4 5 6: 8 is predicted by 9, on rank 0, and the others by 3 4 5, on rank 1; padded to three on each.
    assert (first.targets.tolist(), first.sources.tolist()) == ([8, 0, 0], [0, 0, 0])
    assert (second.targets.tolist(), second.sources.tolist()) == ([4, 5, 6], [1, 2, 3])
    assert first.order is not None
    assert first.order.tolist() == [0, 3, 4, 5]
    assert first.trained.tolist() == second.trained.tolist() == [1, 5, 6, 7]
