"""What one long rollout costs in bytes, through the whole orchestrator and the real codec, on simulated time."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any
from unittest import mock

from tests.sim import memory
from tests.sim.peers import World
from tests.sim.run import config, run


def bytes_of(num_tokens: int, folder: Path) -> dict[str, int]:
    """Bytes between each pair of processes, and in each file, of a run of one step with two rollouts of so many tokens."""
    sent: collections.Counter[str] = collections.Counter()
    carry = memory.FaultyNetwork.carry

    def count(network: memory.FaultyNetwork, pair: str, frame: bytes, deliver: Any) -> None:
        sent[pair] += len(frame)
        carry(network, pair, frame, deliver)

    settings = config(
        rollout={"group_size": 2, "max_tokens": num_tokens},
        engine={"count": 1, "max_running": 2},
        batch={"groups_per_step": 1, "max_tokens": num_tokens + 64},
        pipeline={"mode": "sync"},
        prm={"path": "unused", "chunk_tokens": 32},
        trainer={"steps": 1},
    )
    folder.mkdir()
    with mock.patch.object(memory.FaultyNetwork, "carry", count):
        simulated = run(settings, folder=folder, world=World(mean_tokens=10**9), is_recorded=True)
    assert simulated.problems() == []
    assert simulated.record.tokens == {0: 2 * num_tokens}, "both were trained, to the last token"
    files = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "config.json"}
    return dict(sent) | files
