"""The alarms of learning by name: `run.fatal_alarms` lists those that end a run."""

from __future__ import annotations

import enum


class AlarmName(enum.StrEnum):
    """What an alarm is about."""

    TRUNCATION = "truncation"
    """Most samples are cut off at the longest length."""
    NO_SIGNAL = "no_signal"
    """Most groups have equal rewards, so that their gradient is zero, although the task is not solved."""
    ENTROPY_COLLAPSE = "entropy_collapse"
    """The policy has become nearly deterministic before the task is solved."""
    REWARD_HACKING = "reward_hacking"
    """The training reward rises while held-out, or another component, falls."""
    LENGTH_DRIFT = "length_drift"
    """Samples become much longer or shorter, and the reward does not rise with it."""
    REPETITION = "repetition"
    """Samples say the same again and again."""
    OFF_POLICY = "off_policy"
    """Importance weights leave little of what is trained."""
    MISMATCH = "mismatch"
    """Engine and trainer disagree about the probability of the same tokens under the same weights."""
    ENGINE_MISMATCH = "engine_mismatch"
    """One engine's log-probabilities differ from the trainer's far more than the others' do."""
    STALE_KV = "stale_kv"
    """What is sampled over an older KV cache is far from the policy."""
    STALE = "stale"
    """Many groups are given up because they are too old when trained."""
    FLAT_REWARD = "flat_reward"
    """The reward has not moved."""
