"""Environments of SkyRL-Gym (`skyrl-gym`): `cls = "pipelinerl.environments.skyrl_gym:SkyRLGym"`.

    [environment]
    cls = "pipelinerl.environments.skyrl_gym:SkyRLGym"
    options = { env_id = "gsm8k_multi_turn" }

The row's columns are the environment's `extras`, as in SkyRL (`reward_spec`, `extra_info`, `max_turns`), and its prompt a chat.
"""

from __future__ import annotations

import importlib
from typing import Any


class SkyRLGym:
    """One episode of a registered environment, or of a class that `env_id` names as `module:Class`."""

    package = "skyrl_gym"

    def __init__(self, env_id: str, **config: Any) -> None:
        """Take the environment's id, and its `env_config`."""
        self._gym = importlib.import_module(self.package)
        self._env_id, self._config = env_id, config
        self._environment: Any = None
        if ":" in env_id and env_id not in self._gym.envs.registration.registry:
            self._gym.register(id=env_id, entry_point=env_id)

    def reset(self, chat: list[dict[str, Any]], **columns: Any) -> list[dict[str, Any]]:
        """Begin an episode; return the messages that the environment puts behind the prompt."""
        self._environment = self._gym.make(self._env_id, env_config=self._config, extras=columns)
        messages, _ = self._environment.init([dict(message) for message in chat])
        if messages[: len(chat)] != chat:
            raise ValueError(f"{self._env_id} changes the prompt: {messages[: len(chat)]}; here it stands, and messages may follow it")
        return messages[len(chat) :]

    def step(self, message: str) -> tuple[list[dict[str, Any]] | None, float, bool]:
        """Answer a turn."""
        said = self._environment.step(str(message))
        return said["observations"] or None, float(said["reward"]), bool(said["done"])

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            self._environment.close()
