"""An environment for Tinker's SDK and its cookbook, beside the project's: it sees the project's packages and adds what it lacks.

They ask for other versions of what vLLM needs, so they may not be installed with it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "runs" / "tinker"
PYTHON = FOLDER / "bin" / "python"
SDK, COOKBOOK = "tinker==0.38.0", "tinker-cookbook==0.6.1"
NEEDED = ("chz", "datasets", "pyrage", "blobfile", "termcolor", "tiktoken", "math-verify", "pylatexenc", "sympy")
"""What these recipes import. The cookbook asks for tml-renderers 0.4.1, too, which PyPI does not have: models called Inkling need it."""


def make() -> None:
    """Make the environment, unless it is whole. Raises `CalledProcessError` with what pip said."""
    if (FOLDER / "ready").exists():
        return
    _call(sys.executable, "-m", "venv", "--without-pip", "--clear", str(FOLDER))
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)}))
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = (sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", "--no-input", "--disable-pip-version-check")
    _call(*install, SDK, *NEEDED)
    _call(*install, "--no-deps", COOKBOOK)
    (FOLDER / "ready").touch()


def has_cookbook() -> bool:
    """Whether the environment is there, with the cookbook."""
    return any(FOLDER.glob("lib/python*/site-packages/tinker_cookbook"))


def _call(*command: str) -> None:
    subprocess.run(command, check=True, timeout=600)
