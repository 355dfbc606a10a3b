"""Who may connect: CURVE key pairs of one run, and the allow-list that ZeroMQ asks for every connection.

The launcher makes one key pair for the orchestrator and one for each kind of peer, in `<run>/keys/`, readable by their owner only.
A secret key never stands on a command line or in a config. A connection whose public key is not on the list is refused before a byte
of it is decoded: the list is fail-closed, an empty one lets nobody in.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import zmq

from pipelinerl.errors import ConfigError

ROLES = ("engine", "scorer", "trainer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair in Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes = dataclasses.field(repr=False)


def make_keys(run_folder: Path) -> None:
    """Make fresh keys for the orchestrator and every kind of peer. Raises `ConfigError` where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq was built without CURVE, so connections could not be protected; install pyzmq from its wheel")
    folder = run_folder / "keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in ("orchestrator", *ROLES):
        public, secret = zmq.curve_keypair()
        with open(os.open(folder / f"{role}.key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(public + b"\n" + secret + b"\n")


def read_keys(run_folder: Path, role: str) -> KeyPair:
    """Read one role's pair. Raises `ConfigError` where it is missing, malformed, or readable by others."""
    path = run_folder / "keys" / f"{role}.key"
    try:
        mode = path.stat().st_mode & 0o777
        lines = path.read_bytes().split()
    except OSError as error:
        raise ConfigError(f"no key for {role} at {path}: {error}; make keys with `pipelinerl keys {run_folder}`") from None
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:o}: others can read this run's key; run `chmod 600 {path}`")
    if len(lines) != 2 or any(len(line) != 40 for line in lines):
        raise ConfigError(f"{path} is not a key pair: expected two lines of 40 characters; make keys with `pipelinerl keys {run_folder}`")
    return KeyPair(public=lines[0], secret=lines[1])


class AllowList:
    """Answers ZeroMQ's question whether a client's public key may connect."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self.allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        """True where `key` (Z85 text) is on the list; called by pyzmq's authenticator for every new connection."""
        return key in self.allowed
