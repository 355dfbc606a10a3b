"""The run as a whole: how a policy travels, who waits for whom, how old what is trained is, and what it costs."""

from __future__ import annotations

from pipelinerl.planning.sheet import Row

PLACEMENT = (
    Row("engine_ranks", "ranks", "engine_tensor * engine_pipeline", "GPUs of one engine"),
    Row(
        "used_gpus",
        "GPUs",
        "(ranks + engines * engine_ranks if mode < 3"
        " else max(ranks, (engines - engines_apart) * engine_ranks) + engines_apart * engine_ranks) + prm_gpus",
        "of trainer, engines and process reward model; engines that take turns with the trainer have its own",
    ),
    Row("is_one_machine", "", "1 if used_gpus <= gpus_per_node else 0", "1: all of them are in one node"),
    Row(
        "wanted_transport",
        "",
        "0 if mode >= 3 else transport if transport >= 0"
        " else (0 if is_one_machine > 0 else 2) if engine_ranks < 2 else (1 if is_one_machine > 0 else 3)",
        "how policies shall go: 0 CUDA IPC, 1 shared memory, 2 NCCL, 3 gloo, 4 files, 5 all cards together; engines of several ranks do not"
        " take 0 or 2",
    ),
)

SYNC = (
    Row("policy_bytes", "B", "policy_parameters * dtype_bytes", "one published policy"),
    Row("gather_s", "s", "0 if weight_share < 2 else policy_bytes / link_bandwidth", "bringing it together on one rank"),
    Row(
        "commit_s",
        "s",
        "policy_bytes / engine_ranks / host_bandwidth if stages_on_host > 0 else 2 * policy_bytes / engine_ranks / bandwidth",
        "the swap itself: staged to live, read and written on the device, or brought from the host",
    ),
    Row("sync_cuda_ipc_s", "s", "gather_s + policy_bytes / nvlink_bandwidth + commit_s", "by CUDA IPC: one machine"),
    Row(
        "sync_shared_memory_s",
        "s",
        "gather_s + policy_bytes / host_bandwidth + policy_bytes / engine_ranks / host_bandwidth + commit_s",
        "through shared memory: one machine; each engine rank reads its part by itself",
    ),
    Row("sync_nccl_s", "s", "gather_s + engines * policy_bytes / nic_bandwidth + commit_s", "by NCCL, from the first rank to each engine"),
    Row(
        "sync_gloo_s",
        "s",
        "gather_s + engines * policy_bytes / gloo_bandwidth + commit_s",
        "by gloo, from the first rank's host to each engine",
    ),
    Row(
        "sync_files_s", "s", "gather_s + (1 + engines) * policy_bytes / files_bandwidth + commit_s", "through files that every machine sees"
    ),
    Row(
        "sync_direct_s",
        "s",
        "max(policy_bytes / (engine_ranks * nic_bandwidth), policy_bytes / (ranks * nic_bandwidth)) + commit_s",
        "what all cards together could do: every trainer rank to every engine rank, engines passing it on",
    ),
    Row(
        "sync_s",
        "s",
        "sync_cuda_ipc_s if chosen_transport < 1 else sync_shared_memory_s if chosen_transport < 2 else sync_nccl_s if chosen_transport < 3"
        " else sync_gloo_s if chosen_transport < 4 else sync_files_s if chosen_transport < 5 else sync_direct_s",
        "by the run's own transport, from the end of a step to the swap",
    ),
    Row(
        "sync_delta_s",
        "s",
        "changed_fraction * policy_parameters * 6 / nic_bandwidth + commit_s",
        "what changed alone, six bytes a weight, by one card",
    ),
)

TIME = (
    Row("speed_ratio", "", "generated_rate / trained_rate", "rho: generation over training"),
    Row("step_rollouts", "rollouts", "groups_per_step * group_size", "of one step"),
    Row("step_tokens", "tokens", "step_rollouts * mean_tokens", "sampled tokens of one step"),
    Row(
        "batch_passes",
        "passes",
        "max(0, step_rollouts / engines / max_running - 1) * mean_tokens + max_tokens",
        "of an engine that writes one step's rollouts and no others: full until none is left to begin, then until the longest ends",
        "arXiv 2509.19128 appendix A: t_gen, for a pass whose time grows evenly with its sequences",
    ),
    Row(
        "batch_s",
        "s",
        "batch_passes * alone_s + step_tokens / engines * ((pass_s - alone_s) / running + prefill_s)",
        "generating one step's rollouts and no others",
    ),
    Row("turns_step_s", "s", "batch_s + training_s + sync_s", "a step where generation and training take turns, each on its own GPUs"),
    Row(
        "recompute_s",
        "s",
        "running * decode_context * prefill_s * mean_tokens / prompt_tokens",
        "computing anew the KV caches of an engine's running sequences, which were dropped for the trainer",
    ),
    Row("trainers_turn_s", "s", "training_s + sync_s + 2 * switch_s", "of a step, in which engines in turns sleep, fall asleep or wake"),
    Row(
        "beside_tokens",
        "tokens",
        "min(step_tokens, engines_apart * engine_rate * trainers_turn_s)",
        "of a step, written by engines apart while the trainer has its turn",
    ),
    Row(
        "carrying_step_s",
        "s",
        "(step_tokens - beside_tokens) / generated_rate + recompute_s + trainers_turn_s",
        "a step in turns on the same GPUs, where sequences that are not finished go on in the next phase",
    ),
    Row(
        "step_s",
        "s",
        "max(step_tokens / min(generated_rate, trained_rate), sync_s / max(1, max_staleness)) if mode < 1"
        " else max(batch_s, training_s) + sync_s if mode < 2 else turns_step_s if mode < 3 else turns_step_s + 2 * switch_s if mode < 4"
        " else carrying_step_s",
        "one optimizer step: streaming at min(R, T), and no policy is on its way for longer than the staleness bound; one step off at the"
        " slower of both, and the sync; else in turns",
        "R and T: arXiv 2509.19128 appendix A",
    ),
    Row("run_rate", "tokens/s", "step_tokens / step_s", "sampled tokens trained per second"),
    Row("streaming_gain", "x", "turns_step_s / step_s", "over taking turns"),
    Row("engines_idle", "", "1 - step_tokens / generated_rate / step_s", "part of the time that engines would not need"),
    Row("trainer_idle", "", "1 - training_s / step_s", "part of the time in which the trainer waits"),
    Row(
        "best_engine_fraction",
        "",
        "trained_rate / ranks / (generated_rate / (engines * engine_ranks) + trained_rate / ranks)",
        "part of trainer's and engines' GPUs, given to engines, at which both are as fast",
    ),
)

STALENESS = (
    Row(
        "tail",
        "",
        "min(max_tokens / mean_tokens, 1 + length_cv * sqrt(3) * (group_size - 1) / (group_size + 1))",
        "mean of a group's longest over the mean: the maximum of as many even draws",
    ),
    Row("in_flight", "rollouts", "engines * running", "in engines at once"),
    Row("queue_steps", "steps", "max(1, max_staleness + 1 - in_flight / step_rollouts)", "finished steps that may wait for the trainer"),
    Row(
        "flight_staleness",
        "versions",
        "in_flight * tail / (step_rollouts * max(1, speed_ratio))",
        "made while a group is written",
        "Applied Compute, July 2026: expected staleness of asynchronous RL",
    ),
    Row(
        "queue_staleness",
        "versions",
        "(2 * queue_steps + speed_ratio - 1) / (2 * speed_ratio) if speed_ratio > 1 else (speed_ratio if queue_steps > 1 else 0.5)",
        "made while it waits",
        "as above; with one step of queue and slow generation its value overshoots, and 0.5 is used",
    ),
    Row("sync_staleness", "versions", "sync_s / step_s", "made while a policy is on its way"),
    Row(
        "expected_staleness",
        "versions",
        "min(max_staleness, flight_staleness + queue_staleness + sync_staleness) if mode < 1 else 1 if mode < 2 else 0 if mode < 4"
        " else min(max_staleness, in_flight * tail / step_rollouts)",
        "mean; never above the bound. In turns nothing waits for the trainer, and no policy is on its way",
    ),
    Row(
        "longest_lag",
        "versions",
        "ceil(in_flight * max_tokens / (mean_tokens * step_rollouts))",
        "of the oldest token, were there no bound",
        "PipelineRL, arXiv 2509.19128 appendix A",
    ),
)

COST = (
    Row("run_s", "s", "steps * step_s + longest_s", "the whole run, the first rollouts included"),
    Row("gpu_hours", "GPU-hours", "run_s * used_gpus / 3600", "of all GPUs that are reserved"),
    Row("tokens_per_gpu", "tokens/s", "run_rate / used_gpus", "sampled tokens trained per second and GPU"),
    Row("million_tokens_gpu_hours", "GPU-hours", "1e6 / tokens_per_gpu / 3600", "for a million sampled and trained tokens"),
)
