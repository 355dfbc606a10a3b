"""The peers that tests make keys for."""

from __future__ import annotations

from pipelinerl.transport.keys import ROLES

PEERS = tuple(f"{role}-{number}" for role in ROLES for number in range(4))
