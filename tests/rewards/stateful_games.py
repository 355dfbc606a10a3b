"""Environments with state for tests: one that plays fair, and one that does whatever it is told."""

from __future__ import annotations

import os
import time
from typing import Any

from pipelinerl.environments import Said, Step, answers


class Guess:
    """Guess a number; what it holds are the guesses so far."""

    def __init__(self, low: int = 0) -> None:
        self.low = low
        self.guesses: list[int] = []

    def reset(self, number: int) -> str:
        self.number = number
        return f"from {self.low} "

    def step(self, message: Said) -> tuple[str, float, bool]:
        self.guesses.append(int(message))
        if self.guesses[-1] == self.number:
            return "", 1.0, True
        return f"no {len(self.guesses)} ", -0.25, False


class Told:
    """Does what the model says, or what the row says at its reset."""

    def reset(self, at_reset: str = "") -> Any:
        return self.act(at_reset) if at_reset else "begin"

    def step(self, message: Said) -> Any:
        returned = self.act(str(message))
        return returned if isinstance(returned, tuple | Step) or message == "nothing" else (returned, 0.0, False)

    def act(self, order: str) -> Any:
        if order == "raise":
            raise KeyError("no such move")
        if order == "die":
            os._exit(3)
        if order == "hang":
            time.sleep(1000.0)
        special = {
            "nan": ("go on", float("nan"), False),
            "text reward": ("go on", "1", False),
            "great reward": ("go on", 1e13, False),
            "huge": ("x" * 10_000_000, 0.0, False),
            "number": (7, 0.0, False),
            "two": ("go on", 0.0),
            "silent": (None, 0.0, False),
            "undone": ("go on", 0.0, "no"),
            "nothing": None,
            "state": Step("go on", 0.5, state="here"),
            "over": (None, 2.0, True),
            "process": (str(os.getpid()), 0.0, False),
        }
        return special.get(order, f"heard {order}")

    def close(self) -> None:
        if (path := os.environ.get("PIPELINERL_TEST_CLOSED")) is not None:
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")


class Shop:
    """Offers a tool."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "price",
                "description": "The price of an item.",
                "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
            },
        },
    )

    async def reset(self) -> str:
        return "What does a pear cost?"

    async def step(self, message: Said) -> Step:
        if message.tool_calls:
            return Step(answers(message.tool_calls, lambda call: f"{call.arguments['item']}: 3"), 0.1)
        return Step(None, float(message == "3"), done=True)


class Packaged(Guess):
    package = "no_such_game_engine"


class NoStep:
    def reset(self) -> None: ...


class WrongStep:
    def reset(self) -> None: ...

    def step(self, message: str, other: str) -> None: ...


class WrongTools(Told):
    tools = ("price",)
