"""Commands that train: a run, a trial of its rewards, a warm start, the demo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pipelinerl.cli.app import ConfigFile, Overrides, console, exit_as
from pipelinerl.cli.start import print_plan, print_policies_plan, train
from pipelinerl.config.file import load
from pipelinerl.data.hub import resolved
from pipelinerl.errors import ConfigError
from pipelinerl.launch import resuming
from pipelinerl.launch.roles import begin_early

commands = typer.Typer()
PANEL = "Train"


@commands.command(cls=resuming.RunCommand, rich_help_panel=PANEL)
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
    settings = resolved(load(config_file, overrides=overrides or []), is_dry=dry_run)
    if dry_run:
        (print_policies_plan if settings.policies else print_plan)(settings)
        return
    train(settings, resume=resume, takes_over=take_over)


@commands.command(rich_help_panel=PANEL)
def init(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, or a name of the Hub", show_default=False)],
    data: Annotated[
        str, typer.Argument(help="as data.source: a file, a data set of the Hub, reasoning-gym:NAME, `path:name`", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("my.toml"),
    prompt_column: Annotated[str | None, typer.Option(help="default: the likeliest by name")] = None,
    answer_column: Annotated[str | None, typer.Option(help="what completions are compared with; default: the likeliest by name")] = None,
    reward: Annotated[str | None, typer.Option(help="`path:name` of a function that scores completions, in place of a comparison")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite what is there")] = False,
) -> None:
    """Write a commented config for a model and a dataset, after looking at both; then make every check that a run makes.

        pipelinerl init Qwen/Qwen3-0.6B openai/gsm8k:main/train
        pipelinerl init models/my-model prompts.jsonl --out first.toml
        pipelinerl init models/my-model 'reasoning-gym:chain_sum?max_terms=2&size=2000'

    Looked at are the model's config, tokenizer, chat template and weights' sizes, and the first rows: their columns and lengths in tokens.
    From these follow the reward, the room for prompts and completions, the system prompt, and whether all weights or adapters are trained
    in the memory that this machine has.
    """
    named = {"--prompt-column": prompt_column, "--answer-column": answer_column, "--reward": reward}
    options = [part for option, value in named.items() if value is not None for part in (option, value)]
    exit_as("orchestrator.draft", model, data, "--out", out, *options, *(["--force"] if force else []))


@commands.command("try", rich_help_panel=PANEL)
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
    options = [f"--completion={text}" for text in completion or ()] + ([f"--column={column}"] if column else [])
    options += ([f"--run={recorded}"] if recorded else []) + [f"--sample={sample}", f"--rows={rows}", f"--first={first}"]
    exit_as("orchestrator.rescore", config_file, *(overrides or []), *options)


@commands.command(rich_help_panel=PANEL)
def sft(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Warm-start: train the model on prompts and completions (section `sft`), with the trainer that RL uses."""
    exit_as("trainer.sft", config_file, *(overrides or []))


@commands.command(rich_help_panel=PANEL)
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="of the model, the prompts and the sampling")] = 0,
    folder: Annotated[Path, typer.Option(help="where the model and the run go")] = Path("runs"),
) -> None:
    """Make a 1 M parameter model, warm-start it, train it by RL to sort digits, and write a report: about three minutes on two cores."""
    from pipelinerl.demo.settings import demo_config, make_demo_model

    settings_file = demo_config(folder=folder, seed=seed)
    settings = load(settings_file, overrides=overrides or [])
    with begin_early(settings) as early:  # the imports of the run, beside the warm start
        console.print(f"[bold]1/3[/] a fresh model in {escape(str(settings.model.path))}")
        make_demo_model(settings.model.path, seed=seed)
        console.print("[bold]2/3[/] warm start on demonstrations, a quarter of which show what will be rewarded")
        if code := subprocess.call([sys.executable, "-m", "trainer.sft", str(settings_file), *(overrides or [])]):
            raise typer.Exit(code)
        console.print("[bold]3/3[/] streaming RL: reward 1 for the digits in ascending order")
        own = load(settings_file, overrides=[*(overrides or []), f"model.path={json.dumps(str(settings.sft_output))}"])
        train(own, early=early, since_s=time.time())
