"""Which token was sampled under which version, and who has trained on it: known here without a word from the client.

Every sampled sequence gets a name, which the client hands back with what it trains on (its provenance spans). So of each datum it is
known how many of its tokens were sampled here, whether they are still the same, how old they are, and whether they were trained before.
No clock, no socket.

Legend: `T` sampled tokens of a sequence, `R` targets of a datum.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipelinerl.messages import Int32, Mask
from pipelinerl.tinker.backend import Publication
from pipelinerl.tinker.ledger import Ledger

MAX_TOKENS = 16 << 20
"""Tokens of sequences that are remembered, the newest: 9 bytes each. With fewer, what waits for long before it is trained on is unknown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring targets of a datum and where the client has them from."""

    sequence_id: str
    is_sampled: bool
    """True for sampled tokens, False for those of a prompt."""
    offset: int
    """Place of the first of them in that sequence."""
    length: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Facts:
    """What is known of the sampled tokens that a model was trained on, since its last step."""

    num_joined: int = 0
    """Tokens whose sampling is known."""
    num_unknown: int = 0
    """Tokens said to be of sequences that were not sampled here, or so long ago that they are forgotten."""
    num_drifted: int = 0
    """Tokens that are others than were sampled."""
    num_repeated: int = 0
    """Tokens that this model was trained on before."""
    num_foreign: int = 0
    """Tokens that another model sampled: they have no age."""
    ages: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Number of tokens by the optimizer steps since the weights that sampled them."""

    def add(self, other: Facts) -> None:
        """Count another datum's among these."""
        for field in dataclasses.fields(self):
            if field.name != "ages":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.ages.update(other.ages)

    @property
    def max_age(self) -> int:
        """Of the oldest token; 0 where none has an age."""
        return max(self.ages, default=0)

    def record(self) -> dict[str, Any]:
        """Return them as JSON holds them."""
        counts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "ages"}
        return counts | {"ages": {str(age): count for age, count in self.ages.items()}}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Facts:
        """Read what `record` returned; nothing of an empty one."""
        ages = collections.Counter({int(age): count for age, count in record.get("ages", {}).items()})
        return cls(**{name: count for name, count in record.items() if name != "ages"}, ages=ages)

    def metrics(self) -> dict[str, float]:
        """Return them as a client logs them; mean and maximum of the ages."""
        num = self.ages.total()
        mean = sum(age * count for age, count in self.ages.items()) / num if num else 0.0
        counts = {
            "sampled_tokens": self.num_joined,
            "unknown_tokens": self.num_unknown,
            "drifted_tokens": self.num_drifted,
            "repeated_tokens": self.num_repeated,
            "foreign_tokens": self.num_foreign,
            "staleness_mean": mean,
            "staleness_max": self.max_age,
        }
        return {f"pipelinerl/{name}": float(count) for name, count in counts.items()}


@dataclasses.dataclass(slots=True, kw_only=True)
class _Sequence:
    tokens: Int32
    """[T]."""
    versions: Int32
    """[T]."""
    trained: dict[str, Mask] = dataclasses.field(default_factory=dict)
    """[T] bool by model: trained on."""


class Provenance:
    """All sampled sequences that are remembered, here and in the ledger."""

    def __init__(self, publications: Mapping[int, Publication], *, ledger: Ledger, max_tokens: int = MAX_TOKENS) -> None:
        self._publications, self._ledger = publications, ledger
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._sequences: collections.OrderedDict[str, _Sequence] = collections.OrderedDict()
        for sequence_id, tokens, versions in ledger.sequences():
            self._remember(sequence_id, tokens=np.frombuffer(tokens, np.int32), versions=np.frombuffer(versions, np.int32))
        for sequence_id, model_id, start, length in ledger.trained():
            self._mark(sequence_id, model_id, start=start, length=length)

    def sampled(self, sequence_id: str, *, tokens: Int32, versions: Int32) -> None:
        """Remember a sequence."""
        tokens, versions = tokens.astype(np.int32), versions.astype(np.int32)
        self._ledger.add_sequence(sequence_id, tokens=tokens.tobytes(), versions=versions.tobytes())
        self._remember(sequence_id, tokens=tokens, versions=versions)
        while self._num_tokens > self._max_tokens and len(self._sequences) > 1:
            oldest_id, oldest = self._sequences.popitem(last=False)
            self._num_tokens -= len(oldest.tokens)
            self._ledger.remove_sequence(oldest_id)

    def look(self, spans: Iterable[Span], *, targets: Int32, model_id: str, num_steps: int) -> Facts:
        """Find out what is known of a datum's targets [R]; `num_steps` is where the model stands."""
        facts, at = Facts(), 0
        for span in spans:
            if span.is_sampled:
                self._look_at(span, targets[at : at + span.length], facts, model_id=model_id, num_steps=num_steps)
            at += span.length
        return facts

    def trained(self, spans: Iterable[Span], *, model_id: str) -> None:
        """Note that a model is trained on the sampled tokens of some data."""
        marks: list[tuple[str, str, int, int]] = []
        for span in spans:
            if span.is_sampled and span.sequence_id in self._sequences:
                marks.append((span.sequence_id, model_id, span.offset, span.length))
                self._mark(span.sequence_id, model_id, start=span.offset, length=span.length)
        self._ledger.was_trained(marks)

    def _remember(self, sequence_id: str, *, tokens: Int32, versions: Int32) -> None:
        if (before := self._sequences.pop(sequence_id, None)) is not None:
            self._num_tokens -= len(before.tokens)
        self._sequences[sequence_id] = _Sequence(tokens=tokens, versions=versions)
        self._num_tokens += len(tokens)

    def _mark(self, sequence_id: str, model_id: str, *, start: int, length: int) -> None:
        if (sequence := self._sequences.get(sequence_id)) is not None:
            done = sequence.trained.setdefault(model_id, np.zeros(len(sequence.tokens), np.bool_))
            done[start : start + length] = True

    def _look_at(self, span: Span, targets: Int32, facts: Facts, *, model_id: str, num_steps: int) -> None:
        sequence = self._sequences.get(span.sequence_id)
        part = slice(span.offset, span.offset + span.length)
        if sequence is None or span.offset + span.length > len(sequence.tokens):
            facts.num_unknown += span.length
            return
        facts.num_joined += span.length
        facts.num_drifted += int((sequence.tokens[part] != targets).sum())
        if (done := sequence.trained.get(model_id)) is not None:
            facts.num_repeated += int(done[part].sum())
        for version, count in zip(*np.unique(sequence.versions[part], return_counts=True), strict=True):
            publication = self._publications.get(int(version))
            if publication is None or publication.model_id not in ("", model_id):
                facts.num_foreign += int(count)
            else:
                facts.ages[num_steps - publication.num_steps] += int(count)
