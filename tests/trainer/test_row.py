"""The layout of a packed row, on rows worked out by hand."""

import numpy as np
import pytest

from pipelinerl.errors import DataError
from trainer.row import Row, arrange


def _arrange(samples: list[tuple[list[int], list[int]]]) -> Row | None:
    """Arrange samples given as (prompt, completion)."""
    return arrange(
        np.array([token for prompt, completion in samples for token in prompt + completion], np.int32),
        trains=np.array(
            [is_completion for prompt, completion in samples for is_completion in [False] * len(prompt) + [True] * len(completion)], bool
        ),
        lengths=np.array([len(prompt) + len(completion) for prompt, completion in samples], np.int32),
        names=[f"rollout-{number}" for number in range(len(samples))],
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
    assert (branches.start, branches.num, branches.length, branches.trunk_length) == (4, 2, 2, 3)
    assert branches.trunk is not None
    assert row.token_ids[branches.trunk].tolist() == [1, 2, 3, 1, 2, 3]
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
