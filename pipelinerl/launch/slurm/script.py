"""Config -> sbatch script: a pure function, so that what will be submitted can be read, compared and kept.

The script is the one owner of the requeue. A heterogeneous job is submitted again instead: one that was requeued stays pending for ever
(seen with Slurm 22.05, where backfill alone starts such jobs). sbatch options that would make a second owner, or change what the script
relies on, are refused.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launch.placement import Group, groups_of
from pipelinerl.launch.supervisor import UNFINISHED

EARLY_S = 60
"""Slurm may send its signal up to a minute before the time asked for, and looks only once in so long."""
OWNED = (
    "requeue",
    "no-requeue",
    "signal",
    "dependency",
    "open-mode",
    "output",
    "error",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "time",
    "job-name",
)
"""sbatch options that the script sets itself."""


def render(config: Config, *, run_folder: Path, python: str) -> str:
    """The script. Raises `ConfigError` for options that the script sets itself."""
    section = config.slurm
    given = [("options", option) for option in section.options] + [("engine_options", option) for option in section.engine_options]
    for key, option in given:
        name = option.lstrip("-").partition("=")[0].partition(" ")[0]
        if not option.startswith("--") or name in OWNED:
            hint = "the script sets it itself" if name in OWNED else "an option is `--name=value`"
            raise ConfigError(f"slurm.{key}: {option!r} cannot be used: {hint}")
    return "\n".join((*_head(config, run_folder), "", *_body(config, run_folder, python), ""))


def _head(config: Config, run_folder: Path) -> list[str]:
    section, (first, *others) = config.slurm, _components(config)
    is_het = bool(others)
    lines = [
        "#!/usr/bin/env bash",
        f"# {config.run.name}: made by `pipelinerl slurm`; what each node runs stands in {run_folder / 'roles.json'}.",
        f"#SBATCH --job-name={config.run.name}",
        f"#SBATCH --nodes={first.count}",
        *_size(config, gpus=first.gpus),
        f"#SBATCH --time={section.time}",
        f"#SBATCH --output={run_folder / 'logs'}/slurm-%j.log",
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=B:USR1@{section.save_s + EARLY_S}",
        {
            "requeue": "#SBATCH --no-requeue" if is_het else "#SBATCH --requeue",
            "chain": "#SBATCH --no-requeue --dependency=singleton",
            "end": "#SBATCH --no-requeue",
        }[section.at_limit],
        *(f"#SBATCH {option}" for option in section.options),
    ]
    for group in others:
        lines += ["#SBATCH hetjob", f"#SBATCH --nodes={group.count}", *_size(config, gpus=group.gpus), f"#SBATCH --time={section.time}"]
        lines += [f"#SBATCH {option}" for option in section.engine_options if group.name == "engines"]
    return lines


def _components(config: Config) -> tuple[Group, ...]:
    """The nodes by what they are asked for with; several make the job a heterogeneous one."""
    return groups_of(config.slurm, are_engines_other=bool(config.slurm.engine_options))


def _size(config: Config, *, gpus: int) -> list[str]:
    """Return the options by which one component asks for its part of every node."""
    section = config.slurm
    wanted = {
        "ntasks-per-node": "1",
        "cpus-per-task": str(section.cpus_per_node),
        "gpus-per-node": str(gpus) if gpus else None,
        "mem": section.memory_per_node,
        "partition": section.partition,
        "account": section.account,
    }
    return [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None]


def _body(config: Config, run_folder: Path, python: str) -> list[str]:
    section, num_components = config.slurm, len(_components(config))
    run, interpreter = shlex.quote(str(run_folder)), shlex.quote(python)
    submit = 'sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" "$run/job.sbatch"'
    go_on = {
        "requeue": f'echo "attempt $attempt saved; submitted again as job $({submit})"; code=0'
        if num_components > 1
        else 'echo "attempt $attempt saved; requeue"; scontrol requeue "$SLURM_JOB_ID"',
        "chain": 'echo "attempt $attempt saved; the next job of this name goes on"; code=0',
        "end": 'echo "attempt $attempt saved, and is not to go on by itself"; code=0',
    }[section.at_limit]
    return [
        "set -uo pipefail",
        f"run={run}",
        "",
        "# An attempt is one start of this job, or one job of a chain.",
        'attempt=$(find "$run/logs" -maxdepth 1 -name "attempt-*" | wc -l)',
        'mkdir -p "$run/logs/attempt-$attempt"',
        "# The wish to save is a file: a signal passed on by srun would reach, and end, every process of the run.",
        'trap \'echo "attempt $attempt: USR1, saving"; echo USR1 >"$run/logs/attempt-$attempt/save"\' USR1',
        "",
        'ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"',
        *section.setup,
        "",
        'for old in failures endpoints; do [[ -d $run/$old ]] && mv "$run/$old" "$run/logs/attempt-$attempt/$old-before"; done',
        'echo "attempt $attempt: job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, $SLURM_JOB_NODELIST, $(date -u +%FT%TZ)"',
        "",
        "# The budget counts from the start of the allocation, whenever the run itself got going.",
        'until=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e | head -n 1)" +%s)',
        "",
        "srun --kill-on-bad-exit=1"
        + (f" --het-group={','.join(map(str, range(num_components)))}" if num_components > 1 else "")
        + ' --output="$run/logs/attempt-$attempt/supervisor-%N-%t.log" \\',
        f'    {interpreter} -m pipelinerl.launch.slurm --run-folder "$run" --attempt "$attempt" --until "$until" &',
        "step=$!",
        "trap 'echo \"attempt $attempt: TERM\"' TERM",
        "# A trap interrupts wait, so wait again until the step has ended.",
        'while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done',
        'echo "attempt $attempt ended with $code"',
        "",
        "# The one owner of the requeue. Any other code is the end.",
        f"if ((code == {UNFINISHED})); then {go_on}; fi",
        'exit "$code"',
    ]
