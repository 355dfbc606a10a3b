"""`pipelinerl scale`: engines, processes of models that score and trainer ranks join and leave a live run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from pipelinerl.cli.app import RunFolder, console
from pipelinerl.cli.train import PANEL
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.membership import Members

commands = typer.Typer()


@commands.command(rich_help_panel=PANEL)
def scale(
    run_folder: RunFolder,
    wanted: Annotated[
        list[str] | None,
        typer.Argument(metavar="[engines=N] [prm=N] [reward=N] [trainer=N] [tensor_parallel_size=N]", help="without: what there is"),
    ] = None,
    drain_s: Annotated[float, typer.Option(help="seconds that engines which leave may take to end what they have")] = 60.0,
    elsewhere: Annotated[bool, typer.Option("--elsewhere", help="another machine, or job, is to start those that join")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="of a run under Slurm: hand the jobs of those that join to sbatch")] = False,
) -> None:
    """Have engines join a live run, or leave it, until it has N; or have a model that scores, or its trainer, go on with N.

        pipelinerl scale runs/run-20260101-120000 engines=4
        pipelinerl scale runs/run-20260101-120000 engines=1 --drain-s 300
        pipelinerl scale runs/run-20260101-120000 engines=2 trainer=2
        pipelinerl scale runs/run-20260101-120000 engines=2 prm=2
        pipelinerl scale runs/run-20260101-120000 engines=1 tensor_parallel_size=2
        pipelinerl scale runs/run-20260101-120000 engines=2 reward=2

    Those that join begin on this run's machine; of a run under Slurm a job is written, and submitted with --submit. Those that leave take
    no new work; what they have not ended after --drain-s seconds goes on in others, with its tokens. The trainer saves between two steps
    and starts anew, on devices that are free then.
    """
    from pipelinerl.config.file import load_run, with_tensor_parallel
    from pipelinerl.launch import scaling
    from pipelinerl.launch.slurm import engines as jobs
    from pipelinerl.launch.slurm.submit import submit as hand_over
    from pipelinerl.runtime.membership import ScaleFolder, StartedBy, State

    run_folder = run_folder.absolute()
    if wanted is None:
        scaling.check_is_run(run_folder)
        if (found := ScaleFolder(run_folder).members()) is None:
            raise ConfigError(f"{run_folder} has no engines so far: no orchestrator of it has said which")
        _tell(run_folder, found)
        if not scaling.is_live(run_folder):
            console.print("no orchestrator of this run listens: it has ended, or is only starting, and this is what was said last")
        return
    is_slurm = (run_folder / "job.sbatch").exists()
    if submit and not is_slurm:
        raise ConfigError(f"--submit: {run_folder} is not a run under Slurm")
    started_by = StartedBy.JOB if elsewhere or is_slurm else StartedBy.LAUNCHER
    found = scaling.ask(run_folder, scaling.wanted_of(wanted), drain_s=drain_s, started_by=started_by)
    _tell(run_folder, found)
    waiting = [one for one in found.members if one.state is State.JOINING and one.request_id == found.request_id]
    joining = [one.engine_id for one in waiting if one.started_by is StartedBy.JOB]
    if joining and is_slurm and not elsewhere:
        config = load_run(run_folder)
        config = config if found.tensor_parallel_size is None else with_tensor_parallel(config, found.tensor_parallel_size)
        for script in jobs.prepare(config, run_folder, joining, python=sys.executable):
            console.print(f"script: {escape(str(script))}", soft_wrap=True)
            if submit:
                console.print(f"job: {hand_over(script)}")
    elif joining:
        ids = ",".join(map(str, joining))
        console.print(f"start there: pipelinerl engines {escape(str(run_folder))} --ids {ids}", soft_wrap=True, highlight=False)


def _table(found: Members, what: str) -> Table:
    has_width = found.tensor_parallel_size is not None
    table = Table(
        what,
        "is",
        *(["tensor_parallel_size"] if has_width else []),
        "started by",
        "why",
        title=f"{found.num_wanted} {what}{('es' if what.endswith('ss') else 's') * (found.num_wanted != 1)} asked for",
        title_justify="left",
        box=None,
    )
    for one in found.members:
        width = [str(one.tensor_parallel_size)] if has_width else []
        table.add_row(str(one.engine_id), one.state, *width, one.started_by, escape(one.reason))
    return table


def _tell(run_folder: Path, found: Members) -> None:
    """Print which engines there are, and how many ranks the trainer has."""
    from pipelinerl.observe.fold.rows import TrainerRanksRow, read
    from pipelinerl.runtime.membership import ScaleFolder

    console.print(_table(found, "engine"))
    if found.prm is not None:
        console.print(_table(found.prm, "PRM engine"))
    for kind, record in found.rewards.items():
        console.print(_table(record, f"{kind} process"))
    if (record := ScaleFolder(run_folder).trainer()) is not None:
        console.print(escape(read(TrainerRanksRow, msgspec.structs.asdict(record)).words), soft_wrap=True, highlight=False)
