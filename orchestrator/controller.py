"""`pipelinerl.Controller`: the second way to use the system. A script says what happens next, in place of a config alone.

    async with Controller("my.toml") as run:
        while run.step < run.num_steps:
            scored = await run.score(run.sample(run.prompts(16)))
            done = await run.train(run.advantages(scored))
            await run.publish()

The script's process is the orchestrator: engines, scorer and trainer are started beside it as in every run, by the same launcher, and the
same stages, ledger and journal serve it. The event loop must get its turns between a script's calls: long work belongs into
`asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from rich.console import Console

from orchestrator.assembly import opened
from orchestrator.data.encoder import encoder_of
from orchestrator.data.sources import PromptBuilder, longest_prompt
from orchestrator.ledger.answers import ANSWERS_FILE, Answers
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import num_decided
from orchestrator.run import Run
from orchestrator.scripted_run import DemonstrationOf, Row, ScriptedRun
from orchestrator.stages.leasing import Table
from orchestrator.stages.script_replay import ScriptRecord
from orchestrator.stages.script_waits import ScriptWaits
from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.config.nodes import NodesSection
from pipelinerl.data.demonstrations import DemonstrationEncoder
from pipelinerl.data.hub import resolved
from pipelinerl.data.tokenizer import decoder, load_tokenizer
from pipelinerl.errors import ConfigError, DataError, PipelineError, ScriptError
from pipelinerl.launch import resuming
from pipelinerl.launch.gpus import place
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.preflight import check
from pipelinerl.launch.roles import Role, begin_early, processes_beside_script, sidecars_of
from pipelinerl.launch.run_folder import SCRIPT_FILE, make_run_folder, needed_by_agents
from pipelinerl.launch.run_launcher import launcher_of
from pipelinerl.messages import Prompt
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.findings import Finding, Level, note, refuse, show
from pipelinerl.runtime.lease import EPOCH, Lease, held
from pipelinerl.runtime.network import address_of
from pipelinerl.runtime.process import allow_open_files, end_stuck
from pipelinerl.runtime.sidecars import sidecars
from pipelinerl.runtime.watch import guarded


class Controller:
    """A run that a script drives; `async with` starts its processes and gives the `ScriptedRun`, and saves and ends them at its end.

    However the block is left, what was trained is saved, and stands in `<run>/model`. Raises `ConfigError` with all problems at once
    before anything runs; what ends the run later is raised by the call that is under way, or by the next one.
    """

    def __init__(self, config: Config | Path | str, *overrides: str, resume: bool | str = False, replay: bool = False) -> None:
        """`config` is a TOML file or what `pipelinerl.config.file.load` returns; `overrides` are as on the command line,
        `"trainer.steps=10"`.

        `resume` goes on with the newest run of `run.name`, or with the one that is named, at the step after the last that was trained or
        decided upon; where there is none of that name yet, a new one begins. What the script before had asked for beside is cancelled.

        `replay` records what calls are answered, and leads a script that goes on through the calls of the one before, from its first line:
        what its variables held is there again, and so are rollouts that were asked for before that step. A call that differs from the
        record raises `ScriptDiverged`.
        """
        if isinstance(config, Config) and overrides:
            raise ConfigError(
                f"Controller: overrides {', '.join(overrides)} are for a TOML file, and a Config was given: load it with them"
            )
        self._config = resolved(config if isinstance(config, Config) else load(Path(config), overrides=overrides))
        self._resume = resume
        self._replay = replay
        self._at_end = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ScriptedRun:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(ends_at_signals(save_s=self._config.trainer.silent_after_s))
            early = stack.enter_context(begin_early(self._config))
            name = self._resume if isinstance(self._resume, str) else None
            earlier = resuming.find_run(self._config, name) if self._resume else None
            lease = stack.enter_context(held(earlier.folder)) if earlier is not None else None
            findings = await asyncio.to_thread(lambda: [*not_in_scripts(self._config), *check(self._config, in_script=True)])
            refuse(findings)
            show(findings, Console(stderr=True), Level.NOTE, Level.WARN)
            folder = earlier.folder if earlier is not None else make_run_folder(self._config)
            lease = lease or stack.enter_context(held(folder))
            if earlier is not None:
                resuming.make_ready(self._config, folder, in_script=True)
            (folder / SCRIPT_FILE).write_text(json.dumps({"command": sys.orig_argv}))
            print(f"run folder: {earlier or folder}", flush=True)
            roles, _ = place(self._config, processes_beside_script(self._config, folder), usable_gpus())
            record = open_record(folder, {"": folder}, stack=stack) if self._replay else None
            run, scripted, launcher = open_run(self._config, folder, roles=roles, lease=lease, early=early, record=record, stack=stack)
            await stack.enter_async_context(driven(run, scripted, launcher=launcher))
            if self._config.gateway is not None:
                print("\n".join(needed_by_agents(folder)), flush=True)
            self._at_end = stack.pop_all()
        return scripted

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._at_end.__aexit__(kind, error, trace)


@contextlib.contextmanager
def ends_at_signals(*, save_s: float) -> Iterator[None]:
    """Have SIGTERM, which clusters send before they end a job, and Ctrl-C leave the block: what is trained is saved, and the process ends
    with exit code 143, or by `KeyboardInterrupt`.

    Another one changes nothing: it says that a save is under way, and that this takes `save_s` at most. Outside of the main thread signals
    are not heard.
    """
    loop, script, told = asyncio.get_running_loop(), asyncio.current_task(), list[signal.Signals]()
    assert script is not None, "a block is entered by a task"

    def end(number: signal.Signals) -> None:
        words = f"being saved, which takes {save_s:g} s at most (trainer.silent_after_s); SIGKILL alone ends that"
        said = f"what the script has trained is {words}" if told else "the script is ended, and what it has trained is saved"
        print(f"{number.name}: {said}", file=sys.stderr, flush=True)
        told.append(number)
        if len(told) == 1:
            script.cancel()

    is_heard = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if is_heard}
    for number in before:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    except asyncio.CancelledError:
        if not told:
            raise
        if told[0] is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def open_record(folder: Path, policies: Mapping[str, Path], *, stack: contextlib.AsyncExitStack) -> ScriptRecord:
    """Open the record of a script, in its run's folder, until `stack` ends; `policies` are the folders of those that are trained.

    Raises `ScriptDiverged` where it does not lead to where the run stands.
    """
    answers = stack.enter_context(contextlib.closing(Answers(folder / ANSWERS_FILE)))
    return ScriptRecord(answers, next_steps={name: _num_decided(own / "ledger.sqlite") for name, own in policies.items()})


def _num_decided(path: Path) -> int:
    """Return how many steps the scripts before have decided upon, as the ledger of a run has it, or will have."""
    if not path.exists():
        return 0
    with contextlib.closing(Ledger(path)) as ledger:
        return num_decided(ledger)


def open_run(
    config: Config,
    folder: Path,
    *,
    roles: Sequence[Role],
    lease: Lease,
    early: EarlyProcesses,
    record: ScriptRecord | None,
    stack: contextlib.AsyncExitStack,
    policy: str = "",
    table: Table | None = None,
) -> tuple[Run, ScriptedRun, Launcher]:
    """Open what the run of one policy depends on, until `stack` ends; `roles` are its processes, each with its devices.

    `policy` and `table`: see `opened`.
    """
    allow_open_files()
    stack.enter_context(sidecars(folder, sidecars_of(config, folder)))
    environment = {EPOCH: str(lease.epoch)}
    address = address_of(config.run.interface)
    given = stack.enter_context(
        opened(
            config,
            folder,
            address=address,
            environment=environment,
            in_script=True,
            record=record,
            policy=policy,
            table=table,
        )
    )
    stack.enter_context(guarded(config.pipeline.stall_limit_s, end=functools.partial(end_stuck, folder, "script")))
    launcher = launcher_of(config, tuple(roles), folder, lease=lease, early=early, is_orchestrator=True)
    run, tokenizer = Run(config, given), load_tokenizer(config.model.path)
    scripted = ScriptedRun(
        run,
        config=config,
        folder=folder,
        prompt_of=prompt_maker(config, tokenizer),
        decode=decoder(tokenizer, ends=given.stop_token_ids),
        demonstration=_demonstrations(config, tokenizer),
    )
    return run, scripted, launcher


class Drivable(Protocol):
    """What goes on beside a script: a whole run, or engines alone."""

    ready: asyncio.Event

    async def run(self) -> object: ...

    def stop(self, reason: str, *, evaluates: bool = True) -> None: ...


class Asked(Protocol):
    """What a script asks of it."""

    @property
    def waits(self) -> ScriptWaits: ...

    async def leave(self) -> None: ...


_Asked = TypeVar("_Asked", bound=Asked)


@contextlib.asynccontextmanager
async def driven(
    run: Drivable, scripted: _Asked, *, launcher: Launcher | None, on_failed: Callable[[BaseException], None] = lambda error: None
) -> AsyncIterator[_Asked]:
    """Have a run go on beside the block, from its first peer on; end it well where the block ends well, and save it however that ends.

    `on_failed` hears what has ended it before the block did.
    """
    driving = asyncio.create_task(_drive(run, scripted.waits, launcher, on_failed), name="run")
    ready = asyncio.create_task(run.ready.wait())
    try:
        await asyncio.wait((ready, driving), return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            await driving  # raises why it could not begin
        yield scripted
        await scripted.leave()
    except BaseException as error:
        run.stop(why_left(error), evaluates=False)
        with contextlib.suppress(PipelineError):  # one that ended the run was raised by a call of the script
            await _ended(driving)
        raise
    finally:
        ready.cancel()
    await _ended(driving)


async def _ended(driving: asyncio.Task[None]) -> None:
    """Wait until a run has saved and ended. Raises what has ended it; a cancellation meanwhile is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not driving.done():
        try:
            await asyncio.wait((driving,))
        except asyncio.CancelledError as error:
            cancelled = error
    driving.result()
    if cancelled is not None:
        raise cancelled


def why_left(error: BaseException) -> str:
    """Say for the journal what has left the block before its end."""
    return "the script was stopped" if isinstance(error, asyncio.CancelledError) else "the script has failed"


async def _drive(run: Drivable, waits: ScriptWaits, launcher: Launcher | None, on_failed: Callable[[BaseException], None]) -> None:
    """Run to the end, beside the processes. Raises the error that came first, of the run or of a process."""
    try:
        async with asyncio.TaskGroup() as group:
            if launcher is not None:
                group.create_task(launcher.run(), name="launcher")
            await run.run()
            if launcher is not None:
                launcher.orchestrator_ended()
        waits.fail(ScriptError("the block of the Controller is left, and its run has ended: nothing can be asked of it any more"))
    except BaseException as error:
        first = _first(error)
        waits.fail(first)
        on_failed(first)
        if first is error:
            raise
        raise first from error


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group that is our own, else its first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_first(one) for one in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, PipelineError)), leaves[0])


def _demonstrations(config: Config, tokenizer: Any) -> DemonstrationOf:
    """Make demonstrations of rows; a tokenizer that cannot end a text is an error of the first one."""
    encoder = functools.cache(lambda: DemonstrationEncoder(config, tokenizer=tokenizer))
    return lambda row, *, where: encoder().encode(row, where=where)


def prompt_maker(config: Config, tokenizer: Any) -> Callable[[int, Row], Prompt]:
    """Return what makes a prompt of a number and a row of the script's."""
    builder = PromptBuilder(prompt_column=config.data.prompt_column, encoder=encoder_of(config, tokenizer))
    return functools.partial(_own_prompt, builder, longest_prompt(config))


def _own_prompt(builder: PromptBuilder, longest: int, number: int, row: Row) -> Prompt:
    """Make a prompt of a row of the script's. Raises `DataError`."""
    prompt = builder.prompt(number, row, epoch=0, where="sample")
    if len(prompt.token_ids) > longest:
        raise DataError(
            f"sample: a prompt has {len(prompt.token_ids)} tokens, at most {longest} are allowed. Shorten it, or raise model.max_tokens"
        )
    return prompt


_SENT_BY = {"slurm": "slurm", "kubernetes": "k8s", "ray": "ray"}
"""The commands that send a run to several nodes, by the section that says how many."""


def not_in_scripts(config: Config) -> Iterator[Finding]:
    """Name what a script's run cannot have, and what does nothing in it."""
    for name in ("slurm", "kubernetes", "ray"):
        nodes: NodesSection = getattr(config, name)
        if (count := nodes.trainer_nodes + nodes.engine_nodes + nodes.scorer_nodes) > 1:
            found = f"asks for {count} nodes, and a script starts all its processes on one machine"
            keys = ", ".join(f"{name}.{key}" for key in ("trainer_nodes", "engine_nodes", "scorer_nodes") if key in nodes.model_fields_set)
            without = f"run the config without a script: `pipelinerl {_SENT_BY[name]}`"
            do = f"leave {keys} out, and start it on a machine with GPUs for all, or {without}"
            yield Finding(Level.FAIL, name, found, do)
    if config.is_mixed:
        found = f"is {config.engine.apart}, and a script may await what an engine has that sleeps until the script itself publishes"
        yield Finding(Level.FAIL, "engine.apart", found, "leave it out: all engines then take turns, or none does (pipeline.placement)")
    if config.pipeline.elastic:
        found = "is true, and a script's run keeps its engines, unless the script asks for others, and its trainer's ranks"
        yield Finding(Level.FAIL, "pipeline.elastic", found, "leave it out; run.reallocate(engines=N) asks for engines")
    for section, key, instead in (("evaluation", "every", "run.evaluate()"), ("batch", "groups_per_step", "run.train(rows)")):
        if key in getattr(config, section).model_fields_set:
            yield note(f"{section}.{key}", f"does nothing in a script's run unless the script reads it: {instead} says it")
