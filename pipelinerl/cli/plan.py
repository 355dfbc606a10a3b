"""The command that tells what a run would take, and how to place it, before anything is started or downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.app import ConfigFile, Overrides, console
from pipelinerl.config.file import load

commands = typer.Typer()
PANEL = "Train"


@commands.command(rich_help_panel=PANEL)
def plan(
    config_file: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs to place the run on; default: as many as its settings take", min=1)] = None,
    gpu: Annotated[str | None, typer.Option(help="their kind: a100, h100, h200, b200, ... or cpu: this machine's memory alone")] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a measured value for an input of the plan")
    ] = None,
    explain: Annotated[str | None, typer.Option(metavar="FIGURE", help="the arithmetic of one figure, for example step_s")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for machines")] = False,
    page: Annotated[Path | None, typer.Option(help="write a page with sliders, one HTML file that opens offline")] = None,
) -> None:
    """Plan a run before it starts: what fits where, how fast it is, how old its samples get, and what it costs.

    Needs no GPU, no weights and no network: `model.path` may be a folder with no more than a config.json, or a public model's name:

        pipelinerl plan my.toml --gpus 64 --gpu h100                   # the best placement, beside the run as configured
        pipelinerl plan my.toml --gpus 64 --gpu h100 --set mean_tokens=900 --set prompt_tokens=300
        pipelinerl plan my.toml --gpus 64 --gpu h100 --explain step_s
        pipelinerl plan my.toml --gpus 64 --gpu h100 --page plan.html
        pipelinerl plan my.toml                                        # without a GPU here: what the run takes of this machine's memory
    """
    import json

    from pipelinerl.errors import ConfigError
    from pipelinerl.planning.inputs import read_settings
    from pipelinerl.planning.machine import show_machine
    from pipelinerl.planning.plan import make_plan
    from pipelinerl.planning.show import explain as explain_figure
    from pipelinerl.planning.show import show
    from pipelinerl.runtime.machine import has_gpu

    settings = load(config_file, overrides=overrides or [], for_run=False)
    if gpu is None and (gpus is not None or has_gpu()):
        raise ConfigError(
            "--gpu is missing: name the kind of GPU, for example --gpu h100. `--gpu cpu` tells of this machine's memory alone"
        )
    if gpu in (None, "cpu"):
        show_machine(settings, console, as_json=as_json)
        return
    made = make_plan(settings, gpu=gpu, num_gpus=gpus, given=read_settings(given or []))
    if as_json:
        print(json.dumps(made.data(), indent=1))
    elif explain is not None:
        explain_figure(made, explain, console)
    else:
        show(made, console)
    if page is not None:
        from pipelinerl.planning.page import write_plan

        console.print(f"page: {write_plan(made, page)}", soft_wrap=True)
