"""The folders, processes and devices of a run with several policies: `<run>/policies/<name>` is a whole run folder for each.

So whatever reads a run's folder (report, view, checker, export) reads a policy's, and nothing of one policy can be taken for another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load_run, write_run
from pipelinerl.config.policies import PolicySettings
from pipelinerl.errors import ConfigError
from pipelinerl.launch import resuming
from pipelinerl.launch.gpus import Placement, place
from pipelinerl.launch.preflight import check
from pipelinerl.launch.roles import Role, engine_roles, processes_beside_script
from pipelinerl.launch.run_folder import fill, folder_of_policy, make_run_folder
from pipelinerl.runtime.devices import Gpu, named, usable_gpus
from pipelinerl.runtime.findings import Finding, collect, ok


def make_folders(config: Config, policies: Sequence[PolicySettings]) -> Path:
    """Make the folder of a run, and in it one for each policy; return the run's. Raises `ConfigError`."""
    folder = make_run_folder(config)
    try:
        for one in policies:
            fill(folder_of_policy(folder, one.name), settings_in(one, folder))
    except OSError as error:
        raise ConfigError(f"run.folder {config.run.folder}: no run can be kept there: {error.strerror or error}") from error
    return folder


def make_ready(config: Config, policies: Sequence[PolicySettings], run_folder: Path) -> None:
    """Make the folders of a run that goes on ready; only who holds their leases may.

    Raises `ConfigError` where the run had other policies, or where one would go on with settings that it cannot change.
    """
    before = {name: bool(entry.get("frozen")) for name, entry in load_run(run_folder).policies.items()}
    now = {one.name: one.is_frozen for one in policies}
    if before != now:
        raise ConfigError(f"{run_folder} was begun with {_said(before)}, and this config has {_said(now)}. Keep them, or start a new run")
    write_run(run_folder, config)
    for one in policies:
        settings, folder = settings_in(one, run_folder), folder_of_policy(run_folder, one.name)
        if one.is_frozen:
            resuming.make_frozen_ready(settings, folder)
        else:
            resuming.make_ready(settings, folder, in_script=True)


def settings_in(policy: PolicySettings, run_folder: Path) -> Config:
    """The settings of a policy in a run's folder: in a store its checkpoints lie below the run's name, where no other run has any."""
    if (to := policy.config.checkpoint.to) is None:
        return policy.config
    section = policy.config.checkpoint.model_copy(update={"to": f"{to.rstrip('/')}/{run_folder.name}"})
    return policy.config.model_copy(update={"checkpoint": section})


def roles_of_policy(policy: PolicySettings, run_folder: Path) -> tuple[Role, ...]:
    """The processes of a policy, beside the script."""
    return roles_in(policy, folder_of_policy(run_folder, policy.name))


def roles_in(policy: PolicySettings, folder: Path) -> tuple[Role, ...]:
    """The same, by the policy's own folder."""
    if policy.is_frozen:
        return engine_roles(policy.config, folder)
    return tuple(role for role in processes_beside_script(policy.config, folder) if policy.lends or role.name != "gateway-0")


def check_policies(policies: Sequence[PolicySettings], *, is_dry: bool = False) -> list[Finding]:
    """Look at everything of every policy, and at the devices of all of them together; whatever is wrong is in the findings, by policy."""
    return collect(*(_findings(one, is_dry=is_dry) for one in policies), _devices(policies))


def _findings(policy: PolicySettings, *, is_dry: bool) -> Iterator[Finding]:
    found = check(policy.config, is_dry=is_dry, in_script=True, is_one_of_several=True, is_frozen=policy.is_frozen)
    return (Finding(one.level, f"policies.{policy.name}" + (f": {one.what}" if one.what else ""), one.found, one.do) for one in found)


def _devices(policies: Sequence[PolicySettings]) -> Iterator[Finding]:
    placed = place_policies(policies, Path("RUN"), usable_gpus())
    for name, (_, placement) in placed.items():
        yield from (ok("GPUs", f"policies.{name}: {gpu}: {users}") for gpu, users in placement.users() if users != "free")


def place_policies(
    policies: Sequence[PolicySettings], run_folder: Path, gpus: Sequence[Gpu]
) -> Mapping[str, tuple[tuple[Role, ...], Placement]]:
    """Deal the GPUs of this machine to the processes of all policies: (processes, GPUs) of each, by its name.

    A policy has its GPUs for itself, in the order of the file, those that it names or the next of those that nobody names; policies whose
    `engine.shares_gpus` is set share what is left by the others. Raises `ConfigError` where they do not suffice, or two name one.
    """
    listed = {one.name: _listed(one, gpus) for one in policies}
    _refuse_overlaps(policies, listed)
    taken: dict[str, str] = {}
    found: dict[str, tuple[tuple[Role, ...], Placement]] = {}
    for one in sorted(policies, key=lambda one: one.config.engine.shares_gpus):
        of_others = {uuid for name, uuids in listed.items() if name != one.name for uuid in uuids}
        left = [gpu for gpu in gpus if gpu.uuid not in taken and (gpu.uuid not in of_others or one.config.engine.shares_gpus)]
        if gpus and not left:
            raise ConfigError(f"policies.{one.name}: no GPU is left of {len(gpus)} found here: {_users(taken)}. {_DO}")
        try:
            found[one.name] = place(one.config, roles_of_policy(one, run_folder), left)
        except ConfigError as error:
            raise ConfigError(f"policies.{one.name}: {error}" + (f" ({_users(taken)})" if taken else "")) from None
        if not one.config.engine.shares_gpus:
            taken |= {gpu.uuid: one.name for own in found[one.name][1].taken.values() for gpu in own}
    return {one.name: found[one.name] for one in policies}


_DO = (
    "Lower engine.count or trainer.ranks of some, or have policies share GPUs: engine.shares_gpus = true, with an engine.kv_cache_bytes"
    " that leaves the others their room"
)


def _listed(policy: PolicySettings, gpus: Sequence[Gpu]) -> frozenset[str]:
    if not gpus:
        return frozenset()
    keys = {"engine.gpus": policy.config.engine.gpus} | ({} if policy.is_frozen else {"trainer.gpus": policy.config.trainer.gpus})
    return frozenset(gpu.uuid for key, names in keys.items() for gpu in named(names, gpus, key=f"policies.{policy.name}.{key}"))


def _refuse_overlaps(policies: Sequence[PolicySettings], listed: Mapping[str, frozenset[str]]) -> None:
    owners: dict[str, PolicySettings] = {}
    for one in policies:
        for uuid in sorted(listed[one.name]):
            other = owners.setdefault(uuid, one)
            if other is not one and not (one.config.engine.shares_gpus and other.config.engine.shares_gpus):
                raise ConfigError(
                    f"policies.{other.name} and policies.{one.name} both name GPU {uuid}: each would take its memory for itself. {_DO}"
                )


def _users(taken: Mapping[str, str]) -> str:
    counts = {name: list(taken.values()).count(name) for name in taken.values()}
    return ", ".join(f"{name} has {count}" for name, count in counts.items())


def _said(policies: Mapping[str, bool]) -> str:
    return ", ".join(name + " (frozen)" * is_frozen for name, is_frozen in policies.items()) or "one policy"
