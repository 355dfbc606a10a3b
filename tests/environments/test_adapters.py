"""Adapters of other people's environments: as their packages answered when that was recorded, and with the packages where they are."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.rewards.interpreter import RemoteClass
from tests.environments.plays import HERE, PLAYS, Replayed, adapter, play

ROOT = HERE.parents[1]
OTHER = ROOT / "runs" / "environments" / "bin" / "python"
NEEDED = "python -m venv runs/environments && runs/environments/bin/pip install textarena openenv skyrl-gym reasoning-gym"


def recorded(name: str) -> dict[str, Any]:
    return json.loads((HERE / "recorded" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PLAYS)
def test_an_adapter_asks_and_answers_as_was_recorded_with_the_real_package(name: str) -> None:
    said, known = PLAYS[name], recorded(name)
    found = play(adapter(name, package=Replayed(known["calls"]))(**said["options"]), said["moves"], **said["columns"])
    assert json.loads(json.dumps(found)) == known["played"]
    assert known["calls"] == [], "all that was asked then is asked"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real OpenEnv server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([OTHER, HERE / "openenv_game.py", str(port)]) as process:
        end = time.monotonic() + 60.0
        while process.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.kill()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not OTHER.exists(), reason=f"no interpreter with the packages at {OTHER}: {NEEDED}")
@pytest.mark.parametrize("name", PLAYS)
def test_an_adapter_plays_with_the_real_package_under_its_own_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    said = PLAYS[name]
    options = dict(said["options"])
    if name == "openenv":
        options["url"] = request.getfixturevalue("server")
    module = "openenv" if name == "openenv" else said["package"]
    reference = f"pipelinerl.environments.{module}:{said['adapter']}"
    made = RemoteClass(reference, python=str(OTHER), what=name)
    try:
        found = play(_Moves(made(**options)), said["moves"], **said["columns"])
    finally:
        made.end()
    assert json.loads(json.dumps(found)) == recorded(name)["played"]


class _Moves:
    """Hands what is said over as the worker does."""

    def __init__(self, environment: RemoteClass) -> None:
        self.reset, self.close = environment.reset, environment.close
        self._step = environment.step

    def step(self, move: str) -> Any:
        from pipelinerl.environments import Said

        return self._step(Said.of(move))


def test_no_adapter_imports_its_package_or_this_project_until_it_is_used() -> None:
    for path in sorted((ROOT / "pipelinerl" / "environments").glob("*.py")):
        imports = [line for line in Path(path).read_text().splitlines() if line.startswith(("import ", "from "))]
        names = {line.split()[1].partition(".")[0] for line in imports}
        assert names <= set(sys.stdlib_module_names), path.name
