"""Runs of the demo in processes of their own, with other settings, and what their journals say."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.observe.lines import read_journals


def prepare(folder: Path) -> Path:
    """Write the demo's config and a fresh model to `folder`; return the config's path."""
    settings = demo_config(folder=folder, seed=0)
    make_demo_model(folder / "demo-model", seed=0)
    return settings


def warm_start(settings: Path, *overrides: str) -> str:
    """Give the model its supervised start; return the override that has a run begin with it."""
    program("trainer.sft", str(settings), *overrides)
    return f"model.path={load(settings).sft_output}"


def program(module: str, *words: str) -> None:
    """Run a program of the product. Raises `CalledProcessError` where it fails."""
    subprocess.run([sys.executable, "-m", module, *words], check=True)


def lines_of(run_folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of all journals of a run by their kind, in order of time; none of a kind that is not there."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in read_journals(run_folder):
        found[line["kind"]].append(line)
    return found


def mean(lines: list[dict[str, Any]], name: str) -> float:
    """The mean of one field of them."""
    return sum(line[name] for line in lines) / len(lines)
