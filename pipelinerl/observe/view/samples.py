"""The samples a run shows, to be looked through: by status, reward, step and text, a page at a time.

Memory is bounded: the newest are all held, of the older ones ever fewer, so that some are left from every part of a long run.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import DataError
from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.rows import RunRow
from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report.samples import Decoder, ShownSample, shown_sample

HELD = 2000
"""Samples held at most: the newest hour and a half of a run that shows three each ten seconds. A search reads all of them."""
HELD_BYTES = 32 << 20
"""Bytes of the journal held at most, which acts where samples are long."""
MAX_LIMIT = 50
"""Samples of one page. Each of its tokens becomes an element of the browser's page."""
MAX_OFFSET = HELD
MAX_TEXT = 200
REASONS = 32
"""Reasons told, the commonest first."""

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The filter of samples; None and the empty text ask for all."""

    status: str | None = None
    """A `messages.TerminalStatus`, or `untrained` for all but the trained."""
    reason: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    from_step: int | None = None
    to_step: int | None = None
    text: str = ""
    """Found in prompt, completion, columns or error, whatever the case of its letters."""
    offset: int = 0
    limit: int = 12

    @classmethod
    def parse(cls, asked: Mapping[str, Sequence[str]]) -> Query:
        """Read an address's query. Raises `DataError` for a name that is none, and for a value out of its bounds."""
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(asked.keys() - names):
            raise DataError(f"samples know no filter {unknown[0][:40]!r}; they know {', '.join(sorted(names))}")
        given = {name: values[-1] for name, values in asked.items() if values}
        numbers: dict[str, Any] = {name: _reward(name, given[name]) for name in ("min_reward", "max_reward") if name in given}
        for name, (low, high) in _WHOLE.items():
            if name in given:
                numbers[name] = _whole(name, given[name], low=low, high=high)
        texts = {name: given[name] for name in ("status", "reason", "text") if name in given}
        for name, text in texts.items():
            if len(text) > MAX_TEXT:
                raise DataError(f"{name} has {len(text)} characters; samples are searched for at most {MAX_TEXT}")
        return cls(**texts, **numbers)


_WHOLE = {"from_step": (0, 1 << 53), "to_step": (0, 1 << 53), "offset": (0, MAX_OFFSET), "limit": (1, MAX_LIMIT)}


@dataclasses.dataclass(slots=True, kw_only=True)
class _Held:
    """One sample, as the journal has it."""

    step: int
    reward: float | None
    status: str
    reason: str
    raw: bytes
    searched: str | None = None
    """Its text, folded for searching; None until a search came by."""


class Samples:
    """A run's samples, as the journal gains them."""

    def __init__(self, run_folder: Path) -> None:
        self._decoder = Decoder(run_folder, None)
        self._run_folder = run_folder
        self._held: list[_Held] = []
        self._num_bytes = 0
        self.num_seen = 0
        """Samples in the journal, those included that are held no more."""

    def begin(self, run: RunRow) -> None:
        """Take a start of the run: its model's tokenizer decodes what follows."""
        self._decoder = Decoder(self._run_folder, run.setting("model", "path"))

    def add(self, line: Line) -> None:
        """Take a line of kind `sample`; one without a step is passed over."""
        if rows.number(line.get("step")) is None:
            return
        raw = msgspec.json.encode(line)
        status, reason = str(line.get("status", "trained")), str(line.get("reason", ""))
        self._held.append(_Held(step=int(line["step"]), reward=rows.number(line.get("reward")), status=status, reason=reason, raw=raw))
        self.num_seen += 1
        self._num_bytes += len(raw)
        while len(self._held) > 1 and (len(self._held) > HELD or self._num_bytes > HELD_BYTES):
            self._let_go()

    def as_json(self) -> Json:
        """Their number, and the reasons by which they ended."""
        reasons = collections.Counter((one.status, one.reason) for one in self._held if one.status != "trained")
        told = [[status, reason, count] for (status, reason), count in reasons.most_common(REASONS)]
        return {"seen": self.num_seen, "held": len(self._held), "reasons": told}

    def page(self, query: Query) -> Json:
        """A page of those asked for, the newest first, and how many there are of them."""
        found = [one for one in reversed(self._held) if self._is_asked_for(one, query)]
        page = found[query.offset : query.offset + query.limit]
        samples = [_told(shown_sample(msgspec.json.decode(one.raw), self._decoder)) for one in page]
        return {**self.as_json(), "found": len(found), "offset": query.offset, "limit": query.limit, "samples": samples}

    def _is_asked_for(self, one: _Held, query: Query) -> bool:
        if query.status is not None and one.status != query.status and not (query.status == "untrained" and one.status != "trained"):
            return False
        if query.reason is not None and one.reason != query.reason:
            return False
        if not _is_within(one.step, query.from_step, query.to_step) or not _is_within(one.reward, query.min_reward, query.max_reward):
            return False
        return not query.text or query.text.casefold() in self._searched(one)

    def _searched(self, one: _Held) -> str:
        if one.searched is None:
            line = msgspec.json.decode(one.raw)
            columns = (line.get("columns") or {}).values()
            texts = (line.get("prompt"), self._decoder.whole(line.get("token_ids", [])), *columns, one.reason, line.get("error"))
            one.searched = "\n".join(str(text) for text in texts if text).casefold()
        return one.searched

    def _let_go(self) -> None:
        """Drop every second one of the older half."""
        older = (len(self._held) + 1) // 2
        self._num_bytes -= sum(len(one.raw) for one in self._held[:older:2])
        del self._held[:older:2]


def _is_within(value: float | None, low: float | None, high: float | None) -> bool:
    """Whether a value lies between two bounds, if any; one that is not there lies between none."""
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def _reward(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{name} is {text[:40]!r}: expected a number")
    return value


def _whole(name: str, text: str, *, low: int, high: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not low <= value <= high:
        raise DataError(f"{name} is {text[:40]!r}: expected a whole number from {low} to {high}")
    return value


def _told(sample: ShownSample) -> Json:
    """Its fields, as the page knows them."""
    names = {field.name: field.name for field in dataclasses.fields(sample) if field.name != "t"} | {"rollout_id": "id"}
    return {name: getattr(sample, field) for field, name in names.items()}
