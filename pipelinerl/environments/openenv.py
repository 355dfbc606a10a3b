"""Environments behind an OpenEnv server (`openenv`), by its own client: `cls = "pipelinerl.environments.openenv:OpenEnv"`.

    [environment]
    cls = "pipelinerl.environments.openenv:OpenEnv"
    options = { url = "http://127.0.0.1:8000", action = "message", observation = "echoed_message" }

Each episode is a session of the server. A row's columns `seed` and `episode_id` go to its `reset`. What the model says is the field
`action` of the action; where the environment offers tools (`data.tools`), a call's arguments are the action itself.
"""

from __future__ import annotations

import importlib
import json
from typing import Any


class OpenEnv:
    """One session of a server."""

    package = "openenv.core.generic_client"

    def __init__(self, url: str, action: str = "message", observation: str | None = None, **fields: Any) -> None:
        """Take the server's `url`, the names of the fields that hold what is said on either side, and further fields of each action.

        Without `observation`, the model sees all fields of an observation, as JSON.
        """
        client = importlib.import_module(self.package).GenericEnvClient(base_url=url)
        self._client = client.sync()
        self._action, self._observation, self._fields = action, observation, fields
        self._client.connect()

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> str:
        """Begin a session; return what it says first."""
        named = {"seed": seed, "episode_id": episode_id}
        return self._text(self._client.reset(**{name: value for name, value in named.items() if value is not None}).observation)

    def step(self, message: Any) -> tuple[str | None, float, bool]:
        """Act. An observation without a reward gives 0.0."""
        calls = getattr(message, "tool_calls", ())
        said = dict(calls[0].arguments) if calls else {self._action: str(message)}
        result = self._client.step({**self._fields, **said})
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _text(self, observation: dict[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(observation)
        if self._observation not in observation:
            raise KeyError(f"the observation has no field {self._observation!r}; it has {', '.join(observation) or 'none'}")
        return str(observation[self._observation])
