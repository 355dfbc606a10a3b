"""Forks of a bench, each on the core it is told to, which die with it.

A fork of a process that has run a torch operation is not safe. A bench that forks more than once measures in children only.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any

from pipelinerl.runtime.process import die_with_parent


def start(work: Callable[[], object], *, cores: Collection[int] = ()) -> int:
    """Run in a child, on these cores or on any, and return its process id. It exits 1 where the work fails, with the error printed."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent()
        if cores:
            os.sched_setaffinity(0, cores)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the child must never return into the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def result_of(
    work: Callable[..., Any], *arguments: Any, cores: Collection[int] = (), meanwhile: Callable[[], object] = lambda: None
) -> Any:
    """Run in a child, and something else here meanwhile; return what the child returns, through JSON. Ends this process where it fails."""
    reader, writer = os.pipe()
    child = start(lambda: os.write(writer, json.dumps(work(*arguments)).encode()), cores=cores)
    os.close(writer)
    meanwhile()
    with os.fdopen(reader) as result:
        text = result.read()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{work.__name__} failed; its error stands above")
    return json.loads(text)
