"""Games of TextArena (`textarena`) for one player: `cls = "pipelinerl.environments.textarena:TextArena"`.

    [environment]
    cls = "pipelinerl.environments.textarena:TextArena"
    options = { env_id = "GuessTheNumber-v0" }

A row's column `seed` draws the game, so that siblings play the same one. The game is made without TextArena's wrappers: they repeat the
whole game in each observation, and here the model has it before it already.
"""

from __future__ import annotations

import importlib
from typing import Any


class TextArena:
    """One game, from its rules to its outcome."""

    package = "textarena"

    def __init__(self, env_id: str, **options: Any) -> None:
        """Take the game's id, as `GuessTheNumber-v0`, and arguments of it, as `max_turns`."""
        arena = importlib.import_module(self.package)
        self._game = arena.make(env_id=env_id if env_id.endswith("-raw") else f"{env_id}-raw", **options)

    def reset(self, seed: int | None = None) -> str:
        """Begin the game; return its rules."""
        self._game.reset(num_players=1, seed=seed)
        return self._heard()

    def step(self, message: str) -> tuple[str | None, float, bool]:
        """Make a move. The reward is the game's, at its end; a game that ends by a move it does not allow says so with its own reward."""
        done, _ = self._game.step(action=str(message))
        if not done:
            return self._heard(), 0.0, False
        rewards, _ = self._game.close()
        return None, float((rewards or {}).get(0, 0.0)), True

    def _heard(self) -> str:
        """Return what the game has said since the last move, without the player's own words."""
        player, heard = self._game.get_observation()
        return "\n".join(text for sender, text, *_ in heard if sender != player) or "Go on."
