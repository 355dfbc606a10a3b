"""Runs code that the policy wrote, against tests, with the best isolation this machine offers; `isolation` says which that is.

| isolation | files | network | processes, memory, disk of a call |
| --- | --- | --- | --- |
| bubblewrap | the system's folders, read-only, and its own | none | bounded |
| namespaces | the same | none | bounded |
| none | all that the worker's user may read and write | the machine's | each process bounded, the call not |

With isolation, the program is process 2 of namespaces of its own. It sees the system's folders (`/usr`, `/lib`, ..., the Python it runs
on), read-only, and writes to a file system in memory that ends with it: no run folder, no home, no keys, no `/dev/shm` of the machine. The
call as a whole is bounded in processes and threads (`MAX_PROCESSES`), memory of all of them together (`MEMORY_BYTES`), files (`DISK_BYTES`)
and time; a process beside the program ends all of it at a bound. Each process is also bounded in CPU seconds, address space, file size and
open files. Namespaces need no installed program, but a kernel (5.12 or later) that lets this user make them, which some containers do not:
install bubblewrap there, or allow `unshare`.

Without isolation, code is run only where the reward's options say `require_isolation = false`.

The environment variables are empty but for a path, a language and a number of threads. Tests on standard input and output are judged
outside of the process. Tests in the same process (`assert`) are for policies that do not attack them: code can change its own process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 30
"""Bound on the memory of all processes of a call together; files in memory are bounded separately, by `DISK_BYTES`."""
DISK_BYTES = 64 << 20
MAX_FILES = 4096
MAX_PROCESSES = 64
"""Maximum number of processes and threads of a call. A smaller one breaks programs with thread pools; a larger one lets a call take the
machine's scheduler."""
OUTPUT_BYTES = 1 << 20
"""Maximum size of a file, including standard output; a larger one ends the program."""
INSIDE = "65534"
"""User and group id of a program, the same as `jail.INSIDE_ID`."""
_JAIL = Path(__file__).with_name("jail.py")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


class Isolation(enum.StrEnum):
    """The kind of isolation between the program and the machine."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    NONE = "no isolation"


class NotIsolated(Exception):
    """A program was not run, because it could not be isolated from the machine; the message says what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of running a program."""

    output: str
    exit_code: int
    is_timeout: bool = False
    over: str = ""
    """The bound of the whole call at which the program was ended; empty where it was not."""


def passes_tests(completion: str, tests: object, *, timeout_s: float = 5.0, require_isolation: bool = True) -> float:
    """Return 1.0 where the last fenced block of the completion (or all of it) passes every test; else 0.0.

    `tests` is Python source that raises where the code is wrong, or a list of {input, output}: then the code is a program, whose standard
    output must equal `output`, apart from trailing white space of lines. Raises `NotIsolated` where isolation is required and none works.
    """
    if require_isolation and isolation() is Isolation.NONE:
        raise NotIsolated(
            f"code is not run, for this machine offers no isolation: {'; '.join(why_not())}. Install bubblewrap (`apt install bubblewrap`),"
            " or allow user namespaces; or set require_isolation = false among the reward's options, and the policy's code may read, write"
            " and send whatever this user may"
        )
    code = _code_of(completion)
    if isinstance(tests, str):
        return float(_passes_source(code, tests, timeout_s=timeout_s))
    if not isinstance(tests, Sequence) or not all(isinstance(test, Mapping) for test in tests) or not tests:
        raise TypeError(f"tests is {tests!r}, expected Python source or a list of {{input, output}}")
    return float(all(_passes_case(code, test, timeout_s=timeout_s) for test in tests))


def run_python(code: str, *, stdin: str = "", timeout_s: float = 5.0, under: Isolation | None = None) -> Ran:
    """Run a program in a new folder, and return its standard output, without standard error. `under` is by default the best isolation.

    Raises `NotIsolated` where the isolation fails.
    """
    with tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) as name, open(Path(name) / "output", "w+b") as output:
        folder = Path(name)
        (folder / "program.py").write_text(code)
        (folder / "root").mkdir()
        under = isolation() if under is None else under
        report, theirs = os.pipe()
        with open(report, "rb") as reports:
            try:
                process = _start(under, folder, output.fileno(), theirs, timeout_s=timeout_s)
            finally:
                os.close(theirs)
            is_timeout = _wait(process, stdin, timeout_s=timeout_s)
            said = _said(reports)
        if under is not Isolation.NONE and not is_timeout and "exit_code" not in said:
            raise NotIsolated(f"code could not be run under {under}: {said.get('error', f'it ended with {process.returncode}')}")
        output.seek(0)
        return Ran(
            output=output.read(OUTPUT_BYTES).decode(errors="replace"),
            exit_code=said.get("exit_code", process.returncode),
            is_timeout=is_timeout,
            over=said.get("over", ""),
        )


@functools.cache
def isolation() -> Isolation:
    """Return the best isolation that works here. It is tried once per process, because what is installed may still be forbidden."""
    return next((under for under, problem in _tried().items() if not problem), Isolation.NONE)


def why_not() -> list[str]:
    """Return, for each isolation that does not work here, the reason."""
    return [f"{under}: {problem}" for under, problem in _tried().items() if problem]


@functools.cache
def _tried() -> dict[Isolation, str]:
    """Return, for each isolation, best first, the problem that keeps it from working; empty where it works."""
    problems: dict[Isolation, str] = {}
    for under in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES):
        problems[under] = "" if under is not Isolation.BUBBLEWRAP or shutil.which("bwrap") else "bwrap is not installed"
        if problems[under]:
            continue
        try:
            ran = run_python("print('it runs')", timeout_s=20.0, under=under)
            problems[under] = (
                "" if ran.output == "it runs\n" else f"a program printed {ran.output!r}, and ended with {ran.exit_code} {ran.over}"
            )
        except (NotIsolated, OSError) as error:
            problems[under] = str(error)
    return problems


def _start(under: Isolation, folder: Path, output: int, report: int, *, timeout_s: float) -> subprocess.Popen[bytes]:
    limits = _limits(timeout_s)
    command = [_python(), "-I", "-B", "program.py"]
    call = {
        "program": str(folder / "program.py"),
        "root": str(folder / "root"),
        "seen": _seen(),
        "command": command,
        "environment": _ENVIRONMENT,
        "limits": limits,
        "memory_bytes": MEMORY_BYTES,
        "disk_bytes": DISK_BYTES,
        "max_files": MAX_FILES,
        "max_processes": MAX_PROCESSES,
        "report": report,
    }
    jail = [_python(), "-I", "-S"]
    if under is Isolation.BUBBLEWRAP:
        command = [*_bubblewrap(folder), *jail, "/jail.py", "supervise", json.dumps(call)]
    elif under is Isolation.NAMESPACES:
        command = [*jail, str(_JAIL), "enter", json.dumps(call)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=_ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        pass_fds=() if under is Isolation.NONE else (report,),
        start_new_session=True,
        preexec_fn=functools.partial(_limit, limits) if under is Isolation.NONE else None,  # a worker has one thread
    )


def _wait(process: subprocess.Popen[bytes], stdin: str, *, timeout_s: float) -> bool:
    """Wait for the end, and kill whatever is left. Return true where the program took more than `timeout_s`."""
    try:
        process.communicate(stdin.encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def _said(reports: Any) -> dict[str, Any]:
    """Return the jail's first report of the program's end; empty where the jail was killed before."""
    if not select.select([reports], [], [], 0.0)[0]:
        return {}
    first = os.read(reports.fileno(), 1 << 16).split(b"\n")[0]
    return json.loads(first) if first else {}


def _seen() -> list[str]:
    """Return the folders of the machine that a program sees, read-only; a folder comes before those inside it."""
    return sorted({*_SYSTEM_FOLDERS, sys.base_prefix})


def _bubblewrap(folder: Path) -> list[str]:
    binds = [part for path in _seen() for part in ("--ro-bind-try", path, path)]
    spaces = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
    spaces += ["--uid", INSIDE, "--gid", INSIDE, "--proc", "/proc", "--dev", "/dev"]
    files = ["--ro-bind", str(_JAIL), "/jail.py", "--size", str(DISK_BYTES // 2), "--tmpfs", "/work"]
    files += ["--ro-bind", str(folder / "program.py"), "/work/program.py"]
    files += [part for path in ("/tmp", "/dev/shm") for part in ("--size", str(DISK_BYTES // 4), "--tmpfs", path)]
    return [*spaces, *binds, *files, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work", "--"]


def _python() -> str:
    return os.path.realpath(sys.executable)


def _limits(timeout_s: float) -> dict[str, int]:
    """Return the limits of each process, by the limit's name."""
    return {
        "RLIMIT_CPU": int(timeout_s) + 1,
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_FSIZE": OUTPUT_BYTES,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }


def _limit(limits: Mapping[str, int]) -> None:
    for name, value in limits.items():
        limit = getattr(resource, name)
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _passes_source(code: str, tests: str, *, timeout_s: float) -> bool:
    """Return true where the code passes the tests. A random word must be printed at the end: an exit code of 0 is not enough, because code
    that calls `sys.exit()` before its tests has it, too.
    """
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
