"""Commands that hand a run to a cluster: Slurm, Kubernetes, Ray."""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pipelinerl.cli.app import ConfigFile, Overrides, RunFolder, console, errors
from pipelinerl.cli.start import report
from pipelinerl.cli.train import PANEL
from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.data.hub import resolved
from pipelinerl.errors import PipelineError
from pipelinerl.launch import resuming
from pipelinerl.launch.ray.attempts import Attempts, Place

commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def slurm(
    config_file: ConfigFile,
    overrides: Overrides = None,
    submit: Annotated[bool, typer.Option("--submit", help="hand it to sbatch; else the script is only written")] = False,
) -> None:
    """Make a run's Slurm job: a readable sbatch script that saves before the limit, requeues itself and goes on (section `slurm`)."""
    from pipelinerl.launch.node_roles import check_gpus
    from pipelinerl.launch.preflight import check as preflight
    from pipelinerl.launch.slurm import submit as job
    from pipelinerl.runtime.findings import refuse

    settings = resolved(load(config_file, overrides=overrides or []))
    if submit:
        refuse(preflight(settings, runs_here=False))
    script = job.prepare(settings)
    console.print(f"script: {escape(str(script))}", soft_wrap=True)
    for line in check_gpus(settings, settings.slurm, key="slurm"):
        console.print(line, highlight=False)
    if submit:
        console.print(f"job: {job.submit(script)}")


@commands.command(rich_help_panel=PANEL)
def k8s(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Print a run's Kubernetes manifests (section `kubernetes`): pipelinerl k8s my.toml | kubectl apply -f -

    Paths in the config are those of the pods: the model, the rows and your own files have to be in the image, or on the claim.
    """
    from pipelinerl.launch.kubernetes.manifest import as_list, manifests
    from pipelinerl.launch.node_roles import check_gpus
    from pipelinerl.launch.run_folder import name_now

    settings = load(config_file, overrides=overrides or [], for_run=False)
    for line in check_gpus(settings, settings.kubernetes, key="kubernetes"):
        errors.print(line, highlight=False)
    typer.echo(as_list(manifests(settings, name=name_now(settings))), nl=False)


@commands.command(rich_help_panel=PANEL)
def engines(
    run_folder: RunFolder,
    part: Annotated[str, typer.Option(help="K/N: part K, from 0, of those that N jobs start between them")] = "0/1",
    ids: Annotated[str | None, typer.Option(help="in place of a part: engines that `pipelinerl scale` has let join, such as 2,3")] = None,
) -> None:
    """Start engines of a run in a job, or on a machine, of their own: those that its engine.elsewhere leaves to others, or that joined it.

        pipelinerl run my.toml engine.count=6 engine.elsewhere=2 run.interface=ib0
        srun --gpus=2 pipelinerl engines runs/run-20260101-120000      # in another job, which sees the run folder

    They stay until the run is finished, also where it is saved and goes on. A run waits for them at its start (engine.ready_deadline_s),
    and goes on while any engine serves; those that are lost may be started again.
    """
    from pipelinerl.launch.joining import join

    asyncio.run(join(run_folder.absolute(), part, ids))


@commands.command(cls=resuming.RunCommand, rich_help_panel=PANEL)
def ray(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="[RUN]", help="go on with this run (its folder, or its name); by itself: the newest that began"),
    ] = None,
) -> None:
    """Train on a Ray cluster: a placement group with a bundle a node, and the run followed to its end (section `ray`).

    The cluster has to ask for a token (RAY_AUTH_MODE=token), and its nodes have to share `run.folder`. Ctrl-C once saves and ends; twice
    ends at once. Either way `--resume` goes on.
    """
    from pipelinerl.launch.node_roles import check_gpus
    from pipelinerl.launch.preflight import check as preflight
    from pipelinerl.launch.ray.cluster import cluster_of
    from pipelinerl.launch.ray.prepare import bundles_in, prepare
    from pipelinerl.launch.supervisor import DONE
    from pipelinerl.runtime.findings import refuse

    settings = resolved(load(config_file, overrides=overrides or []))
    refuse(preflight(settings, runs_here=False))
    for line in check_gpus(settings, settings.ray, key="ray"):
        console.print(line, highlight=False)
    run_folder = prepare(settings, resume=resume)
    console.print(f"run folder: {escape(str(run_folder))}", soft_wrap=True)
    bundles = bundles_in(run_folder, settings)
    for bundle in bundles:
        console.print(escape(str(bundle)), highlight=False, soft_wrap=True)
    try:
        with cluster_of(settings.ray, bundles) as cluster:
            code = asyncio.run(_follow(settings, run_folder, cluster))
    finally:
        report(run_folder)
    if code == DONE:
        console.print(f"model: {escape(str(run_folder / 'model'))}", soft_wrap=True)
    else:
        console.print(f"saved; `pipelinerl ray {config_file} --resume {run_folder.name}` goes on", soft_wrap=True)


async def _follow(settings: Config, run_folder: Path, cluster: Place) -> int:
    """Run attempts to their end and show the run meanwhile; the exit code."""
    from pipelinerl.launch.placement import nodes_of
    from pipelinerl.launch.ray.prepare import command_of
    from pipelinerl.observe.terminal import show

    attempts = Attempts(
        settings.run,
        run_folder,
        nodes_of(settings.ray),
        cluster,
        save_s=settings.ray.save_s,
        command=functools.partial(command_of, run_folder),
        say=functools.partial(errors.print, markup=False, highlight=False, soft_wrap=True),
    )
    loop, until = asyncio.get_running_loop(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        view = group.create_task(show(run_folder, console=console, until=until, began=time.time()))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, attempts.save)
        try:
            outcome = await attempts.run()
        except PipelineError as error:
            outcome = error
        until.set()
        await view
    if isinstance(outcome, PipelineError):
        raise outcome
    return outcome
