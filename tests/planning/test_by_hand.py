"""Every row of speed, sync, staleness and cost, worked a second time with the numbers of two runs on H100s, in plain arithmetic."""

from __future__ import annotations

import math

import pytest

from tests.planning.runs import figures_of, inputs_of

H100 = {"peak": 989.4e12, "memory": 3.35e12, "link": 450e9, "card": 50e9, "host": 50e9, "bytes": 81559 * 2**20}
N = 7_615_616_512
TABLE = 152_064 * 3584
"""Qwen2.5-7B: all parameters, and those of one table of embeddings."""


def test_a_dense_run_over_every_kind_of_rank() -> None:
    """Qwen2.5-7B: 16 ranks of 2 copies x context 2 x tensor 2 x pipeline 2; two engines of tensor 2 x pipeline 2.

    32 groups of 8 of 256 + 1,024 tokens: 327,680 tokens in rows of at most 8,192: 20 for each of two replicas, whole.
    """
    found = figures_of(
        "Qwen2.5-7B",
        given={"length_cv": 0.5, "mean_tokens": 1024.0},
        rollout={"max_tokens": 2048},
        model={"max_tokens": 2304},
        batch={"max_tokens": 8192, "groups_per_step": 32},
        trainer={"ranks": 16, "parallel": {"context": 2, "tensor": 2, "pipeline": 2}, "steps": 50},
        engine={"count": 2, "max_running": 96, "options": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
    )

    def holds(**expected: float) -> None:
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-9), name

    share = N / 4
    matmul = N - TABLE
    holds(replicas=2, used_gpus=24, is_one_machine=0, chosen_transport=3, rank_parameters=share)
    # An engine rank: a fourth of the weights twice, one layer's pass over 8,192 tokens, and the logits of 96 sequences.
    pass_bytes = 8192 * 2 * (3 * 3584 + 3 * 18944 / 2) + 96 * 152_064 * 26
    cache = H100["bytes"] * 0.96 - 4 * share - pass_bytes - 2 * 2**30
    token = 14 * 1024 * 2 / 2
    context = 256 + 1024 * 1.25 / 2
    holds(engine_pass_bytes=pass_bytes, kv_cache_bytes=cache, kv_tokens=cache / token, engine_rank_bytes=H100["bytes"] * 0.96)
    holds(engine_left_bytes=cache + 2 * share, stages_on_host=0, staged_bytes=2 * share)
    holds(wanted_cache_bytes=min((96 * 2304 + 2304) * token, (cache + 2 * share) / 2))
    holds(engine_rank_room=cache / token - (256 + 2048), decode_context=context, kv_running=cache / token / context)
    holds(admitted_running=5 * 256 / 2, running=96, experts_read=0)
    # A pass reads a stage's weights without the input embeddings, and the cache of half of the sequences.
    read = (matmul * 2 / 4 + 48 * context * token) / (H100["memory"] * 0.7)
    flops = 2 * matmul + 2 * 28 * context * 7168
    compute = 48 * flops / (4 * H100["peak"] * 0.5)
    sums = 2 * 14 * (1e-5 + 2 * 0.5 * 48 * 3584 * 2 / H100["link"])
    stage = max(read, compute) + sums + 2e-3 + 96 * 5e-6
    prefill = 256 / 1024 * 2 * matmul / (4 * H100["peak"] * 0.5)
    rate = 1 / (2 * stage / 96 + prefill)
    holds(
        read_s=read, decode_flops=flops, decode_compute_s=compute, decode_reduce_s=sums, stage_s=stage, pass_s=2 * stage, prefill_s=prefill
    )
    alone = 2 * (matmul * 2 / 4 / (H100["memory"] * 0.7) + 2e-3)
    holds(alone_s=alone, engine_rate=rate, generated_rate=2 * rate, sequence_s=1024 * 96 / rate, longest_s=2048 * 96 / rate)
    # A row: 8,192 tokens, each with (256 + 1,024 x 1.25) / 2 before it; two sums a layer each way.
    before = (256 + 1024 * 1.25) / 2
    forward = 2 * matmul + 2 * 28 * 7168 * before
    row_compute = 8192 * forward * 3 / (8 * H100["peak"] * 0.3)
    row_sums = 8 * 0.5 * 14 * 4096 * 3584 * 2 / H100["link"]
    bubble = 1 / 21
    row = (row_compute + row_sums) / (1 - bubble)
    holds(trained_tokens=327_680, rows_per_replica=20, row_length=8192, mean_context=before, forward_flops=forward, passes=3)
    holds(row_compute_s=row_compute, row_gather_s=0, row_reduce_s=row_sums, row_expert_s=0, bubble=bubble, row_s=row)
    update = share * 28 / H100["memory"] + 8 * share / H100["link"]
    training = 20 * row + update
    trained = 262_144 / training
    holds(link_bandwidth=H100["link"], update_s=update, training_s=training, trained_rate=trained)
    holds(training_mfu=327_680 * forward * 3 / (training * 16 * H100["peak"]))
    # The policy: 2 N bytes, gathered, then by gloo to each of two engines.
    policy = 2 * N
    gather, commit = policy / H100["link"], 2 * policy / 4 / H100["memory"]
    gloo = gather + 2 * policy / 5e9 + commit
    holds(gather_s=gather, commit_s=commit, sync_gloo_s=gloo, sync_s=gloo, sync_cuda_ipc_s=gather + policy / H100["link"] + commit)
    holds(
        sync_shared_memory_s=gather + policy / H100["host"] + policy / 4 / H100["host"] + commit,
        sync_files_s=gather + 3 * policy / 2e9 + commit,
    )
    holds(sync_nccl_s=gather + 2 * policy / H100["card"] + commit, sync_delta_s=0.012 * N * 6 / H100["card"] + commit)
    # Streaming: the slower side, and a policy on its way for at most four steps.
    step = max(262_144 / min(2 * rate, trained), gloo / 4)
    passes = (256 / 2 / 96 - 1) * 1024 + 2048
    batch = passes * alone + 262_144 / 2 * ((2 * stage - alone) / 96 + prefill)
    holds(speed_ratio=2 * rate / trained, step_s=step, run_rate=262_144 / step, batch_passes=passes, batch_s=batch)
    holds(turns_step_s=batch + training + gloo, streaming_gain=(batch + training + gloo) / step)
    holds(engines_idle=1 - 262_144 / (2 * rate) / step, trainer_idle=1 - training / step)
    tail = 1 + 0.5 * math.sqrt(3) * 7 / 9
    ratio = 2 * rate / trained
    queue = max(1, 5 - 192 / 256)
    waits = (2 * queue + ratio - 1) / (2 * ratio) if ratio > 1 else ratio
    flight = 192 * tail / (256 * max(1, ratio))
    holds(tail=tail, in_flight=192, queue_steps=queue, flight_staleness=flight, queue_staleness=waits, sync_staleness=gloo / step)
    holds(expected_staleness=min(4, flight + waits + gloo / step), longest_lag=2)
    run = 50 * step + 2048 * 96 / rate
    holds(
        run_s=run, gpu_hours=run * 24 / 3600, tokens_per_gpu=262_144 / step / 24, million_tokens_gpu_hours=1e6 * 24 * step / 262_144 / 3600
    )


def test_a_mixture_whose_experts_lie_apart() -> None:
    """Qwen3-30B-A3B: 16 ranks, shards over all, each expert on one of 16; engines of one. Layers are computed again."""
    found = figures_of(
        "Qwen3-30B-A3B",
        gpu="h200",
        batch={"max_tokens": 4096, "groups_per_step": 16},
        trainer={"ranks": 16, "parallel": {"shard": 16, "expert": 16}, "activation_checkpointing": "full"},
        engine={"count": 4, "max_running": 64},
    )
    experts = 48 * 128 * 3 * 2048 * 768
    table = 151_936 * 2048
    rest = 30_532_122_624 - experts - 2 * table
    layer = rest / 48 + experts / 48 / 16
    assert found["layer_parameters"] == pytest.approx(layer)
    assert found["gathered_bytes"] == pytest.approx(layer * 8 + 2 * table / 1 / 1 * 2)
    assert found["link_bandwidth"] == found["expert_bandwidth"] == 50e9, "more than a node"
    assert found["chosen_transport"] == 2, "engines of one rank on several machines: NCCL"
    assert found["published_bytes"] == 6 * 30_532_122_624
    kept = 2 * 2048 * 8 + 6 * (4096 + 512) + 2 * (4096 + 4096 + 1024 + 4 * 8 * 768)
    assert found["layer_kept_bytes"] == pytest.approx(kept)
    assert found["activation_bytes"] == pytest.approx(4096 * (48 * 2048 * 2 + kept))
    logits = 12 * 2**23 + 2 * 4096 * 2048 * 2
    assert found["at_head_bytes"] == pytest.approx(2 * table * 2 + layer * 2 + 4096 * 48 * 2048 * 2 + logits + table * 6)
    assert found["at_layer_bytes"] == pytest.approx(found["gathered_bytes"] + table * 2 + found["activation_bytes"])
    assert found["at_end_bytes"] == pytest.approx(2 * table * (2 + 4)), "both tables, and both in float32 to be reduced"
    total = 16 * 30_532_122_624 / 16 + found["at_head_bytes"] + found["published_bytes"] + 1.5e9
    assert found["trainer_rank_bytes"] == pytest.approx(total)
    assert found["trainer_rank_room"] == pytest.approx(143_771 * 2**20 * 0.95 - total)
    tokens = 16 * 8 * (256 + 512)
    rows = math.ceil(tokens / (4096 * 16))
    length = tokens / rows / 16
    assert (found["rows_per_replica"], found["row_length"]) == (rows, length)
    assert found["row_gather_s"] == pytest.approx(8 * layer * 48 / 50e9)
    assert found["row_expert_s"] == pytest.approx(6 * 15 / 16 * 48 * length * 8 * 2048 * 2 / 50e9)
    assert found["passes"] == 4
    assert found["row_s"] == pytest.approx(max(found["row_compute_s"], found["row_gather_s"]) + found["row_expert_s"])
    running = found["running"]
    assert found["experts_read"] == pytest.approx(1 - (15 / 16) ** running)
    once = rest + table
    read = (once + found["experts_read"] * experts) * 2 + running * found["decode_context"] * 48 * 1024 * 2
    assert found["read_bytes"] == pytest.approx(read)
    assert found["alone_s"] == pytest.approx((once + experts / 16) * 2 / (4.8e12 * 0.7) + 2e-3)


def test_passes_of_more_epochs_references_and_critics() -> None:
    plain = figures_of("Qwen2.5-7B")["passes"]
    assert plain == 3
    assert figures_of("Qwen2.5-7B", trainer={"epochs": 2})["passes"] == 7, "two updates, and one pass for the old log-probabilities"
    assert figures_of("Qwen2.5-7B", algorithm={"name": "ppo"})["passes"] == 7, "a critic's forward, forward and backward"


@pytest.mark.parametrize(
    ("engine_ranks", "engines", "mode", "chosen"), [(1, 2, 0, 0), (2, 2, 0, 1), (1, 30, 0, 2), (4, 30, 0, 3), (4, 30, 3, 0)]
)
def test_how_a_policy_travels_by_itself(engine_ranks: int, engines: int, mode: int, chosen: int) -> None:
    """As `orchestrator.rules.weight_transport` chooses, and what takes turns on the same GPUs stays on them."""
    run = inputs_of("Qwen2.5-7B") | {"engine_tensor": float(engine_ranks), "engines": float(engines), "mode": float(mode)}
    assert figures_of("Qwen2.5-7B", given=run)["wanted_transport"] == chosen


def test_a_policy_without_room_on_the_trainers_gpu_goes_through_shared_memory() -> None:
    """Three of 15.2 GB beside 44.1 of training leave an H100; beside an H200's there is room."""
    run = {"trainer": {"ranks": 4, "parallel": {"shard": 4}, "activation_checkpointing": "full"}, "engine": {"count": 4}}
    full = figures_of("Qwen2.5-7B", batch={"max_tokens": 16384}, **run)
    assert (full["wanted_transport"], full["chosen_transport"], full["published_bytes"]) == (0, 1, 0)
    assert full["trainer_rank_bytes"] == full["training_bytes"] == pytest.approx(44.1e9, rel=0.01)
    assert figures_of("Qwen2.5-7B", gpu="h200", batch={"max_tokens": 16384}, **run)["chosen_transport"] == 0


def test_a_mode_in_which_both_wait_for_each_other_takes_the_slower_of_them() -> None:
    one_step_off = figures_of("Qwen2.5-7B", pipeline={"mode": "one_step_off"})
    assert one_step_off["step_s"] == max(one_step_off["batch_s"], one_step_off["training_s"]) + one_step_off["sync_s"]
    assert one_step_off["expected_staleness"] == 1


def test_engines_and_trainer_in_turns_share_gpus_their_memory_and_a_step() -> None:
    """Qwen2.5-7B on eight GPUs, fully sharded; an engine of one rank on each.

    Between two phases a trainer rank keeps an eighth of the weights, in float32, and of the optimizer's moments; the rest is the engine's,
    which is woken by the policy that it needs, so none is staged beside its weights.
    """
    run = {"trainer": {"ranks": 8, "parallel": {"shard": 8}}, "engine": {"count": 8, "max_running": 64}, "rollout": {"max_tokens": 2048}}
    load = {"batch": {"max_tokens": 4096}, "model": {"max_tokens": 4096}, "given": {"mean_tokens": 1024.0, "length_cv": 0.5}}
    whole = figures_of("Qwen2.5-7B", **run, **load, pipeline={"placement": "colocated", "mode": "sync"})
    carried = figures_of("Qwen2.5-7B", **run, **load, pipeline={"placement": "colocated"})
    apart = figures_of("Qwen2.5-7B", **run, **load)
    assert (whole["used_gpus"], carried["used_gpus"], apart["used_gpus"]) == (8, 8, 16)
    resident = N / 8 * (4 + 8) + 1.5e9
    assert carried["resident_bytes"] == pytest.approx(resident)
    assert carried["kv_cache_bytes"] == pytest.approx(apart["kv_cache_bytes"] + apart["staged_bytes"] - resident)
    assert carried["trainer_rank_room"] == pytest.approx(apart["trainer_rank_room"] + apart["published_bytes"] - 2 * 2**30)
    assert whole["step_s"] == whole["turns_step_s"] + 10
    assert whole["expected_staleness"] == 0
    # Each of 64 sequences has 256 + 1024 * 1.25 / 2 tokens in its cache, which a prompt's speed computes anew.
    prompt_token_s = 2 * (N - TABLE) / (H100["peak"] * 0.5)
    again = 64 * (256 + 640) * prompt_token_s
    assert carried["recompute_s"] == pytest.approx(again)
    tokens = carried["step_tokens"]
    assert carried["step_s"] == pytest.approx(tokens / carried["generated_rate"] + again + carried["training_s"] + carried["sync_s"] + 10)
    assert carried["step_s"] < whole["step_s"], "nobody waits for the longest of a batch"
    tail = min(2.0, 1 + 0.5 * math.sqrt(3) * 7 / 9)
    assert carried["expected_staleness"] == pytest.approx(min(4.0, 8 * 64 * tail / (tokens / 1024)))


def test_engines_apart_have_gpus_of_their_own_and_write_while_the_trainer_has_its_turn() -> None:
    """Four trainer ranks on the GPUs of four engines, and an engine apart: five GPUs."""
    run = {"trainer": {"ranks": 4, "parallel": {"shard": 4}}, "rollout": {"max_tokens": 2048}, "pipeline": {"placement": "colocated"}}
    load = {"batch": {"max_tokens": 4096}, "model": {"max_tokens": 4096}, "given": {"mean_tokens": 1024.0, "length_cv": 0.5}}
    mixed = figures_of("Qwen2.5-7B", **run, **load, engine={"count": 5, "apart": 1})
    turns = figures_of("Qwen2.5-7B", **run, **load, engine={"count": 5})
    assert (mixed["used_gpus"], turns["used_gpus"]) == (5, 5)
    turn_s = mixed["training_s"] + mixed["sync_s"] + 2 * 5.0
    beside = mixed["engine_rate"] * turn_s
    assert 0 < beside < mixed["step_tokens"]
    assert mixed["step_s"] == pytest.approx(turns["step_s"] - beside / mixed["generated_rate"])
    assert figures_of("Qwen2.5-7B", **run, **load, engine={"count": 3, "apart": 1})["used_gpus"] == 5, (
        "ranks without an engine have theirs, too"
    )
