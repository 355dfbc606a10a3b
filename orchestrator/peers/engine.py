"""An engine and its requests as the orchestrator knows them: what the engine was told decides what it can truly answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from orchestrator.rules.validation.completions import AnswerBounds, CompletionCheck
from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.engine.held_images import ImagesSent
from pipelinerl.messages import Completion, EngineLoad, EngineReady, Finish, Generate, Int32, Tokens

UNKNOWN_SWAPS = 1 << 16
"""The number of swaps assumed for a request of an earlier orchestrator: any number that a message can hold."""

Sink = Callable[[Completion, int], None]
"""The sink takes a completion and the id of the engine that made it."""
Moved = Callable[[Completion, int, int | None], None]
"""The callback takes what an engine has written of a sequence that moves, that engine's id, and the id of the one that it is to go on in:
None for any.
"""
Lost = Callable[[int], None]
"""The callback is told that the engine of this id will not answer."""
Refused = Callable[[int, Violation], None]
"""The callback is told that the engine of this id has given an impossible answer, and the violation in it."""


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
    """Newest rollback epoch that it was told of, or announced."""
    rolled_back_to: int | None = None
    """Oldest version that a rollback since it announced itself has taken it to; None: there was none."""
    num_orders: int = 0
    """Policies that it was told to fetch."""
    fault: str = ""
    """The reason why it takes no new work; empty while it does. Its running sequences go on under its old version."""
    is_rejected: bool = False
    """True where it keeps committing violations, or says that it has failed: its process is being replaced."""
    leaves_for: str = ""
    """The reason why it leaves the run, or is given up; empty while it stays. Its running sequences go on until it is dismissed."""
    is_asleep: bool = False
    """True while the trainer has its devices, and others of the run take new work. Its sequences go on once it is awake."""
    images: ImagesSent = dataclasses.field(default_factory=ImagesSent)
    """The images that its process holds."""
    num_outstanding: int = 0
    """Rollouts it was asked for and has not answered."""
    load: EngineLoad | None = None
    """Its last gauges; None before the first."""

    def ordered(self, *, version: int, rollback_epoch: int) -> None:
        """Note that it is being told to fetch a policy: from now on its tokens may be of that policy."""
        self.num_orders += 1
        self.newest_told = max(self.newest_told, version)
        if rollback_epoch > self.rollback_epoch:
            self.rollback_epoch = rollback_epoch
            self.rolled_back_to = version if self.rolled_back_to is None else min(version, self.rolled_back_to)

    @property
    def is_busy(self) -> bool:
        """True until it has ended all that it had."""
        return self.num_outstanding > 0

    @property
    def takes_work(self) -> bool:
        """True where it is neither fenced, nor asleep, nor about to be replaced or to leave."""
        return not (self.fault or self.is_asleep or self.is_rejected or self.leaves_for)


@dataclasses.dataclass(slots=True, kw_only=True)
class Request:
    """A request that an engine has."""

    engine_id: int
    request: Generate
    is_reattached: bool
    """True where an earlier orchestrator had asked for it."""
    oldest: int
    """Version that the engine held when it was asked."""
    num_orders: int
    """Policies that the engine had been told to fetch when it was asked."""
    sink: Sink
    lost: Lost
    refused: Refused
    moved: Moved | None = None
    """The callback of a sequence that may move; None where it may not."""
    is_withdrawn: bool = False
    """True where the engine was asked to end it."""
    is_moving: bool = False
    """True where it was asked to end it so that another one goes on with it."""
    target: int | None = None
    """The engine that it moves to; None for any."""
    told: list[Int32] = dataclasses.field(default_factory=list)
    """The tokens that the engine has sent while the sequence was being written."""

    def is_answered_by(self, engine_id: int, attempt: int, turn: int) -> bool:
        """Return True for an answer of the engine that was asked, to this very attempt and turn."""
        return (self.engine_id, self.request.attempt, self.request.turn) == (engine_id, attempt, turn)

    @property
    def may_have_moved(self) -> bool:
        """True where an orchestrator that is gone may have asked the engine to end it so that it moves."""
        return self.is_reattached and self.moved is not None

    def goes_on_after(self, completion: Completion) -> bool:
        """Return whether this answer is what the engine has written of a sequence that moves."""
        return (self.is_moving or self.may_have_moved) and completion.finish is Finish.CANCELLED

    def noted(self, tokens: Tokens) -> None:
        """Note tokens that the engine has sent while the sequence goes on."""
        if tokens.start == sum(map(len, self.told)):
            self.told.append(tokens.token_ids)

    def known(self, engine: Engine) -> AnswerBounds:
        """Return what the engine was asked, and what it can have done since."""
        rolled_back_to = engine.rolled_back_to
        return AnswerBounds(
            request=self.request,
            oldest=self.oldest if rolled_back_to is None else min(self.oldest, rolled_back_to),
            newest=engine.newest_told,
            max_model_tokens=engine.ready.max_model_tokens,
            max_swaps=UNKNOWN_SWAPS if self.is_reattached else engine.num_orders - self.num_orders + 2,  # one being staged, one behind it
            may_be_cancelled=self.is_withdrawn or self.may_have_moved or rolled_back_to is not None,
        )

    def violation_in(self, completion: Completion, engine: Engine, rule: CompletionCheck) -> Violation | None:
        """Return the violation in its answer, by the rule and by the tokens that the engine has sent before; None where all is well."""
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
    """Return the keys of a request among fenced ones: that of its answer, and that of the tokens sent before the answer."""
    return (request.rollout_id, request.attempt, request.turn), (request.rollout_id, request.attempt)
