"""Whether engine and trainer mean the same by a log-probability: checked for every token of the first step, in the mean at every step."""

from __future__ import annotations

import numpy as np
import torch

from pipelinerl.algorithms.loss import TokenColumns
from pipelinerl.errors import MismatchError
from pipelinerl.messages import MicroBatch

DRIFT = 20.0
"""How much more than engine and trainer at equal weights all tokens may differ, staleness included. At the default limit that is a mean KL
of 0.6 nats per token: a few tokens then hold all the importance. Smaller would end runs that stale tokens alone have moved."""


def check_agreement(columns: TokenColumns, *, batch: MicroBatch, limit: float) -> None:
    """Raise `MismatchError` where a token has another log-probability here than in its engine, though the weights are the same.

    They are in sequences that the version being trained sampled whole: what lived through a swap saw keys and values of older weights.
    """
    fresh = (columns.versions == columns.trained_version) & torch.from_numpy(_sampled_whole(batch)).to(columns.versions.device)
    if not bool(fresh.any()):
        return
    ours, theirs = columns.logprobs.detach(), columns.behaviour_logprobs
    gaps = (ours - theirs).abs().masked_fill(~fresh, 0.0)  # NaN is the largest for argmax, and below no limit
    worst = int(gaps.argmax())
    if float(gaps[worst]) <= limit:
        return
    place = int(np.flatnonzero(batch.trains)[worst])
    sample = int(np.searchsorted(np.cumsum(batch.lengths), place, side="right"))
    within = place - int(batch.lengths[:sample].sum())
    raise MismatchError(
        f"rollout {batch.rollout_ids[sample]}, token {within} (id {batch.token_ids[place]}): the trainer's log-probability is"
        f" {float(ours[worst]):.6f}, the engine's {float(theirs[worst]):.6f}; expected a gap of at most"
        f" {limit:g}, got {float(gaps[worst]):.3g} (mean {float(gaps[fresh].mean()):.3g} over {int(fresh.sum())} tokens). Both hold version"
        f" {columns.trained_version}, so the two compute something else, and every importance ratio would be wrong. Likely causes:\n"
        "  - the engine serves other weights: another model folder, or weights it transformed after loading\n"
        "  - another dtype: bfloat16 here and float32 there differ by 0.01 to 0.5 (trainer.max_logprob_gap is the bound)\n"
        "  - the engine's log-probabilities are those before temperature, top-p or top-k (vLLM: logprobs_mode must be processed_logprobs)\n"
        "  - samples of a packed row see each other, or positions do not restart: a model whose code ignores our attention\n"
        "  - token ids of another tokenizer, or a chat template applied twice"
    )


def check_mismatch(numbers: dict[str, float], *, step: int, limit: float) -> None:
    """Raise `MismatchError` where engine and trainer drift apart, before the step's update; `numbers` are the step's meters.

    The limit is for sequences that one version sampled whole, the one being trained: there the weights are equal, and no token saw keys and
    values of older weights (an engine keeps those over a swap, so a sequence that lived through one differs for a reason that is no fault).
    A step may hold no such sequence; all its tokens together may then differ by staleness, too, and only `DRIFT` times as much is too much.
    """
    for name, bound, whose in (
        ("mismatch_kl_fresh", limit, "sequences that version {0} sampled whole"),
        ("mismatch_kl_k3", DRIFT * limit, "all tokens, whatever their version"),
    ):
        found = numbers.get(name, 0.0)
        if not found <= bound:  # NaN is below no limit
            raise MismatchError(
                f"step {step}: mean KL between engine and trainer over {whose.format(step)}: got {found:.3g}, expected at most {bound:g}"
                f" (trainer.max_mismatch_kl = {limit:g}; largest single gap {numbers.get('logprob_gap_max', float('nan')):.3g}, mean"
                f" staleness {numbers.get('staleness_mean', float('nan')):.2f}). Nothing was updated. Likely causes: an engine that serves"
                " another version than it says, arithmetic of another precision, a policy that has diverged (lower trainer.learning_rate or"
                " pipeline.max_staleness), or, for mixtures of experts, other routes in engine and trainer"
            )


def _sampled_whole(batch: MicroBatch) -> np.ndarray:
    """[tokens with a loss] bool: whether one version sampled the token's whole sequence."""
    sample = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[batch.trains]
    versions = batch.versions[batch.trains]
    oldest, newest = np.full(len(batch.lengths), np.iinfo(np.int32).max), np.full(len(batch.lengths), -1)
    np.minimum.at(oldest, sample, versions)
    np.maximum.at(newest, sample, versions)
    return (oldest == newest)[sample]
