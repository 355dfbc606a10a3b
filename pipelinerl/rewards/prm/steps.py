"""Finds the ends of a trace's steps while the trace is still being written. A rule: no clock, no model.

Steps are separated by blank lines of the text (Qwen2.5-Math-PRM's convention), but not inside a fenced code block or display mathematics,
whose blank lines are part of one step. Only the policy's tokens count: text is decoded from them as they arrive, a step is identified by
the position of its last token, and text is never tokenised for the policy again. So a process reward model may have any tokenizer.

A step is complete when the first character of the next one has arrived, or when the trace has ended. Later text never changes it, hence
chunks of any size give the same steps.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The character that a tokenizer gives for a character of which some bytes are still to come."""
_WINDOW = 8
"""Number of tokens decoded again with every new one, because some tokenizers drop a leading space of the first. A smaller number loses
spaces; a larger one costs time."""
_MARKS = re.compile(r"^[ ]{0,3}(?P<fence>```|~~~)|(?P<dollars>\$\$)|(?P<open>\\\[)|(?P<close>\\\])", re.MULTILINE)
_LONGEST_MARK = 6
"""Characters of a fence with its indentation: as many may be the beginning of a mark whose rest is still to come."""
_BLANK_LINE = re.compile(r"\n[ \t]*\n\s*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One complete step."""

    index: int
    """Number of the step in its trace, from 0."""
    text: str
    """Text of the step, without the white space around it."""
    end: int
    """Position of its last token among the policy's tokens; it rises from step to step."""


def splitter_of(
    decode: Callable[[list[int]], str], *, turn_ends: Sequence[int] | None, max_steps: int, separator: str | None
) -> Splitter | TurnSplitter:
    """Return what cuts a trace: an episode by its turns, which end at `turn_ends`, a completion by its text."""
    if turn_ends is not None:
        return TurnSplitter(decode, ends=turn_ends)
    return Splitter(decode, max_steps=max_steps, separator=separator)


class TurnSplitter:
    """Cuts an episode into its turns. A step is a turn with what was said to the model since the turn before."""

    def __init__(self, decode: Callable[[list[int]], str], *, ends: Sequence[int]) -> None:
        """`ends` are the positions of the turns' last tokens."""
        self._decode = decode
        self._ends = ends
        self._token_ids: list[int] = []
        self._num_steps = 0

    def feed(self, token_ids: Sequence[int]) -> list[Step]:
        """Take the next tokens, and return the turns that they complete."""
        self._token_ids += map(int, token_ids)
        steps: list[Step] = []
        for end in self._ends[self._num_steps :]:
            if end >= len(self._token_ids):
                break
            start = self._ends[self._num_steps - 1] + 1 if self._num_steps else 0
            steps.append(Step(index=self._num_steps, text=self._decode(self._token_ids[start : end + 1]).strip(), end=end))
            self._num_steps += 1
        return steps

    def finish(self) -> list[Step]:
        """End the episode: what follows its last turn is no step."""
        return []


class Splitter:
    """Cuts one trace into steps. Steps that would end in one and the same token become one step."""

    def __init__(self, decode: Callable[[list[int]], str], *, max_steps: int, separator: str | None = None) -> None:
        """Begin a trace. After `max_steps` - 1 steps, the rest is its last step, so that a thousand one-word steps cannot flood a stage.

        `separator` is the text between steps; None means a blank line.
        """
        self._between = _BLANK_LINE if separator is None else re.compile(re.escape(separator))
        self._separator_length = 0 if separator is None else len(separator)
        """Length of the separator in characters; 0 where it is a blank line."""
        self._decode = decode
        self._max_steps = max_steps
        self._token_ids: list[int] = []
        self._reads: list[tuple[int, int]] = [(0, 0)]
        """Numbers of tokens and of characters up to the end of each piece of text that was decoded."""
        self._text = ""
        self._new: list[str] = []
        """What is still to be appended to `_text`: each time costs a copy of it."""
        self._start = 0
        """Character at which the step being written begins."""
        self._searched = 0
        """Character before which the search for separators is done."""
        self._inside = ""
        """Code fence or display mathematics that is open in the step being written, as far as that was scanned."""
        self._num_scanned = 0
        """Characters of that step in which marks were looked for."""
        self._num_steps = 0
        self._last_end = -1

    def feed(self, token_ids: Sequence[int]) -> list[Step]:
        """Take the next tokens, and return the steps that they complete."""
        known = len(self._token_ids)
        self._token_ids += map(int, token_ids)
        if not self._read(len(self._token_ids)):  # the last character is not whole: those before it are read now
            for end in range(known + 1, len(self._token_ids)):
                self._read(end)
        return self._cut()

    def finish(self) -> list[Step]:
        """End the trace, and return the steps that are left; the last one holds the rest of the text, unless that is white space."""
        self._read(len(self._token_ids), is_last=True)
        steps = self._cut(is_last=True)
        text = self._text[self._start :].strip()
        if text:
            steps.append(self._step(text, end=len(self._token_ids) - 1))
            self._start = len(self._text)
        return steps

    def _read(self, end: int, *, is_last: bool = False) -> bool:
        """Append to the text the characters of the tokens before `end` that are not in it; return false where the last one is not whole."""
        begin, num_characters = self._reads[-1]
        text = self._decoded(begin, end)
        if begin == end or (text.endswith(_UNFINISHED) and not is_last):
            return begin == end
        self._new.append(text)
        self._reads.append((end, num_characters + len(text)))
        return True

    def _decoded(self, begin: int, end: int) -> str:
        """Return the characters that the tokens from `begin` on, and before `end`, add to those before."""
        before = max(0, begin - _WINDOW)
        return self._decode(self._token_ids[before:end])[len(self._decode(self._token_ids[before:begin])) :]

    def _cut(self, *, is_last: bool = False) -> list[Step]:
        self._text += "".join(self._new)
        self._new.clear()
        steps: list[Step] = []
        position = max(self._start, self._searched)
        while self._num_steps < self._max_steps - 1 and (blank := self._between.search(self._text, position)):
            position = blank.end()
            if position == len(self._text) and not is_last:
                position = blank.start()
                break  # more white space may follow and belong to the separator, and the next step has not begun
            text = self._text[self._start : blank.start()]
            end = self._token_before(position)
            if self._is_open(text) or end <= self._last_end:
                continue
            if text.strip():
                steps.append(self._step(text.strip(), end=end))
            self._start = position
            self._inside, self._num_scanned = "", 0
        self._searched = max(position, len(self._text) - self._separator_length)  # a separator may be incomplete at the end
        while self._searched > position and self._text[self._searched - 1].isspace():
            self._searched -= 1
        return steps

    def _is_open(self, text: str) -> bool:
        """Return true where a code fence or display mathematics that begins in this text of the step does not end in it.

        Only what came since the last question is scanned: a fence that is never closed would otherwise be read again at each blank line.
        """
        for mark in _MARKS.finditer(text, self._num_scanned):
            kind, value = mark.lastgroup, mark[mark.lastgroup or 0]
            if self._inside:
                is_end = (kind == "close") if self._inside == "\\[" else value == self._inside
                self._inside = "" if is_end else self._inside
            elif kind != "close":
                self._inside = value
            self._num_scanned = mark.end()
        self._num_scanned = max(self._num_scanned, len(text) - _LONGEST_MARK)
        return bool(self._inside)

    def _step(self, text: str, *, end: int) -> Step:
        step = Step(index=self._num_steps, text=text, end=end)
        self._num_steps += 1
        self._last_end = end
        return step

    def _token_before(self, position: int) -> int:
        """Return the last token whose characters all lie before this position; -1 where there is none. Tokens that share a character all
        end with it.
        """
        read = bisect.bisect_right(self._reads, position, key=lambda read: read[1]) - 1
        begin, num_characters = self._reads[read]
        low, high = begin, self._reads[read + 1][0] if read + 1 < len(self._reads) else begin + 1
        while high - low > 1:  # the text up to `low` lies before the position, and that up to `high` does not
            end = middle = (low + high) // 2
            while (text := self._decoded(begin, end)).endswith(_UNFINISHED) and end < high:
                end += 1
            low, high = (middle, high) if num_characters + len(text) <= position else (low, middle)
        return low - 1
