"""Errors in a user's function (reward, environment, prompt source, loss) with their place: told whole once, counted ever after.

`where` is the line a person would look at: the innermost one in code that is neither Python's, nor an installed package's, nor ours; where
there is none, as in a function of an installed package, the innermost of all; where nothing of the function ran, the line it begins at.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import sysconfig
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

CAUSE_CHARACTERS = 500
"""Longest cause. It stands in lists and in the last words of a run, on one line."""
TRACEBACK_CHARACTERS = 8000
"""Longest traceback that travels: its end, where the error is. Longer would let one deep recursion fill the journal."""
_OURS = Path(__file__).parents[2]
_CALLERS = tuple(
    str(_OURS / "pipelinerl" / "rewards" / path)
    for path in ("pool/worker.py", "runner.py", "reward.py", "environment.py", "stateful.py", "interpreter.py", "arguments.py")
)
"""Frames of these files are how a function is called, and say nothing of its error."""
_STACK_LINE = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+|\?+) in (?P<name>.*)$', re.MULTILINE)


class FunctionError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a call of a function gave nothing, and where."""

    cause: str
    """On one line: exception type and message, as in `ValueError("no answer")`; or what it returned, or how its process ended."""
    where: str = ""
    """`file:line`, the file relative to the working folder where it lies in it; empty where nobody knows."""
    traceback: str = ""
    """The end of Python's traceback, or the stack of a process that hung or crashed; empty where nothing was raised."""

    def __str__(self) -> str:
        return f"{self.cause} at {self.where}" if self.where else self.cause


class OtherProcessError(Exception):
    """What a function raised in another process, which described it there."""

    def __init__(self, described: FunctionError) -> None:
        super().__init__(str(described))
        self.described = described


def error_of(raised: BaseException, *, function: Any = None) -> FunctionError:
    """Describe what a function raised. Never raises, whatever the exception's class does."""
    if isinstance(raised, OtherProcessError):
        return raised.described
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(raised.__traceback__)]
    return FunctionError(
        cause=_one_line(_cause_of(raised)),
        where=_where(frames) or place_of(function),
        traceback=_plain(_formatted(raised))[-TRACEBACK_CHARACTERS:],
    )


def error_in(stack: str, *, cause: str, place: str = "") -> FunctionError:
    """Describe what a process was doing when it hung or crashed; `stack` is `faulthandler`'s, of all threads, most recent call first."""
    threads = re.split(r"^(?=Thread |Current thread |Task )", stack, flags=re.MULTILINE)
    calling = [thread for thread in threads if any(caller in thread for caller in _CALLERS)]
    frames = [
        [(found["path"], int(found["line"])) for found in _STACK_LINE.finditer(thread) if found["line"].isdigit()][::-1]
        for thread in calling[::-1]  # a task of an event loop comes last, and says more than the loop that waits for it
    ]
    where = next((place for thread in frames if (place := _where(thread, only_theirs=True))), "")
    where = where or next((place for thread in frames if (place := _where(thread))), "")
    return FunctionError(cause=_one_line(cause), where=where or place, traceback=_plain(stack)[-TRACEBACK_CHARACTERS:])


def place_of(function: Any) -> str:
    """`file:line` at which a function, or the class of a callable object, begins; empty where it has no source."""
    if isinstance(function, functools.partial):
        return place_of(function.func)
    function = inspect.unwrap(function) if callable(function) else function
    if isinstance(function, types.MethodType):
        function = function.__func__
    called = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    code = getattr(called, "__code__", None)
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""


def shown_path(path: str) -> str:
    """A path as a person in the working folder would type it."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(path).relative_to(_LAUNCH_FOLDER))
    return path


_LAUNCH_FOLDER = Path.cwd()
"""A reward worker changes its folder later; the user's paths are relative to this one."""


def message_of(raised: BaseException) -> str:
    """Return an exception's message, also where its `__str__` fails."""
    try:
        return str(raised)
    except Exception as broken:  # an exception of a user's own class may not even be printable
        return f"(message unavailable: its __str__ raised {type(broken).__name__})"


def _cause_of(raised: BaseException) -> str:
    text = message_of(raised)
    return f"{type(raised).__name__}({json.dumps(text, ensure_ascii=False)})" if text else f"{type(raised).__name__}()"


def _formatted(raised: BaseException) -> str:
    """Python's traceback, without the frames that call the function."""
    tail = raised.__traceback__
    while tail is not None and tail.tb_frame.f_code.co_filename in _CALLERS:
        tail = tail.tb_next
    try:
        return "".join(traceback.format_exception(type(raised), raised, tail))
    except Exception:  # as above: it also formats what the exception was raised from
        return "".join(traceback.format_tb(tail))


def _where(frames: Sequence[tuple[str, int]], *, only_theirs: bool = False) -> str:
    """The line to look at, of frames with the most recent call last."""
    first = next((index for index, (path, _) in enumerate(frames) if path not in _CALLERS and not _is_pythons(path)), len(frames))
    called = [frame for frame in frames[first:] if frame[0] not in _CALLERS]
    theirs = [frame for frame in called if not _is_library(frame[0])]
    chosen = theirs or ([] if only_theirs else called)
    return f"{shown_path(chosen[-1][0])}:{chosen[-1][1]}" if chosen else ""


def _is_library(path: str) -> bool:
    """A file of Python, of an installed package, or of ours: not what somebody who uses us has written."""
    parts = Path(path).parts
    is_ours = any(path.startswith(f"{_OURS / package}{os.sep}") for package in ("pipelinerl", "orchestrator", "trainer"))
    return is_ours or _is_pythons(path) or "site-packages" in parts or "dist-packages" in parts


def _is_pythons(path: str) -> bool:
    is_installed = "site-packages" in path or "dist-packages" in path
    return path.startswith("<") or (not is_installed and path.startswith(f"{_PYTHONS}{os.sep}"))


_PYTHONS = os.path.realpath(sysconfig.get_path("stdlib"))


def _one_line(text: str) -> str:
    text = " ".join(_plain(text).split())
    return text if len(text) <= CAUSE_CHARACTERS else f"{text[: CAUSE_CHARACTERS - 1]}…"


def _plain(text: str) -> str:
    """Replace what UTF-8 cannot carry: a message may quote half a character."""
    return text.encode("utf-8", "backslashreplace").decode()
