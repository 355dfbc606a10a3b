"""The alarms of learning by name, each with what to change."""

from __future__ import annotations

import dataclasses
import enum


class Name(enum.StrEnum):
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One that was raised, or, with `is_over`, that ended."""

    name: Name
    began: int
    """Step from which on it holds; of an evaluation, the version."""
    step: int
    """At which it was noticed."""
    figure: str
    """What was seen, in one sentence."""
    change: str
    """What to change."""
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.name} since step {self.began}: {self.figure}"


CHANGE = {
    Name.TRUNCATION: "Raise rollout.max_tokens, or see that the model's end is heard: rollout.stop_token_ids, the tokenizer's end of turn.",
    Name.NO_SIGNAL: "Choose prompts that are solved now and then (data.difficulty rests the others), raise rollout.temperature or"
    " rollout.group_size, or give partial rewards.",
    Name.ENTROPY_COLLAPSE: "Lower trainer.learning_rate, raise rollout.temperature, or take a method that keeps entropy (clip-higher, an"
    " entropy term, a KL to a reference).",
    Name.REWARD_HACKING: "Read the newest samples of high reward: the reward pays for something else than what is wanted. Mend it, or"
    " weigh the component that falls more; earlier checkpoints have what was lost.",
    Name.LENGTH_DRIFT: "See whether the loss is averaged per sequence, which favours long wrong answers, and whether a reward pays for"
    " length.",
    Name.REPETITION: "Read samples: a loop ends at rollout.max_tokens. Lower trainer.learning_rate, or give no reward to loops.",
    Name.OFF_POLICY: "Lower pipeline.max_staleness, trainer.learning_rate or trainer.epochs, or take a method that caps its weights.",
    Name.MISMATCH: "See that engine and trainer compute alike: model.dtype, trainer.float32_head, model.replay_routing for mixtures.",
    Name.ENGINE_MISMATCH: "See that engine's log and what it runs on: it computes something else than the others, or does not report what"
    " it sampled. Replace it.",
    Name.STALE_KV: "Have swaps recompute older caches: weights.kv_max_staleness, or weights.kv_max_kl.",
    Name.STALE: "Raise pipeline.max_staleness, or keep fewer rollouts in engines at once (pipeline.max_running).",
    Name.FLAT_REWARD: "See in samples that the reward tells better from worse, that the prompts are within reach, and that"
    " trainer.learning_rate is not too small.",
}
