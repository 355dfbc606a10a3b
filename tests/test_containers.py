"""The recipes of containers, as far as a machine without Docker or Apptainer can hold them to the repository: files, lock, shell, Slurm."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKER = (ROOT / "scripts/containers/Dockerfile").read_text()
APPTAINER = (ROOT / "scripts/containers/pipelinerl.def").read_text()
PREFIX = "/opt/pipelinerl/"


def copied(recipe: str) -> dict[str, str]:
    """Where each file or folder of the repository goes."""
    if recipe is DOCKER:
        lines = [line.split()[1:] for line in recipe.splitlines() if line.startswith("COPY ")]
        return {source: place + source if place.endswith("/") else place for *sources, place in lines for source in sources}
    section = re.search(r"^%files\n(.*?)\n\n", recipe, re.DOTALL | re.MULTILINE)
    assert section is not None
    return dict(line.split() for line in section[1].splitlines())


def commands(recipe: str) -> list[str]:
    """What is run while the image is made, comments left out."""
    if recipe is DOCKER:
        return re.findall(r"^RUN (.*)$", recipe, re.MULTILINE)
    section = re.search(r"^%post\n(.*?)\n\n", recipe, re.DOTALL | re.MULTILINE)
    assert section is not None
    return [line.strip() for line in section[1].splitlines() if not line.strip().startswith(("#", "set ", "export "))]


def test_both_images_are_made_of_the_same_things() -> None:
    assert re.findall(r"^FROM (\S+)$", DOCKER, re.MULTILINE) == re.findall(r"^From: (\S+)$", APPTAINER, re.MULTILINE)
    assert copied(DOCKER) == copied(APPTAINER)
    assert commands(DOCKER) == commands(APPTAINER)


@pytest.mark.parametrize("recipe", [DOCKER, APPTAINER], ids=["docker", "apptainer"])
def test_what_is_copied_is_there_and_is_all_that_the_installation_needs(recipe: str) -> None:
    files = copied(recipe)
    assert all((ROOT / source).exists() for source in files)
    assert all(place == PREFIX + source for source, place in files.items())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.partition(".")[0] for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", project["project"]["license-files"][0], "README.md", "scripts/lock/gpu.txt"} == set(files)
    assert project["project"].get("readme", "README.md") in files


@pytest.mark.parametrize("recipe", [DOCKER, APPTAINER], ids=["docker", "apptainer"])
def test_every_command_is_shell_and_installs_the_locked_versions_alone(recipe: str) -> None:
    for command in commands(recipe):
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    pip = [command for command in commands(recipe) if " pip " in command]
    assert len(pip) == 2
    assert all("--no-deps" in command for command in pip), "pip would choose versions of its own"
    assert pip[0].endswith("-r /opt/pipelinerl/scripts/lock/gpu.txt")
    major, minor = re.findall(r"python:(\d+)\.(\d+)", recipe)[0]
    assert (major, minor) == ("3", "11"), "the version on which the lock was resolved"


SETUPS = re.findall(r"^setup = \['(.*)'\]$", (ROOT / "docs/start/slurm.md").read_text(), re.MULTILINE)
STEP = (
    'set -uo pipefail\n{setup}\nsrun --kill-on-bad-exit=1 --output="a b.log" \\\n    python -m program --run-folder "runs/x y" &\nwait $!\n'
)


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (
            0,
            ["--container-image={here}/pipelinerl.sqsh", "--container-mounts={here}:{here}", "--container-workdir={here}",
             "--kill-on-bad-exit=1", "--output=a b.log", "python", "-m", "program", "--run-folder", "runs/x y"],
        ),
        (
            1,
            ["--kill-on-bad-exit=1", "--output=a b.log", "apptainer", "exec", "--nv", "--bind", "{here}", "pipelinerl.sif", "python", "-m",
             "program", "--run-folder", "runs/x y"],
        ),
    ],
    ids=["pyxis", "plain srun"],
)  # fmt: skip
def test_the_documented_lines_put_a_jobs_step_into_the_container(tmp_path: Path, setup: int, expected: list[str]) -> None:
    """The line of docs/start/slurm.md before a step as the job's script starts it; in place of srun stands one that says its words."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(
        ["bash", "-c", STEP.format(setup=SETUPS[setup])], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert said.stdout.splitlines() == [word.format(here=tmp_path) for word in expected]
