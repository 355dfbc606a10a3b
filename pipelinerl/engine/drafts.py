"""Drafts for speculative decoding: the likely next tokens of a sequence, read off text that was written before.

No draft model: a sequence often goes on as it, or a sibling of its group, went on after the same tokens. The end of the sequence is looked
up in its own text and, if wanted, in the finished completions of its siblings; the longest match says what comes next, by the majority of
its places. A draft changes nothing about what is sampled: the engine's forward pass verifies it, token by token, and a wrong one costs time
alone. So a group is told by the rollout's name without proof, texts of older policies serve on, and old text may be forgotten.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import numpy as np

LEAST_MATCH, MOST_MATCH = 2, 16
"""Fewest last tokens that have to match, and most that are compared. A shorter match drafts tokens that are mostly rejected; a longer
comparison tells hardly any places apart."""
MOST_PLACES = 64
"""Places of a match that vote, the latest of each text. More cost time, and hardly change a majority."""
KEPT_TOKENS = 1 << 22
"""Tokens of finished completions that are kept (16 MiB), of the groups that ended one last. Fewer forget siblings that are still needed."""
END = -1
"""Stands behind every finished completion: no token has this number."""


class Drafts:
    """Texts of running sequences and of their finished siblings."""

    def __init__(self, *, num_tokens: int, from_siblings: bool, kept_tokens: int = KEPT_TOKENS) -> None:
        """Draft at most `num_tokens` for a sequence; without `from_siblings` from its own text alone."""
        self._num_tokens, self._from_siblings, self._kept_tokens = num_tokens, from_siblings, kept_tokens
        self._own: dict[str, _Text] = {}
        self._groups: collections.OrderedDict[str, _Text] = collections.OrderedDict()
        """Finished completions by group, the one that had one last at the end."""

    def num_known(self, name: str) -> int:
        """Return the number of tokens that are known of a running sequence, its prompt included."""
        return self._own[name].length if name in self._own else 0

    def extend(self, name: str, token_ids: Sequence[int]) -> None:
        """Note the next tokens of a running sequence; its prompt comes first."""
        self._own.setdefault(name, _Text()).append(token_ids)

    def end(self, name: str, completion: Sequence[int] = ()) -> None:
        """Forget a sequence, and keep its completion for its siblings."""
        self._own.pop(name, None)
        if not self._from_siblings or not completion:
            return
        group = group_of(name)
        self._groups.setdefault(group, _Text()).append([*completion, END])
        self._groups.move_to_end(group)
        while len(self._groups) > 1 and sum(text.length for text in self._groups.values()) > self._kept_tokens:
            self._groups.popitem(last=False)

    def draft(self, name: str, *, most: int) -> list[int]:
        """Draft up to `most` next tokens of a running sequence, and no more than the tokens that match; empty where nothing does."""
        own = self._own[name].tokens
        texts = [own] + ([self._groups[group].tokens] if (group := group_of(name)) in self._groups else [])
        suffix = own[-MOST_MATCH:]
        found = [(*longest_match(text, suffix), text) for text in texts]
        length = max(length for length, _, _ in found)
        num = min(most, self._num_tokens, length)
        if length < LEAST_MATCH or num <= 0:
            return []
        return majority(continuations(text, places[-MOST_PLACES:], num) for matched, places, text in found if matched == length)


def group_of(name: str) -> str:
    """Return the group of a rollout (`7/2` is of group 7), or the name itself."""
    return name.rpartition("/")[0] or name


def longest_match(text: np.ndarray, suffix: np.ndarray) -> tuple[int, np.ndarray]:
    """Return how many last tokens of `suffix` stand in `text` with a token behind them, and the places behind them, in order."""
    places = np.flatnonzero(text[:-1] == suffix[-1]) + 1
    length = min(1, len(places))
    while 0 < length < len(suffix):
        longer = places[places > length]
        longer = longer[text[longer - length - 1] == suffix[-length - 1]]
        if not len(longer):
            break
        length, places = length + 1, longer
    return length, places


def continuations(text: np.ndarray, places: np.ndarray, num: int) -> np.ndarray:
    """Return the `num` tokens from each place on, [P, num]; `END` behind the end of the text."""
    at = places[:, None] + np.arange(num)
    return np.where(at < len(text), text[np.minimum(at, len(text) - 1)], END)


def majority(tables: Iterable[np.ndarray]) -> list[int]:
    """Return a common beginning of rows [P, num]: at each place the token of most rows that agree so far; it ends where most have ended."""
    rows = np.concatenate(list(tables))
    draft: list[int] = []
    for place in range(rows.shape[1]):
        token_ids, counts = np.unique(rows[:, place], return_counts=True)
        chosen = int(token_ids[counts.argmax()])
        if chosen == END:
            break
        draft.append(chosen)
        rows = rows[rows[:, place] == chosen]
    return draft


class _Text:
    """Tokens that grow at their end."""

    def __init__(self) -> None:
        self.length = 0
        self._room = np.empty(256, np.int32)

    @property
    def tokens(self) -> np.ndarray:
        """[length] int32; a view, good until the next token comes."""
        return self._room[: self.length]

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.length + len(token_ids)
        if end > len(self._room):
            self._room = np.concatenate([self._room, np.empty(max(end, len(self._room)), np.int32)])
        self._room[self.length : end] = token_ids
        self.length = end
