"""Runs code that the policy wrote, against tests, with the best isolation this machine offers; `isolation` says which that is.

| isolation | network | files | processes |
| --- | --- | --- | --- |
| bubblewrap | none | sees system folders, read-only, and its own; no home, no run folder | a PID namespace of its own |
| namespaces (`unshare`) | none | has the rights of "nobody else", but READS what the worker's user can read | a PID namespace of its own |
| limits only | the machine's | has all rights of the worker's user | killed with the worker's process group |

In all three: CPU seconds, address space, file size, open files and output are limited, the environment is empty, the working folder is new
and removed afterwards, and the whole process group is killed at the end. Tests on standard input and output are judged outside of the
process. Tests in the same process (`assert`) are for policies that do not attack them: code can change what is in its own process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 30
OUTPUT_BYTES = 1 << 20
"""Larger files, standard output included, end the program."""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


class Isolation(enum.StrEnum):
    """What stands between the program and the machine."""

    BUBBLEWRAP = "bubblewrap: no network, no files but the system's and its own"
    NAMESPACES = "namespaces: no network, own processes; can read the files of this user"
    LIMITS = "limits only: has network and files of this user; install bubblewrap"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program ended."""

    output: str
    exit_code: int
    is_timeout: bool = False


def passes_tests(completion: str, tests: object, *, timeout_s: float = 5.0, require_isolation: bool = False) -> float:
    """1.0 where the last fenced block of the completion (or all of it) passes every test; else 0.0.

    `tests` is Python source that raises where the code is wrong, or a list of {input, output}: then the code is a program, whose standard
    output must equal `output`, trailing white space of lines aside. With `require_isolation` it refuses to run under "limits only".
    """
    found = isolation()
    if require_isolation and found is Isolation.LIMITS:
        raise PermissionError(f"code is not run: {found}")
    code = _code_of(completion)
    if isinstance(tests, str):
        return float(_passes_source(code, tests, timeout_s=timeout_s))
    if not isinstance(tests, Sequence) or not all(isinstance(test, Mapping) for test in tests) or not tests:
        raise TypeError(f"tests is {tests!r}, expected Python source or a list of {{input, output}}")
    return float(all(_passes_case(code, test, timeout_s=timeout_s) for test in tests))


def run_python(code: str, *, stdin: str = "", timeout_s: float = 5.0) -> Ran:
    """Run a program in a new folder, isolated; its standard output, standard error left out."""
    with tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) as name, open(Path(name) / "output", "w+b") as output:
        folder = Path(name)
        (folder / "program.py").write_text(code)
        process = subprocess.Popen(
            [*_prefix(folder), _python(), "-I", "-B", "program.py"],
            cwd=folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=functools.partial(_limit, timeout_s),  # a worker has one thread
        )
        is_timeout = False
        try:
            process.communicate(stdin.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            is_timeout = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ran(output=output.read(OUTPUT_BYTES).decode(errors="replace"), exit_code=process.returncode, is_timeout=is_timeout)


@functools.cache
def isolation() -> Isolation:
    """The best isolation that works here, tried once per process; what is installed may still be forbidden."""
    with tempfile.TemporaryDirectory() as folder:
        for candidate in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES):
            command = _COMMANDS[candidate](Path(folder))
            if shutil.which(command[0]) is None:
                continue
            tried = subprocess.run([*command, _python(), "-I", "-c", ""], cwd=folder, env={}, capture_output=True, check=False)
            if tried.returncode == 0:
                return candidate
    return Isolation.LIMITS


def _prefix(folder: Path) -> list[str]:
    found = isolation()
    return [] if found is Isolation.LIMITS else _COMMANDS[found](folder)


def _bubblewrap(folder: Path) -> list[str]:
    seen = {*_SYSTEM_FOLDERS, sys.base_prefix}
    binds = [part for path in sorted(seen) for part in ("--ro-bind-try", path, path)]
    own = ["--bind", str(folder), "/work", "--chdir", "/work"]
    return ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", *binds, "--proc", "/proc", "--dev", "/dev", *own]


def _namespaces(folder: Path) -> list[str]:
    del folder
    return ["unshare", "--user", "--net", "--ipc", "--pid", "--fork", "--kill-child=KILL"]


_COMMANDS = {Isolation.BUBBLEWRAP: _bubblewrap, Isolation.NAMESPACES: _namespaces}


def _python() -> str:
    return os.path.realpath(sys.executable)


def _limit(timeout_s: float) -> None:
    seconds = int(timeout_s) + 1
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _passes_source(code: str, tests: str, *, timeout_s: float) -> bool:
    """An exit code of 0 is not enough: code that calls `sys.exit()` before its tests has it, too. The word at the end must be printed."""
    word = secrets.token_hex(16)
    ran = run_python(f"{code}\n\n{tests}\n\nprint('\\n{word}')\n", timeout_s=timeout_s)
    return ran.exit_code == 0 and not ran.is_timeout and ran.output.rstrip().endswith(word)


def _passes_case(code: str, test: Mapping[str, Any], *, timeout_s: float) -> bool:
    ran = run_python(code, stdin=str(test["input"]), timeout_s=timeout_s)
    return ran.exit_code == 0 and not ran.is_timeout and _lines(ran.output) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _code_of(completion: str) -> str:
    blocks = _FENCE.findall(completion)
    return blocks[-1] if blocks else completion
