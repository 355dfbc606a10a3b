"""Episodes that are played with the adapters, and calls of the packages behind them, recorded and replayed.

PYTHON plays.py NAME [key=value]      plays one with the real package, under an interpreter that has it; writes recorded/NAME.json
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GSM8K = {"reward_spec": {"method": "rule", "ground_truth": "18"}, "extra_info": {"max_turns": 3}}
PLAYS: dict[str, dict[str, Any]] = {
    "textarena": {
        "package": "textarena",
        "adapter": "TextArena",
        "options": {"env_id": "GuessTheNumber-v0"},
        "columns": {"seed": 7},
        "moves": ["[1]", "I do not know", "[20]", "[11]"],
    },
    "textarena_lost": {
        "package": "textarena",
        "adapter": "TextArena",
        "options": {"env_id": "Mastermind-v0"},
        "columns": {"seed": 3},
        "moves": ["[1 2 3 4]", "what?", "what?", "what?"],
    },
    "openenv": {
        "package": "openenv.core.generic_client",
        "adapter": "OpenEnv",
        "options": {"url": "http://127.0.0.1:8723", "observation": "text"},
        "columns": {"seed": 5},
        "moves": ["0", "none", "9", *"123456"],
    },
    "skyrl_gym": {
        "package": "skyrl_gym",
        "adapter": "SkyRLGym",
        "options": {"env_id": "gsm8k_multi_turn"},
        "columns": {"chat": [{"role": "user", "content": "How many eggs?"}], **GSM8K},
        "moves": ["#### 17", "eighteen", "#### 18"],
    },
    "reasoning_gym": {
        "package": "reasoning_gym",
        "adapter": "ReasoningGym",
        "options": {"attempts": 3},
        "columns": {"prompt": "3 + 4 =", "answer": "7", "metadata": {"source_dataset": "chain_sum", "source_index": 0}},
        "moves": ["8", "<answer>6</answer>", "so <answer>7</answer>"],
    },
}


def play(environment: Any, moves: list[str], **columns: Any) -> list[Any]:
    """Return all that an environment answers, until the episode is over."""
    found: list[Any] = [environment.reset(**columns)]
    for move in moves:
        step = environment.step(move)
        step = list(step) if isinstance(step, tuple) else [step.observation, step.reward, step.done]
        found.append(step)
        if step[2]:
            break
    if callable(close := getattr(environment, "close", None)):
        close()
    return found


def adapter(name: str, *, package: Any) -> Any:
    """Return the adapter's class, from its file alone, as the interpreter need not have this project; it imports `package`."""
    said = PLAYS[name]
    file = {"openenv.core.generic_client": "openenv"}.get(said["package"], said["package"])
    path = HERE.parents[1] / "pipelinerl" / "environments" / f"{file}.py"
    spec = importlib.util.spec_from_file_location(f"adapter_of_{file}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["importlib"] = types.SimpleNamespace(import_module=lambda name: package)
    return getattr(module, said["adapter"])


class Recorder:
    """Stands before an object of a package and writes down what is asked of it, and what it answers."""

    def __init__(self, real: Any, log: list[list[Any]]) -> None:
        self._real, self._log = real, log

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value):
            return self._written([name, None], value)

        def call(*arguments: Any, **named: Any) -> Any:
            asked = [name, [[plain(one) for one in arguments], {key: plain(one) for key, one in named.items()}]]
            return self._written(asked, value(*arguments, **named))

        return call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        asked = ["()", [[plain(one) for one in arguments], {key: plain(one) for key, one in named.items()}]]
        return self._written(asked, self._real(*arguments, **named))

    def _written(self, asked: list[Any], value: Any) -> Any:
        said = plain(value)
        self._log.append([*asked, said])
        return Recorder(value, self._log) if said == OBJECT else value


OBJECT = {"an": "object"}


class Replayed:
    """Answers as was recorded, in that order, and is asked for nothing else."""

    def __init__(self, log: list[list[Any]]) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        if self._log and self._log[0][:2] == [name, None]:
            return self._answer()
        return lambda *arguments, **named: self._called(name, arguments, named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._called("()", arguments, named)

    def _called(self, name: str, arguments: Any, named: dict[str, Any]) -> Any:
        asked = [name, [[plain(one) for one in arguments], {key: plain(one) for key, one in named.items()}]]
        assert self._log, f"{asked} was not recorded"
        assert self._log[0][:2] == asked
        return self._answer()

    def _answer(self) -> Any:
        said = self._log.pop(0)[2]
        return Replayed(self._log) if said == OBJECT else restored(said)


def plain(value: Any) -> Any:
    """Return a value as JSON, with tuples and other keys than text marked; what is none of it is an object."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [plain(one) for one in value]}
    if type(value) is list:
        return [plain(one) for one in value]
    if type(value) is dict:
        return {"pairs": [[plain(key), plain(one)] for key, one in value.items()]}
    return str(value) if isinstance(value, enum.Enum) else OBJECT


def restored(said: Any) -> Any:
    """Return what `plain` was made of."""
    if isinstance(said, list):
        return [restored(one) for one in said]
    if not isinstance(said, dict):
        return said
    if "tuple" in said:
        return tuple(restored(one) for one in said["tuple"])
    return {restored(key): restored(one) for key, one in said["pairs"]}


def main() -> None:
    name, *options = sys.argv[1:]
    said, log = PLAYS[name], []
    real = importlib.import_module(said["package"])
    made = adapter(name, package=Recorder(real, log))(**said["options"] | dict(option.split("=", 1) for option in options))
    found = play(made, said["moves"], **said["columns"])
    text = json.dumps({"calls": log, "played": found}, indent=1)
    (HERE / "recorded" / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
