"""The encoder of a run's prompts: by the settings of `data`, and, with an environment with state, without the opening of a turn.

Such an environment speaks first: what its `reset` says, and the opening of the model's turn, follow the prompt. Tools that its class offers
stand in the prompt, unless `data.tools` names others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pipelinerl.config import Config
from pipelinerl.data.images import ImageProcessor
from pipelinerl.data.tokenizer import ChatOptions, TextEncoder
from pipelinerl.rewards.pool.plan import environment_component
from pipelinerl.rewards.stateful import offered_tools


def encoder_of(config: Config, tokenizer: Any) -> TextEncoder:
    """Return the encoder; `tokenizer` is what `load_tokenizer` gives. Raises `ConfigError` where the class cannot be loaded."""
    options = ChatOptions.of(config.data)
    component = environment_component(config.environment)
    if component is None or not component.is_stateful:
        processor = functools.cache(lambda: ImageProcessor(config.model.path))
        return TextEncoder(tokenizer, options=options, image_processor=processor)
    if options.tools is None and (tools := offered_tools(component)):
        options = dataclasses.replace(options, tools=tools)
    return TextEncoder(tokenizer, options=options, opens_turn=False)
