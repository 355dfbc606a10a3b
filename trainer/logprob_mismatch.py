"""Checks that engine and trainer compute the same log-probabilities: mean, high quantile and KL at the first step, KL at every step.

No single token ends a run: rounding in bfloat16 moves the largest gap of a healthy run to half a nat, and further with every token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipelinerl.algorithms.loss import TokenColumns
from pipelinerl.algorithms.loss.columns import log_difference
from pipelinerl.algorithms.loss.kl import estimate_k3
from pipelinerl.algorithms.mismatch import MismatchRule
from pipelinerl.errors import MismatchError
from pipelinerl.messages import EngineMismatch, MicroBatch
from trainer.logprob_quantile import GapQuantile

DRIFT = 20.0
"""All tokens may differ by this many times as much as tokens at equal weights, staleness included. At the default limit that is a mean KL
of 0.6 nats per token: a few tokens then hold all the importance. Smaller would end runs that stale tokens alone have moved."""


QUANTILE_FACTOR = 10.0
"""Engine and trainer may differ by this many times as much at the 0.99 quantile as in the mean. Normal errors have 3.2 times their mean
there, rounding has a longer tail; smaller would end runs over it, larger would let one wrong sequence in fifty pass."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """The token where engine and trainer differ most at equal weights: told with an alarm, and by itself none."""

    gap: float
    """Nats."""
    words: str


class Agreement:
    """The check that the engines' log-probabilities are the trainer's, for one step after the other; all ranks call it alike."""

    def __init__(
        self, *, max_logprob_gap: float, device: torch.device, max_mismatch_kl: float = math.inf, first_step: int = 0, num_engines: int = 0
    ) -> None:
        """`max_logprob_gap` bounds the check of `first_step`, `max_mismatch_kl` that of every step; `num_engines` are compared."""
        self.max_logprob_gap = max_logprob_gap
        self.max_mismatch_kl = max_mismatch_kl
        self._first_step = first_step
        self._worst: WorstToken | None = None
        """The worst token of this rank's rows of the first step."""
        self._sums = torch.zeros((num_engines, 3), dtype=torch.float64, device=device)
        """[E, 3]: sequences, tokens, k3 of each engine; nothing is copied to the host before the step ends."""
        self._gaps = GapQuantile(device)
        """Of tokens at equal weights."""

    def add(self, columns: TokenColumns, *, batch: MicroBatch) -> None:
        """Take a row, as the trainer's policy at the start of the step sees it."""
        fresh = _fresh(columns, batch=batch)
        self._gaps.add((columns.logprobs - columns.behaviour_logprobs).abs(), inside=fresh)
        if batch.step == self._first_step:
            found = worst_token(columns, batch=batch, fresh=fresh)
            if found is not None and (self._worst is None or not found.gap <= self._worst.gap):  # NaN is the worst
                self._worst = found
        if batch.engine_ids is None or not len(self._sums):
            return
        known = (batch.engine_ids >= 0) & (batch.engine_ids < len(self._sums))
        engine_ids = torch.from_numpy(np.where(known, batch.engine_ids, 0).astype(np.int64)).to(self._sums.device)
        of_known = torch.from_numpy(known.astype(np.float64)).to(self._sums.device)
        counts = torch.stack((of_known, torch.zeros_like(of_known), torch.zeros_like(of_known)), dim=1)
        self._sums.index_add_(0, engine_ids, counts)
        values = estimate_k3(log_difference(columns.logprobs.detach(), columns.behaviour_logprobs)).double()
        inside = of_known[columns.sequence_ids]
        of_tokens = torch.stack((torch.zeros_like(inside), inside, torch.where(inside > 0, values, 0.0)), dim=1)
        self._sums.index_add_(0, engine_ids[columns.sequence_ids], of_tokens)

    def quantile(self, *, summed: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return `logprob_gap_p999` of the rows so far, `summed` over the replicas; nothing of too few tokens. Then begin it anew."""
        found = self._gaps.take(summed)
        return {} if found is None else {"logprob_gap_p999": found}

    def check(self, numbers: dict[str, float], *, step: int, summed: Callable[[torch.Tensor], torch.Tensor]) -> tuple[EngineMismatch, ...]:
        """Return the mismatch of each engine with a token, `summed` over the replicas; then begin anew. `numbers` are the step's meters.

        Raises `MismatchError` where engine and trainer do not agree.
        """
        rows = summed(self._sums.clone()).tolist() if len(self._sums) else []
        self.drop()
        engines = tuple(
            EngineMismatch(engine_id=engine_id, num_sequences=int(sequences), num_tokens=int(tokens), kl_sum=kl_sum)
            for engine_id, (sequences, tokens, kl_sum) in enumerate(rows)
            if tokens
        )
        outlying = MismatchRule(limit=self.max_mismatch_kl).words(engines)
        if step == self._first_step:
            check_logprob_gap(numbers, step=step, limit=self.max_logprob_gap, worst=self._worst, engines=outlying)
        check_mismatch_kl(numbers, step=step, limit=self.max_mismatch_kl, engines=outlying)
        return engines

    def drop(self) -> None:
        """Forget the rows so far."""
        self._sums.zero_()
        self._gaps.drop()


def _fresh(columns: TokenColumns, *, batch: MicroBatch) -> torch.Tensor:
    """[K] bool: tokens of sequences that the version being trained sampled whole. What lived through a swap saw keys and values of older
    weights."""
    return (columns.versions == columns.trained_version) & torch.from_numpy(_sampled_whole(batch)).to(columns.versions.device)


def worst_token(columns: TokenColumns, *, batch: MicroBatch, fresh: torch.Tensor) -> WorstToken | None:
    """The token of a row with the largest gap among `fresh` ones, [K] bool; None where there is none."""
    if not bool(fresh.any()):
        return None
    ours, theirs = columns.logprobs.detach(), columns.behaviour_logprobs
    gaps = (ours - theirs).abs().masked_fill(~fresh, 0.0)  # NaN is the largest for argmax
    worst = int(gaps.argmax())
    place = int(np.flatnonzero(batch.loss_mask)[worst])
    sample = int(np.searchsorted(np.cumsum(batch.lengths), place, side="right"))
    within = place - int(batch.lengths[:sample].sum())
    return WorstToken(
        gap=float(gaps[worst]),
        words=f"rollout {batch.rollout_ids[sample]}, token {within} (id {batch.token_ids[place]}): the trainer's log-probability is"
        f" {float(ours[worst]):.6f}, the engine's {float(theirs[worst]):.6f}",
    )


def check_logprob_gap(numbers: dict[str, float], *, step: int, limit: float, worst: WorstToken | None, engines: Sequence[str] = ()) -> None:
    """Raise `MismatchError` where engine and trainer do not mean the same by a log-probability, before the first update.

    `numbers` are the step's meters: the mean gap over the tokens of sequences that one version sampled whole, the one being trained, and
    its 0.99 quantile in the worst row. Their KL is bounded at every step, see `check_mismatch_kl`. `worst` is this rank's; `engines` says
    which engine stands out, if one does.
    """
    for name, bound, what in (("logprob_gap_mean", limit, "mean"), ("logprob_gap_p99", QUANTILE_FACTOR * limit, "0.99 quantile")):
        found = numbers.get(name, 0.0)
        if found <= bound:  # NaN is below no limit
            continue
        raise MismatchError(
            f"step {step}: {what} of |engine - trainer| log-probability over sequences that version {step} sampled whole: got {found:.3g},"
            f" expected at most {bound:g} (trainer.max_logprob_gap = {limit:g}). Nothing was updated."
            f" The largest: {'on another rank' if worst is None else worst.words}.{_named(engines)} Both"
            " have the same weights, so the two compute something else, and every importance ratio would be wrong. Likely causes:\n"
            "  - the engine serves other weights: another model folder, or weights it transformed after loading\n"
            "  - another dtype: bfloat16 here and float32 there differ by 0.01 to 0.1 in the mean\n"
            "  - the engine's log-probabilities are those before temperature, top-p or top-k (vLLM: logprobs_mode must be"
            " processed_logprobs)\n"
            "  - samples of a packed row see each other, or positions do not restart: a model whose code ignores our attention\n"
            "  - token ids of another tokenizer, or a chat template applied twice"
        )


def check_mismatch_kl(numbers: dict[str, float], *, step: int, limit: float, engines: Sequence[str] = ()) -> None:
    """Raise `MismatchError` where engine and trainer drift apart, before the step's update; `numbers` are the step's meters, `engines` says
    which engine stands out, if one does.

    The limit is for sequences that one version sampled whole, the one being trained: there the weights are equal, and no token saw keys and
    values of older weights (an engine keeps those over a swap, so a sequence that lived through one differs for a reason that is no fault).
    A step may hold no such sequence; all its tokens together may then differ by staleness, too, and only `DRIFT` times as much is too much.
    """
    for name, bound, whose in (
        ("mismatch_kl_on_policy", limit, "sequences that version {0} sampled whole"),
        ("mismatch_kl_k3", DRIFT * limit, "all tokens, whatever their version"),
    ):
        found = numbers.get(name, 0.0)
        if not found <= bound:  # NaN is below no limit
            raise MismatchError(
                f"step {step}: mean KL between engine and trainer over {whose.format(step)}: got {found:.3g}, expected at most {bound:g}"
                f" (trainer.max_mismatch_kl = {limit:g}; largest single gap {numbers.get('logprob_gap_max', float('nan')):.3g}, mean"
                f" staleness {numbers.get('staleness_mean', float('nan')):.2f}).{_named(engines)} Nothing was updated. Likely causes: an"
                " engine that serves another version than it says, arithmetic of another precision, a policy that has diverged (lower"
                " trainer.learning_rate or pipeline.max_staleness), or, for mixtures of experts, other routes in engine and trainer"
            )


def _named(engines: Sequence[str]) -> str:
    return "".join(f" {words[0].upper()}{words[1:]}." for words in engines)


def _sampled_whole(batch: MicroBatch) -> np.ndarray:
    """[tokens with a loss] bool: whether one version sampled the token's whole sequence."""
    sample = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[batch.loss_mask]
    versions = batch.versions[batch.loss_mask]
    oldest, newest = np.full(len(batch.lengths), np.iinfo(np.int32).max), np.full(len(batch.lengths), -1)
    np.minimum.at(oldest, sample, versions)
    np.maximum.at(newest, sample, versions)
    return (oldest == newest)[sample]
