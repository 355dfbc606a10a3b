"""The alarms of learning: what each means, and what to change."""

from __future__ import annotations

import dataclasses

from pipelinerl.config.alarm_names import AlarmName


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The meaning of an alarm, and the change to make."""

    meaning: str
    change: str


ALARMS = {
    AlarmName.TRUNCATION: Kind(
        "Most samples are cut off at the longest length.",
        "Raise rollout.max_tokens, or see that the model's end is heard: rollout.stop_token_ids, the tokenizer's end of turn.",
    ),
    AlarmName.NO_SIGNAL: Kind(
        "Most groups have equal rewards, so that their gradient is zero, although the task is not solved.",
        "Choose prompts that are solved now and then (data.difficulty rests the others), raise rollout.temperature or"
        " rollout.group_size, or give partial rewards.",
    ),
    AlarmName.ENTROPY_COLLAPSE: Kind(
        "The policy has become nearly deterministic before the task is solved.",
        "Lower trainer.learning_rate, raise rollout.temperature, or take a method that keeps entropy (clip-higher, an"
        " entropy term, a KL to a reference).",
    ),
    AlarmName.REWARD_HACKING: Kind(
        "The training reward rises while held-out, or another component, falls.",
        "Read the newest samples of high reward: the reward pays for something else than what is wanted. Mend it, or"
        " weigh the component that falls more; earlier checkpoints have what was lost.",
    ),
    AlarmName.LENGTH_DRIFT: Kind(
        "Samples become much longer or shorter, and the reward does not rise with it.",
        "See whether the loss is averaged per sequence, which favours long wrong answers, and whether a reward pays for length.",
    ),
    AlarmName.REPETITION: Kind(
        "Samples say the same again and again.",
        "Read samples: a loop ends at rollout.max_tokens. Lower trainer.learning_rate, or give no reward to loops.",
    ),
    AlarmName.OFF_POLICY: Kind(
        "Importance weights leave little of what is trained.",
        "Lower pipeline.max_staleness, trainer.learning_rate or trainer.epochs, or take a method that caps its weights.",
    ),
    AlarmName.MISMATCH: Kind(
        "Engine and trainer disagree about the probability of the same tokens under the same weights.",
        "See that engine and trainer compute alike: model.dtype, trainer.float32_head, model.replay_routing for mixtures.",
    ),
    AlarmName.ENGINE_MISMATCH: Kind(
        "One engine's log-probabilities differ from the trainer's far more than the others' do.",
        "See that engine's log and what it runs on: it computes something else than the others, or does not report what"
        " it sampled. Replace it.",
    ),
    AlarmName.STALE_KV: Kind(
        "What is sampled over an older KV cache is far from the policy.",
        "Have swaps recompute older caches: weights.kv_max_staleness, or weights.kv_max_kl.",
    ),
    AlarmName.STALE: Kind(
        "Many groups are dropped because they are too old when trained.",
        "Raise pipeline.max_staleness, or keep fewer rollouts in engines at once (pipeline.max_running).",
    ),
    AlarmName.FLAT_REWARD: Kind(
        "The reward has not moved.",
        "See in samples that the reward tells better from worse, that the prompts are within reach, and that"
        " trainer.learning_rate is not too small.",
    ),
}
