"""Checks of a reward model's folder that load nothing: a head node makes them before a run, and a worker before it loads the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def problem_of(folder: Path) -> str | None:
    """Say why a folder is no sequence classifier with one logit, for a person; None where it is one. It reads config.json alone."""
    config = json.loads((folder / "config.json").read_text())
    architectures = config.get("architectures") or []
    if not any(name.endswith(("ForSequenceClassification", "RewardModel")) for name in architectures):
        found = ", ".join(architectures) or "none"
        return f"{folder} has the architecture {found}, expected a sequence classifier, for example Qwen2ForSequenceClassification"
    num_labels = len(config["id2label"]) if "id2label" in config else int(config.get("num_labels", 2))
    if num_labels != 1:
        return f"{folder} has {num_labels} labels, expected 1: the reward is the one logit of its head (num_labels in config.json)"
    return None


def problem_of_tokenizer(folder: Path, tokenizer: Any, *, form: str) -> str | None:
    """Say why a tokenizer cannot write what the model reads; None where it can."""
    if form == "chat" and not tokenizer.chat_template:
        return (
            f'{folder} has no chat template, which reward.format = "chat" needs. Set it to "text", or add chat_template.jinja to the folder'
        )
    return None
