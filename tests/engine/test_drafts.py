"""Drafts worked out by hand: which text is looked up, what the majority of its places says, how much of it, and what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from pipelinerl.engine.drafts import Drafts, continuations, group_of, longest_match, majority

MANY = 8


def drafts(own: list[int], *siblings: list[int], num_tokens: int = MANY, from_siblings: bool = True) -> Drafts:
    """Those of rollout 0/9, with finished siblings."""
    found = Drafts(num_tokens=num_tokens, from_siblings=from_siblings)
    for number, completion in enumerate(siblings):
        found.end(f"0/{number}", completion)
    found.extend("0/9", own)
    return found


def test_the_longest_match_is_found_with_all_its_places():
    text = np.array([1, 2, 3, 9, 2, 3, 8, 1, 2, 3, 7, 2, 3], np.int32)
    length, places = longest_match(text, np.array([5, 1, 2, 3], np.int32))
    assert (length, places.tolist()) == (3, [3, 10]), "1 2 3 stands twice; the 2 3 at 4 matches less, that at the end has nothing behind it"
    assert longest_match(text, np.array([6], np.int32))[0] == 0
    length, places = longest_match(np.array([2, 7, 1], np.int32), np.array([1, 2], np.int32))
    assert (length, places.tolist()) == (1, [1]), "what stands before the beginning is not the end"
    assert longest_match(text[:0], np.array([6], np.int32))[0] == 0


@pytest.mark.parametrize(
    ("own", "siblings", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [], [3, 4]),  # its own text; as many as the two that match
        ([1, 2, 3, 4, 5, 1, 2, 3], [], [4, 5, 1]),
        ([4, 4, 4], [], [4]),  # two match at the first place, and the text ends behind the third
        ([1, 2, 3], [], []),  # nothing stands twice
        ([1, 2, 3, 1], [], []),  # a single token says too little
        ([7, 8, 9], [[0, 7, 8, 9, 5, 6, 4]], [5, 6, 4]),  # a sibling's text
        ([7, 8, 9], [[0, 7, 8, 9]], []),  # which ended there
        ([7, 8, 9], [[7, 8, 9, 1, 1], [7, 8, 9, 2, 2], [7, 8, 9, 2, 3]], [2, 2]),  # the majority, then a tie: the smaller token
        ([7, 8, 9], [[7, 8, 9, 5], [7, 8, 9, 5], [7, 8, 9, 5, 6]], [5]),  # most of them ended behind it
        ([6, 7, 8, 9, 3, 7, 8, 9], [[4, 3, 7, 8, 9, 5]], [5]),  # four match in the sibling's text, three in its own
        ([1, 2], [[8, 1], [2, 9, 9]], []),  # no match goes from one sibling into the next
    ],
)
def test_a_draft_follows_the_longest_match(own: list[int], siblings: list[list[int]], expected: list[int]):
    assert drafts(own, *siblings).draft("0/9", most=MANY) == expected


def test_a_draft_is_no_longer_than_what_is_wanted_or_what_is_left_to_write():
    own = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    assert drafts(own).draft("0/9", most=MANY) == [5, 6, 1, 2]
    assert drafts(own, num_tokens=3).draft("0/9", most=MANY) == [5, 6, 1]
    assert drafts(own).draft("0/9", most=1) == [5]
    assert drafts(own).draft("0/9", most=0) == []
    assert drafts(own).draft("0/9", most=-1) == []


def test_only_finished_siblings_serve_and_only_where_they_are_asked_for():
    sibling, own = [7, 8, 9, 5], [7, 8, 9]
    assert drafts(own, sibling, from_siblings=False).draft("0/9", most=MANY) == []
    other_group = Drafts(num_tokens=MANY, from_siblings=True)
    other_group.end("1/0", sibling)
    other_group.extend("0/8", sibling)  # it goes on
    other_group.extend("0/9", own)
    assert other_group.draft("0/9", most=MANY) == []
    assert [group_of(name) for name in ("12/3", "a/b/3", "alone")] == ["12", "a/b", "alone"]


def test_text_grows_token_by_token_and_is_forgotten_with_its_sequence():
    found = Drafts(num_tokens=MANY, from_siblings=True)
    for token in (*range(3, 300), 3, 4):
        found.extend("0/0", [token])
    assert found.num_known("0/0") == 299
    assert found.draft("0/0", most=MANY) == [5, 6]
    found.end("0/0")
    assert found.num_known("0/0") == 0


def test_the_groups_that_ended_last_are_kept():
    found = Drafts(num_tokens=MANY, from_siblings=True, kept_tokens=12)
    for group in (0, 1, 0):  # five tokens each with the end behind them: the third makes fifteen, and group 1 has waited longest
        found.end(f"{group}/0", [7, 8, 9, group])
    for group, expected in ((0, [0]), (1, [])):
        found.extend(f"{group}/1", [7, 8, 9])
        assert found.draft(f"{group}/1", most=MANY) == expected


def test_a_majority_is_of_those_that_agree_so_far():
    text = np.array([5, 6, 5, 7, 5, 7, 4, 6, 6], np.int32)
    rows = continuations(text, np.array([0, 2, 4, 7]), 3)
    assert rows.tolist() == [[5, 6, 5], [5, 7, 5], [5, 7, 4], [6, 6, -1]]
    assert majority([rows[:2], rows[2:]]) == [5, 7, 4], "of 4 and 5 behind 5 7 the smaller"
