"""Commands that tell about this program and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.app import console
from pipelinerl.config.file import described_keys
from pipelinerl.errors import ConfigError

commands = typer.Typer()
PANEL = "Reference"


@commands.command(rich_help_panel=PANEL)
def doctor(
    folder: Annotated[Path, typer.Option(help="where runs go")] = Path("runs"),
    gpu: Annotated[bool, typer.Option("--gpu", help="try GPUs, engine, trainer and whole runs: minutes, a process for each check")] = False,
    model: Annotated[Path | None, typer.Option(help="with --gpu: a model's folder for engine and trainer, in place of a tiny one")] = None,
    only: Annotated[list[str] | None, typer.Option(help="with --gpu: this check of the table alone; may be repeated")] = None,
) -> None:
    """Check this machine: Python, torch and vLLM versions, GPUs, NCCL, ports, disk, limits; and say what to do.

    With `--gpu` the table of docs/start/gpu.md follows, each check in a process of its own with a deadline: what was found, what this
    machine could not show, what to do. All figures are in `<folder>/doctor-gpu.json`.
    """
    from pipelinerl.launch.doctor import judge, look
    from pipelinerl.launch.gpu_checks.running import run_all
    from pipelinerl.launch.gpu_checks.table import chosen
    from pipelinerl.runtime.findings import Level, sentences, show

    if (model or only) and not gpu:
        raise ConfigError("--model and --only choose among the checks of --gpu, which is not given: add --gpu")
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: got no config.json there, expected the folder of a Hugging Face model")
    checks = chosen(only or (), model=model) if gpu else ()
    findings = judge(look(folder))
    show(findings, console, *Level)
    if checks:
        path = folder / "doctor-gpu.json"
        console.print(
            f"{len(checks)} checks of GPUs, engine and trainer, one after another; what is known stands in {path}", soft_wrap=True
        )
        results = run_all(checks, path=path, tell=lambda result: show([result.finding()], console, *Level))
        findings += [result.finding() for result in results]
    raise typer.Exit(1 if sentences(findings, Level.FAIL) else 0)


@commands.command(rich_help_panel=PANEL)
def algorithms() -> None:
    """Print the table of methods, and the rules that each of their columns may be overridden with: formulas, defaults, sources."""
    from pipelinerl.algorithms.listing import render_rules, render_table

    console.print(f"{render_table()}\n{render_rules()}", markup=False, highlight=False, soft_wrap=True)


@commands.command(rich_help_panel=PANEL)
def keys(markdown: Annotated[bool, typer.Option("--markdown", help="as a page, which is docs/config.md")] = False) -> None:
    """List every config key with its type, its default and what it means."""
    if markdown:
        from pipelinerl.config.reference import markdown as page

        print(page(), end="")
        return
    for key, kind, default, meaning in described_keys():
        console.print(f"{key:<36} {kind:<24} {default:<14} {meaning}", markup=False, highlight=False, soft_wrap=True)


@commands.command(rich_help_panel=PANEL)
def metrics(markdown: Annotated[bool, typer.Option("--markdown", help="as a page, which is docs/metrics.md")] = False) -> None:
    """List every metric with its unit, its formula and what to do about it."""
    from pipelinerl.observe.metrics.page import SECTIONS
    from pipelinerl.observe.metrics.page import markdown as page

    if markdown:
        print(page(), end="")
        return
    for title, _, listed in SECTIONS:
        console.print(f"{title}", style="bold")
        for one in listed:
            console.print(f"{one.name:<46} {one.unit:<14} {one.formula}. {one.action}", markup=False, highlight=False, soft_wrap=True)
