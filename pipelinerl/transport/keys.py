"""CURVE key pairs of one run, and the allow-list that ZeroMQ asks for every connection.

The launcher makes one key pair for the orchestrator and one for each peer, in `<run>/keys/`, readable by their owner only. A secret key
never stands on a command line or in a config. A connection whose public key is not on the list is refused before a byte of it is decoded:
the list is fail-closed, an empty one lets nobody in. The key says who a peer is, not the peer: the holder of one key speaks for one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import zmq

from pipelinerl.errors import ConfigError

ROLES = ("engine", "scorer", "trainer", "gateway")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair in Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes = dataclasses.field(repr=False)


def make_keys(run_folder: Path, peers: Iterable[str]) -> None:
    """Make fresh keys for the orchestrator and peers (`engine-0`), where they have none. Raises `ConfigError` without CURVE in ZeroMQ."""
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq was built without CURVE, so connections could not be protected; install pyzmq from its wheel")
    folder = run_folder / "keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("orchestrator", *peers):
        public, secret = zmq.curve_keypair()
        with contextlib.suppress(FileExistsError), open(folder / f"{name}.key", "xb", opener=_for_owner) as file:
            file.write(public + b"\n" + secret + b"\n")


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_keys(run_folder: Path, name: str) -> KeyPair:
    """Read one process's pair. Raises `ConfigError` where it is missing, malformed, or readable by others."""
    path = run_folder / "keys" / f"{name}.key"
    try:
        mode = path.stat().st_mode & 0o777
        lines = path.read_bytes().split()
    except OSError as error:
        raise ConfigError(f"no key for {name} at {path}: {error}; the launcher makes one for each process of the config") from None
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:o}: others can read this run's key; run `chmod 600 {path}`")
    if len(lines) != 2 or any(len(line) != 40 for line in lines):
        raise ConfigError(f"{path} is not a key pair: expected two lines of 40 characters; remove it and start the run again")
    return KeyPair(public=lines[0], secret=lines[1])


class AllowList:
    """Answers ZeroMQ's question whether a client's public key may connect, and ours whose it is."""

    def __init__(self, names: dict[bytes, str]) -> None:
        self.names = names
        """Names of peers by their public keys (Z85 text)."""

    def callback(self, domain: str, key: bytes) -> bool:
        """True where `key` (Z85 text) is on the list; called by pyzmq's authenticator for every new connection."""
        return key in self.names


def read_allow_list(run_folder: Path, role: str) -> AllowList:
    """The list of all peers of a role that have keys. Raises as `read_keys`."""
    names = sorted(path.stem for path in (run_folder / "keys").glob(f"{role}-*.key"))
    return AllowList({read_keys(run_folder, name).public: name for name in names})
