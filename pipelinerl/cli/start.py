"""The start of a run: what is looked at before it, the launcher, the view in the terminal, and the report after its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path

from rich.markup import escape

from pipelinerl.cli.app import console, errors
from pipelinerl.config import Config
from pipelinerl.data.hub import resolved
from pipelinerl.errors import ConfigError, PipelineError
from pipelinerl.launch import resuming
from pipelinerl.launch.gpus import place
from pipelinerl.launch.roles import begin_early, roles_of, sidecars_of
from pipelinerl.launch.run_folder import GATEWAY_FILE, make_run_folder, needed_by_agents
from pipelinerl.launch.run_launcher import launcher_of
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime import startup
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.lease import Lease, held
from pipelinerl.runtime.sidecars import sidecars
from pipelinerl.runtime.watch import FILE_POLL_S


def train(
    settings: Config,
    *,
    resume: str | None = None,
    takes_over: bool = False,
    early: EarlyProcesses | None = None,
    since_s: float | None = None,
) -> None:
    """Check and run. What imports for longest begins beside the checks, if it has not (`early`); the start counts from `since_s`, Unix
    seconds, or from the begin of this process."""
    with contextlib.ExitStack() as at_end:
        if early is None:
            early = at_end.enter_context(begin_early(settings))
        with startup.mark("reads the settings", since_s=since_s or startup.begun_s()):
            from pipelinerl.launch.preflight import check as preflight
            from pipelinerl.runtime.findings import Level, refuse, show

            earlier = resuming.find_run(settings, resume or None) if resume is not None else None
        lease = None
        if earlier:  # before anything else is looked at: what another launcher holds is refused at once
            lease = at_end.enter_context(held(earlier.folder, takes_over=takes_over))
        with startup.mark("checks settings, functions and rows"):
            refuse(findings := preflight(settings))
        show(findings, console, Level.NOTE, Level.WARN)
        run_folder = earlier.folder if earlier else make_run_folder(settings)
        lease = lease or at_end.enter_context(held(run_folder))
        with contextlib.closing(Journal(run_folder, "launcher")) as journal:
            startup.write(journal)
        if earlier:
            resuming.make_ready(settings, run_folder)
        console.print(f"run folder: {escape(str(earlier or run_folder))}", soft_wrap=True)
        try:
            with sidecars(run_folder, sidecars_of(settings, run_folder)):
                asyncio.run(_launch_and_show(settings, run_folder, lease=lease, early=early))
        finally:
            report(run_folder)
    log = (run_folder / "logs" / "orchestrator.log").read_text().splitlines()
    console.print(escape(log[-1]) if log else "", soft_wrap=True)
    console.print(f"model: {escape(str(run_folder / 'model'))}", soft_wrap=True)


def print_plan(settings: Config) -> None:
    """Print what would run, what it would take, and what is wrong with it. Raises `ConfigError` with all problems at once."""
    from pipelinerl.algorithms.listing import describe_run
    from pipelinerl.launch.preflight import check as preflight
    from pipelinerl.runtime.findings import Level, refuse, show

    console.print_json(settings.model_dump_json())
    for name, value in settings.derived().items():
        console.print(f"{name}: {value}", highlight=False)
    with contextlib.suppress(ConfigError):  # told below, beside whatever else is wrong
        console.print(describe_run(settings), markup=False, highlight=False, soft_wrap=True)
    console.print("processes:")
    run_folder = settings.run.folder / f"{settings.run.name}-<time>"
    roles = roles_of(settings, run_folder)
    with contextlib.suppress(ConfigError):
        roles, _ = place(settings, roles, usable_gpus())
    for role in (*roles, *sidecars_of(settings, run_folder)):
        console.print(f"  {escape(str(role))}", highlight=False, soft_wrap=True)
    findings = preflight(settings, is_dry=True)
    show(findings, console, Level.OK, Level.NOTE, Level.WARN)
    refuse(findings)
    console.print("nothing is wrong that can be known without loading a model")


def print_policies_plan(settings: Config) -> None:
    """Print what would run of several policies, on which devices, and what is wrong with it; raises as `print_plan`."""
    from pipelinerl.config.policies import policies_of
    from pipelinerl.launch.policies import check_policies, place_policies, roles_of_policy
    from pipelinerl.runtime.findings import Level, refuse, show

    run_folder = settings.run.folder / f"{settings.run.name}-<time>"
    policies = [dataclasses.replace(one, config=resolved(one.config, is_dry=True)) for one in policies_of(settings)]
    console.print_json(settings.model_dump_json())
    processes = {one.name: roles_of_policy(one, run_folder) for one in policies}
    with contextlib.suppress(ConfigError):  # told below, beside whatever else is wrong
        processes = {name: roles for name, (roles, _) in place_policies(policies, run_folder, usable_gpus()).items()}
    for one in policies:
        console.print(f"policy {one.name}, {'frozen' if one.is_frozen else 'trained'}:", highlight=False)
        for role in processes[one.name]:
            console.print(f"  {escape(str(role))}", highlight=False, soft_wrap=True)
    findings = check_policies(policies, is_dry=True)
    show(findings, console, Level.OK, Level.NOTE, Level.WARN)
    refuse(findings)
    console.print("nothing is wrong that can be known without loading a model; a script starts it, with `pipelinerl.Policies`")


def report(run_folder: Path) -> None:
    """Write the report; where that fails, as on a full disk, say so: it must not hide why the run ended."""
    from pipelinerl.observe.report import write_report
    from pipelinerl.observe.segments import has_lines

    if not has_lines(run_folder / "journal" / "orchestrator.jsonl"):
        return
    try:
        console.print(f"report: {escape(str(write_report(run_folder)))}", soft_wrap=True)
    except (OSError, PipelineError) as error:
        errors.print(f"no report: {escape(str(error))}; `pipelinerl report {run_folder}` writes it later", highlight=False, soft_wrap=True)


async def _launch_and_show(settings: Config, run_folder: Path, *, lease: Lease, early: EarlyProcesses) -> None:
    from pipelinerl.observe.terminal import show

    until = asyncio.Event()
    roles, _ = place(settings, roles_of(settings, run_folder), usable_gpus())
    if not console.is_terminal:
        console.print(f"starting {', '.join(role.name for role in roles)}; logs: {escape(str(run_folder / 'logs'))}", soft_wrap=True)
    async with asyncio.TaskGroup() as group:
        agents = group.create_task(_tell_agents(run_folder)) if settings.gateway else None
        view = group.create_task(show(run_folder, console=console, until=until, began=time.time()))
        try:
            await launcher_of(settings, roles, run_folder, lease=lease, early=early).run()
        except PipelineError as error:
            failure = error
        else:
            failure = None
        if agents is not None:
            agents.cancel()
        until.set()
        await view
    if failure is not None:
        raise failure


async def _tell_agents(run_folder: Path) -> None:
    """Print what an agent needs to play the run's rollouts, once the gateway listens."""
    path = run_folder / GATEWAY_FILE
    while not path.exists():  # noqa: ASYNC110
        await asyncio.sleep(FILE_POLL_S)  # a file tells nobody that it is there
    for line in needed_by_agents(run_folder):
        console.print(escape(line), highlight=False, soft_wrap=True)
