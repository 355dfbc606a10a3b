"""Prompts as vLLM takes them: tokens, and the images among them.

vLLM's own processor makes pixels of images, and what it would write for them must be what the prompt has. A request comes with all its
tokens, placeholders included; nothing is tokenised here. vLLM is given the images alone, and the runs of placeholders that it makes of them
are looked for among the request's tokens, in order: where one is not found, orchestrator and engine do not mean the same image or the same
processor, and the request is refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pipelinerl.config.families import takes_images
from pipelinerl.data.images import open_image
from pipelinerl.errors import DataError, EngineError
from pipelinerl.messages import MAX_IMAGES, Generate

CACHE_GIB = 0.25
"""Host memory for pixels of images that siblings have in common. Smaller makes them again for each sibling."""


def image_options(folder: Path) -> dict[str, Any]:
    """Options of vLLM for the model of a folder: whether it needs a tokenizer, which its image processor asks for placeholders."""
    if not takes_images(folder):
        return {"skip_tokenizer_init": True}
    return {"limit_mm_per_prompt": {"image": MAX_IMAGES}, "mm_processor_cache_gb": CACHE_GIB}


class Prompts:
    """Makes vLLM's input of a request, and has vLLM forget features of images that an older policy computed."""

    def __init__(self, llm: Any, *, folder: Path) -> None:
        self._llm = llm
        self.token_id: int | None = json.loads((folder / "config.json").read_text())["image_token_id"] if takes_images(folder) else None
        """The placeholder; None for a model that takes no images."""

    def prompt_of(self, request: Generate, *, salt: str) -> Any:
        """Return what vLLM is to be given; prefixes are shared under the same `salt` alone. Raises `EngineError`."""
        token_ids = request.token_ids.tolist()
        if not request.images and self.token_id not in token_ids:
            return {"prompt_token_ids": token_ids, "cache_salt": salt}
        if self.token_id is None:
            raise EngineError(f"{request.rollout_id} has images, and the model that is served takes none here")
        if not request.images:
            raise EngineError(f"{request.rollout_id} has placeholders of images in its prompt (token {self.token_id}), and no images")
        try:
            opened = [open_image(data) for data in request.images]
        except DataError as error:
            raise EngineError(f"{request.rollout_id}: {error}") from error
        asked = {"prompt_token_ids": [self.token_id] * len(opened), "multi_modal_data": {"image": opened}}
        (made,) = self._llm.renderer.render_cmpl([asked])
        places, at = [], 0
        for place in made["mm_placeholders"]["image"]:
            run = made["prompt_token_ids"][place.offset : place.offset + place.length]
            starts = range(at, len(token_ids) - len(run) + 1)
            start = next((start for start in starts if token_ids[start : start + len(run)] == run), None)
            if start is None:
                raise EngineError(
                    f"{request.rollout_id}: vLLM makes {len(run)} tokens of image {len(places)}, {run[:8]} ..., which its prompt has not:"
                    " the orchestrator and the engine read different image processors. Compare preprocessor_config.json on their machines"
                )
            places.append(dataclasses.replace(place, offset=start))
            at = start + len(run)
        return {**made, "prompt_token_ids": token_ids, "mm_placeholders": {"image": places}, "cache_salt": salt}

    def forget_features(self) -> None:
        """Have images of prompts that go on or begin be computed by the policy now in force."""
        if self.token_id is not None:
            self._llm.engine_core.reset_encoder_cache()
