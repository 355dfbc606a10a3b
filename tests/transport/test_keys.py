"""Keys: made for one run, their owner's alone, and refused where others could read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.transport.keys import make_keys, read_keys
from tests.keys import PEERS


def test_keys_are_their_owners_alone_and_no_secret_shows_in_a_repr(tmp_path: Path):
    make_keys(tmp_path, PEERS)
    for role in ("orchestrator", *PEERS):
        assert (tmp_path / "keys" / f"{role}.key").stat().st_mode & 0o777 == 0o600
        pair = read_keys(tmp_path, role)
        assert pair.secret.decode() not in repr(pair)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    pairs = {name: read_keys(tmp_path, name) for name in ("orchestrator", *PEERS)}
    assert len({pair.public for pair in pairs.values()}) == len(pairs)
    make_keys(tmp_path, [*PEERS, "engine-9"])
    assert {name: read_keys(tmp_path, name) for name in pairs} == pairs, "a run that goes on with more engines keeps its keys"
    assert read_keys(tmp_path, "engine-9")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_keys_that_others_can_read_are_refused(tmp_path: Path, mode: int):
    make_keys(tmp_path, PEERS)
    os.chmod(tmp_path / "keys" / "engine-0.key", mode)
    with pytest.raises(ConfigError, match=rf"engine-0.key has mode {mode:o}: others can read this run's key; run `chmod 600"):
        read_keys(tmp_path, "engine-0")


@pytest.mark.parametrize("content", [b"", b"a" * 40, b"a" * 40 + b"\n" + b"b" * 39, b"a" * 40 + b"\n" + b"b" * 40 + b"\n" + b"c" * 40])
def test_a_file_that_is_no_key_pair_is_refused(tmp_path: Path, content: bytes):
    make_keys(tmp_path, PEERS)
    (tmp_path / "keys" / "engine-0.key").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a key pair"):
        read_keys(tmp_path, "engine-0")


def test_a_missing_key_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no key for engine-0 at .*the launcher makes one for each"):
        read_keys(tmp_path, "engine-0")
