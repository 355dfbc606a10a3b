"""`python -m orchestrator.draft MODEL DATA`: what `pipelinerl init` starts, in a process of its own because rows may be the user's code."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from orchestrator.draft.look import look_at_data, look_at_model
from orchestrator.draft.propose import Machine, propose
from pipelinerl.config.file import load
from pipelinerl.data.hub import resolved
from pipelinerl.errors import ConfigError, PipelineError
from pipelinerl.launch.preflight import check
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.findings import Level, refuse, show
from pipelinerl.runtime.machine import memory_bytes


def main() -> None:
    """Look, write, and make every check that a run makes before its start."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.draft", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompt-column")
    parser.add_argument("--answer-column")
    parser.add_argument("--reward")
    parser.add_argument("--force", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    try:
        _draft(arguments)
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _draft(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    reward_path = out.with_name(f"{out.stem}_reward.py")
    _refuse_to_overwrite(out, force=arguments.force)
    model = look_at_model(arguments.model)
    columns = {"prompt_column": arguments.prompt_column, "answer_column": arguments.answer_column}
    data = look_at_data(arguments.data, model=model, **columns)
    proposal = propose(model, data, machine(), reward=arguments.reward, reward_path=reward_path, name=out.stem)
    if proposal.reward_file is not None:
        _refuse_to_overwrite(reward_path, force=arguments.force)
        reward_path.write_text(proposal.reward_file)
        print(f"wrote {reward_path}")
    out.write_text(proposal.text)
    print(f"wrote {out}\n\n{proposal.text}")
    findings = check(resolved(load(out)), is_dry=True)
    show(findings, Console(), Level.OK, Level.NOTE, Level.WARN)
    refuse(findings)
    print(f"\nnext: pipelinerl try {out} --sample 4     what the model writes today, and what the reward says of it")
    print(f"      pipelinerl run {out}")


def machine() -> Machine:
    """Return this machine, as processes of a run would see it."""
    gpus = usable_gpus()
    return Machine(memory_bytes=sum(gpu.total_bytes for gpu in gpus) if gpus else memory_bytes(), num_gpus=len(gpus))


def _refuse_to_overwrite(path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: name another file with --out, or overwrite it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"no folder at {path.parent} (looked from {Path.cwd()}): name one that exists with --out")


if __name__ == "__main__":
    main()
