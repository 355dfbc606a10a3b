"""The command line."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pipelinerl import __version__
from pipelinerl.config import Config
from pipelinerl.config.file import described_keys, load
from pipelinerl.data.hub import resolved
from pipelinerl.errors import ConfigError, PipelineError
from pipelinerl.launch import local, resuming
from pipelinerl.runtime.lease import Lease, held

app = typer.Typer(
    name="pipelinerl",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Streaming RL post-training of language models: prompts flow into vLLM, rewards and training run beside it, and new weights
are swapped in between forward passes.

**Start here:** `pipelinerl demo` trains a small model and shows the report.
Then write a TOML file (`pipelinerl run --help` says how) and `pipelinerl run my.toml`.""",
)
console = Console()
errors = Console(stderr=True)

ConfigFile = Annotated[Path, typer.Argument(help="TOML file with the sections model, data, reward, ...", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, in TOML syntax", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="a run's folder, for example runs/demo-20260101-120000", show_default=False)]


@app.command(cls=resuming.RunCommand)
def run(
    config_file: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="look at everything that can be known before the start, print the plan, start nothing")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="[RUN]", help="go on with this run (its folder, or its name); by itself: the newest that began"),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="with --resume: also where a launcher on another machine still holds the run")
    ] = False,
) -> None:
    """Train: start the orchestrator, the engines, the scorers and the trainer, and follow the run to its end.

    A config needs five lines; everything else has a default:

        [model]
        path = "models/my-model"            # a Hugging Face folder
        [data]
        source = "prompts.jsonl"            # one JSON object a line, with a "prompt"
        [[reward]]
        function = "rewards.py:my_reward"   # def my_reward(prompt, completion, **columns) -> float

    Change single settings on the command line: `pipelinerl run my.toml trainer.steps=10 engine.count=2`.
    Ctrl-C once saves the model and ends; twice ends at once. Either way `--resume` goes on: from the last checkpoint, with what was
    generated and scored since; the same command line starts a run and, after whatever ended it, goes on with it.
    """
    settings = resolved(load(config_file, overrides=overrides or []))
    if dry_run:
        _print_plan(settings)
        return
    _train(settings, resume=resume, takes_over=take_over)


@app.command("try")
def try_out(
    config_file: ConfigFile,
    overrides: Overrides = None,
    completion: Annotated[
        list[str] | None,
        typer.Option(help="a completion of each row; several: siblings, or, with an environment, the turns of one rollout"),
    ] = None,
    column: Annotated[str | None, typer.Option(help="try what stands in this column, for example the answer")] = None,
    recorded: Annotated[Path | None, typer.Option("--run", help="try what a run sampled: its folder")] = None,
    sample: Annotated[int, typer.Option(help="have the engine write so many completions of each row; it loads the model", min=0)] = 0,
    rows: Annotated[int, typer.Option(help="rows of the data, or groups of the run", min=1)] = 3,
    first: Annotated[int, typer.Option(help="the first row, from 0", min=0)] = 0,
) -> None:
    """Score a few rows with the rewards, the environment and the process reward model, and show what each said: nothing is trained.

    Write a reward, then try it before a run does:

        pipelinerl try my.toml --column answer            # does the right answer get the full reward?
        pipelinerl try my.toml --completion 4 --completion "I do not know"
        pipelinerl try my.toml --sample 4 --rows 2        # what the model itself writes; loads the engine
        pipelinerl try my.toml --run runs/run-20260101-120000    # what a run sampled, with the rewards as they are now
        pipelinerl try my.toml                            # asks you to type

    Functions are called as in a run: in the scorer's processes, with its deadlines and retries. Of each row are printed the prompt as the
    model sees it, every completion, each component with its time, or its error with file, line and traceback, the reward, and, of siblings,
    the advantages that `algorithm` makes of them. Exits with 1 where a function failed.
    """
    chosen = [
        name for name, given in (("--completion", completion), ("--column", column), ("--run", recorded), ("--sample", sample)) if given
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: a row is tried with one of them. Leave the others out")
    command = [sys.executable, "-m", "orchestrator.rescore", str(config_file), *(overrides or []), f"--rows={rows}", f"--first={first}"]
    command += [f"--completion={text}" for text in completion or ()] + ([f"--column={column}"] if column else [])
    command += ([f"--run={recorded}"] if recorded else []) + [f"--sample={sample}"]
    raise typer.Exit(subprocess.call(command))


@app.command()
def sft(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Warm-start: train the model on prompts and completions (section `sft`), with the trainer that RL uses."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "trainer.sft", str(config_file), *(overrides or [])]))


@app.command()
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="of the model, the prompts and the sampling")] = 0,
    folder: Annotated[Path, typer.Option(help="where the model and the run go")] = Path("runs"),
) -> None:
    """Make a 1 M parameter model, warm-start it, train it by RL to sort digits, and write a report: about three minutes on two cores."""
    from pipelinerl.demo.settings import demo_config, make_demo_model

    settings_file = demo_config(folder=folder, seed=seed)
    settings = load(settings_file, overrides=overrides or [])
    console.print(f"[bold]1/3[/] a fresh model in {escape(str(settings.model.path))}")
    make_demo_model(settings.model.path, seed=seed)
    console.print("[bold]2/3[/] warm start on demonstrations, a quarter of which show what will be rewarded")
    if code := subprocess.call([sys.executable, "-m", "trainer.sft", str(settings_file), *(overrides or [])]):
        raise typer.Exit(code)
    console.print("[bold]3/3[/] streaming RL: reward 1 for the digits in ascending order")
    _train(load(settings_file, overrides=[*(overrides or []), f"model.path={json.dumps(str(settings.sft_output))}"]))


@app.command()
def report(run_folder: RunFolder) -> None:
    """Write a run's report: one self-contained HTML page. Works on a run under way, too."""
    from pipelinerl.observe.report import write_report

    console.print(f"report: {write_report(run_folder)}")


@app.command()
def compare(
    run_folders: Annotated[list[Path], typer.Argument(help="run folders; the first one is the reference", show_default=False)],
    page: Annotated[Path, typer.Option(help="where the page goes")] = Path("comparison.html"),
) -> None:
    """Lay runs side by side on one self-contained HTML page: numbers, curves, where the time went, settings that differ."""
    from pipelinerl.observe.report.comparison import write_comparison

    console.print(f"comparison: {write_comparison(run_folders, path=page)}")


@app.command()
def watch(run_folder: RunFolder) -> None:
    """Follow a run in the terminal, from another window or after its end."""
    from pipelinerl.observe.report.reading import has_journal
    from pipelinerl.observe.terminal import show

    has_journal(run_folder)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(run_folder, console=console, until=asyncio.Event()))


@app.command()
def export(
    run_folder: RunFolder,
    output: Annotated[Path, typer.Argument(help="folder to write", show_default=False)],
    adapter: Annotated[bool, typer.Option(help="the LoRA adapter by itself, as PEFT and vLLM load it")] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder, which transformers and vLLM load."""
    command = [sys.executable, "-m", "trainer.export", "--run-folder", str(run_folder), "--output", str(output)]
    command += ["--adapter"] if adapter else []
    raise typer.Exit(subprocess.call(command))


@app.command()
def ledger(
    run_folder: RunFolder,
    prompt: Annotated[str | None, typer.Argument(help="a prompt's id, `<epoch>:<row>`, or a rollout's, `<group>/<sibling>`")] = None,
) -> None:
    """Tell what became of a run's prompts, or, step by step, of one: `pipelinerl ledger RUN 0:17`."""
    from pipelinerl.observe.history import story_of, summary_of

    for line in summary_of(run_folder) if prompt is None else story_of(run_folder, prompt):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def check(run_folder: RunFolder) -> None:
    """Judge a run by its ledger and its checkpoints: nothing lost, nothing trained twice, nothing too old."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "pipelinerl.checker", str(run_folder)]))


@app.command()
def migrate(run_folder: RunFolder) -> None:
    """Bring a run folder that an earlier version wrote to the present form: `pipelinerl run my.toml --resume` then goes on with it.

    The run must have ended. Its old ledger stays beside the new one.
    """
    raise typer.Exit(subprocess.call([sys.executable, "-m", "orchestrator.ledger.migration", str(run_folder)]))


@app.command()
def replay(
    run_folder: RunFolder,
    overrides: Overrides = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="prompts, dispatch, following, scoring, batching, delivery, refresh; several at once")
    ] = None,
) -> None:
    """Run stages of a recorded run once more, alone, and tell what comes out otherwise: no engine, no trainer.

    After a change of `rewards.py`: `pipelinerl replay RUN --stage scoring`. With other settings than the run's:
    `pipelinerl replay RUN --stage scoring --stage batching 'reward=[{function="other.py:reward"}]' algorithm.name=dapo`.
    """
    stages = [f"--stage={name}" for name in stage or ["scoring"]]
    raise typer.Exit(subprocess.call([sys.executable, "-m", "orchestrator.replay", str(run_folder), *(overrides or []), *stages]))


@app.command()
def track(
    run_folder: RunFolder,
    to: Annotated[list[str] | None, typer.Option(help="wandb, tensorboard; default: what the run's config names")] = None,
) -> None:
    """Send a run's numbers to its trackers, or what they missed of it, from the run's journal."""
    from pipelinerl.observe.tracking.beside import missing_packages, track
    from pipelinerl.runtime.process import read_config

    to = to or [name for name in read_config(run_folder).tracking.to if name != "prometheus"]
    missing_packages(to)
    raise typer.Exit(0 if track(run_folder, to) else 1)


@app.command()
def trace(run_folder: RunFolder) -> None:
    """Write a run's timeline as a Chrome trace, which ui.perfetto.dev opens."""
    from pipelinerl.observe.tracking.trace import write_trace

    console.print(f"trace: {write_trace(run_folder)}")


@app.command()
def slurm(
    config_file: ConfigFile,
    overrides: Overrides = None,
    submit: Annotated[bool, typer.Option("--submit", help="hand it to sbatch; else the script is only written")] = False,
) -> None:
    """Make a run's Slurm job: a readable sbatch script that saves before the limit, requeues itself and goes on (section `slurm`)."""
    from pipelinerl.launch.preflight import check as preflight
    from pipelinerl.launch.slurm import submit as job
    from pipelinerl.runtime.findings import refuse

    settings = resolved(load(config_file, overrides=overrides or []))
    if submit:
        refuse(preflight(settings, runs_here=False))
    script = job.prepare(settings)
    console.print(f"script: {escape(str(script))}")
    if submit:
        console.print(f"job: {job.submit(script)}")


@app.command()
def doctor(folder: Annotated[Path, typer.Option(help="where runs go")] = Path("runs")) -> None:
    """Check this machine: Python, torch and vLLM versions, GPUs, NCCL, ports, disk, limits; and say what to do."""
    from pipelinerl.launch.doctor import judge, look
    from pipelinerl.runtime.findings import Level, sentences, show

    findings = judge(look(folder))
    show(findings, console, *Level)
    raise typer.Exit(1 if sentences(findings, Level.FAIL) else 0)


@app.command()
def view(
    run_folder: RunFolder,
    port: Annotated[int, typer.Option(help="0: a free one")] = 0,
    interface: Annotated[str, typer.Option(help="where it listens; the page asks for the token in its address everywhere")] = "127.0.0.1",
) -> None:
    """Follow a run in the browser: the pipeline as a picture, curves, who waits for whom, samples. Works on a finished run, too."""
    from pipelinerl.observe.view.server import View

    page = View(run_folder, interface=interface, port=port)
    console.print(f"view: {page.address}", soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt):
        page.serve()


@app.command()
def algorithms() -> None:
    """Print the table of methods, and the rules that each of their columns may be overridden with: formulas, defaults, sources."""
    from pipelinerl.algorithms.listing import render_rules, render_table

    console.print(f"{render_table()}\n{render_rules()}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def keys(markdown: Annotated[bool, typer.Option("--markdown", help="as a page, which is docs/config.md")] = False) -> None:
    """List every config key with its type, its default and what it means."""
    if markdown:
        from pipelinerl.config.reference import markdown as page

        print(page(), end="")
        return
    for key, kind, default, meaning in described_keys():
        console.print(f"{key:<36} {kind:<24} {default:<14} {meaning}", markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: errors of our own tree, and those of files and disks, print as one message and exit with 1."""
    try:
        app()
    except PipelineError as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        do = "; make room there, and `--resume` goes on" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        errors.print(
            f"[bold red]{type(error).__name__}[/]: {escape(f'{error.strerror or error}{where}{do}')}", highlight=False, soft_wrap=True
        )
        sys.exit(1)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        console.print(f"pipelinerl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")] = False,
) -> None:
    """Options before any command."""


def _train(settings: Config, *, resume: str | None = None, takes_over: bool = False) -> None:
    from pipelinerl.launch.preflight import check as preflight
    from pipelinerl.observe.tracking.beside import trackers
    from pipelinerl.runtime.findings import Level, refuse, show

    earlier = resuming.find_run(settings, resume or None) if resume is not None else None
    with contextlib.ExitStack() as at_end:
        lease = None
        if earlier:  # before anything else is looked at: what another launcher holds is refused at once
            lease = at_end.enter_context(held(earlier.folder, takes_over=takes_over))
        refuse(findings := preflight(settings))
        show(findings, console, Level.NOTE, Level.WARN)
        run_folder = earlier.folder if earlier else local.make_run_folder(settings)
        lease = lease or at_end.enter_context(held(run_folder))
        if earlier:
            resuming.make_ready(settings, run_folder)
        console.print(f"run folder: {escape(str(earlier or run_folder))}", soft_wrap=True)
        try:
            with trackers(run_folder, settings.tracking.to):
                asyncio.run(_launch_and_show(settings, run_folder, lease=lease))
        finally:
            _report(run_folder)
    log = (run_folder / "logs" / "orchestrator.log").read_text().splitlines()
    console.print(escape(log[-1]) if log else "")
    console.print(f"model: {escape(str(run_folder / 'model'))}")


def _report(run_folder: Path) -> None:
    """Write the report; where that fails, as on a full disk, say so: it must not hide why the run ended."""
    from pipelinerl.observe.report import write_report
    from pipelinerl.observe.segments import has_lines

    if not has_lines(run_folder / "journal" / "orchestrator.jsonl"):
        return
    try:
        console.print(f"report: {escape(str(write_report(run_folder)))}")
    except (OSError, PipelineError) as error:
        errors.print(f"no report: {escape(str(error))}; `pipelinerl report {run_folder}` writes it later", highlight=False, soft_wrap=True)


async def _launch_and_show(settings: Config, run_folder: Path, *, lease: Lease) -> None:
    from pipelinerl.observe.terminal import show

    until, roles = asyncio.Event(), local.roles_of(settings, run_folder)
    if not console.is_terminal:
        console.print(f"starting {', '.join(role.name for role in roles)}; logs: {escape(str(run_folder / 'logs'))}", soft_wrap=True)
    async with asyncio.TaskGroup() as group:
        view = group.create_task(show(run_folder, console=console, until=until, began=time.time()))
        try:
            await local.Launcher(roles, run_folder, **local.limits_of(settings), lease=lease).run()
        except PipelineError as error:
            failure = error
        else:
            failure = None
        until.set()
        await view
    if failure is not None:
        raise failure


def _print_plan(settings: Config) -> None:
    """Print what would run, what it would take, and what is wrong with it. Raises `ConfigError` with all problems at once."""
    from pipelinerl.algorithms.listing import describe_run
    from pipelinerl.launch.preflight import check as preflight
    from pipelinerl.observe.tracking.beside import command
    from pipelinerl.runtime.findings import Level, refuse, show

    console.print_json(settings.model_dump_json())
    for name, value in settings.derived().items():
        console.print(f"{name}: {value}", highlight=False)
    with contextlib.suppress(ConfigError):  # told below, beside whatever else is wrong
        console.print(describe_run(settings), markup=False, highlight=False, soft_wrap=True)
    console.print("processes:")
    run_folder = settings.run.folder / f"{settings.run.name}-<time>"
    trackers = [local.Role(name=f"track-{name}", command=tuple(command(run_folder, name))) for name in settings.tracking.to]
    for role in (*local.roles_of(settings, run_folder), *trackers):
        console.print(f"  {escape(str(role))}", highlight=False, soft_wrap=True)
    findings = preflight(settings, is_dry=True)
    show(findings, console, Level.OK, Level.NOTE, Level.WARN)
    refuse(findings)
    console.print("nothing is wrong that can be known without loading a model")


if __name__ == "__main__":
    main()
