"""The actor in a bundle: runs one command line, and tells its exit code. It ends with its actor, however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
from pathlib import Path

from pipelinerl.launch.ray.access import without_ray
from pipelinerl.runtime.process import die_with_parent

END_S = 10.0
"""For a command to end when it is asked to; then it is killed."""


class Member:
    """One node's supervisor, as a child of this process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def address(self) -> str:
        """Where other nodes reach this one. An answer says, too, that the bundle has room, and that the actor is there."""
        return str(importlib.import_module("ray.util").get_node_ip_address())

    async def run(self, command: tuple[str, ...], *, folder: Path, log: Path) -> int:
        """Run a command in `folder` to its end, its output in `log`; its exit code, negative for a signal. Raises `OSError`."""
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=without_ray(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        finally:
            os.close(output)
        return await self._process.wait()

    async def end(self) -> None:
        """Ask the command to end, and kill it after `END_S`."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
