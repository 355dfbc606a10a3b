"""Play the environments of one class for a worker under another interpreter: one JSON object a line, on standard input and output.

    python serve.py path:Class       ->  {"tools": [...]}                      once it is loaded
    {"do": "new", "options": {}}     ->  {}
    {"do": "reset", "columns": {}}   ->  {"value": observation}
    {"do": "step", "text": "...", "tool_calls": [{"name", "arguments"}]}
                                     ->  {"step": [observation, reward, done, state]}, or {"value": ...} of what is no step
    {"do": "close"}                  ->  {}
    whatever raises                  ->  {"error": {"cause", "where", "traceback"}}

It needs nothing but Python beside what the class itself imports. What the class prints goes to standard error.
`pipelinerl.rewards.interpreter` is the other end.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEP = ("observation", "reward", "done", "state")


def main() -> None:
    """Serve until standard input closes."""
    sys.path[:] = [one for one in sys.path if Path(one or ".").resolve() != HERE]  # the adapters have the names of what they adapt
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server = None
    try:
        server = Server(sys.argv[1])
        _say(answers, {"tools": list(getattr(server.function, "tools", None) or ())})
    except Exception as error:  # the boundary to the class: whatever it raises is told
        _say(answers, {"error": _told(error)})
        return
    for line in sys.stdin:
        try:
            said = server.do(json.loads(line))
        except BaseException as error:  # as above, SystemExit too
            said = {"error": _told(error)}
        _say(answers, said)


class Server:
    """A class and the one object of it that is in use."""

    def __init__(self, reference: str) -> None:
        self._loop = asyncio.new_event_loop()
        package = _load_package()
        self._step_type: Any = package.Step
        path, _, name = reference.rpartition(":")
        self.function: Any = _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        for part in name.split("."):
            self.function = getattr(self.function, part)
        missing = [one for one in ("reset", "step") if not callable(getattr(self.function, one, None))]
        if missing:
            raise TypeError(f"{reference} has no {' and no '.join(missing)}, expected a class with reset and step")
        package.import_package(self.function)
        self._environment: Any = None

    def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer one request."""
        if asked["do"] == "new":
            self._environment = self._value(self.function(**asked["options"]))
            return {}
        if asked["do"] == "reset":
            parameters = inspect.signature(self._environment.reset).parameters
            takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            asked_for = {name for name in asked["columns"] if name in parameters or (takes_any and name not in ("prompt", "chat"))}
            columns = {name: value for name, value in asked["columns"].items() if name in asked_for}
            return {"value": self._value(self._environment.reset(**columns))}
        if asked["do"] == "step":
            package = sys.modules["pipelinerl.environments"]
            calls = tuple(package.ToolCall(**call) for call in asked["tool_calls"])
            returned: Any = self._value(self._environment.step(package.Said.of(asked["text"], tool_calls=calls)))
            if isinstance(returned, tuple) and len(returned) == 3:
                returned = self._step_type(*returned)
            is_step = isinstance(returned, self._step_type)
            return {"step": [getattr(returned, name) for name in STEP]} if is_step else {"value": returned}
        environment, self._environment = self._environment, None
        if callable(close := getattr(environment, "close", None)):
            self._value(close())
        return {}

    def _value(self, returned: Any) -> Any:
        return self._loop.run_until_complete(returned) if inspect.isawaitable(returned) else returned


def _load_package() -> Any:
    """Make `pipelinerl.environments` importable here, without the package around it, which this interpreter may not have."""
    whole = types.ModuleType("pipelinerl")
    whole.__path__ = []
    sys.modules["pipelinerl"] = whole
    return _load(HERE / "__init__.py", "pipelinerl.environments", folder=HERE)


def _load_file(path: Path) -> Any:
    return _load(path, f"pipelinerl_plugin_{path.stem}", folder=None)


def _load(path: Path, name: str, *, folder: Path | None) -> Any:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=None if folder is None else [str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _say(answers: Any, said: dict[str, Any]) -> None:
    try:
        line = json.dumps(said)
    except (TypeError, ValueError) as error:
        line = json.dumps({"error": _told(TypeError(f"it returned what JSON cannot say: {error}"))})
    answers.write(line + "\n")
    answers.flush()


def _told(error: BaseException) -> dict[str, str]:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((__file__, "<"))]
    theirs = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return {
        "cause": f"{type(error).__name__}({json.dumps(str(error))})",
        "where": f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else "",
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:],
    }


if __name__ == "__main__":
    main()
