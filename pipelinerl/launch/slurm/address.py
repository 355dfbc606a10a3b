"""Finds the address at which other nodes reach this one: the one on its way to them, as Slurm knows where they are."""

from __future__ import annotations

import os
import re
import subprocess

from pipelinerl.runtime.network import address_towards


def address_towards_others() -> str:
    """Return this node's address towards another node of the job. Raises `ConfigError` where no route leads there."""
    here = os.environ.get("SLURMD_NODENAME", "")
    other = next((name for name in _nodes() if name != here), here)
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", other, "--oneliner"))
    return address_towards(found[1] if found else other)


def _nodes() -> list[str]:
    """The nodes of the job, those of all components of a heterogeneous one."""
    lists = [value for name, value in sorted(os.environ.items()) if re.fullmatch(r"SLURM_JOB_NODELIST(_HET_GROUP_\d+)?", name)]
    return [node for one in lists for node in _scontrol("show", "hostnames", one).split()]


def _scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True).stdout
