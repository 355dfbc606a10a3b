"""`sample` lines as text: what the policy wrote, piece by piece, each with the version that sampled it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.observe.fold import rows
from pipelinerl.observe.renamed import Line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """One sample that was trained, or that ended otherwise."""

    t: float
    step: int
    rollout_id: str
    status: str = "trained"
    """A `messages.TerminalStatus`."""
    reason: str = ""
    """The reason why it was not trained; empty where it was."""
    error: str = ""
    """The words of the engine, the environment or a reward function about its failure."""
    prompt: str
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Columns of the prompt's row, as text, cut: an expected answer stands there. Empty in journals from before they were recorded."""
    pieces: tuple[tuple[int, tuple[str, ...]], ...]
    """(version, text of each of its tokens) along the completion; version -1 where nobody sampled, for example tool output."""
    num_tokens: int
    """Tokens of the completion; more than shown where it was long."""
    reward: float | None
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    """Reward of each function that applied, before weighting."""
    advantage: float | None
    finish: str
    step_scores: tuple[tuple[int, float], ...] = ()
    """(position of its last token in the completion, score) of each step, where a process reward model gave them."""

    @property
    def completion(self) -> str:
        return "".join(text for _, texts in self.pieces for text in texts)

    @property
    def versions(self) -> str:
        """`v3 × 5, v4 × 9`: versions and how many tokens each sampled."""
        return ", ".join(f"v{version} × {len(texts)}" for version, texts in self.pieces)

    @property
    def step_scores_text(self) -> str:
        """The scores in order, as text."""
        return ", ".join(f"{score:.3f}" for _, score in self.step_scores)


class Decoder:
    """Token ids -> text of each token, with the run's own tokenizer; where that is gone, the ids themselves are the text."""

    def __init__(self, run_folder: Path, model_folder: str | None) -> None:
        self._folders = [run_folder / "model", *([Path(model_folder)] if model_folder else [])]
        self._tokenizer: Any = None
        self._is_tried = False

    def texts(self, token_ids: list[int]) -> tuple[str, ...]:
        """One text per token; joined they are the whole text, also where a character is spread over several tokens."""
        self._once()
        if self._tokenizer is None:
            return tuple(f"{token_id} " for token_id in token_ids)
        texts, start, read = [], 0, 0
        for end in range(1, len(token_ids) + 1):
            before, now = self._text(token_ids[start:read]), self._text(token_ids[start:end])
            if now.endswith(_HALF) and end < len(token_ids):
                texts.append("")  # half a character: the token that completes it shows it
                continue
            texts.append(now[len(before) :])
            start, read = read, end  # decoded with the token before it, as some tokenizers drop a leading space
        return tuple(texts)

    def whole(self, token_ids: list[int]) -> str:
        """The text of all, at once: as `texts` joined, in a hundredth of the time where there are many."""
        self._once()
        return "".join(self.texts(token_ids)) if self._tokenizer is None else self._text(token_ids)

    def _once(self) -> None:
        if not self._is_tried:
            self._is_tried = True
            self._tokenizer = self._load()

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) if token_ids else ""

    def _load(self) -> Any:
        from pipelinerl.data.tokenizer import load_tokenizer

        for folder in self._folders:
            if folder.is_dir():
                try:
                    return load_tokenizer(folder)
                except (ConfigError, ImportError):
                    continue
        return None


_HALF = "\N{REPLACEMENT CHARACTER}"


def shown_sample(line: Line, decoder: Decoder) -> ShownSample:
    """A line of kind `sample`, decoded."""
    token_ids = [int(token_id) for token_id in line.get("token_ids", [])]
    texts = decoder.texts(token_ids)
    pieces, at = [], 0
    for version, count in line.get("versions", []):
        pieces.append((int(version), texts[at : at + count]))
        at += count
    return ShownSample(
        t=line["t"],
        step=int(line["step"]),
        rollout_id=str(line.get("rollout_id", "")),
        prompt=str(line.get("prompt", "")),
        pieces=tuple(pieces),
        num_tokens=int(line.get("num_tokens", len(token_ids))),
        reward=rows.number(line.get("reward")),
        advantage=rows.number(line.get("advantage")),
        finish=str(line.get("finish", "")),
        status=str(line.get("status", "trained")),
        reason=str(line.get("reason", "")),
        error=str(line.get("error", "")),
        columns={str(name): str(text) for name, text in (line.get("columns") or {}).items()},
        components=rows.numbers(line.get("components")),
        step_scores=tuple((int(end), float(score)) for end, score in line.get("step_scores", [])),
    )
