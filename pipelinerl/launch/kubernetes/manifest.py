"""Config -> Kubernetes manifests: a pure function, so that what will be applied can be read, compared and kept.

Indexed Jobs (batch/v1), because every cluster has them; JobSet is an addition that many lack. One Job for each kind of nodes, as all pods
of a Job ask for the same. Pods find each other by the run folder, so that no Service is needed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launch.placement import Group, groups_of
from pipelinerl.launch.supervisor import FAILED

SETTINGS = "/etc/pipelinerl/settings.json"
"""Where pods find the resolved settings."""
INTERRUPTS = {"type": "DisruptionTarget", "status": "True"}
"""What a pod's conditions say where the cluster took it: preempted, evicted, drained."""
_OWNED = ("containers", "restartPolicy", "volumes", "terminationGracePeriodSeconds")


def manifests(config: Config, *, name: str) -> list[dict[str, Any]]:
    """The objects of a run whose folder is `<run.folder>/<name>`, in the order in which they are applied. Raises `ConfigError`."""
    section = config.kubernetes
    if problems := list(_problems(config)):
        raise ConfigError("pipelinerl k8s:\n" + "\n".join(f"  - {problem}" for problem in problems))
    named = {"name": _label(name), "namespace": section.namespace, "labels": {"app.kubernetes.io/name": "pipelinerl"}}
    settings = config.model_dump_json(indent=1)
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": {Path(SETTINGS).name: settings}}
    groups = groups_of(section, are_engines_other=bool(section.engine_pod))
    return [config_map, *(_job(config, name=name, metadata=named, group=group) for group in groups)]


def _job(config: Config, *, name: str, metadata: dict[str, Any], group: Group) -> dict[str, Any]:
    section = config.kubernetes
    if group.name:
        metadata = metadata | {"name": _label(f"{name}-{group.name}")}
    policy = [
        {"action": "Ignore", "onPodConditions": [INTERRUPTS]},
        {"action": "FailJob", "onExitCodes": {"containerName": "run", "operator": "In", "values": [FAILED]}},
    ]
    pod = {
        **section.pod,
        **(section.engine_pod if group.name == "engines" else {}),
        "restartPolicy": "Never",  # the Job makes a new pod, elsewhere where a node is gone
        "terminationGracePeriodSeconds": section.save_s,
        "containers": [_container(config, name=name, first_node=group.first_node, gpus=group.gpus)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": section.claim}},
            {"name": "settings", "configMap": {"name": _label(name)}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": group.count,
        "parallelism": group.count,
        "backoffLimit": section.restarts,
        "podFailurePolicy": {"rules": policy},
        "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _container(config: Config, *, name: str, first_node: int, gpus: int) -> dict[str, Any]:
    section = config.kubernetes
    folder = str(config.run.folder)
    asked = {
        "cpu": str(section.cpus_per_node),
        **({"memory": section.memory_per_node} if section.memory_per_node else {}),
        **({section.gpu_resource: str(gpus)} if gpus else {}),
    }
    return {
        "name": "run",
        "image": section.image,
        "command": ["python", "-m", "pipelinerl.launch.kubernetes"],
        "args": ["--settings", SETTINGS, "--run-folder", f"{folder}/{name}", "--first-node", str(first_node)],
        "workingDir": folder,
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, {"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": {"requests": asked, "limits": {key: asked[key] for key in asked if key != "cpu"}},
        "volumeMounts": [
            {"name": "runs", "mountPath": folder},
            {"name": "settings", "mountPath": str(Path(SETTINGS).parent), "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def _problems(config: Config) -> list[str]:
    section = config.kubernetes
    found = [f"kubernetes.{key} is not set: {what}" for key, what in _NEEDED.items() if not getattr(section, key)]
    if not config.run.folder.is_absolute():
        found.append(f"run.folder is {config.run.folder}: pods mount the claim there, so give it as an absolute path, for example /runs")
    for kind, pod in (("pod", section.pod), ("engine_pod", section.engine_pod)):
        found += [f"kubernetes.{kind}.{key} cannot be used: `pipelinerl k8s` sets it itself" for key in pod if key in _OWNED]
    if config.tinker is not None:
        found.append("section tinker is for `pipelinerl serve`, which runs on one machine: leave it out")
    return found


_NEEDED = {
    "image": "name the container image, for example one built by scripts/containers/Dockerfile",
    "claim": "name the PersistentVolumeClaim (ReadWriteMany) for run.folder",
}


def _label(name: str) -> str:
    """A name as Kubernetes takes it (RFC 1123): pods append their index and five characters to it, and have 63 in all."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[-50:].strip("-")


def as_list(objects: list[dict[str, Any]]) -> str:
    """The objects as one JSON document, which kubectl takes as it takes YAML."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
