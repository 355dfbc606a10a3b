"""The loss of one step: that of the run's own method, of another row of the table, or, for demonstrations, their likelihood.

A script names it (`orchestrator.scripted_run`), and trainer and orchestrator know it by that name. What a loss reads beyond a row has to be
there since the run began: models are loaded for `algorithm.name`.
"""

from __future__ import annotations

from pipelinerl.algorithms.method import CRITICS, Method, Need
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.errors import ConfigError

SFT = "sft"
"""The name of the loss of demonstrations: the mean negative log-likelihood of their completions' tokens."""
LOADED_AT_START = CRITICS | {Need.SQUARE_SUM, Need.DIVERGENCE}
"""Needs that the policy, or a model beside it, is loaded for."""


def method_of_loss(config: Config, name: str) -> Method:
    """Return the method whose loss `name` means: the run's own, with its overrides, where it is empty or `algorithm.name`, else the row of
    the table.

    Raises `ConfigError` for an unknown name, and for a method whose needs nothing in this run supplies.
    """
    own = method_of(config)
    if name in ("", config.algorithm.name):
        return own
    algorithm = config.algorithm.model_copy(update={"name": name, "overrides": {}})
    method = method_of(config.model_copy(update={"algorithm": algorithm}))
    if lacking := sorted((method.needs & LOADED_AT_START) - own.needs):
        raise ConfigError(
            f"loss {name!r} needs {', '.join(lacking)}, and the trainer was started for algorithm.name = {config.algorithm.name!r}, which"
            f" has none: set algorithm.name to {name!r}, and name the other losses in the script"
        )
    return method
