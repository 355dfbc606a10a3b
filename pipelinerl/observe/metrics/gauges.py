"""Metrics of the moment, which stand over seconds (`progress/seconds`), and of evaluations, over the version (`eval/version`)."""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.observe.fold.rows import EngineGauge, EvaluationRow, StatusRow, SwapRow
from pipelinerl.observe.fold.state import RunState
from pipelinerl.observe.metrics.table import Metric, Values, over_fleet

GAUGES = (
    Metric(
        "inference/throughput",
        "generated_tokens",
        "tokens/s",
        "growth of generated tokens over the last 10 s",
        "Falling at the same load: an engine is ill, or caches are full.",
        read=lambda state: state.generated_tokens_per_s,
    ),
    Metric(
        "inference/agg/num_running/<mean, min, max>",
        "engines",
        "sequences",
        "sequences that an engine decodes",
        "Below `engine.max_running`: admission or prompts hold engines back.",
        read=lambda state: _engines(state, lambda engine: engine.num_running),
    ),
    Metric(
        "inference/agg/num_waiting/<mean, min, max>",
        "engines",
        "sequences",
        "sequences queued in an engine",
        "Above 0 for long: its KV cache is full; `pipeline.adaptive_concurrency`.",
        read=lambda state: _engines(state, lambda engine: engine.num_waiting),
    ),
    Metric(
        "inference/agg/kv_cache_used/<mean, min, max>",
        "engines",
        "part of one",
        "KV cache that sequences hold / KV cache",
        "Above 0.9: sequences push each other out; more cache. Below 0.6 with all slots in use: raise `engine.max_running`.",
        read=lambda state: _engines(state, lambda engine: engine.kv_used),
    ),
    Metric(
        "inference/agg/drafts_accepted/<mean, min, max>",
        "engines",
        "part of one",
        "drafted tokens that became part of a completion / drafted tokens that an engine has verified, with `engine.speculation`",
        'Below 0.2: passes verify more than they save; `engine.speculation = "siblings"`, fewer `engine.speculative_tokens`, or off.',
        read=lambda state: _engines(state, _drafts_accepted),
    ),
    Metric(
        "inference/agg/version/<mean, min, max>",
        "engines",
        "versions",
        "version that an engine samples with",
        "One that stays behind: see its log and `weights/...`.",
        read=lambda state: _engines(state, lambda engine: engine.version),
    ),
    Metric(
        "idle_ratio/trainer",
        "waited_s",
        "part of one",
        "seconds that the trainer waited for a micro-batch in the last 10 s / 10 s",
        "High: engines or scoring are the limit.",
        read=lambda state: state.trainer_wait_fraction,
    ),
    Metric(
        "idle_ratio/engines",
        "engines",
        "part of one",
        "seconds that engines stood without a request in the last 10 s / (engines × 10 s)",
        "High: the trainer or the staleness bound is the limit.",
        read=lambda state: state.engine_idle_fraction,
    ),
    Metric(
        "idle_ratio/slots_empty_admission_closed",
        "waits",
        "part of one",
        "mean over the last 10 s of 1 − sequences / slots while admission is closed, else 0",
        "High: raise `pipeline.max_staleness` by one and compare the reward curve.",
        read=lambda state: state.engine_empty_fraction,
    ),
    Metric(
        "queue/<queue>/items",
        "queues",
        "items",
        "items that wait between two stages",
        "The stage after the fullest queue is the slow one.",
        read=lambda state: {name: queue.items for name, queue in _status(state).queues.items()},
    ),
    Metric(
        "queue/<queue>/fill",
        "queues",
        "part of one",
        "bytes that wait / bytes allowed",
        "At 1 the stage before it stands still.",
        read=lambda state: {name: queue.fill_fraction for name, queue in _status(state).queues.items()},
    ),
    Metric(
        "rollouts/<status>",
        "rollouts",
        "rollouts",
        "rollouts since the run began: admitted = in_flight + trained + filtered + stale + failed + cancelled",
        "Many failed: see `errors/...`. Many stale: see the alarm stale. Many filtered: see batch/zero_variance_fraction.",
        read=lambda state: _status(state).rollouts,
    ),
    Metric(
        "environment/<gauge>",
        "environment",
        "counts",
        "of an environment: replies so far, rollouts between two turns; of one with state also objects alive, episodes that began again"
        " because theirs was lost, and that ended because the chat template cannot say what follows a turn (drifts)",
        "num_alive at `environment.concurrency`: raise that. num_restarts grows: its processes are killed, often for memory. num_drifts"
        " grows: such a template serves one turn only.",
        read=lambda state: _status(state).environment,
    ),
    Metric(
        "gateway/<gauge>",
        "gateway",
        "counts",
        "of a run whose rollouts agents play: episodes lent now (num_open), on offer, and lent so far, agents that wait for one, HTTP"
        " requests, those refused, turns, retries that got the answer they had, branches, turns rendered anew (num_drifted); leases that"
        " expired, attempts given up, and tokens of such attempts",
        "num_agents_waiting at 0 with episodes on offer: start more agents. num_expired grows: agents need longer than a lease lasts."
        " num_drifted grows: the agent changes what it was told, or the chat template drops it.",
        read=lambda state: _status(state).gateway,
    ),
    Metric(
        "weights/policy_version",
        "version",
        "versions",
        "policies published so far",
        "Progress.",
        read=lambda state: _status(state).version,
    ),
    Metric(
        "memory/orchestrator_bytes",
        "memory_bytes",
        "bytes",
        "resident memory of the orchestrator",
        "Queues are bounded, so it is flat; a rise is a defect.",
        read=lambda state: _status(state).memory_bytes,
    ),
)
"""Each read from the state of the run."""
SWAPS = (
    Metric(
        "weights/pause_s/<mean, min, max>",
        "pause_s",
        "seconds",
        "time that a swap kept an engine from its next forward pass, over the swaps since the last point",
        "Above some milliseconds: see `weights.swap_mode`.",
        read=lambda swap: swap.pause_s,
    ),
    Metric(
        "weights/stage_s/<mean, min, max>",
        "stage_s",
        "seconds",
        "time that a version took to arrive, while decoding went on",
        "Longer than a step: staleness grows; a faster `weights.transport`.",
        read=lambda swap: swap.stage_s,
    ),
)
"""Each read from one swap."""
ERRORS = Metric(
    "errors/<function>/<exception> <file:line>",
    "function_error",
    "failures",
    "failures of a function of yours by one cause",
    "Mend the function; `pipelinerl view` shows cause and place.",
)
EVALUATION = (
    Metric(
        "eval/all/avg@<k>",
        "reward_mean",
        "reward",
        "mean reward over the held-out prompts, k answers to each",
        "The number to judge a run by. Falling while reward/all/mean rises: the alarm reward_hacking.",
        read=lambda row: {f"{row.num_samples or 1:.0f}": row.reward_mean},
    ),
    Metric(
        "eval/all/pass@<k>",
        "pass_at",
        "part of one",
        "chance that one of k answers is correct (arXiv:2107.03374)",
        "Falling while avg@k rises: the policy loses diversity.",
        read=lambda row: row.pass_at,
    ),
    Metric(
        "eval/<function>/mean",
        "components",
        "reward of the function, before its weight",
        "mean over the held-out answers",
        "As reward/<function>/mean.",
        read=lambda row: row.components,
    ),
    Metric("eval/num_prompts", "num_prompts", "prompts", "held-out prompts", "Few: noise.", read=lambda row: row.num_prompts),
    Metric(
        "eval/oldest_version",
        "oldest_version",
        "versions",
        "oldest version that sampled one of the answers",
        "Below the version asked: engines lag behind.",
        read=lambda row: row.oldest_version,
    ),
)
"""Each read from an evaluation."""


def gauges_of(state: RunState, swaps: list[SwapRow]) -> dict[str, float]:
    """Every gauge under its name; `swaps`: those since the last point."""
    found = {name: value for metric in GAUGES for name, value in metric.named(metric.read(state)).items()}
    for metric in SWAPS:
        found |= metric.named(over_fleet(metric.read(swap) for swap in swaps))  # pyright: ignore[reportArgumentType]
    return found


def evaluation_metrics(row: EvaluationRow) -> dict[str, float]:
    """Every metric of an evaluation under its name."""
    return {name: value for metric in EVALUATION for name, value in metric.named(metric.read(row)).items()}


def _engines(state: RunState, value_of: Callable[[EngineGauge], float | None]) -> Values:
    return over_fleet(map(value_of, _status(state).engines))


def _drafts_accepted(engine: EngineGauge) -> float | None:
    return engine.num_accepted / engine.num_drafted if engine.num_drafted and engine.num_accepted is not None else None


def _status(state: RunState) -> StatusRow:
    return state.status or StatusRow(t=0.0)
