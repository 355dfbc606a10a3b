"""The placement group of a run, and command lines run in its bundles. The one module that calls Ray."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config import RaySection
from pipelinerl.errors import ConfigError, PeerGone, PeerSilent
from pipelinerl.launch.ray.access import refuse_open, show_token
from pipelinerl.launch.ray.bundles import Bundle
from pipelinerl.launch.ray.member import END_S, Member

ASK_AGAIN_S = 1.0
"""Between two questions to an actor that does not answer, until Ray knows whether its node is lost."""


class Cluster:
    """The run's share of a Ray cluster."""

    def __init__(self, ray: Any, group: Any, bundles: Sequence[Bundle], *, wait_s: float) -> None:
        self._ray = ray
        self._group = group
        self._bundles = bundles
        self._wait_s = wait_s

    async def run(self, node: int, command: tuple[str, ...], *, log: Path) -> int:
        """Run a command line, with `--address` of its node, in a bundle to its end; its exit code. Where this is cancelled, end it.

        Raises `PeerSilent` where the cluster has no room for the bundle, `PeerGone` where its node was lost, and `ConfigError` where the
        command cannot be started there.
        """
        bundle, errors = self._bundles[node], self._ray.exceptions
        actor = self._actor(bundle)
        try:
            try:
                async with asyncio.timeout(self._wait_s):
                    address = await actor.address.remote()
            except TimeoutError:
                raise PeerSilent(f"waited {self._wait_s:g} s for room for {bundle}; {self._said()}") from None
            try:
                return await self._end_of(actor, (*command, "--address", address), log)
            finally:
                with contextlib.suppress(errors.RayError, TimeoutError):
                    async with asyncio.timeout(2 * END_S):
                        await actor.end.remote()
        except (errors.RayActorError, errors.ActorUnschedulableError, errors.ActorPlacementGroupRemoved) as error:
            raise PeerGone(f"{bundle} is lost: {_why(error)}") from error
        except OSError as error:  # as the actor raised it
            raise ConfigError(
                f"{bundle} cannot start {command[0]} in {Path.cwd()} with its log at {log}: {' '.join(str(error).split())[-300:]}."
                " Every node must see run.folder, the environment of this Python and this folder at the same paths"
            ) from error
        finally:
            self._ray.kill(actor)

    async def _end_of(self, actor: Any, command: tuple[str, ...], log: Path) -> int:
        """The command's exit code; raises Ray's `ActorDiedError` once Ray knows that the actor is lost, and not before: until then a new
        one would be sent to the same node."""
        try:
            return await actor.run.remote(command, folder=Path.cwd(), log=log)
        except self._ray.exceptions.ActorUnavailableError:
            while True:
                try:
                    await actor.address.remote()
                except self._ray.exceptions.ActorUnavailableError:
                    await asyncio.sleep(ASK_AGAIN_S)  # Ray tells nobody when it has made up its mind
                else:
                    raise PeerGone("its connection broke, and with it word of how it ends") from None

    def _actor(self, bundle: Bundle) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        placed = strategies.PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=bundle.node)
        options = {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "scheduling_strategy": placed}
        return self._ray.remote(Member).options(max_restarts=0, max_task_retries=0, **options).remote()

    def _said(self) -> str:
        """What the cluster has, for a person."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return "the cluster has " + ("; ".join(map(_described, nodes)) or "no node")


@contextlib.contextmanager
def cluster_of(section: RaySection, bundles: Sequence[Bundle]) -> Iterator[Cluster]:
    """Connect, and hold the run's placement group, which is given back at the end, also where this process is killed.

    Raises `ConfigError` where Ray is not installed, where no cluster is there, or where it lets in who has no token.
    """
    show_token(os.environ, home=Path.home())
    try:
        ray, groups = importlib.import_module("ray"), importlib.import_module("ray.util.placement_group")
    except ImportError as error:
        raise ConfigError(f"pipelinerl ray: {error}: pip install 'pipelinerl[ray]'") from None
    try:
        ray.init(address=section.address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(f"pipelinerl ray: no cluster at ray.address = {section.address}: {' '.join(str(error).split())}") from None
    try:
        refuse_open(ray.get_runtime_context().gcs_address)
        group = groups.placement_group(
            [bundle.resources for bundle in bundles],
            strategy=section.strategy,
            bundle_label_selector=[bundle.labels for bundle in bundles],
        )
        try:
            yield Cluster(ray, group, bundles, wait_s=section.wait_s)
        finally:
            groups.remove_placement_group(group)
    finally:
        ray.shutdown()


def _why(error: Exception) -> str:
    """Ray's words for why an actor died, without those for which actor it was."""
    words = " ".join(str(error).split())
    return words[max(0, words.find("The actor died because")) :]


def _described(node: dict[str, Any]) -> str:
    resources = ", ".join(f"{name} {node['Resources'].get(name, 0):g}" for name in ("CPU", "GPU"))
    labels = ", ".join(f"{name}={value}" for name, value in node.get("Labels", {}).items() if name != "ray.io/node-id")
    return f"{node['NodeManagerAddress']} ({resources}{', ' if labels else ''}{labels})"
