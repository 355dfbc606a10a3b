"""Routing replay in the trainer: recorded experts, live gates, whatever the layout; and tables of routes."""

import functools
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.config.layout import Layout
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from pipelinerl.data.expert_routes import dtype_for, joined, num_unrouted, routes_of, table_of, unknown
from pipelinerl.errors import ConfigError
from pipelinerl.messages import MicroBatch, Routes
from pipelinerl.transport.codec import Decoder, encode
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step
from trainer.model.routing_replay import RoutingReplay
from trainer.parallel.replicas import Replicas

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def _samples() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(8)
    samples = [make_sample(generator, prompt=4, completion=int(generator.integers(2, 9))) for _ in range(8)]
    for sample in samples[:3]:
        sample["token_ids"][:4] = samples[0]["token_ids"][:4]  # a prompt that is computed once
    return samples


def _routed(samples: list[dict[str, np.ndarray]], *, step: int = 0, index: int = 0) -> MicroBatch:
    """A row whose tokens go to experts drawn by their own ids and places; of every third token nothing is known."""
    batch = make_batch(samples, step=step, index=index)
    places = np.concatenate([np.arange(len(sample["token_ids"])) for sample in samples])
    first = (batch.token_ids[:, None] * 7 + places[:, None] + np.arange(LAYERS)) % EXPERTS
    table = np.stack((first, (first + 1 + batch.token_ids[:, None] % 2) % EXPERTS), -1).astype(np.uint8)
    table[places % 3 == 2] = 255
    return msgspec.structs.replace(batch, routes=routes_of(table))


def test_indices_are_the_record_and_probabilities_the_gates(folders: dict[str, Path]) -> None:
    module = make_model(folders["qwen3_moe"]).module
    router: Any = module.get_submodule("model.layers.1.mlp.gate")
    replay = RoutingReplay(module)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    logits, scores, native = router(hidden)
    recorded = (native + 1) % EXPERTS
    replay.routes = torch.stack((torch.zeros_like(recorded), recorded), 1).to(torch.int16)
    replay.routes[2] = -1
    replayed_logits, replayed_scores, chosen = router(hidden)
    assert torch.equal(replayed_logits, logits)
    assert torch.equal(chosen[:2], recorded[:2])
    assert torch.equal(chosen[2], native[2]), "what is not known is routed as usual"
    probabilities = logits.softmax(-1).gather(-1, chosen)
    torch.testing.assert_close(replayed_scores, probabilities / probabilities.sum(-1, keepdim=True))
    torch.testing.assert_close(replayed_scores[2], scores[2])
    assert float(torch.autograd.grad(replayed_scores[0, 0], router.weight)[0].norm()) > 0, "gates learn"


def test_a_model_without_experts_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM is no mixture of experts"):
        make_model(folders["qwen3"], replay_routing=True)


def _train(
    replicas: Replicas,
    *,
    folder: Path,
    split: tuple[int, ...] = (3, 5),
    replays: bool = True,
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE,
) -> dict[str, Any]:
    model = make_model(folder, replicas=replicas, replay_routing=replays, activation_checkpointing=activation_checkpointing)
    step, _ = make_step(model, replicas=replicas, replay_routing=replays, max_grad_norm=0.5)
    rows = np.split(np.arange(8), np.cumsum(split)[:-1])
    samples = _samples()
    for index in range(replicas.number, len(rows), replicas.layout.replicas):
        step.add(_routed([samples[number] for number in rows[index]], index=index))
    step.train_held(make_seal(samples))
    metrics = step.finish(make_seal(samples))
    return {"weights": {name: tensor.clone() for name, tensor in model.tensors().items()}, "metrics": metrics}


def test_a_row_is_trained_by_its_record_however_it_is_packed(folders: dict[str, Path]) -> None:
    alone = functools.partial(_train, Replicas(ranks=1, deadline_s=60), folder=folders["qwen3_moe"])
    expected = alone()
    places = [len(sample["token_ids"]) - 1 for sample in _samples()]
    lasts = sum(place % 3 == 2 for place in places)
    known = sum(sum(place % 3 != 2 for place in range(last + 1)) for last in places)
    total = sum(last + 1 for last in places)
    assert expected["metrics"]["num_unrouted_tokens"] == total - known - 8
    assert lasts < 8
    other = alone(replays=False)
    assert other["metrics"]["loss"] != pytest.approx(expected["metrics"]["loss"], rel=1e-3)
    assert "num_unrouted_tokens" not in other["metrics"]
    for split in ((8,), (1, 2, 5)):
        got = alone(split=split)
        assert got["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-5)
        for name, weight in got["weights"].items():
            assert torch.allclose(weight, expected["weights"][name], atol=2e-4), name


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
def test_every_layout_replays_alike(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also where several rows go through a layer before the first comes back to it, and it is computed again then."""
    job = functools.partial(_train, folder=folders["qwen3_moe"])
    expected = job(Replicas(ranks=1, deadline_s=60))
    kinds: list[dict[str, Any]] = [{kind: 2} for kind in ("shard", "tensor", "context", "expert", "pipeline")]
    layouts = [Layout(ranks=2), *(Layout(ranks=2, **kind) for kind in kinds)]
    jobs = [(layout, job) for layout in layouts] + [
        (layouts[-1], functools.partial(job, activation_checkpointing=ActivationCheckpointing.FULL))
    ]
    for ranks in run_jobs(jobs, tmp_path):
        for rank in ranks:
            assert rank["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-4)
            assert rank["metrics"]["num_unrouted_tokens"] == expected["metrics"]["num_unrouted_tokens"]
            for name, weight in rank["weights"].items():
                assert torch.allclose(weight, expected["weights"][name], atol=2e-4), name


def test_tables_travel_in_the_smallest_type_that_holds_them() -> None:
    assert [dtype_for(count).itemsize for count in (4, 255, 256, 512)] == [1, 1, 2, 2]
    for dtype in (np.uint8, np.uint16):
        table = np.arange(12).reshape(2, 3, 2).astype(dtype)
        routes = Decoder[Routes](Routes).decode(encode(routes_of(table)))
        assert (routes.num_rows, routes.width) == (2, table.itemsize)
        assert np.array_equal(table_of(routes), table)


def test_sequences_join_with_unknown_rows_where_nothing_is_known() -> None:
    table = np.array([[[1, 2]], [[3, 0]]], np.uint8)
    whole = joined([routes_of(table), None], lengths=[3, 2])
    assert whole is not None
    assert unknown(table_of(whole)).tolist() == [False, False, True, True, True]
    assert num_unrouted(whole, lengths=np.array([3, 2], np.int32)) == 1
    assert num_unrouted(None, lengths=np.array([3, 2], np.int32)) == 3
    assert joined([None, None], lengths=[3, 2]) is None


def test_bytes_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes are no rows of 2 x 2 numbers of 1 bytes"):
        Routes(num_layers=2, top_k=2, width=1, experts=np.zeros(7, np.uint8))
