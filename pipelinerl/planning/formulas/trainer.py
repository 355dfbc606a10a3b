"""What a trainer rank holds, and how long a step of training takes.

Memory follows `trainer.optimizer` and `trainer.parallel.sharding`: gradients and moments are float32; a rank that holds whole tensors in 16
bits has a float32 copy that takes the updates; pieces of sharded tensors (FSDP2) are float32 by themselves and gathered layer by layer.
"""

from __future__ import annotations

from pipelinerl.planning.sheet import Row

TRAINER_MEMORY = (
    Row("replicas", "", "ranks / (context * tensor * pipeline)", "rows trained at once"),
    Row("is_sharded", "", "1 if shard > 1 else 0", "1: pieces are float32 and gathered layer by layer (FSDP2)"),
    Row("weight_share", "ranks", "(shard * context if shard > 1 else 1) * tensor * pipeline", "ranks that share one copy of the weights"),
    Row(
        "expert_share",
        "ranks",
        "(max(1, min(ranks / pipeline, experts)) * pipeline if shard > 1 else expert * pipeline) if expert > 1"
        " else max(1, min(shard * context, experts)) * tensor * pipeline if shard > 1 else weight_share",
        "ranks that share one copy of the experts, of which each holds whole ones where they are sharded (FSDP2 cuts the first dimension)",
    ),
    Row(
        "rank_tables",
        "tables",
        "embedding_tables if pipeline < 2 else 1",
        "tables of embeddings on one rank: a pipeline's ends have one each",
    ),
    Row("stage_layers", "layers", "ceil(layers / pipeline)", "layers of the fullest stage of a pipeline"),
    Row(
        "rank_parameters",
        "parameters",
        "((parameters - expert_parameters - embedding_tables * embedding_parameters) * stage_layers / layers"
        " + rank_tables * embedding_parameters) * pipeline / weight_share"
        " + expert_parameters * stage_layers / layers * pipeline / expert_share",
        "parameters that the fullest rank holds",
    ),
    Row("rank_trained", "parameters", "trained_parameters / parameters * rank_parameters", "of them, those that are trained"),
    Row("trainer_weights_bytes", "B", "rank_parameters * (4 if is_sharded else dtype_bytes) * (1 - offloads_weights)", "weights"),
    Row("trainer_gradients_bytes", "B", "4 * rank_trained", "gradients, float32"),
    Row(
        "trainer_optimizer_bytes",
        "B",
        "rank_trained * (8 + (4 if dtype_bytes < 4 and is_sharded < 1 else 0)) * (1 - offloads_optimizer)",
        "two moments, and where weights are 16 bits wide the float32 copy that takes the updates",
    ),
    Row(
        "layer_parameters",
        "parameters",
        "(parameters - expert_parameters - embedding_tables * embedding_parameters) / layers / tensor"
        " + expert_parameters / layers / (expert if expert > 1 else tensor)",
        "one layer, as a rank computes it",
    ),
    Row(
        "gathered_bytes",
        "B",
        "is_sharded * (layer_parameters * (stage_layers * (dtype_bytes + 4) if pipeline > 1"
        " else min(1 + prefetch_layers, layers) * dtype_bytes + 4)"
        " + embedding_tables * embedding_parameters / tensor / min(pipeline, embedding_tables) * dtype_bytes)",
        "gathered weights and gradients: a layer, those gathered ahead, a layer's gradients (with a pipeline all), embeddings",
        "torch.distributed.fsdp.fully_shard: the root is not freed",
    ),
    Row("rank_tokens", "tokens", "row_tokens / context", "tokens of a row on one rank"),
    Row(
        "layer_kept_bytes",
        "B",
        "2 * hidden * (4 + 2 * dtype_bytes)"
        " + (4 + dtype_bytes) * normed_width / tensor"
        " + dtype_bytes * (query_width + value_width + (2 * query_width if is_latent else cache_width * context) + 4 * inner_width)"
        " / tensor",
        "kept per token and layer for the backward pass: norms (their input in float32), queries, keys and values (the whole"
        " row's), output, inner tensors",
        "counted on transformers' own modules by tests/planning; attention scores are not kept (arXiv 2205.14135)",
    ),
    Row(
        "again_kept_bytes",
        "B",
        "dtype_bytes * (hidden + keeps_products * ((2 + experts_per_token) * hidden + (query_width + value_width"
        " + (2 * query_width if is_latent else cache_width) + 2 * inner_width) / tensor))",
        "the same of a layer that is computed again: its input; with selective checkpointing also what its matrix products and its"
        " attention gave",
    ),
    Row(
        "activation_bytes",
        "B",
        "rank_tokens * ((layers * again_kept_bytes + layer_kept_bytes) if is_checkpointed else layers * layer_kept_bytes)",
        "activations: a pipeline's first rank keeps as many rows as it has ranks, of as many times fewer layers",
        "arXiv 2205.05198 (checkpointing), 2104.04473 (1F1B)",
    ),
    Row(
        "head_bytes",
        "B",
        "3 * 4 * min(logit_numbers, rank_tokens * vocabulary / tensor) + 2 * rank_tokens * hidden * dtype_bytes",
        "tables of logits of one piece, and its ends",
    ),
    Row("trains_all", "", "1 if trained_parameters >= parameters else 0", "1: all weights are trained, 0: adapters alone"),
    Row("table_bytes", "B", "embedding_parameters / tensor * dtype_bytes", "a rank's piece of a table of embeddings, as it computes"),
    Row("root_bytes", "B", "is_sharded * rank_tables * table_bytes", "gathered tables of embeddings, which stay through a pass"),
    Row(
        "kept_logits_bytes",
        "B",
        "min(32 * logit_numbers, 4 * rank_tokens * mean_tokens / (prompt_tokens + mean_tokens) * vocabulary / tensor)"
        " if 4 * rank_tokens * mean_tokens / (prompt_tokens + mean_tokens) * vocabulary / tensor <= 32 * logit_numbers else 0",
        "a table of logits small enough to be kept for the backward pass",
    ),
    Row(
        "pipeline_bytes",
        "B",
        "4 * pipeline * rank_tokens * hidden * dtype_bytes if pipeline > 1 else 0",
        "what a stage receives, for every row of a pass: trainer.backend puts four for each rank off",
    ),
    Row(
        "table_grad_bytes",
        "B",
        "4 if pipeline > 1 and is_sharded > 0 else dtype_bytes",
        "of a number of a table's gradient, added up over rows",
    ),
    Row(
        "at_head_bytes",
        "B",
        "root_bytes + is_sharded * layer_parameters * dtype_bytes * (stage_layers if pipeline > 1 else 1) + pipeline_bytes"
        " + rank_tokens * layers * (again_kept_bytes if is_checkpointed else layer_kept_bytes) / pipeline"
        " + head_bytes + kept_logits_bytes + trains_all * embedding_parameters / tensor * (4 + (dtype_bytes if dtype_bytes < 4 else 0))",
        "alive where the backward pass leaves the output embedding, whose gradient is added up in float32 and rounded",
    ),
    Row(
        "at_layer_bytes",
        "B",
        "gathered_bytes + pipeline_bytes + (trains_all * is_sharded * table_bytes if pipeline < 2 else 0) + activation_bytes",
        "alive where it is in the last layer",
    ),
    Row(
        "at_end_bytes",
        "B",
        "trains_all * max(embedding_parameters / tensor * table_grad_bytes * (1 + (tensor if tensor > 1 else 0))"
        " + (pipeline - 1) / pipeline * activation_bytes + pipeline_bytes"
        " + is_sharded * (root_bytes + (table_bytes if pipeline < 2 else 0) + 4 * layer_parameters),"
        " root_bytes * (1 + 4 / dtype_bytes))",
        "alive where it leaves the input embedding, whose gradient every rank makes whole, and where sharded tables are reduced in float32",
    ),
    Row(
        "step_bytes",
        "B",
        "max(at_head_bytes, at_layer_bytes, at_end_bytes)",
        "most that a step takes beside what stays: the worst of three moments",
    ),
    Row(
        "critic_bytes",
        "B",
        "critics * (trainer_weights_bytes + (trainer_gradients_bytes + trainer_optimizer_bytes) * parameters / trained_parameters)",
        "the second model that is trained, with its state",
    ),
    Row("reference_bytes", "B", "references * rank_parameters * dtype_bytes * (1 - offloads_reference)", "frozen models"),
    Row(
        "training_bytes",
        "B",
        "trainer_weights_bytes + trainer_gradients_bytes + trainer_optimizer_bytes + step_bytes"
        " + critic_bytes + reference_bytes + trainer_process_bytes",
        "all of a rank but policies on their way",
    ),
    Row(
        "chosen_transport",
        "",
        "1 if wanted_transport < 1 and mode < 3 and training_bytes + 3 * policy_parameters * dtype_bytes > gpu_bytes * usable_fraction"
        " else wanted_transport",
        "how policies do travel: one that finds no room on the first rank's GPU goes through shared memory",
        "pipelinerl.weights.transports: RoomierSender",
    ),
    Row(
        "published_bytes",
        "B",
        "3 * policy_parameters * dtype_bytes if mode < 3 and (chosen_transport < 1 or chosen_transport == 2) else 0",
        "policies on their way, on the first rank's GPU where the transport keeps them there",
    ),
    Row("trainer_rank_bytes", "B", "training_bytes + published_bytes", "all of the fullest rank"),
    Row(
        "offloaded_bytes",
        "B",
        "offloads_weights * rank_parameters * 4 + offloads_optimizer * rank_trained * (12 + 4 * (1 - is_sharded))"
        " + offloads_reference * references * rank_parameters * dtype_bytes",
        "on the host, for each rank",
    ),
    Row(
        "trainer_rank_room",
        "B",
        "gpu_bytes * usable_fraction - trainer_rank_bytes - (engine_process_bytes if mode >= 3 else 0)",
        "left, beside an engine that sleeps where it has the same GPU; below 0 it does not fit",
    ),
)

TRAINING = (
    Row("trained_tokens", "tokens", "groups_per_step * group_size * (prompt_tokens + mean_tokens)", "of one step, with prompts"),
    Row("rows_per_replica", "rows", "max(1, ceil(trained_tokens / (row_tokens * replicas)))", "packed rows of one step"),
    Row("row_length", "tokens", "trained_tokens / (rows_per_replica * replicas)", "tokens of a packed row, on average"),
    Row(
        "mean_context",
        "tokens",
        "(prompt_tokens + mean_tokens * (1 + length_cv ** 2)) / 2",
        "earlier tokens that a trained token attends to, on average",
    ),
    Row(
        "forward_flops",
        "FLOP",
        "2 * matmul_parameters + 2 * layers * (query_width + value_width) * mean_context",
        "one token forward: two for each parameter that multiplies it, and attention",
        "arXiv 2001.08361 section 2.1; PaLM (2204.02311) appendix B",
    ),
    Row(
        "passes",
        "",
        "(3 + is_checkpointed * (0.05 if keeps_products else 1)) * epochs + (1 if epochs > 1 else 0) + references + 4 * critics",
        "forward passes that a token costs; a backward pass counts as two, what selective checkpointing computes again as 0.05",
    ),
    Row(
        "row_compute_s",
        "s",
        "row_length * forward_flops * passes / (context * tensor * pipeline * peak_flops * training_efficiency)",
        "arithmetic of one row",
    ),
    Row(
        "link_bandwidth",
        "B/s",
        "nvlink_bandwidth if weight_share <= gpus_per_node else nic_bandwidth",
        "slowest link of the ranks that share weights",
    ),
    Row(
        "row_gather_s",
        "s",
        "is_sharded * ((2 * dtype_bytes if pipeline <= 1 else dtype_bytes / rows_per_replica) + 4)"
        " * layer_parameters * layers / pipeline / link_bandwidth",
        "sharded weights gathered forward and backward, gradients scattered, for every row; hidden behind arithmetic",
    ),
    Row(
        "tensor_bandwidth", "B/s", "nvlink_bandwidth if tensor <= gpus_per_node else nic_bandwidth", "link of the ranks that share matrices"
    ),
    Row(
        "row_reduce_s",
        "s",
        "0 if tensor < 2 else 8 * (tensor - 1) / tensor * layers / pipeline * row_length / context * hidden * dtype_bytes"
        " / tensor_bandwidth",
        "sums over tensor parallel ranks: two of each layer forward and two backward, each twice over the link",
        "arXiv 1909.08053 section 3",
    ),
    Row(
        "expert_bandwidth", "B/s", "nvlink_bandwidth if expert <= gpus_per_node else nic_bandwidth", "link of the ranks that share experts"
    ),
    Row(
        "row_expert_s",
        "s",
        "0 if expert < 2 else 6 * (expert - 1) / expert * layers / pipeline * row_length / context * experts_per_token * hidden"
        " * dtype_bytes / expert_bandwidth",
        "tokens sent to their experts and back, forward and twice backward",
    ),
    Row(
        "bubble",
        "",
        "(pipeline - 1) / (rows_per_replica + pipeline - 1)",
        "part of a pipeline's time in which a rank waits",
        "arXiv 2104.04473",
    ),
    Row("row_s", "s", "(max(row_compute_s, row_gather_s) + row_reduce_s + row_expert_s) / (1 - bubble)", "one row of one replica"),
    Row("update_bytes", "B", "rank_trained * 28", "an update reads gradient, weight and moments and writes them back"),
    Row(
        "update_s",
        "s",
        "update_bytes / (host_bandwidth if offloads_optimizer else bandwidth)"
        " + (0 if replicas <= shard else 8 * rank_trained / link_bandwidth)",
        "the optimizer's update, and the sum of gradients over copies",
    ),
    Row("training_s", "s", "rows_per_replica * row_s + update_s", "the trainer's work on one step"),
    Row("trained_rate", "tokens/s", "groups_per_step * group_size * mean_tokens / training_s", "T: sampled tokens trained per second"),
    Row(
        "training_mfu",
        "",
        "trained_tokens * forward_flops * 3 / (training_s * ranks * peak_flops)",
        "model FLOPs utilisation of the trainer while it works",
    ),
)
