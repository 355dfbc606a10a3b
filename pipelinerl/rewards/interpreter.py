"""A class of environments that another interpreter runs (`environment.python`): its packages may exclude ours.

The worker starts `pipelinerl/environments/serve.py` under that interpreter and talks to it line by line. It is a child of the worker, in
its process group, so it is killed with the worker, at its deadlines too.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from pipelinerl import environments
from pipelinerl.environments import Said, Step
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.function_errors import FunctionError, OtherProcessError

SERVE = Path(environments.__file__).with_name("serve.py")


class RemoteClass:
    """A class under another interpreter. Calling it makes an object of it, the one there is from then on."""

    def __init__(self, reference: str, *, python: str, what: str) -> None:
        """Start the interpreter and load the class. Raises `ConfigError` where that fails."""
        self._what = what
        try:
            self._process = subprocess.Popen(
                [python, str(SERVE), reference],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise ConfigError(f"environment.python: {python} cannot be started: {error}. Name an interpreter, as env/bin/python.") from None
        try:
            self.tools = tuple(self._heard()["tools"])
        except OtherProcessError as error:
            self.end()
            raise ConfigError(f"{what} cannot be loaded by {python}: {error}") from error

    def __call__(self, **options: Any) -> RemoteClass:
        self.ask(do="new", options=options)
        return self

    def reset(self, **columns: Any) -> Any:
        """Begin an episode; return its first observation."""
        return self.ask(do="reset", columns=columns)["value"]

    def step(self, message: Said) -> Any:
        """Answer what the model said."""
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        said = self.ask(do="step", text=str(message), tool_calls=calls)
        return Step(*said["step"]) if "step" in said else said["value"]

    def close(self) -> None:
        """Close the object."""
        self.ask(do="close")

    def end(self) -> None:
        """End the interpreter."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.kill()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Have the other process do something. Raises `OtherProcessError` for what it raised, and where it ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        said = json.loads(line)
        if (error := said.get("error")) is not None:
            raise OtherProcessError(FunctionError(**error))
        return said

    def _ended(self) -> OtherProcessError:
        return OtherProcessError(FunctionError(cause=f"its interpreter ended with code {self._process.wait()}"))
