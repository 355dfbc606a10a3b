"""The alarms of learning by name: `run.fatal_alarms` lists those that end a run."""

from __future__ import annotations

import enum


class AlarmName(enum.StrEnum):
    """What an alarm is about; `pipelinerl.observe.alarms.names` says what each means, and what to change."""

    TRUNCATION = "truncation"
    NO_SIGNAL = "no_signal"
    ENTROPY_COLLAPSE = "entropy_collapse"
    REWARD_HACKING = "reward_hacking"
    LENGTH_DRIFT = "length_drift"
    REPETITION = "repetition"
    OFF_POLICY = "off_policy"
    MISMATCH = "mismatch"
    ENGINE_MISMATCH = "engine_mismatch"
    STALE_KV = "stale_kv"
    STALE = "stale"
    FLAT_REWARD = "flat_reward"
