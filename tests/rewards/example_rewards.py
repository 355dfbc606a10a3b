"""Reward functions that behave well and badly, for the tests of the scorer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_CALLS = 0


def nothing(completion: str) -> float:
    """The cheapest reward there is."""
    return float(len(completion))


def constant(completions: list[str], seconds_first: tuple[float] = (0.0,)) -> list[float]:
    """In TRL's shape."""
    time.sleep(seconds_first[0])
    return [10.0 for _ in completions]


def act(completion: str, **columns: Any) -> Any:
    """Do what the completion says."""
    global NUM_CALLS
    NUM_CALLS += 1
    return _ACTS[completion](columns) if completion in _ACTS else float(len(completion))


async def later(completion: str, delay_s: float = 0.0) -> float:
    await asyncio.sleep(delay_s)
    return float(len(completion))


async def hang_later(completion: str) -> float:
    """Waits on an event loop, so its own stack holds no line of this file."""
    if completion == "later":
        await asyncio.sleep(1000)  # here it hangs
    return 0.0


def _hang(columns: dict[str, Any]) -> float:
    while True:
        time.sleep(1000)  # here it hangs, too


def _leave_children_and_hang(columns: dict[str, Any]) -> float:
    """A child in the process group, one in a session of its own, and a daemon forked twice; all carry the marker, `started` names them."""
    sleep = [sys.executable, "-c", f"import time; time.sleep(1000) # {columns['marker']}"]
    children = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
    if os.fork() == 0:
        os.setsid()
        if (daemon := os.fork()) == 0:
            os.execv(sleep[0], sleep)
        Path(columns["started"]).write_text(" ".join(map(str, [*children, daemon])))
        os._exit(0)
    return _hang(columns)


def _leave_children_and_die(columns: dict[str, Any]) -> float:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1000) # {columns['marker']}"], start_new_session=True)
    os._exit(5)


def _sleep(columns: dict[str, Any]) -> float:
    time.sleep(columns["seconds"])
    return columns["seconds"]


def _wait(columns: dict[str, Any]) -> float:
    """Go on once the file is there that the row names, if any."""
    while "until" in columns and not Path(columns["until"]).exists():
        time.sleep(0.01)
    return 1.0


def _fail(columns: dict[str, Any]) -> float:
    raise KeyError("no such theorem")


def _tell(columns: dict[str, Any]) -> float:
    """Write what this process can see into a file."""
    import resource

    seen = {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "process_id": os.getpid(),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "files": list(_open_files().values()),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "address_space": resource.getrlimit(resource.RLIMIT_AS),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "num_threads_of_parent": len(os.listdir(f"/proc/{os.getppid()}/task")),
    }
    Path(columns["path"]).write_text(json.dumps(seen))
    return 1.0


def _write_garbage(columns: dict[str, Any]) -> float:
    """Write into the only socket this process has, the one to the scorer."""
    for descriptor, path in _open_files().items():
        if path.startswith("socket:"):
            os.write(descriptor, b"\x04\x00\x00\x00junk")
    return _hang(columns)


def _open_files() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing itself is closed by now
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _fork(columns: dict[str, Any]) -> float:
    """Return twice."""
    os.fork()
    return 7.0


def _start_daemon(columns: dict[str, Any]) -> float:
    """Leave a process that is no child of this one, and go on until told."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep(1000) # {columns['marker']}"])
        os._exit(0)
    os.wait()
    return _wait(columns)


def _log(columns: dict[str, Any]) -> float:
    """Append one line to a file, so that a test can count the calls."""
    with open(columns["path"], "a") as file:
        file.write(f"{columns['line']}\n")
    return _wait(columns)


_ACTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "hang": _hang,
    "children": _leave_children_and_hang,
    "die with children": _leave_children_and_die,
    "daemon": _start_daemon,
    "fork": _fork,
    "sleep": _sleep,
    "wait": _wait,
    "raise": _fail,
    "exit": lambda columns: sys.exit("leaving"),
    "die": lambda columns: os._exit(3),
    "crash": lambda columns: os.kill(os.getpid(), 11),
    "none": lambda columns: None,
    "nan": lambda columns: math.nan,
    "text": lambda columns: "high",
    "tell": _tell,
    "garbage": _write_garbage,
    "log": _log,
    "one": lambda columns: 1.0,
    "process": lambda columns: float(os.getpid()),
}


def rank(completions: list[str]) -> list[float]:
    """Per group: how many siblings are shorter."""
    if "hang" in completions:
        _hang({})
    if "raise" in completions:
        raise ValueError("no order")
    return [float(sum(len(other) < len(mine) for other in completions)) for mine in completions]


def answer(turns: list[str], replies: list[str], seen: str, mark: str) -> Any:
    """An environment: does what the last turn says."""
    match turns[-1]:
        case "raise":
            raise KeyError("no such move")
        case "die":
            os._exit(3)
        case "hang":
            time.sleep(1000)
        case "number":
            return 7
        case "nothing":
            return ""
        case "over":
            return None
        case "state":
            return "go on", "a state"
    return f"{len(turns)} turns, replies {''.join(replies)}, seen {seen}{mark}"
