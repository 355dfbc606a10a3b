"""A language model as judge, behind an endpoint that speaks OpenAI's chat completions (extra `rewards`, for httpx).

The judge's limits are those of the reward in the config: `concurrency`, `per_s`, `retries` (with the circuit breaker) and `deadline_s`. A
call here is one request. Anything but a valid answer raises, which is a failed try and never a score.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError

try:
    import httpx
except ImportError as error:
    raise ConfigError("the judge needs httpx: pip install 'pipelinerl[rewards]'") from error

QUESTION = """Rate the answer to the task from 0 (useless) to 10 (perfect). Reason briefly, then end with one line: SCORE: <number>

<task>
{prompt}
</task>
<answer>
{completion}
</answer>
"""
_SCORE = re.compile(r"SCORE:\s*(-?\d+(?:\.\d+)?)(?![\d.])", re.IGNORECASE)
_ERROR_CHARACTERS = 300


class NoVerdict(Exception):
    """The judge did not answer, or its answer holds no score in range; the message says what came."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judge's answer and its cost."""

    score: float
    """Score from 0 to 1."""
    num_tokens: int
    """Number of tokens of question and answer, as the endpoint counts them; 0 where it gives no count."""
    num_cached: int
    """Number of these tokens that were read from the endpoint's prefix cache."""


def ask_judge(
    prompt: str,
    completion: str,
    *,
    url: str,
    model: str,
    question: str = QUESTION,
    best: float = 10.0,
    max_tokens: int = 512,
    timeout_s: float = 60.0,
    key_file: str | None = None,
    extra: dict[str, Any] | None = None,
) -> float:
    """Return the judge's score divided by `best`, hence from 0 to 1. Raises `NoVerdict`.

    `url` is the endpoint up to and including `/v1`. In `question`, {prompt} and {completion} are replaced. The completion may plead for a
    good score, so the last score in the judge's own words counts. `key_file` holds the key, because a worker's environment holds no
    secrets. `extra` are further fields of the request, as the endpoint takes them.
    """
    judge = Judge(url=url, model=model, question=question, best=best, max_tokens=max_tokens, timeout_s=timeout_s, extra=extra or {})
    return judge.ask(prompt, completion, client=_client(key_file)).score


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A judge's endpoint, and how it is asked; for the fields see `ask_judge`."""

    url: str
    model: str
    question: str
    best: float
    max_tokens: int
    timeout_s: float
    extra: Mapping[str, Any]

    def ask(self, prompt: str, completion: str, *, client: httpx.Client) -> Verdict:
        """Return the score together with the cost of the answer. Raises `NoVerdict`."""
        words = {"prompt": prompt, "completion": completion}
        text = re.sub(r"\{(prompt|completion)\}", lambda found: words[found[1]], self.question)
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0.0, "max_tokens": self.max_tokens}
        try:
            response = client.post(f"{self.url.rstrip('/')}/chat/completions", json=body | dict(self.extra), timeout=self.timeout_s)
        except httpx.HTTPError as error:
            raise NoVerdict(f"{self.url} could not be asked: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise NoVerdict(f"{self.url} answered {response.status_code}: {response.text[:_ERROR_CHARACTERS]}")
        return _read(response, best=self.best)


def _read(response: httpx.Response, *, best: float) -> Verdict:
    try:
        answer = response.json()
        reply = answer["choices"][0]["message"]["content"]
        found = _SCORE.findall(reply)
        usage = answer.get("usage") or {}
        num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NoVerdict(f"the judge's answer is no chat completion: {response.text[:_ERROR_CHARACTERS]}") from error
    if not found:
        raise NoVerdict(f"the judge gave no line 'SCORE: <number>': {reply[-_ERROR_CHARACTERS:]!r}")
    score = float(found[-1])
    if not 0.0 <= score <= best:
        raise NoVerdict(f"the judge gave {score:g}, expected a score from 0 to {best:g}")
    return Verdict(score=score / best, num_tokens=int(usage.get("total_tokens") or 0), num_cached=int(num_cached))


def client_with(key_file: str | None) -> httpx.Client:
    """Return a client that sends the key in this file, if there is one, and keeps its connections."""
    headers = {} if key_file is None else {"Authorization": f"Bearer {Path(key_file).read_text().strip()}"}
    return httpx.Client(headers=headers, trust_env=False)


_client = functools.cache(client_with)
"""Clients by key file, made once per worker."""
