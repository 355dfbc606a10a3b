"""Tokens in, tokens out: the route and the shapes of vLLM's `/inference/v1/generate`, which clients use that render chats themselves.

The session that a client names is its own affair: whose attempt it is, the token says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelinerl.gateway import fields
from pipelinerl.gateway.fields import Body
from pipelinerl.gateway.refusal import wrong
from pipelinerl.messages import Finish, TurnSampled


def read(body: Body, *, max_tokens: int, max_context_tokens: int, vocabulary: int | None) -> tuple[Sequence[int], int]:
    """Return the tokens that are to be continued, each one of the `vocabulary`, and the most that are to be sampled.

    Raises `RequestRefused`: what the gateway passed on would count as its own fault.
    """
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise wrong(f"sampling_params is {str(sampling)[:80]!r}, expected an object", param="sampling_params")
    fields.refuse_what_changes_sampling(sampling)
    if fields.number(sampling, "n", default=1, most=2) > 1:
        raise wrong("sampling_params.n is more than 1: ask as often as you want answers", param="sampling_params.n")
    token_ids = fields.integers(body, "token_ids", most=max_context_tokens, below=vocabulary or 1 << 31)
    return token_ids, fields.number(sampling, "max_tokens", "max_completion_tokens", default=max_tokens, most=max_tokens)


def answer(turn: TurnSampled, *, lease: str) -> dict[str, Any]:
    """Return the answer."""
    pairs = zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True)
    content = [{"token": f"token_id:{token_id}", "logprob": logprob, "top_logprobs": []} for token_id, logprob in pairs]
    choice = {
        "index": 0,
        "token_ids": turn.token_ids.tolist(),
        "logprobs": {"content": content},
        "finish_reason": "length" if turn.finish is Finish.LENGTH else "stop",
        "policy_versions": turn.versions.tolist(),
    }
    return {"request_id": f"generate-{lease}-{turn.node}", "choices": [choice]}
