"""`<run>/endpoints/<role>.json`: where the orchestrator listens, published once it does, and read by every peer that connects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.network import address_towards
from pipelinerl.runtime.watch import wait_for_file


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The address at which the orchestrator listens for one kind of peer, and the key by which it is known."""

    address: Annotated[str, msgspec.Meta(pattern=r"^tcp://[A-Za-z0-9.:\[\]_-]+:\d{1,5}$", max_length=300)]
    server_key: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
    closing_message: Annotated[bytes, msgspec.Meta(max_length=1 << 20)] = b""
    """An encoded message, once the orchestrator ends: whoever looks for it need not look on."""


def publish_endpoint(path: Path, endpoint: Endpoint) -> None:
    """Write an endpoint to its file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(endpoint))
    os.replace(draft, path)


def is_listening(path: Path) -> bool:
    """Return whether an orchestrator has published this endpoint and not ended since. Raises `ConfigError` for a damaged file."""
    return path.exists() and not read_endpoint(path, deadline_s=1.0).closing_message


def read_endpoint(path: Path, *, deadline_s: float) -> Endpoint:
    """Read an endpoint, once there is one. Raises `PeerSilent` after the deadline, `ConfigError` for a damaged file."""
    text = wait_for_file(path, peer="orchestrator", deadline_s=deadline_s)
    try:
        return msgspec.json.decode(text, type=Endpoint)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no endpoint that an orchestrator has published: {error}") from None


def own_address(run_folder: Path, role: str, *, deadline_s: float = 60.0) -> str:
    """This machine's address on the way to the orchestrator, once that has published its own."""
    endpoint = read_endpoint(run_folder / "endpoints" / f"{role}.json", deadline_s=deadline_s)
    return address_towards(endpoint.address.removeprefix("tcp://").rpartition(":")[0])
