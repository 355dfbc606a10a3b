"""Slurm jobs of engines that join a live run: short scripts, one for each node's worth of engines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelinerl.config import Config


def prepare(config: Config, run_folder: Path, engine_ids: Sequence[int], *, python: str) -> list[Path]:
    """Write a script for each node that the engines need, and return their paths."""
    return [_write(config, run_folder, ids, python=python) for ids in _by_node(config, engine_ids)]


def _by_node(config: Config, engine_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    gpus = _gpus_of_a_node(config)
    num_here = max(1, gpus // config.engine.num_ranks) if gpus else len(engine_ids)
    yield from (engine_ids[start : start + num_here] for start in range(0, len(engine_ids), num_here))


def _gpus_of_a_node(config: Config) -> int:
    section = config.slurm
    return section.gpus_per_node if section.engine_gpus_per_node is None else section.engine_gpus_per_node


def _write(config: Config, run_folder: Path, engine_ids: Sequence[int], *, python: str) -> Path:
    path = run_folder / "scale" / f"engines-{'-'.join(map(str, engine_ids))}.sbatch"
    path.write_text(render(config, run_folder, engine_ids, python=python))
    return path


def render(config: Config, run_folder: Path, engine_ids: Sequence[int], *, python: str) -> str:
    """The script. Slurm's signal reaches the engines' own launcher, which leaves word that they are gone; a requeued job brings them
    back."""
    section, ids = config.slurm, ",".join(map(str, engine_ids))
    wanted = {
        "job-name": f"{config.run.name}-engines",
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(section.cpus_per_node),
        "gpus-per-node": str(len(engine_ids) * config.engine.num_ranks) if _gpus_of_a_node(config) else None,
        "mem": section.memory_per_node,
        "partition": section.partition,
        "account": section.account,
        "time": section.time,
        "output": f"{run_folder / 'logs'}/slurm-engines-%j.log",
        "open-mode": "append",
    }
    own = {option.partition("=")[0]: option for option in (*section.options, *section.engine_options)}
    lines = [
        "#!/usr/bin/env bash",
        f"# Engines {ids} of {run_folder}: made by `pipelinerl scale`.",
        *(f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None and f"--{name}" not in own),
        "#SBATCH --requeue",
        *(f"#SBATCH {option}" for option in own.values()),
        "",
        "set -uo pipefail",
        'ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"',
        *section.setup,
        f"exec srun --kill-on-bad-exit=1 {shlex.quote(python)} -m pipelinerl engines {shlex.quote(str(run_folder))} --ids {ids}",
        "",
    ]
    return "\n".join(lines)
