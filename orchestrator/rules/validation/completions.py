"""This module checks what an engine says it has sampled: an impossible answer is refused before any of it becomes durable.

Only the trainer can see what is plausible and false, such as log-probabilities that the engine did not sample with:
`pipelinerl.algorithms.mismatch`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from orchestrator.rules.validation.violations import Kind, Violation
from pipelinerl.data.expert_routes import table_of
from pipelinerl.messages import Completion, Finish, Generate, Int32, Routes, Tokens

MAX_LOGPROB = 1e-3
"""A log-probability of a token that is nearly certain may come out above 0 by rounding: float32 over 2^18 logits by less than 1e-5, and
half precision by less than this. A larger value lets forged weights above 1 through.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBounds:
    """The request to an engine, and the limits of what the engine can have done since."""

    request: Generate
    oldest: int
    """The version that it held when it was asked, or that a rollback since has taken it to."""
    newest: int
    """The newest version that it was told to fetch, or announced."""
    max_model_tokens: int
    """The limit on prompt and completion that the engine announced, in tokens."""
    max_swaps: int
    """The number of times it may have changed its version since."""
    may_be_cancelled: bool
    """True where it was asked to end this rollout, or told of a rollback."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The size of a mixture of experts whose routes travel. A field is None where the model's folder does not say."""

    num_layers: int | None
    """Layers of the whole model: more than have a router, where some have none."""
    num_experts: int | None
    top_k: int | None
    """Experts that each token is routed to."""


class CompletionCheck:
    """The check returns the violation in an engine's answer.

    A `vocabulary` of None means that the model's folder does not say; `experts` of None that no routes travel.
    """

    def __init__(self, *, vocabulary: int | None, experts: Experts | None = None) -> None:
        self._vocabulary = vocabulary
        self._experts = experts

    def completion(self, said: Completion, asked: AnswerBounds) -> Violation | None:
        """Return the first violation, or None."""
        for check in (self._ids, _logprobs, _versions, _length, _finish, self._routes, _rest):
            if (violation := check(said, asked)) is not None:
                return violation
        return None

    def tokens(self, said: Tokens, asked: AnswerBounds) -> Violation | None:
        """Return the first violation in a part of a sequence that goes on, or None."""
        end = said.start + len(said.token_ids)
        if said.start < 0 or end > asked.request.sampling.max_tokens:
            limit = asked.request.sampling.max_tokens
            return Violation(kind=Kind.LENGTH, words=f"{_about(said)}: tokens {said.start} to {end}, expected at most {limit}")
        return self.ids(said.token_ids, about=_about(said))

    def ids(self, token_ids: Int32, *, about: str) -> Violation | None:
        """Check token ids from any peer: each must be one of the vocabulary's."""
        if not len(token_ids):
            return None
        low, high = int(token_ids.min()), int(token_ids.max())
        if low >= 0 and (self._vocabulary is None or high < self._vocabulary):
            return None
        expected = "0 or more" if self._vocabulary is None else f"0 to {self._vocabulary - 1}"
        return Violation(kind=Kind.TOKENS, words=f"{about}: token ids from {low} to {high}, expected {expected}")

    def _ids(self, said: Completion, asked: AnswerBounds) -> Violation | None:
        return self.ids(said.token_ids, about=_about(said))

    def _routes(self, said: Completion, asked: AnswerBounds) -> Violation | None:
        if said.routes is None:
            return None
        if self._experts is None:
            return Violation(kind=Kind.ROUTES, words=f"{_about(said)}: routes, expected none: model.replay_routing is false")
        wrong = _wrong_routes(said.routes, self._experts, num_rows=asked.num_prompt + len(said.token_ids) - 1)
        return Violation(kind=Kind.ROUTES, words=f"{_about(said)}: {wrong}") if wrong else None


def _logprobs(said: Completion, asked: AnswerBounds) -> Violation | None:
    if not len(said.logprobs):
        return None
    low, high = float(said.logprobs.min()), float(said.logprobs.max())  # NaN where any is
    if math.isfinite(low) and high <= MAX_LOGPROB:
        return None
    return Violation(
        kind=Kind.LOGPROBS, words=f"{_about(said)}: log-probabilities from {low:g} to {high:g}, expected finite ones of at most 0"
    )


def _versions(said: Completion, asked: AnswerBounds) -> Violation | None:
    if not len(said.versions):
        return None
    first, last = int(said.versions[0]), int(said.versions[-1])  # they never fall: the message itself refuses that
    if asked.oldest <= first and last <= asked.newest:
        return None
    expected = f"{asked.oldest}, which it held when it was asked, to {asked.newest}, the newest it was told of"
    return Violation(kind=Kind.VERSIONS, words=f"{_about(said)}: versions from {first} to {last}, expected {expected}")


def _length(said: Completion, asked: AnswerBounds) -> Violation | None:
    num, limit = len(said.token_ids), asked.request.sampling.max_tokens
    if num <= limit:
        return None
    return Violation(kind=Kind.LENGTH, words=f"{_about(said)}: {num} tokens, expected at most {limit}")


def _finish(said: Completion, asked: AnswerBounds) -> Violation | None:
    num, sampling = len(said.token_ids), asked.request.sampling
    is_full = num >= sampling.max_tokens or asked.num_prompt + num >= asked.max_model_tokens - 1
    match said.finish:
        case Finish.STOP if not num:
            wrong = "no token, expected at least the one it stopped at"
        case Finish.LENGTH if not is_full:
            wrong = f"only {num} of {sampling.max_tokens} tokens, and the context is not full"
        case Finish.CANCELLED if not asked.may_be_cancelled:
            wrong = "nobody asked it to"
        case Finish.NOT_HELD if asked.request.version is None or num:
            wrong = f"with {num} tokens, and the request names version {asked.request.version}"
        case _ if said.error and said.finish is not Finish.ERROR:
            wrong = "with words of an error"
        case _:
            return None
    return Violation(kind=Kind.FINISH, words=f"{_about(said)}: ended as {said.finish}, but {wrong}")


def _rest(said: Completion, asked: AnswerBounds) -> Violation | None:
    if said.num_written != asked.request.num_written:
        wrong = f"goes on after {said.num_written} tokens, expected {asked.request.num_written}"
        return Violation(kind=Kind.BOUNDS, words=f"{_about(said)}: {wrong}")
    if len(said.recomputed) > asked.max_swaps:
        num = len(said.recomputed)
        wrong = f"its KV cache was computed anew {num} times, expected at most {asked.max_swaps}, once for each version since"
        return Violation(kind=Kind.BOUNDS, words=f"{_about(said)}: {wrong}")
    num_judged = None if said.prompt_logprobs is None else len(said.prompt_logprobs)
    if num_judged is not None and (num_judged != asked.num_prompt or not asked.request.sampling.has_prompt_logprobs):
        wrong = f"log-probabilities of {num_judged} tokens of its prompt, expected {asked.num_prompt}, where they are asked for"
        return Violation(kind=Kind.LOGPROBS, words=f"{_about(said)}: {wrong}")
    if not (math.isfinite(said.started_at) and math.isfinite(said.finished_at)):
        wrong = f"times {said.started_at} and {said.finished_at}, expected finite ones"
        return Violation(kind=Kind.BOUNDS, words=f"{_about(said)}: {wrong}")
    return None


def _wrong_routes(routes: Routes, experts: Experts, *, num_rows: int) -> str:
    """Say what is wrong with the routes; return an empty string where nothing is."""
    if routes.num_rows != num_rows:
        return f"routes of {routes.num_rows} tokens, expected {num_rows}, all but the last"
    if routes.num_layers > (experts.num_layers or routes.num_layers) or routes.top_k != (experts.top_k or routes.top_k):
        expected = f"expected at most {experts.num_layers} and {experts.top_k}"
        return f"routes through {routes.num_layers} layers to {routes.top_k} experts in each, {expected}"
    table = table_of(routes)
    known = table[table != np.iinfo(table.dtype).max]
    if experts.num_experts is not None and len(known) and int(known.max()) >= experts.num_experts:
        return f"routes to expert {int(known.max())}, expected one of {experts.num_experts}"
    return ""


def _about(said: Completion | Tokens) -> str:
    return f"{type(said).__name__} of rollout {said.rollout_id}, attempt {said.attempt}"
