"""One engine as the orchestrator knows it, and one request that it has: what it was told, hence what it can truly answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from orchestrator.rules.validation.completions import AnswerBounds, CompletionCheck
from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.messages import Completion, EngineLoad, EngineReady, Generate, Int32, Tokens

UNKNOWN_SWAPS = 1 << 16
"""Of what an orchestrator that is gone had asked for: any number that a message can hold."""

Sink = Callable[[Completion, int], None]
"""Takes a completion and the id of the engine that made it."""
Lost = Callable[[int], None]
"""Is told that the engine of this id will not answer."""
Refused = Callable[[int, Violation], None]
"""Is told that the engine of this id has given an answer that cannot be, and what cannot be about it."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Engine:
    """One engine that has announced itself."""

    engine_id: int
    peer: str
    ready: EngineReady
    version: int = 0
    """Version it samples under."""
    newest_told: int = 0
    """Newest version that it was told to fetch, or announced: its tokens can be of no newer one."""
    rollback_epoch: int = 0
    """Newest rollback_epoch of the same."""
    rolled_back_to: int | None = None
    """Oldest version that a rollback since it announced itself has taken it to; None: there was none."""
    num_orders: int = 0
    """Policies that it was told to fetch."""
    fault: str = ""
    """Why it takes no new work; empty while it does. Its running sequences go on under its old version."""
    is_condemned: bool = False
    """It keeps saying what cannot be, or that it has failed: its process is being replaced."""
    num_outstanding: int = 0
    """Rollouts it was asked for and has not answered."""
    load: EngineLoad | None = None
    """Its last gauges; None before the first."""

    def ordered(self, *, version: int, rollback_epoch: int) -> None:
        """It is being told to fetch a policy: from now on its tokens may be of that."""
        self.num_orders += 1
        self.newest_told = max(self.newest_told, version)
        if rollback_epoch > self.rollback_epoch:
            self.rollback_epoch = rollback_epoch
            self.rolled_back_to = version if self.rolled_back_to is None else min(version, self.rolled_back_to)

    @property
    def takes_work(self) -> bool:
        """Neither fenced nor about to be replaced."""
        return not self.fault and not self.is_condemned


@dataclasses.dataclass(slots=True, kw_only=True)
class Request:
    """A request that an engine has."""

    engine_id: int
    request: Generate
    is_reattached: bool
    """The orchestrator before had asked for it."""
    oldest: int
    """Version that the engine held then."""
    num_orders: int
    """Policies that it had been told to fetch."""
    sink: Sink
    lost: Lost
    refused: Refused
    is_withdrawn: bool = False
    """The engine was asked to end it."""
    told: list[Int32] = dataclasses.field(default_factory=list)
    """What the engine has told of it while it was being written."""

    def is_answered_by(self, engine_id: int, attempt: int, turn: int) -> bool:
        """True for an answer of the engine that was asked, to this very attempt and turn."""
        return (self.engine_id, self.request.attempt, self.request.turn) == (engine_id, attempt, turn)

    @property
    def keys(self) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """What names it among what is fenced: as an answer does, and as what is told before that."""
        return keys_of(self.request)

    def noted(self, tokens: Tokens) -> None:
        """The engine has told how it goes on."""
        if tokens.start == sum(map(len, self.told)):
            self.told.append(tokens.token_ids)

    def known(self, engine: Engine) -> AnswerBounds:
        """What its engine was asked and can have done since."""
        rolled_back_to = engine.rolled_back_to
        return AnswerBounds(
            request=self.request,
            oldest=self.oldest if rolled_back_to is None else min(self.oldest, rolled_back_to),
            newest=engine.newest_told,
            max_model_tokens=engine.ready.max_model_tokens,
            max_swaps=UNKNOWN_SWAPS if self.is_reattached else engine.num_orders - self.num_orders + 2,  # one being staged, one behind it
            may_be_cancelled=self.is_withdrawn or rolled_back_to is not None,
        )

    def violation_in(self, completion: Completion, engine: Engine, rule: CompletionCheck) -> Violation | None:
        """What cannot be about its answer, by the rule and by what the engine has told before; None where all is well."""
        start = 0
        for part in self.told:
            if not np.array_equal(part, completion.token_ids[start : start + len(part)]):
                words = (
                    f"Completion of rollout {completion.rollout_id}: from token {start} on other ones than it told of while it wrote them"
                )
                return Violation(kind=Kind.TOKENS, words=words)
            start += len(part)
        return rule.completion(completion, self.known(engine))


def keys_of(request: Generate) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """As `Request.keys`, of one that was not sent."""
    return (request.rollout_id, request.attempt, request.turn), (request.rollout_id, request.attempt)
