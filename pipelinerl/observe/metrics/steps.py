"""Metrics of an optimizer step. All stand over the step (`progress/step`); tokens are sampled tokens that enter the loss."""

from __future__ import annotations

from pipelinerl.observe.fold.rows import StepRow
from pipelinerl.observe.metrics.table import Metric

LOOK_AT_SAMPLES = "Read samples in `pipelinerl view`."
STEP_METRICS = (
    Metric(
        "reward/all/mean",
        "reward_mean",
        "reward",
        "mean over the step's samples of the weighted sum of reward functions",
        "It should rise. Flat: see the alarm flat_reward. Rising while `eval/...` falls: the reward is being gamed.",
        "reward",
    ),
    Metric(
        "reward/all/std",
        "reward_std",
        "reward",
        "standard deviation over the step's samples",
        "Near 0: nothing to learn from; choose prompts that are solved now and then.",
    ),
    Metric(
        "reward/greedy/mean",
        "greedy_reward_mean",
        "reward",
        "mean over the greedy siblings that a method takes as its baseline",
        "Far above the sampled mean: the temperature costs reward.",
    ),
    Metric(
        "reward/<function>/mean",
        "components",
        "reward of the function, before its weight",
        "mean over the samples to which the function applied",
        "A function that falls while the sum rises is being traded away: raise its weight.",
    ),
    Metric(
        "seq_len/all/mean",
        "length_mean",
        "tokens",
        "mean of trained tokens per sample",
        "A drift without a gain in reward: the aggregation or a reward favours length.",
        "length",
    ),
    Metric(
        "seq_len/is_truncated",
        "truncated_fraction",
        "part of one",
        "samples that ended at `rollout.max_tokens` / samples",
        "Above a half: raise `rollout.max_tokens`, or see that the end of turn is heard.",
        "samples cut off",
    ),
    Metric(
        "seq_len/repeated_fraction",
        "repeated_fraction",
        "part of one",
        "4-grams that the same sample has said before / its 4-grams",
        "Rising: loops. Lower the learning rate, give loops no reward.",
        "4-grams said before",
    ),
    Metric(
        "num_turns/all/mean",
        "turns_mean",
        "turns",
        "mean of turns per sample, with an environment",
        "At the environment's bound: episodes are cut off.",
    ),
    Metric(
        "batch/groups", "num_groups", "groups", "groups assigned to the step", "Fewer than `batch.groups_per_step`: the run is at its end."
    ),
    Metric("batch/samples", "num_samples", "samples", "samples assigned to the step", "Context for the means above."),
    Metric("batch/tokens", "num_tokens", "tokens", "prompt and completion tokens of the step", "Context for throughput."),
    Metric("batch/trained_tokens", "num_trained_tokens", "tokens", "tokens that enter the loss", "Context for throughput."),
    Metric(
        "batch/useful_tokens",
        "num_useful_tokens",
        "tokens",
        "trained tokens whose advantage is not zero",
        "Far below `batch/trained_tokens`: most groups have equal rewards, see `batch/zero_variance_fraction`.",
    ),
    Metric(
        "batch/zero_variance_fraction",
        "zero_variance_fraction",
        "part of one",
        "groups whose rewards are all equal / groups",
        "Such groups have no gradient. High: prompts too easy or too hard; see `data.difficulty`, `rollout.group_size`.",
        "groups of equal reward",
    ),
    Metric(
        "off_policy/mean",
        "staleness_mean",
        "versions",
        "mean over tokens of the version being trained less the version that sampled the token",
        "Near `pipeline.max_staleness`: lower the bound, or run fewer rollouts at once, if rewards are unstable.",
        "age of tokens",
    ),
    Metric("off_policy/min", "staleness_min", "versions", "the youngest token's staleness", "Above 0: no token of the step is on policy."),
    Metric("off_policy/max", "staleness_max", "versions", "the oldest token's staleness", "Never above `pipeline.max_staleness`."),
    Metric(
        "off_policy/in_flight/mean",
        "staleness_in_flight_mean",
        "versions",
        "part of the staleness that came up to the sample's last token",
        "High: long completions; fewer sequences per engine, or more engines.",
    ),
    Metric("off_policy/in_flight/max", "staleness_in_flight_max", "versions", "the same of the oldest token", "As its mean."),
    Metric(
        "off_policy/in_queue/mean",
        "staleness_in_queue_mean",
        "versions",
        "part of the staleness that came after the sample's last token",
        "High: scoring or the trainer holds samples up; see `queue/...`.",
    ),
    Metric("off_policy/in_queue/max", "staleness_in_queue_max", "versions", "the same of the oldest token", "As its mean."),
    Metric(
        "time/in_flight", "in_flight_s_mean", "seconds", "mean from a sample's admission to its last token", "High: engines are the limit."
    ),
    Metric(
        "time/in_queue",
        "in_queue_s_mean",
        "seconds",
        "mean from a sample's last token to its assignment to a step",
        "High: scoring is the limit, or groups wait for their last sibling.",
    ),
)
"""Fields of a step that the orchestrator writes."""
TRAINER_METRICS = (
    Metric(
        "mismatch_kl/on_policy/mean",
        "mismatch_kl_on_policy",
        "nats",
        "mean of k3 = r - 1 - log r, r = trainer / engine probability, over sequences that the version being trained sampled whole",
        "It is arithmetic alone: above a third of `trainer.max_mismatch_kl` align engine and trainer (`model.dtype`,"
        " `trainer.float32_head`, `model.replay_routing`).",
        "KL between engine and trainer, same version",
    ),
    Metric(
        "mismatch_kl/logprob_gap/mean",
        "logprob_gap_mean",
        "nats",
        "mean of |trainer - engine log-probability| over the same sequences",
        "As mismatch_kl/on_policy/mean.",
        "|engine − trainer| log-probability, mean",
    ),
    Metric(
        "off_policy/ess",
        "ess_fraction",
        "part of one",
        "(sum w)^2 / (N sum w^2), w = importance weight (arXiv:2509.19128)",
        "Below a half: lower `pipeline.max_staleness`, the learning rate or `trainer.epochs`.",
        "effective sample size",
    ),
    Metric(
        "mismatch_kl/all/mean",
        "mismatch_kl_k3",
        "nats",
        "mean of k3 between the policy and the one that sampled, over all tokens",
        "As off_policy/ess.",
        "KL to the sampling policy",
    ),
    Metric(
        "off_policy/clip_fraction",
        "clip_fraction",
        "part of one",
        "tokens whose ratio was clipped / tokens",
        "Above 0.2: steps are too large or samples too old.",
        "tokens clipped",
    ),
    Metric(
        "off_policy/weight_zero_fraction",
        "weight_zero_fraction",
        "part of one",
        "tokens of importance weight 0 / tokens",
        "High: masks throw samples away; lower the staleness.",
        "tokens of importance weight 0",
    ),
    Metric(
        "entropy/all/mean",
        "entropy",
        "nats",
        "mean entropy of the next-token distribution",
        "Collapsing before the task is solved: a lower learning rate, a higher temperature, clip-higher or an entropy term.",
        "entropy per token",
    ),
    Metric(
        "optim/grad_norm",
        "grad_norm",
        "",
        "norm of the gradient, before clipping",
        "Spikes: look at that step's samples; lower the learning rate.",
        "gradient norm, before clipping",
    ),
    Metric("loss/mean", "loss", "", "the step's loss, all parts", "Its level says little in RL; NaN ends the run.", "loss"),
    Metric("off_policy/ratio/mean", "ratio_mean", "", "mean importance ratio", "Far from 1: off policy.", "importance ratio, mean"),
    Metric("off_policy/ratio/min", "ratio_min", "", "smallest importance ratio", "As its mean.", "importance ratio, smallest"),
    Metric("off_policy/ratio/max", "ratio_max", "", "largest importance ratio", "As its mean.", "importance ratio, largest"),
    Metric("optim/lr", "learning_rate", "", "learning rate of the step", "As configured.", "learning rate"),
    Metric(
        "trainer/kl_penalty",
        "kl_penalty",
        "nats",
        "mean per sequence of the KL penalty to the reference",
        "High: the policy leaves the reference; raise beta if it should not.",
        "KL to the reference, as its penalty measures it",
    ),
    Metric(
        "trainer/divergence",
        "divergence",
        "nats",
        "mean over tokens of the divergence from the teacher, over the whole vocabulary",
        "It should fall.",
        "divergence from the teacher, over all words",
    ),
    Metric(
        "trainer/kl_coef",
        "kl_coef",
        "",
        "beta in force, where it follows `kl.target`",
        "At its bound: the target cannot be held.",
        "coefficient of the KL, which follows it",
    ),
    Metric(
        "trainer/entropy_coef",
        "entropy_coef",
        "",
        "coefficient in force, where it follows the entropy",
        "At its bound: the target cannot be held.",
        "coefficient of the entropy, which follows it",
    ),
    Metric(
        "loss/sft",
        "sft_loss",
        "nats per token",
        "mean negative log-likelihood of the demonstrations",
        "Rising: RL unlearns them; raise `sft_stream.coef`.",
        "negative log-likelihood of the demonstrations beside RL",
    ),
    Metric(
        "trainer/weight_batch_mean",
        "weight_batch_mean",
        "",
        "mean importance weight of the step, by which all were divided",
        "Far from 1: off policy.",
        "mean importance weight of the step, which all were divided by",
    ),
    Metric(
        "off_policy/dropped/<mask>",
        "<mask>_dropped_fraction",
        "part of one",
        "tokens that this mask drops / tokens",
        "High: the mask's bound is too tight, or samples are too old.",
    ),
    Metric(
        "mismatch_kl/stale_kv/mean",
        "mismatch_kl_stale_kv",
        "nats",
        "mean of k3 over tokens of the version being trained in sequences that older versions began",
        "Above `trainer.max_mismatch_kl`: have swaps recompute older caches (`weights.kv_max_staleness`, `weights.kv_max_kl`).",
        "KL between engine and trainer, over older KV caches",
    ),
    Metric("mismatch_kl/logprob_gap/p99", "logprob_gap_p99", "nats", "0.99 quantile of the same gap, of the worst row", "As its mean."),
    Metric(
        "mismatch_kl/logprob_gap/p999",
        "logprob_gap_p999",
        "nats",
        "0.999 quantile of the same gap, of all tokens of the step over all ranks, rounded up by at most 1/32; of 1,000 tokens at least",
        "As its mean.",
    ),
    Metric("mismatch_kl/logprob_gap/max", "logprob_gap_max", "nats", "largest such gap", "A single spike is a kernel's; see its engine."),
    Metric(
        "time/wait_for_batch",
        "wait_s",
        "seconds",
        "the trainer's wait for micro-batches in this step",
        "Most of the step: engines or scoring are the limit; the report says which.",
    ),
    Metric("time/forward_backward", "forward_backward_s", "seconds", "forward and backward passes", "The limit: more trainer ranks."),
    Metric(
        "time/wait_for_core",
        "core_wait_s",
        "seconds",
        "of these, the ones in which the trainer's thread was ready and others had its core, where Linux counts them",
        "More than a tenth: leave the trainer a core of its own (`trainer.cores`, `run.cores`).",
    ),
    Metric("time/optimizer", "optimizer_s", "seconds", "optimizer", "Usually small."),
    Metric(
        "time/broadcast_weights",
        "publish_s",
        "seconds",
        "writing the policy, in which the trainer stood",
        "High: a slow transport or disk (`weights.transport`).",
    ),
    Metric(
        "time/broadcast_weights_async",
        "publish_async_s",
        "seconds",
        "writing the policy while training goes on",
        "Longer than a step: as above.",
    ),
    Metric(
        "perf/throughput_computed",
        "tokens_per_s",
        "tokens/s",
        "tokens of the step / seconds of work, waiting left out",
        "The trainer's own speed.",
    ),
    Metric("trainer/<name>", "<name>", "", "any other metric of the trainer, by its own name", LOOK_AT_SAMPLES),
)
"""Keys of the field `trainer` of a step; the first eight are what goes wrong first. The report draws those with a title in this order."""
COUNTED = (
    Metric("progress/samples", "", "samples", "samples trained since the run began", "Progress."),
    Metric("progress/tokens", "", "tokens", "trained tokens since the run began", "Progress."),
    Metric("perf/throughput", "", "tokens/s", "trained tokens of the last steps / their seconds", "The run's speed."),
    Metric(
        "perf/throughput_useful",
        "",
        "tokens/s",
        "useful tokens of the last steps / their seconds",
        "The speed of what can move the policy. Far below `perf/throughput`: as `batch/useful_tokens`.",
    ),
    Metric("alarm/<name>", "", "0 or 1", "1 while the alarm holds, 0 once it is over", "See the alarms below."),
)
"""Numbers that trackers add to a step from the lines before it."""


def step_value(row: StepRow, field: str) -> float | None:
    """The value of a field of `BY_FIELD` at a step; None where it was not recorded."""
    return row.trainer.get(field) if field in _TRAINER else getattr(row, field)


def trainer_metric(field: str) -> tuple[Metric, str]:
    """The metric of a key of the field `trainer`, and its name in trackers."""
    if (metric := _TRAINER.get(field)) is not None:
        return metric, metric.name
    mask = field.removesuffix(DROPPED)
    metric, part = (_TRAINER["<mask>" + DROPPED], mask) if mask != field else (_TRAINER["<name>"], field)
    return metric, next(iter(metric.named({part: 0.0})))


DROPPED = "_dropped_fraction"
"""End of the key that says which part of the tokens one mask dropped."""
_TRAINER = {metric.field: metric for metric in TRAINER_METRICS}
BY_FIELD = {metric.field: metric for metric in (*STEP_METRICS, *TRAINER_METRICS)}
