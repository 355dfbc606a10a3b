"""Whoever reaches a Ray cluster without authentication runs code on all of its nodes: a cluster that asks for no token is refused.

The names are Ray's: `RAY_AUTH_MODE=token`, and the token in `RAY_AUTH_TOKEN`, in the file `RAY_AUTH_TOKEN_PATH`, or in `~/.ray/auth_token`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from pipelinerl.errors import ConfigError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
PROBE_S = 60.0
"""For a stranger's knock; it imports Ray, which takes seconds."""
_HOW = (
    "Whoever reaches a Ray cluster that asks for no token runs code on all of its nodes. Make a token once"
    " (`ray get-auth-token --generate`), copy ~/.ray/auth_token to every node, start each with `RAY_AUTH_MODE=token ray start ...`, and"
    " set RAY_AUTH_MODE=token here, too"
)
_KNOCK = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_get(b"pipelinerl", None, timeout=10)
except Exception as error:
    print(type(error).__name__)
else:
    print("open")
"""


def show_token(environment: MutableMapping[str, str], *, home: Path) -> None:
    """Have Ray, which is imported later, show its token. Raises `ConfigError` where there is none, or where it is told not to."""
    mode = environment.get(MODE, "token")
    if mode.lower() != "token":
        raise ConfigError(f"pipelinerl ray: {MODE} is {mode!r}, expected 'token'. {_HOW}")
    if not environment.get(TOKEN):
        path = Path(environment.get(TOKEN_PATH) or home / ".ray" / "auth_token")
        if not path.is_file() or not path.read_text().strip():
            raise ConfigError(f"pipelinerl ray: there is no token: {TOKEN} is not set, and {path} holds none. {_HOW}")
    environment[MODE] = "token"


def refuse_open(address: str) -> None:
    """Knock at a cluster without a token. Raises `ConfigError` where that is let in, or where nobody can tell."""
    try:
        knocked = subprocess.run(
            [sys.executable, "-c", _KNOCK, address],
            env=_of_a_stranger(os.environ) | {MODE: "disabled", "HOME": os.devnull},
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
        said = (knocked.stdout.split() or [f"exit code {knocked.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        said = f"no answer within {PROBE_S:g} s"
    if said == "open":
        raise ConfigError(f"pipelinerl ray: the cluster at {address} lets in who has no token. {_HOW}")
    if said != "AuthenticationError":
        raise ConfigError(
            f"pipelinerl ray: whether the cluster at {address} asks for a token is not known: a knock without one was answered by {said},"
            " expected AuthenticationError"
        )


def without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """What processes of a run are given: no role, and no reward function, needs the cluster's token."""
    return _of_a_stranger(environment)


def _of_a_stranger(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}
