"""A rank without values holds and sends what a real one does, and the stored table is what it counts."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.config.layout import Layout
from scripts.bench import layouts
from tests.trainer.ranks import run_jobs
from trainer.build import build_policy, build_step
from trainer.dry_run.collectives import Collectives
from trainer.dry_run.rank import dry_run, train_rows, without_limits
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import local

STORED: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(layouts.RESULT.read_text())["rows"]}
CASES = {case.name: case for case in layouts.cases()}
QUICK = (
    "Qwen3-8B, ranks 1024, shard 64, rank 0, 2 layers",
    "Qwen3-8B, ranks 1024, context 8, rank 0, 2 layers, nothing recomputed",
    "Qwen3-30B-A3B, ranks 1024, shard 256, tensor 4, expert 64, rank 0, 2 layers",
)
ROW_TOKENS, SAMPLE_TOKENS = 32, 16
REAL = (Layout(ranks=2, shard=2), Layout(ranks=2, tensor=2), Layout(ranks=2, context=2), Layout(ranks=2, pipeline=2))
"""Without experts: real tokens choose theirs unevenly."""


def test_the_table_has_every_rank_that_is_listed() -> None:
    assert list(STORED) == list(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_rank_of_a_thousand_is_counted_as_it_is_stored(name: str) -> None:
    assert layouts.count(CASES[name]) == STORED[name]


def test_the_documentation_has_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "layouts.md"
    assert layouts.markdown(list(STORED.values())) in page.read_text()


@pytest.mark.process
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="real collectives between processes need two cores to end in time")
def test_two_real_ranks_hold_and_send_what_pretended_ones_do(folders: dict[str, Path], tmp_path: Path) -> None:
    """Over gloo: the same collectives, as many and of as many bytes, and weights of the same size."""
    configs = [_config(folders["qwen3"], layout) for layout in REAL]
    jobs = [(config.trainer.layout, functools.partial(_real, config=config)) for config in configs]
    for config, of_ranks in zip(configs, run_jobs(jobs, tmp_path), strict=True):
        for rank, found in enumerate(of_ranks):
            dry = dry_run(config, rank=rank, num_rows=_num_rows(config), sample_tokens=SAMPLE_TOKENS)
            expected = {f"{kind} of {ranks}": [one.calls, one.bytes] for (kind, ranks), one in dry.collectives.items()}
            assert found == {"weights": dry.weights_bytes, **expected}, config.trainer.layout


def _real(replicas: Replicas, *, config: Config) -> dict[str, Any]:
    policy = build_policy(config, replicas=replicas)
    step = build_step(config, policy=policy, critic=None, replicas=replicas, first_step=0)
    with Collectives() as collectives:
        train_rows(step, config, num_rows=_num_rows(config), sample_tokens=SAMPLE_TOKENS)
    storages = [local(piece).untyped_storage() for piece in policy.model.pieces().values()]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    sent = {f"{kind} of {ranks}": [one.calls, one.bytes] for (kind, ranks), one in collectives.found.items()}
    return {"weights": sum(weights.values()), **sent}


def _config(folder: Path, layout: Layout) -> Config:
    parallel = {kind: getattr(layout, kind) for kind in ("shard", "context", "tensor", "pipeline")}
    tree = {
        "model": {"path": str(folder), "dtype": "float32"},
        "trainer": {"ranks": layout.ranks, "parallel": parallel},
        "batch": {"max_tokens": ROW_TOKENS},
        "rollout": {"max_tokens": SAMPLE_TOKENS},
    }
    return without_limits(parse(tree, origin="test", for_run=False))


def _num_rows(config: Config) -> int:
    return 4 * config.trainer.layout.pipeline if config.trainer.layout.pipeline > 1 else 2
