"""The settings of `pipelinerl demo`: the config beside this file, fitted to a folder, a seed and this machine's cores."""

from __future__ import annotations

import json
import os
import re
from importlib import resources
from pathlib import Path

from pipelinerl.demo.sort_digits import make_model


def demo_config(*, folder: Path, seed: int) -> Path:
    """Write `<folder>/demo.toml` and return its path. With two cores or more, engine and trainer get one each."""
    text = resources.files("pipelinerl.demo").joinpath("demo.toml").read_text()
    text = _fill(text, section="run", key="folder", value=json.dumps(str(folder)))
    text = _fill(text, section="run", key="seed", value=str(seed))
    text = _fill(text, section="model", key="path", value=json.dumps(str(folder / "demo-model")))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        text = _fill(text, section="engine", key="cores", value=f"[{cores[0]}]")
        text = _fill(text, section="trainer", key="cores", value=f"[{cores[1]}]")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demo.toml"
    path.write_text(text)
    return path


def make_demo_model(folder: Path, *, seed: int) -> None:
    """Write a fresh model and its tokenizer to `folder`."""
    make_model(folder, seed)


def _fill(text: str, *, section: str, key: str, value: str) -> str:
    """Replace the value of one key of one section, keeping every comment."""
    pattern = rf"(?ms)(^\[{section}\]\n(?:(?!^\[).)*?^{key} = )[^\n]*?(?=\s*(?:#[^\n]*)?$)"
    filled, count = re.subn(pattern, lambda match: match[1] + value, text, count=1)
    assert count == 1, f"demo.toml has no {section}.{key}"
    return filled
