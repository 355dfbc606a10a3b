"""`python -m orchestrator.replay RUN --stage scoring`: see `orchestrator.replay`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from orchestrator.data.sources import prompts_of
from orchestrator.ledger.ledger import Ledger
from orchestrator.replay.batching import replay_batching
from orchestrator.replay.differences import compare_batches, compare_prompts, compare_scores
from orchestrator.replay.generation import replay_generation
from orchestrator.replay.prm import replay_prm
from orchestrator.replay.prompts import replay_prompts
from orchestrator.replay.recorded import RecordedGroup, Recording, read_drawn, read_recording
from orchestrator.replay.scoring import replay_scoring
from orchestrator.replay.training import replay_training
from orchestrator.replay.weight_sync import replay_weight_sync
from pipelinerl.config import Config
from pipelinerl.config.file import load_run, write_run
from pipelinerl.data.tokenizer import ChatOptions, TextEncoder, load_tokenizer
from pipelinerl.errors import ConfigError, LedgerError, PipelineError
from pipelinerl.messages import ScoredTrajectory

STAGES = ("prompts", "generation", "prm", "scoring", "batching", "training", "weight_sync")
_OTHER_NAMES = {
    "group_rewards": "it is part of scoring",
    "comparing": "it is now called group_rewards, and part of scoring",
    "dispatch": "it is now called generation",
    "following": "it is now called prm",
    "delivery": "it is now called training",
    "refresh": "it is now called weight_sync",
}
"""Why a stage cannot be replayed by such a name."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.replay", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="a run's folder")
    parser.add_argument("overrides", nargs="*", help="section.key=value, over the run's settings")
    parser.add_argument("--stage", action="append", required=True, help=f"{', '.join(STAGES)}; several follow one another")
    arguments = parser.parse_args()
    try:
        replay(arguments.run_folder, stages=arguments.stage, overrides=arguments.overrides)
    except* PipelineError as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        print(f"{type(first).__name__}: {first}", file=sys.stderr)
        sys.exit(1)


def replay(run_folder: Path, *, stages: list[str], overrides: list[str]) -> None:
    """Replay the named stages and print what differs. Raises `ConfigError` for a stage that cannot run alone, `LedgerError`."""
    for stage in stages:
        if stage not in STAGES:
            why = _OTHER_NAMES.get(stage, "there is no such stage")
            raise ConfigError(f"{stage} cannot be replayed: {why}. These can: {', '.join(STAGES)}")
    config = load_run(run_folder, overrides=overrides)
    if "generation" in stages and config.environment.function is not None:
        raise ConfigError(
            "generation cannot be replayed: this run has an environment, and of its episodes only the end is recorded, not when each turn"
            " was asked for. The other stages can."
        )
    folder = run_folder / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for line in _replay(config, run_folder, folder=folder, stages=stages):
        print(line)
    print(f"every difference: {folder}")


def _replay(config: Config, run_folder: Path, *, folder: Path, stages: list[str]) -> Iterator[str]:
    """One after another, in the order of the pipeline."""
    if "prompts" in stages:
        encoder = TextEncoder(load_tokenizer(config.model.path), options=ChatOptions.of(config.data))
        yield from compare_prompts(replay_prompts(prompts_of(config, encoder=encoder)[0], read_drawn(run_folder / "ledger.sqlite")))
    if "generation" in stages:
        yield from replay_generation(config, run_folder=run_folder, folder=folder)
    if "prm" in stages:
        recording = read_recording(run_folder / "ledger.sqlite")
        yield from replay_prm(config, recording, run_folder=run_folder, folder=folder)
    if "weight_sync" in stages:
        yield from replay_weight_sync(config, run_folder=run_folder, folder=folder)
    if {"scoring", "batching", "training"} & set(stages):
        yield from _replay_groups(config, run_folder, folder=folder, stages=stages)


def _replay_groups(config: Config, run_folder: Path, *, folder: Path, stages: list[str]) -> Iterator[str]:
    recording = read_recording(run_folder / "ledger.sqlite")
    if not recording.groups:
        raise LedgerError(f"{run_folder} has no recorded group: none was settled yet, or run.record_groups was 0")
    write_run(folder, config)
    kept, all_of_them = len(recording.groups), recording.num_completed
    yield f"recorded: {kept:,} of {all_of_them:,} groups" + ("; run.record_groups says how many stay" if kept < all_of_them else "")
    path = run_folder / "ledger.sqlite"
    if {"scoring", "batching"} & set(stages):
        own_path = folder / "ledger.sqlite"
        with contextlib.closing(Ledger(own_path, keep_groups=kept)) as ledger:
            yield from asyncio.run(_run_stages(config, recording, folder=folder, ledger=ledger, stages=stages))
        if "batching" in stages:
            path, recording = own_path, read_recording(own_path)
    if "training" in stages:
        yield from replay_training(config, recording, ledger_path=path, folder=folder)


async def _run_stages(config: Config, recording: Recording, *, folder: Path, ledger: Ledger, stages: list[str]) -> list[str]:
    loop = asyncio.get_running_loop()
    ledger.begin({}, now_s=loop.time(), unix_s=time.time())
    groups = recording.groups if "scoring" in stages else recording.from_a_step_on()
    for group in groups:
        ledger.admit(group.group_id, group.prompt, group_size=len(group.members), position=(0, 0), now_s=loop.time())
    scored = await _scores(config, groups, folder=folder, ledger=ledger, again="scoring" in stages)
    said: list[str] = []
    if "scoring" in stages:
        said += compare_scores(groups, scored, path=folder / "scoring.jsonl", model_path=config.model.path)
    if "batching" in stages:
        tail = recording.from_a_step_on()
        await replay_batching(config, tail, scored=scored, folder=folder, ledger=ledger)
        ledger.flush()
        new = read_recording(folder / "ledger.sqlite")
        said += compare_batches(tail, new.groups, path=folder / "batching.jsonl")
    return said


async def _scores(config: Config, groups: list[RecordedGroup], *, folder: Path, ledger: Ledger, again: bool) -> dict[str, ScoredTrajectory]:
    members = [member for group in groups for member in group.members]
    if not again:
        for member in members:
            ledger.record_score(member, now_s=0.0)
        return {member.trajectory.rollout_id: member for member in members}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scoring", total=len(members))
        return await replay_scoring(config, groups, folder=folder, ledger=ledger, told=lambda done: bar.update(task, completed=done))


if __name__ == "__main__":
    main()
