"""An OpenEnv server with a game that is no echo: find a digit. `python openenv_game.py PORT`, under an interpreter that has `openenv`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn  # pyright: ignore[reportMissingImports]
from openenv.core.env_server import (  # pyright: ignore[reportMissingImports]
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)


class Guess(Action):
    message: str


class Hint(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._digit, self._state = 0, State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._digit, self._state = random.Random(seed).randrange(10), State(episode_id=episode_id, step_count=0)
        return Hint(text="Which digit?", reward=0.0)

    def step(self, action: Guess, *_: Any, **__: Any) -> Hint:
        self._state.step_count += 1
        digits = [int(character) for character in action.message if character.isdigit()]
        if digits and digits[-1] == self._digit:
            return Hint(text="Yes.", reward=1.0, done=True)
        hint = "A digit, please." if not digits else "Higher." if digits[-1] < self._digit else "Lower."
        return Hint(text=hint, reward=-0.1, done=self._state.step_count >= 8)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
