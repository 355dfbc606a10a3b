"""`pipelinerl.Policies`: several policies in one script, trained and frozen ones.

    async with Policies("self_play.toml") as run:
        alice, bob, judge = run.policies["alice"], run.policies["bob"], run.frozen["judge"]
        rollouts = await alice.sample(prompts)
        ...
        await asyncio.gather(alice.train(rows), bob.train(others))

Each policy is a whole run, what `Controller` gives for one: engines, publications, versions, a staleness bound, a trainer, a ledger and
checkpoints of its own, in a folder of its own. So what every run promises holds for each, and nothing of one can get into another. What is
here is what they have in common: one script, one start, one end. An error that ends one of them ends all, and all are saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from rich.console import Console

from orchestrator.controller import Asked, Drivable, driven, ends_at_signals, not_in_scripts, open_record, open_run, prompt_maker, why_left
from orchestrator.frozen_policy import FrozenPolicy
from orchestrator.scripted_run import ScriptedRun
from orchestrator.stages.leasing import Table
from orchestrator.stages.script_replay import ScriptRecord
from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.config.policies import PolicySettings, policies_of
from pipelinerl.data.hub import resolved
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import decoder, load_tokenizer
from pipelinerl.data.vocabulary import vocabulary_of
from pipelinerl.errors import ConfigError, ScriptError
from pipelinerl.launch import resuming
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.policies import check_policies, make_folders, make_ready, place_policies, roles_in, settings_in
from pipelinerl.launch.roles import Role, begin_early
from pipelinerl.launch.run_folder import SCRIPT_FILE, folder_of_policy, needed_by_agents
from pipelinerl.launch.run_launcher import launcher_of
from pipelinerl.messages import FromEngine, Trajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.findings import Finding, Level, collect, refuse, show
from pipelinerl.runtime.lease import Lease, held
from pipelinerl.runtime.machine import cores_and_devices
from pipelinerl.runtime.network import address_of
from pipelinerl.runtime.process import ask_to_replace
from pipelinerl.transport.zmq import ZmqHub

_Policy = TypeVar("_Policy", bound=Asked)


class Named(Mapping[str, _Policy]):
    """Policies by their names. Raises `ScriptError`, which says what there is, for a name that is none of them."""

    def __init__(self, found: Mapping[str, _Policy], *, others: Mapping[str, str]) -> None:
        """`others`: what is to be said of names that are policies of the other kind."""
        self._found = found
        self._others = others

    def __getitem__(self, name: str) -> _Policy:
        if name in self._found:
            return self._found[name]
        if name in self._others:
            raise ScriptError(f"policy {name} {self._others[name]}")
        near = difflib.get_close_matches(name, [*self._found, *self._others], n=1)
        known = ", ".join([*self._found, *self._others])
        raise ScriptError(f"no policy is called {name!r}; " + (f"did you mean {near[0]}? " if near else "") + f"There are: {known}")

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesRun:
    """A run of several policies under way, as its script sees it."""

    policies: Named[ScriptedRun]
    """Those that are trained: each has the calls, the `step` and the `version` of a run of its own."""
    frozen: Named[FrozenPolicy]
    """The others, which answer `sample` and `logprobs`."""
    folder: Path
    """The run's folder; that of each policy is `policies/<name>` in it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One policy that was opened: what goes on beside the script, what the script has of it, and its processes."""

    name: str
    run: Drivable
    asked: ScriptedRun | FrozenPolicy
    launcher: Launcher | None


class Policies:
    """A run of several policies that a script drives; `async with` starts all their processes, and saves and ends them at its end."""

    def __init__(self, config: Config | Path | str, *overrides: str, resume: bool | str = False, replay: bool = False) -> None:
        """`config` is a TOML file with a section `[policies.NAME]` for each policy, or what `pipelinerl.config.file.load` returns of one.

        `overrides` are as on the command line, `"policies.alice.engine.count=2"`. `resume` is as for `Controller`: each policy goes on at
        the step after its own last that was trained or decided upon. `replay` is as for `Controller`: one record has the calls of all
        policies in their order. Raises `ConfigError` with the problems of all policies.
        """
        if isinstance(config, Config) and overrides:
            raise ConfigError(f"Policies: overrides {', '.join(overrides)} are for a TOML file, and a Config was given: load it with them")
        self._config = config if isinstance(config, Config) else load(Path(config), overrides=overrides)
        self._settings = [dataclasses.replace(one, config=resolved(one.config)) for one in policies_of(self._config)]
        self._resume = resume
        self._replay = replay
        self._at_end = contextlib.AsyncExitStack()

    async def __aenter__(self) -> PoliciesRun:
        async with contextlib.AsyncExitStack() as stack:
            save_s = max(one.config.trainer.silent_after_s for one in self._settings)
            stack.enter_context(ends_at_signals(save_s=save_s))
            early = {one.name: stack.enter_context(begin_early(one.config, roles=_roles(one))) for one in self._settings}
            name = self._resume if isinstance(self._resume, str) else None
            earlier = resuming.find_run(self._config, name) if self._resume else None
            leases = self._hold(earlier.folder, stack) if earlier is not None else {}
            refuse(findings := await asyncio.to_thread(self._check))
            show(findings, Console(stderr=True), Level.NOTE, Level.WARN)
            folder = earlier.folder if earlier is not None else make_folders(self._config, self._settings)
            leases = leases or self._hold(folder, stack)
            if earlier is not None:
                make_ready(self._config, self._settings, folder)
            print(f"run folder: {earlier or folder}", flush=True)
            trained = {one.name: folder_of_policy(folder, one.name) for one in self._settings if not one.is_frozen}
            record = open_record(folder, trained, stack=stack) if self._replay else None
            placed = place_policies(self._settings, folder, usable_gpus())
            table = Table()
            lanes = [
                _open(
                    dataclasses.replace(one, config=settings_in(one, folder)),
                    folder_of_policy(folder, one.name),
                    roles=placed[one.name][0],
                    lease=leases[one.name],
                    early=early[one.name],
                    record=record,
                    stack=stack,
                    table=table,
                )
                for one in sorted(self._settings, key=lambda one: not one.lends)  # who lends for all comes first
            ]
            (folder / SCRIPT_FILE).write_text(json.dumps({"command": sys.orig_argv}))
            run = await stack.enter_async_context(all_driven(lanes, folder=folder))
            for one in self._settings:
                if one.lends:
                    print("\n".join(needed_by_agents(folder_of_policy(folder, one.name))), flush=True)
            self._at_end = stack.pop_all()
        return run

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._at_end.__aexit__(kind, error, trace)

    def _check(self) -> list[Finding]:
        return collect(*(not_in_scripts(one.config) for one in self._settings if not one.is_frozen), check_policies(self._settings))

    def _hold(self, folder: Path, stack: contextlib.AsyncExitStack) -> dict[str, Lease]:
        """Hold the folder of each policy."""
        folders = {one.name: folder_of_policy(folder, one.name) for one in self._settings}
        if missing := [name for name, own in folders.items() if not own.is_dir()]:
            raise ConfigError(f"{folder} was begun without policies {', '.join(missing)}. Keep its policies, or start a new run")
        return {name: stack.enter_context(held(own)) for name, own in folders.items()}


@contextlib.asynccontextmanager
async def all_driven(lanes: Sequence[Lane], *, folder: Path):
    """Have all policies go on beside the block, from the first engine of the last on; end and save each as `driven` does."""
    trained = {lane.name: lane.asked for lane in lanes if isinstance(lane.asked, ScriptedRun)}
    frozen = {lane.name: lane.asked for lane in lanes if isinstance(lane.asked, FrozenPolicy)}
    for name, one in trained.items():
        one.tell_owner(functools.partial(_whose, name, trained, frozen))
    async with contextlib.AsyncExitStack() as stack:
        contexts = [driven(lane.run, lane.asked, launcher=lane.launcher, on_failed=_ends_all(lane, lanes)) for lane in lanes]
        begun = await asyncio.gather(*map(stack.enter_async_context, contexts), return_exceptions=True)
        for error in begun:
            if isinstance(error, BaseException):
                raise error
        try:
            yield PoliciesRun(
                policies=Named(trained, others=dict.fromkeys(frozen, "is frozen: nothing trains it. It answers in run.frozen")),
                frozen=Named(frozen, others=dict.fromkeys(trained, "is trained: it answers in run.policies")),
                folder=folder,
            )
        except BaseException as error:
            for lane in lanes:  # all save at once
                lane.run.stop(why_left(error), evaluates=False)
            raise


def _ends_all(failed: Lane, lanes: Sequence[Lane]) -> Callable[[BaseException], None]:
    """Return what tells the other policies of the error that has ended one."""

    def tell(error: BaseException) -> None:
        error.add_note(f"It has ended policy {failed.name}, and with it the run.")
        for lane in lanes:
            if lane is not failed:
                lane.asked.waits.fail(error)
                if not lane.run.ready.is_set():
                    lane.run.stop(f"policy {failed.name} has failed", evaluates=False)

    return tell


def _whose(asker: str, trained: Mapping[str, ScriptedRun], frozen: Mapping[str, FrozenPolicy], rollout: Trajectory) -> str:
    """Say whose rollout it is, where it is another policy's; an empty string where it is nobody's."""
    for name, one in trained.items():
        if name != asker and one.holds(rollout):
            return f"policy {name} has sampled it, and this is policy {asker}: each policy scores and trains what it has sampled itself"
    owner = rollout.rollout_id.partition(":")[0]
    return f"the frozen policy {owner} has sampled it, and what a frozen policy samples never trains" if owner in frozen else ""


def _roles(policy: PolicySettings) -> Callable[[Config, Path], tuple[Role, ...]]:
    return lambda config, folder: roles_in(dataclasses.replace(policy, config=config), folder)


def _open(
    policy: PolicySettings,
    folder: Path,
    *,
    roles: Sequence[Role],
    lease: Lease,
    early: EarlyProcesses,
    record: ScriptRecord | None,
    stack: contextlib.AsyncExitStack,
    table: Table,
) -> Lane:
    """Open what a policy depends on, until `stack` ends."""
    config = policy.config
    (folder / SCRIPT_FILE).write_text(json.dumps({"command": sys.orig_argv}))
    if not policy.is_frozen:
        run, scripted, launcher = open_run(
            config, folder, roles=roles, lease=lease, early=early, record=record, policy=policy.name, table=table, stack=stack
        )
        return Lane(name=policy.name, run=run, asked=scripted, launcher=launcher)
    hub = ZmqHub(folder, "engine", accepts=FromEngine, interface=address_of(config.run.interface))
    stack.callback(hub.close)
    journal = stack.enter_context(contextlib.closing(Journal(folder, "orchestrator")))
    journal.write("run", config=config.model_dump(mode="json"), derived={}, machine=cores_and_devices())
    tokenizer = load_tokenizer(config.model.path)
    stop_token_ids = stop_tokens_of(config.model.path, tokenizer=tokenizer, extra=config.rollout.stop_token_ids).ids
    frozen = FrozenPolicy(
        policy.name,
        config,
        folder=folder,
        hub=hub,
        journal=journal,
        prompt_of=prompt_maker(config, tokenizer),
        decode=decoder(tokenizer, ends=stop_token_ids),
        stop_token_ids=stop_token_ids,
        vocabulary=vocabulary_of(config),
        replace=functools.partial(ask_to_replace, folder),
        record=record,
    )
    if table.leasing is not None:
        table.leasing.seats[policy.name] = frozen.seat(table.leasing)
    launcher = launcher_of(config, tuple(roles), folder, lease=lease, early=early, is_orchestrator=True)
    return Lane(name=policy.name, run=frozen, asked=frozen, launcher=launcher)
