"""Commands on a run's folder: reports and views of it, its ledger, its model, its stages once more."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pipelinerl.cli.app import Overrides, RunFolder, console, exit_as
from pipelinerl.errors import ConfigError
from pipelinerl.launch.run_folder import policy_folders

commands = typer.Typer()
PANEL = "Look at a run"
WHAT_IF_S = 180.0
"""Longest wait for what-ifs, which are bounded in seconds of a core; a machine that does much else takes longer for them."""


@commands.command(rich_help_panel=PANEL)
def watch(run_folder: RunFolder) -> None:
    """Follow a run in the terminal, from another window or after its end."""
    from pipelinerl.observe.report.reading import has_journal
    from pipelinerl.observe.terminal import show, show_all

    several = policy_folders(run_folder)
    for folder in several or (run_folder,):
        has_journal(folder)
    with contextlib.suppress(KeyboardInterrupt):
        following = show_all(several, console=console) if several else show(run_folder, console=console, until=asyncio.Event())
        asyncio.run(following)


@commands.command(rich_help_panel=PANEL)
def view(
    run_folder: RunFolder,
    port: Annotated[int, typer.Option(help="0: a free one")] = 0,
    interface: Annotated[str, typer.Option(help="where it listens; the page asks for the token in its address everywhere")] = "127.0.0.1",
) -> None:
    """Follow a run in the browser: the pipeline as a picture, curves, who waits for whom, samples. Works on a finished run, too.

    A run of several policies has an address for each.
    """
    from pipelinerl.observe.view.server import View

    several = policy_folders(run_folder)
    pages = [View(folder, interface=interface, port=port and port + number) for number, folder in enumerate(several or (run_folder,))]
    for folder, page in zip(several or (run_folder,), pages, strict=True):
        console.print(f"view{f' of {folder.name}' if several else ''}: {page.address}", soft_wrap=True)
    for page in pages[1:]:
        threading.Thread(target=page.serve, name="view", daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        pages[0].serve()


@commands.command(rich_help_panel=PANEL)
def report(
    run_folder: RunFolder,
    what_if: Annotated[bool, typer.Option(help="simulate what other settings would have made of it: at most a minute of a core")] = True,
) -> None:
    """Write a run's report: one self-contained HTML page. Works on a run under way, too.

    A run of several policies has one of each, and one that lays them side by side.
    """
    from pipelinerl.observe.report import write_report
    from pipelinerl.observe.report.comparison import write_comparison

    if several := policy_folders(run_folder):
        for folder in several:
            console.print(f"report of {folder.name}: {write_report(folder)}", soft_wrap=True)
        if len(several) > 1:
            console.print(f"report: {write_comparison(several, path=run_folder / 'report.html')}", soft_wrap=True)
        return
    if what_if and (run_folder / "ledger.sqlite").is_file():
        _foretell(run_folder)
    console.print(f"report: {escape(str(write_report(run_folder)))}", soft_wrap=True)


def _foretell(run_folder: Path) -> None:
    """Have the simulator say what other settings would have made of a run, for its report; what hinders it is said, and no error."""
    program = [sys.executable, "-m", "orchestrator.simulate.what_if", str(run_folder)]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=WHAT_IF_S, check=False)
        said = done.stdout if done.returncode == 0 else f"no what-ifs: {done.stderr.strip().splitlines()[-1]}"
    except (subprocess.TimeoutExpired, IndexError):
        said = f"no what-ifs: the simulation took longer than {WHAT_IF_S:g} s"
    console.print(said.strip(), highlight=False, soft_wrap=True, markup=False)


@commands.command(rich_help_panel=PANEL)
def compare(
    what: Annotated[
        list[str],
        typer.Argument(help="run folders, the first one is the reference; with --modes a TOML file and overrides", show_default=False),
    ],
    page: Annotated[Path | None, typer.Option(help="where the page goes; default: comparison.html, with --modes beside the runs")] = None,
    modes: Annotated[bool, typer.Option("--modes", help="run a config in every mode first, one after the other")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="with --modes: of each mode; default 20, without a limit in seconds")] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="with --modes: of each mode, from its first token on")] = None,
    reward: Annotated[
        float | None,
        typer.Option(help="with --modes: mean reward that seconds are counted to; default: the highest that all modes reached"),
    ] = None,
) -> None:
    """Lay runs side by side on one self-contained HTML page: numbers, curves, where the time went, settings that differ.

    Which mode is best for a config of yours, on this machine?

        pipelinerl compare --modes my.toml                        # 20 steps of sync, colocated, one_step_off, streaming
        pipelinerl compare --modes my.toml --seconds 120 engine.count=2     # and mixed, which takes two engines or more

    Then a table is printed, too: samples per second, seconds to a reward, reward per sample, staleness, and how long engines and trainer
    idled, each with what the simulator foretells of that mode from another one's run. The runs, the page and `comparison.json` lie in
    `<run.folder>/<run.name>-modes-<time>`.
    """
    if modes:
        from pipelinerl.cli.modes import compare_modes

        compare_modes(Path(what[0]), what[1:], steps=steps, seconds=seconds, reward=reward, page=page)
        return
    if (steps, seconds, reward) != (None, None, None):
        raise ConfigError("--steps, --seconds and --reward are of --modes, which runs a config; name it, or leave them out")
    from pipelinerl.observe.report.comparison import write_comparison

    written = write_comparison(list(map(Path, what)), path=page or Path("comparison.html"))
    console.print(f"comparison: {escape(str(written))}", soft_wrap=True)


@commands.command(rich_help_panel=PANEL)
def track(
    run_folder: RunFolder,
    to: Annotated[list[str] | None, typer.Option(help="wandb, tensorboard; default: what the run's config names")] = None,
) -> None:
    """Send a run's numbers to its trackers, or what they missed of it, from the run's journal."""
    from pipelinerl.config.file import load_run
    from pipelinerl.observe.tracking.beside import missing_packages, track

    to = to or [name for name in load_run(run_folder).tracking.to if name != "prometheus"]
    missing_packages(to)
    raise typer.Exit(0 if track(run_folder, to) else 1)


@commands.command(rich_help_panel=PANEL)
def upload(
    run_folder: RunFolder,
    to: Annotated[str | None, typer.Option(help="URL of an object store, for example s3://bucket/prefix; default: checkpoint.to")] = None,
) -> None:
    """Send a run's newest checkpoint and its final model to an object store, or what that lacks of them."""
    from pipelinerl.config.file import load_run
    from pipelinerl.upload import upload

    settings = load_run(run_folder).checkpoint
    if (to := to or settings.to) is None:
        raise ConfigError(f"the settings of {run_folder} name no object store (checkpoint.to): give one with --to")
    if not upload(run_folder, to, keep=settings.keep):
        raise typer.Exit(1)
    console.print(f"in the store: {to.rstrip('/')}/{run_folder.name}", soft_wrap=True, markup=False)


@commands.command(rich_help_panel=PANEL)
def trace(run_folder: RunFolder) -> None:
    """Write a run's timeline as a Chrome trace, which ui.perfetto.dev opens."""
    from pipelinerl.observe.tracking.trace import write_trace

    console.print(f"trace: {escape(str(write_trace(run_folder)))}", soft_wrap=True)


@commands.command(rich_help_panel=PANEL)
def ledger(
    run_folder: RunFolder,
    prompt: Annotated[str | None, typer.Argument(help="a prompt's id, `<epoch>:<row>`, or a rollout's, `<group>/<sibling>`")] = None,
) -> None:
    """Tell what became of a run's prompts, or, step by step, of one: `pipelinerl ledger RUN 0:17`."""
    from pipelinerl.observe.history import story_of, summary_of

    folders = [folder for folder in policy_folders(run_folder) if (folder / "ledger.sqlite").is_file()]  # a frozen policy has none
    for folder in folders or [run_folder]:
        if folders:
            console.print(f"policy {folder.name}:", highlight=False)
        for line in summary_of(folder) if prompt is None else story_of(folder, prompt):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


@commands.command(rich_help_panel=PANEL)
def check(run_folder: RunFolder) -> None:
    """Judge a run by its ledger and its checkpoints: nothing lost, nothing trained twice, nothing too old."""
    if not (folders := [folder for folder in policy_folders(run_folder) if (folder / "ledger.sqlite").is_file()]):
        exit_as("pipelinerl.checker", run_folder)
    codes = []
    for folder in folders:
        console.print(f"policy {folder.name}:", highlight=False)
        codes.append(subprocess.call([sys.executable, "-m", "pipelinerl.checker", str(folder)]))
    raise typer.Exit(max(codes))


@commands.command(rich_help_panel=PANEL)
def replay(
    run_folder: RunFolder,
    overrides: Overrides = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="prompts, generation, prm, scoring, batching, training, weight_sync; several at once")
    ] = None,
) -> None:
    """Run stages of a recorded run once more, alone, and tell what comes out otherwise: no engine, no trainer.

    After a change of `rewards.py`: `pipelinerl replay RUN --stage scoring`. With other settings than the run's:
    `pipelinerl replay RUN --stage scoring --stage batching 'reward=[{function="other.py:reward"}]' algorithm.name=dapo`.
    """
    exit_as("orchestrator.replay", run_folder, *(overrides or []), *(f"--stage={name}" for name in stage or ["scoring"]))


@commands.command(rich_help_panel=PANEL)
def export(
    run_folder: RunFolder,
    output: Annotated[Path, typer.Argument(help="folder to write", show_default=False)],
    adapter: Annotated[bool, typer.Option(help="the LoRA adapter by itself, as PEFT and vLLM load it")] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder, which transformers and vLLM load."""
    exit_as("trainer.export", "--run-folder", run_folder, "--output", output, *(["--adapter"] if adapter else []))


@commands.command(rich_help_panel=PANEL)
def migrate(run_folder: RunFolder) -> None:
    """Bring a run folder that an earlier version wrote to the present form: `pipelinerl run my.toml --resume` then goes on with it.

    The run must have ended. Its old ledger stays beside the new one.
    """
    exit_as("orchestrator.ledger.migration", run_folder)
