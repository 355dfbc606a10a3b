"""Whole runs in forks of one process that has imported what engines and trainers import: two thirds of what a run of two steps takes.

For runs whose point is what they do. Launcher, engines and trainer are processes with the command lines that they always have, and the
others begin from nothing; that all of them can is shown by runs that are started as a user starts them (`e2e/test_run`, for one).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from pipelinerl.runtime.process import die_with_parent

ROOT = Path(__file__).parents[1]
ROOM = " " * 1024
"""Makes the command line as long as what `ps` shall show of engines and trainer, which are forks with the same room."""
Started = Callable[..., tuple[int, str]]
"""Runs `python -m pipelinerl` with these arguments; its exit code, and all that it printed."""


@contextlib.contextmanager
def warm_runs(folder: Path) -> Iterator[Started]:
    """The process that the runs are forks of, for as long as the context lasts; `folder` is where their output goes."""
    output = folder / "printed"

    def started(*arguments: object) -> tuple[int, str]:
        assert warm.stdin is not None
        assert warm.stdout is not None
        try:
            warm.stdin.write(json.dumps([str(output), *map(str, arguments)]) + "\n")
            warm.stdin.flush()
            return int(warm.stdout.readline()), output.read_text()
        except BaseException:  # a test's time is over: the next one shall not be told how this run ended
            warm.kill()
            raise

    command = (sys.executable, "-m", __spec__.name, ROOM)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as warm:
        yield started


class Forked(subprocess.Popen[bytes]):
    """`python -m PROGRAM ARGUMENTS` as a fork of this process, in place of a Python that begins from nothing."""

    def _execute_child(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        """The one method in which `subprocess` makes a process; `rest` ends with whether it shall lead a session, and a group."""
        ends = rest[3:9]  # of the pipes to and from the child; it has the first, the fourth and the last
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for number, end in enumerate((ends[0], ends[3], ends[5])):
                os.dup2(end, number)
            preexec_fn()
            os.environ.update(env)
            become(args[2], args[3:])
        self._child_created = True
        self._close_pipe_fds(*ends)  # pyright: ignore[reportAttributeAccessIssue]


def become(program: str, arguments: tuple[str, ...]) -> NoReturn:
    """Be this program in the middle of another one, of which nothing goes on: neither its `finally` nor its contexts."""
    code: Any = 1
    try:
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def serve() -> None:
    """Fork one run after the other, and tell the exit code of each."""
    from pipelinerl.engine.environment import set_environment
    from pipelinerl.runtime import early
    from pipelinerl.runtime.imports import of_large_packages

    die_with_parent()
    set_environment(is_of_run=True, makes_folder=False)
    with of_large_packages():
        from pipelinerl.engine.vllm.imports import import_everything

        import_everything()
        import pipelinerl.cli.train  # noqa: F401
        import trainer.loop  # noqa: F401
    early.subprocess = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)  # pyright: ignore[reportAttributeAccessIssue]
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        process_id = os.fork()
        if not process_id:
            die_with_parent()
            for name, number in ((os.devnull, 0), (output, 1), (output, 2)):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | (0 if number == 2 else os.O_TRUNC), 0o600), number)
            become("pipelinerl", tuple(arguments))
        print(os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
