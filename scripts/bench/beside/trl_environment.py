"""An environment for TRL alone, beside the project's: it sees the project's packages (torch, transformers) and adds what it lacks.

vLLM is kept out of its sight: TRL would import it at its start, although transformers generates here.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = "1.16.0"
INSTALL_S = 300.0
_UNSEEN = ("vllm", "pip", "setuptools", "__editable__", "_distutils_hack", "distutils-precedence")
"""Names begin so of what is not shared: vLLM, the project itself (found by PYTHONPATH), and what every environment has of its own."""


def trl_python(folder: Path) -> tuple[Path | None, str]:
    """The interpreter of an environment with TRL in `folder`, made where it is not there; without one, why not."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python, ""
    try:
        _call(sys.executable, "-m", "venv", "--clear", str(folder))
        _share(folder)
        constraints = folder / "constraints.txt"  # what is shared stays as it is
        held = [f"{one.name}=={one.version}\n" for one in importlib.metadata.distributions() if not one.name.startswith(_UNSEEN)]
        constraints.write_text("".join(held))
        _call(str(python), "-m", "pip", "install", "-q", "-c", str(constraints), f"trl=={VERSION}")
    except subprocess.TimeoutExpired:
        return None, f"TRL {VERSION} could not be installed within {INSTALL_S:.0f} s"
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        return None, f"TRL {VERSION} could not be installed: {said[-1] if said else error}"
    (folder / "ready").touch()
    return python, ""


def _share(folder: Path) -> None:
    """Have the environment find the project's packages in a folder outside of its own, where pip changes nothing."""
    shared = (folder / "shared").resolve()
    shared.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(_UNSEEN):
            (shared / path.name).symlink_to(path)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "shared.pth").write_text(f"{shared}\n")


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
