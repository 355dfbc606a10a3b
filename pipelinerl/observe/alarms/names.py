"""The alarms of learning by name, each with what to change."""

from __future__ import annotations

import dataclasses

from pipelinerl.config.alarm_names import AlarmName


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One that was raised, or, with `is_over`, that ended."""

    name: AlarmName
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
    AlarmName.TRUNCATION: "Raise rollout.max_tokens, or see that the model's end is heard: rollout.stop_token_ids, the tokenizer's end of"
    " turn.",
    AlarmName.NO_SIGNAL: "Choose prompts that are solved now and then (data.difficulty rests the others), raise rollout.temperature or"
    " rollout.group_size, or give partial rewards.",
    AlarmName.ENTROPY_COLLAPSE: "Lower trainer.learning_rate, raise rollout.temperature, or take a method that keeps entropy (clip-higher,"
    " an entropy term, a KL to a reference).",
    AlarmName.REWARD_HACKING: "Read the newest samples of high reward: the reward pays for something else than what is wanted. Mend it, or"
    " weigh the component that falls more; earlier checkpoints have what was lost.",
    AlarmName.LENGTH_DRIFT: "See whether the loss is averaged per sequence, which favours long wrong answers, and whether a reward pays for"
    " length.",
    AlarmName.REPETITION: "Read samples: a loop ends at rollout.max_tokens. Lower trainer.learning_rate, or give no reward to loops.",
    AlarmName.OFF_POLICY: "Lower pipeline.max_staleness, trainer.learning_rate or trainer.epochs, or take a method that caps its weights.",
    AlarmName.MISMATCH: "See that engine and trainer compute alike: model.dtype, trainer.float32_head, model.replay_routing for mixtures.",
    AlarmName.ENGINE_MISMATCH: "See that engine's log and what it runs on: it computes something else than the others, or does not report"
    " what it sampled. Replace it.",
    AlarmName.STALE_KV: "Have swaps recompute older caches: weights.kv_max_staleness, or weights.kv_max_kl.",
    AlarmName.STALE: "Raise pipeline.max_staleness, or keep fewer rollouts in engines at once (pipeline.max_running).",
    AlarmName.FLAT_REWARD: "See in samples that the reward tells better from worse, that the prompts are within reach, and that"
    " trainer.learning_rate is not too small.",
}
