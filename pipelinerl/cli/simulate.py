"""The command that runs a run in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.cli.app import Overrides, exit_as

commands = typer.Typer()
PANEL = "Train"


@commands.command(rich_help_panel=PANEL)
def simulate(
    config: Annotated[Path, typer.Argument(help="TOML file, or the folder of a run to learn from", show_default=False)],
    overrides: Overrides = None,
    like: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="learn how long everything takes from this run's journal; of several, rollouts are the first one's"
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="or take it from the arithmetic of `pipelinerl plan`: a100, h100, ...")] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a value to assume, for example score_s=2 or mean_tokens=900")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="KIND=NUMBER", help="engine, trainer, scorer, link: so many faults, at steps drawn by seed")
    ] = None,
    seed: Annotated[int, typer.Option(help="of lengths, latencies, rewards and faults: the same one repeats a simulation exactly")] = 0,
    out: Annotated[Path | None, typer.Option(help="the run folder to write; default: beside the others")] = None,
    no_journal: Annotated[bool, typer.Option("--no-journal", help="print figures alone")] = False,
    limit_s: Annotated[float, typer.Option(help="simulated seconds after which a run counts as one that hangs")] = 1e9,
    elastic: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="devices change between engines, trainer and PRM (not live yet), each change taking so long"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for machines")] = False,
) -> None:
    """Simulate a run before it starts: the live rules on simulated time, with models of how long everything takes. Needs no GPU.

    What if this run had another engine, a shorter bound, twice the rollouts?

        pipelinerl simulate runs/run-20260101-120000                      # as it was: how near does the simulation come?
        pipelinerl simulate runs/run-20260101-120000 engine.count=3       # as it would have been
        pipelinerl simulate my.toml --like runs/run-20260101-120000       # another config on that run's machine
        pipelinerl simulate my.toml --gpu h100 --set mean_tokens=900      # a machine that is not there
        pipelinerl simulate my.toml --gpu h100 --fault engine=3 --fault trainer=1
        pipelinerl compare runs/run-20260101-120000 runs/run-simulated-20260101-130000

    Admission, routing, grouping, the batch cut, packing and swaps are the run's own classes. What comes out is a run folder: `report`,
    `view`, `compare` and `watch` read it as any other. Printed are tokens per second, staleness, who waited how long, and for each figure
    the assumption on which it hangs most. docs/simulator.md has the formulas.
    """
    options = [f"--{name}={value}" for name, value in (("gpu", gpu), ("out", out), ("elastic", elastic)) if value is not None]
    options += [f"--like={run}" for run in like or ()]
    options += [f"--set={setting}" for setting in given or ()] + [f"--fault={setting}" for setting in fault or ()]
    options += ["--no-journal"] * no_journal + ["--json"] * as_json
    exit_as("orchestrator.simulate", config, *(overrides or []), *options, f"--seed={seed}", f"--limit-s={limit_s}")
