"""What an engine rank holds, and how many tokens an engine writes per second.

Memory is divided as `pipelinerl.engine.budget` does when an engine starts; a test compares the two.

An engine spreads its weights and its KV cache over `engine_tensor` times `engine_pipeline` ranks. Everything below is of one rank or of
one whole engine, as its name says; nothing is divided by the ranks twice.
"""

from __future__ import annotations

from pipelinerl.planning.sheet import Row

ENGINE_MEMORY = (
    Row("engine_weights_bytes", "B", "parameters * engine_dtype_bytes / engine_ranks", "weights"),
    Row(
        "engine_pass_bytes",
        "B",
        "batched_tokens * dtype_bytes * (3 * hidden + max((query_width + value_width + cache_width) / engine_tensor,"
        " 3 * intermediate / engine_tensor, experts_per_token * (3 * expert_size / engine_tensor + hidden)))"
        " + max_running * vocabulary * (24 + dtype_bytes)",
        "the largest forward pass, and the rows of logits of all that decode",
        "pipelinerl.engine.budget",
    ),
    Row(
        "kv_token_bytes",
        "B",
        "layers / engine_pipeline * cache_width * kv_dtype_bytes / (1 if is_latent else min(engine_tensor, key_heads))",
        "KV cache of one token on one rank; a latent vector is on every rank",
        "arXiv 2305.13245; 2405.04434 section 2.1",
    ),
    Row(
        "resident_bytes",
        "B",
        "trainer_weights_bytes + trainer_optimizer_bytes + critic_bytes + reference_bytes + trainer_process_bytes if mode >= 3 else 0",
        "what the trainer keeps on the GPU while the engine has it; 0 where each has its own",
    ),
    Row(
        "engine_left_bytes",
        "B",
        "gpu_bytes * (1 - engine_margin_fraction) - engine_weights_bytes - engine_pass_bytes - engine_process_bytes - resident_bytes",
        "left beside weights and a pass",
    ),
    Row(
        "wanted_cache_bytes",
        "B",
        "max(context_tokens * kv_token_bytes, min((max_running * min(context_tokens, 2 * max_tokens) + context_tokens) * kv_token_bytes,"
        " 0.5 * engine_left_bytes))",
        "the least KV cache for whose sake the next policy waits on the host",
        "pipelinerl.engine.budget",
    ),
    Row(
        "stages_on_host",
        "",
        "1 if mode < 3 and engine_left_bytes - policy_parameters * engine_dtype_bytes / engine_ranks < wanted_cache_bytes else 0",
        "1: the next policy waits on the host, and a swap is as fast as its link",
    ),
    Row(
        "staged_bytes",
        "B",
        "0 if stages_on_host > 0 or mode >= 3 else policy_parameters * engine_dtype_bytes / engine_ranks",
        "the next policy beside the weights (swap); an engine that sleeps is woken by it",
    ),
    Row("kv_cache_bytes", "B", "max(0, engine_left_bytes - staged_bytes)", "KV cache of a rank: what is left"),
    Row("kv_tokens", "tokens", "kv_cache_bytes / max(1, kv_token_bytes)", "that the KV cache of an engine holds"),
    Row(
        "engine_rank_bytes",
        "B",
        "engine_weights_bytes + staged_bytes + engine_pass_bytes + kv_cache_bytes + engine_process_bytes",
        "all of one rank",
    ),
    Row(
        "prm_weights_bytes",
        "B",
        "prm_parameters * prm_dtype_bytes / max(1, prm_gpus)",
        "process reward model: weights on each of its ranks",
    ),
    Row(
        "prm_rank_room",
        "B",
        "gpu_bytes * (1 - engine_margin_fraction) - prm_weights_bytes - engine_process_bytes",
        "left beside them for its KV cache; below 0 it does not fit",
    ),
    Row(
        "engine_rank_room",
        "tokens",
        "kv_tokens - context_tokens",
        "left beside one sequence as long as the context; below 0 it does not fit",
    ),
)

GENERATION = (
    Row(
        "decode_context",
        "tokens",
        "prompt_tokens + mean_tokens * (1 + length_cv ** 2) / 2",
        "tokens that a running sequence has, on average: long ones run for longer, so are met more often",
    ),
    Row("kv_running", "sequences", "kv_tokens / decode_context", "that the KV cache holds at this mean"),
    Row(
        "admitted_running",
        "sequences",
        "(max_staleness + 1) * groups_per_step * group_size / engines",
        "that the staleness bound admits, for each engine",
    ),
    Row("running", "sequences", "max(1, min(max_running, kv_running, admitted_running))", "decoded at once by one engine"),
    Row("stage_running", "sequences", "running / engine_pipeline", "of them, in one stage of its pipeline"),
    Row(
        "experts_read",
        "",
        "0 if experts < 1 else 1 - (1 - experts_per_token / experts) ** stage_running",
        "part of the experts that a pass reads, tokens choosing evenly",
    ),
    Row(
        "read_bytes",
        "B",
        "((parameters - expert_parameters - (embedding_tables - 1) * embedding_parameters) + experts_read * expert_parameters)"
        " * engine_dtype_bytes / engine_ranks + stage_running * decode_context * kv_token_bytes",
        "weights and KV cache that one rank reads in a pass",
    ),
    Row("read_s", "s", "read_bytes / (bandwidth * read_efficiency)", "time of that"),
    Row(
        "decode_flops",
        "FLOP",
        "2 * matmul_parameters + 2 * layers * decode_context * (key_heads * 2 * cache_width if is_latent else query_width + value_width)",
        "one decoded token",
        "arXiv 2405.04434: with a latent cache every head attends to the latent vector",
    ),
    Row(
        "decode_compute_s",
        "s",
        "stage_running * decode_flops / (engine_ranks * peak_flops * decode_efficiency)",
        "arithmetic of a pass, on one rank",
    ),
    Row(
        "decode_reduce_s",
        "s",
        "0 if engine_tensor < 2 else 2 * layers / engine_pipeline * (reduce_latency_s + 2 * (engine_tensor - 1) / engine_tensor"
        " * stage_running * hidden * dtype_bytes / (nvlink_bandwidth if engine_tensor <= gpus_per_node else nic_bandwidth))",
        "two sums over tensor parallel ranks in each layer",
        "arXiv 1909.08053 section 3",
    ),
    Row(
        "stage_s",
        "s",
        "max(read_s, decode_compute_s) + decode_reduce_s + step_overhead_s + running * sequence_overhead_s",
        "a pass through one stage",
    ),
    Row("pass_s", "s", "engine_pipeline * stage_s", "between two tokens of a sequence"),
    Row(
        "alone_s",
        "s",
        "engine_pipeline * ((parameters - expert_parameters * (1 - min(1, experts_per_token / max(1, experts)))"
        " - (embedding_tables - 1) * embedding_parameters) * engine_dtype_bytes / engine_ranks / (bandwidth * read_efficiency)"
        " + step_overhead_s)",
        "between two tokens of a sequence that is alone",
    ),
    Row(
        "prefill_s",
        "s",
        "prompt_tokens / mean_tokens * 2 * matmul_parameters / (engine_ranks * peak_flops * prefill_efficiency)",
        "reading prompts, per token written",
    ),
    Row("engine_rate", "tokens/s", "1 / (pass_s / running + prefill_s)", "written by one engine"),
    Row("generated_rate", "tokens/s", "engines * engine_rate", "R: written by all engines"),
    Row("sequence_s", "s", "mean_tokens * running / engine_rate", "a rollout of mean length, from admission to its end"),
    Row("longest_s", "s", "max_tokens * running / engine_rate", "a rollout of the longest length"),
)
