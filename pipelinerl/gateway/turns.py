"""A conversation becomes a turn: the tokens behind the turn that it goes on from, and no token twice.

Clients send whole conversations. One that begins with a conversation which a sampled turn has ended goes on from that turn: only the rest
is tokenised, behind the ids that were sampled. One that does not (a sub-agent, what is left after a compaction, a message that the client
changed) is a context of its own, and counted as a branch.

A request is sampled once more each time that it is sent, since agents draw several answers to one question. A *retry* of it is told by
what the client says: OpenAI's SDK counts its own (`x-stainless-retry-count`), others may send an `idempotency-key`. Its key is the turn
that it goes on from, the rest of the conversation, and whatever else was asked; it gets the answer that the first one got, or will get.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipelinerl.data import tool_calls
from pipelinerl.data.chat import ChatTemplate, text_of
from pipelinerl.errors import DataError
from pipelinerl.gateway.episodes import Answer, Episode, Node
from pipelinerl.gateway.orchestrator import Orchestrator
from pipelinerl.gateway.refusal import RequestRefused, wrong
from pipelinerl.messages import NO_NODE, TurnSampled

CHUNK_TOKENS = 8
"""Tokens between two parts of a stream. Fewer make it smoother, and cost the engine a message each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What a client says of a request: whether it is one that it sent before."""

    is_retry: bool = False
    key: str = ""
    """An `idempotency-key`; empty where it sends none."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Retry:
        """Read it from a request's headers."""
        key, count = headers.get("idempotency-key", ""), headers.get("x-stainless-retry-count", "0")
        return cls(is_retry=bool(key) or count not in ("", "0"), key=key)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for, whichever way the client speaks."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    is_streamed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A turn as its client reads it."""

    text: str
    calls: tuple[tool_calls.ToolCall, ...]
    call_ids: tuple[str, ...]

    def message(self) -> dict[str, Any]:
        """Return the assistant's message."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text if self.text or not self.calls else None}
        if self.calls:
            said["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for name, call in zip(self.call_ids, self.calls, strict=True)
            ]
        return said


class Turns:
    """Samples turns for agents."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        template: ChatTemplate,
        decode: Callable[[list[int]], str],
        calls: tool_calls.ToolCallParser | None = None,
        max_turns: int,
        max_parallel: int,
    ) -> None:
        """Take the `template` of the model, `decode`, which makes text of a turn (`pipelinerl.data.tokenizer.decoder`), and what reads tool
        `calls`; None for JSON between `<tool_call>` and `</tool_call>`."""
        self.decode = decode
        self._calls = calls or tool_calls.JsonToolCalls(decode)
        self._orchestrator = orchestrator
        self._template = template
        self._max_turns = max_turns
        self._max_parallel = max_parallel

    def ask(self, episode: Episode, asked: Asked, *, retry: Retry) -> list[Answer]:
        """Have a conversation answered, `num_answers` times. Raises `RequestRefused` where it cannot be."""
        try:
            self._calls.check(asked.tools)
        except DataError as error:
            raise wrong(str(error), param="tools") from None
        try:
            digests = _digests(asked.messages, tools=asked.tools)
            known = next((end for end in range(len(asked.messages) - 1, 0, -1) if digests[end] in episode.by_digest), 0)
            parent = episode.nodes[episode.by_digest[digests[known]]] if known else None
            further = (asked.max_tokens, asked.stop, asked.num_answers, retry.key)
            key = _digest(digests[known], digests[-1], repr(further).encode())
            if retry.is_retry and (answers := episode.answers.get(key)) and not any(answer.has_failed for answer in answers):
                self._orchestrator.counts["num_retried"] += 1
                return answers
            parent, token_ids = self._tokens(asked, parent=parent, known=known)
        except DataError as error:
            raise wrong(str(error), param="messages") from None
        return self._sample(episode, asked, parent=parent, token_ids=token_ids, key=key, conversation=digests[-1])

    def ask_tokens(self, episode: Episode, token_ids: Sequence[int], *, max_tokens: int, retry: Retry) -> list[Answer]:
        """Have a context of tokens continued."""
        whole = np.array(token_ids, np.int32)
        parent = episode.continued_by(whole)
        key = _digest(whole.tobytes(), repr((max_tokens, retry.key)).encode())
        if retry.is_retry and (answers := episode.answers.get(key)) and not any(answer.has_failed for answer in answers):
            self._orchestrator.counts["num_retried"] += 1
            return answers
        asked = Asked(messages=(), max_tokens=max_tokens)
        rest = list(token_ids) if parent is None else list(token_ids[parent.num_context :])
        return self._sample(episode, asked, parent=parent, token_ids=rest, key=key, conversation=key)

    def spoken(self, turn: TurnSampled, asked: Asked, *, lease: str) -> Spoken:
        """Return a turn as its client reads it: without stop strings, with tool calls where there are tools to call."""
        token_ids = turn.token_ids.tolist()
        if asked.tools:
            said = self._calls.said(token_ids, tools=asked.tools, stop=asked.stop)
        else:
            said = tool_calls.Said(text=tool_calls.until(self.decode(token_ids), asked.stop))
        names = tuple(f"call_{lease[:8]}_{turn.node}_{number}" for number in range(len(said.calls)))
        return Spoken(text=said.text, calls=said.calls, call_ids=names)

    def reader(self, asked: Asked) -> Callable[[Sequence[int]], str]:
        """Return a function that is told the tokens of an unfinished turn so far, and returns as much of its text as may be shown."""
        if asked.stop:  # what may be the beginning of a stop string is known at the end alone
            return lambda token_ids: ""
        if asked.tools:
            return self._calls.reader(tools=asked.tools)
        return lambda token_ids: tool_calls.whole_characters(self.decode(list(token_ids)))

    def _tokens(self, asked: Asked, *, parent: Node | None, known: int) -> tuple[Node | None, list[int]]:
        """Return the turn that a conversation goes on from, if any, and the tokens behind it."""
        if parent is not None:
            sampled = parent.turn.token_ids.tolist()
            rest = self._template.continuation(asked.messages[known:], sampled=sampled, tools=asked.tools)
            if rest:
                return parent, rest
            self._orchestrator.counts["num_drifted"] += 1
        return None, self._template.prompt(asked.messages, tools=asked.tools)

    def _sample(
        self, episode: Episode, asked: Asked, *, parent: Node | None, token_ids: list[int], key: bytes, conversation: bytes
    ) -> list[Answer]:
        before = 0 if parent is None else parent.num_context
        self._check(episode, num_tokens=before + len(token_ids), num_answers=asked.num_answers)
        if parent is None and episode.nodes:
            self._orchestrator.counts["num_branches"] += 1
        answers = [
            self._orchestrator.ask(
                episode,
                parent=NO_NODE if parent is None else parent.index,
                token_ids=token_ids,
                max_tokens=asked.max_tokens,
                stop=asked.stop,
                chunk_tokens=CHUNK_TOKENS if asked.is_streamed else 0,
            )
            for _ in range(asked.num_answers)
        ]
        given = np.array(token_ids, np.int32)

        def note(done: Any) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            turn: TurnSampled = done.result()
            node = Node(
                index=turn.node,
                parent=NO_NODE if parent is None else parent.index,
                given=given,
                num_prompt=before + len(given),
                turn=turn,
            )
            said = self.spoken(turn, asked, lease=episode.lease).message() if asked.messages else {"node": turn.node}
            episode.add(node, _digest(conversation, _canonical(said)))

        for answer in answers:
            answer.done.add_done_callback(note)
        episode.answers[key] = answers
        return answers

    def _check(self, episode: Episode, *, num_tokens: int, num_answers: int) -> None:
        if num_tokens >= episode.max_context_tokens:
            raise wrong(
                f"this model's maximum context length is {episode.max_context_tokens} tokens, and the messages have {num_tokens}",
                param="messages",
                code="context_length_exceeded",
            )
        if episode.num_asked + num_answers > self._max_turns:
            words = f"episode {episode.episode_id} has had {episode.num_asked} turns, of at most {self._max_turns} (gateway.max_requests)"
            raise wrong(words, code="too_many_turns")
        if num_answers > self._max_parallel:
            raise wrong(f"n is {num_answers}, expected at most {self._max_parallel} (gateway.max_parallel)", param="n")
        running = sum(not answer.done.done() for answers in episode.answers.values() for answer in answers)
        if running + num_answers > self._max_parallel:
            words = f"{running} turns of this episode are being sampled, at most {self._max_parallel} at once (gateway.max_parallel)"
            raise RequestRefused(429, words, code="rate_limit_exceeded", retry_after_s=1)


def _digests(messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the digests of a conversation up to each of its messages, the empty one first."""
    found = [_digest(msgspec.json.encode(list(tools), order="deterministic"))]
    for message in messages:
        found.append(_digest(found[-1], _canonical(message)))
    return found


def _digest(*parts: bytes) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def _canonical(message: Mapping[str, Any]) -> bytes:
    """Return what a message says, alike for clients that write it differently: no content as None or as an empty text, the text of parts,
    arguments of calls with other spaces. Raises `DataError`."""
    content = text_of(message.get("content"))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    said = [
        message.get("role"),
        content.strip() if message.get("role") == "assistant" else content,
        calls,
        message.get("tool_call_id") or "",
        message.get("name") or "",
    ]
    if "node" in message:
        said.append(message["node"])
    return msgspec.json.encode(said, order="deterministic")


def _call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise DataError(f"a tool call is {str(call)[:80]!r}, expected an object with a function")
    arguments = function.get("arguments")
    with contextlib.suppress(msgspec.DecodeError, RecursionError):  # malformed, as the model wrote it
        arguments = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    return [function.get("name"), arguments]
