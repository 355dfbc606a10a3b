"""What agents have been lent: an episode for each lease, with a token that no other attempt has."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import hmac
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipelinerl.gateway.refusal import RequestRefused, ended
from pipelinerl.messages import NO_NODE, EpisodeLent, Int32, LeaseEnd, Prompt, TurnSampled, part_of

MAX_ENDED = 1 << 12
"""Ended leases whose end is remembered, so that an agent is told why. Of an older one it is told less."""
PREFIX = "ep-"


@dataclasses.dataclass(slots=True)
class Answer:
    """A turn that was asked for: its tokens as they come, and in the end all of it."""

    done: asyncio.Future[TurnSampled]
    told: list[int] = dataclasses.field(default_factory=list)
    """Tokens that the engine has sent while it goes on."""
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when there is more, or the end."""

    @property
    def has_failed(self) -> bool:
        """True where nothing was sampled."""
        return self.done.done() and (self.done.cancelled() or self.done.exception() is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A turn that was sampled."""

    index: int
    parent: int
    given: Int32
    """[T] int32: the tokens between the turn before and this one, or all before the first."""
    num_prompt: int
    """Tokens of the whole context before this turn."""
    turn: TurnSampled

    @property
    def num_context(self) -> int:
        """Tokens of the context up to the turn's last."""
        return self.num_prompt + len(self.turn.token_ids)


@dataclasses.dataclass(slots=True, kw_only=True)
class Episode:
    """One attempt of a rollout, with an agent."""

    lease: str
    rollout_id: str
    attempt: int
    prompt: Prompt
    ends_at: float
    """On the loop's clock, in seconds."""
    max_context_tokens: int
    model: str = ""
    """The policy that samples its turns, of several; empty where there is one."""
    parts: dict[str, Episode] = dataclasses.field(default_factory=dict)
    """What each of several policies plays in it, by name."""
    nodes: dict[int, Node] = dataclasses.field(default_factory=dict)
    by_digest: dict[bytes, int] = dataclasses.field(default_factory=dict)
    """The turn that ends a conversation, by the conversation's digest."""
    answers: dict[bytes, list[Answer]] = dataclasses.field(default_factory=dict)
    """The newest answer to each request, by what was asked."""
    responses: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """The conversation that each response of the Responses API ends."""
    num_asked: int = 0
    """Turns that were asked for."""
    reward: float | None = None
    turn_rewards: dict[int, float] = dataclasses.field(default_factory=dict)
    ended: RequestRefused | None = None
    """What the agent is told once the attempt is over."""
    end: LeaseEnd | None = None
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def episode_id(self) -> str:
        """The rollout's name, as it stands in a URL."""
        return self.rollout_id.replace("/", "-")

    def left_s(self) -> float:
        """Return the seconds until the attempt ends."""
        return max(0.0, self.ends_at - asyncio.get_running_loop().time())

    @property
    def played(self) -> tuple[Episode, ...]:
        """What is played in it: its parts, or itself."""
        return tuple(self.parts.values()) or (self,)

    def part(self, model: str) -> Episode:
        """Return what the policy of this name plays; of one policy, whatever the name. Raises `RequestRefused` for a name of none."""
        if not self.parts:
            return self
        if model not in self.parts:
            words = f"the model {model!r} does not exist: this run has {', '.join(self.parts)}. Name one of them as the model"
            raise RequestRefused(404, words, code="model_not_found", param="model")
        return self.parts[model]

    def add(self, node: Node, digest: bytes) -> None:
        """Note a turn that was sampled, and the digest of the conversation that it ends."""
        self.nodes[node.index] = node
        self.by_digest[digest] = node.index

    def prompt_of(self, node: Node) -> list[int]:
        """Return the tokens of the whole context before a turn."""
        before = self.nodes.get(node.parent)
        return [*([] if before is None else [*self.prompt_of(before), *before.turn.token_ids.tolist()]), *node.given.tolist()]

    def continued_by(self, token_ids: Int32) -> Node | None:
        """Return the turn whose whole context is the longest that `token_ids` go on from; None where there is none."""
        repeated = {NO_NODE}
        found: Node | None = None
        for node in self.nodes.values():  # turns before those that go on from them
            own = np.concatenate((node.given, node.turn.token_ids))
            place = slice(node.num_context - len(own), node.num_context)
            if node.parent in repeated and node.num_context < len(token_ids) and np.array_equal(token_ids[place], own):
                repeated.add(node.index)
                found = node if found is None or node.num_context > found.num_context else found
        return found


class Episodes:
    """The open episodes, by lease; and, for a while, how others ended."""

    def __init__(self, secret: bytes) -> None:
        """Take the `secret` with which tokens are signed: a token is known for one of ours when nothing else is known of it any more."""
        self._secret = secret
        self._open: dict[str, Episode] = {}
        self._ended: collections.OrderedDict[str, Episode] = collections.OrderedDict()

    def __iter__(self) -> Iterator[Episode]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def open(self, lent: EpisodeLent) -> Episode:
        """Note an attempt that was lent."""
        about = {
            "rollout_id": lent.rollout_id,
            "attempt": lent.attempt,
            "prompt": lent.prompt,
            "ends_at": asyncio.get_running_loop().time() + lent.deadline_s,
        }
        parts = {
            name: Episode(lease=part_of(lent.lease, name), model=name, max_context_tokens=most, **about)
            for name, most in lent.models.items()
        }
        episode = Episode(lease=lent.lease, max_context_tokens=lent.max_context_tokens, parts=parts, **about)
        self._open[lent.lease] = episode
        return episode

    def extend(self, lease: str, *, by_s: float) -> None:
        """Note that an open attempt ends later: who waits for a turn of it waits on."""
        if (episode := self._open.get(lease)) is not None:
            for one in (episode, *episode.parts.values()):
                one.ends_at += by_s
                for answer in (answer for answers in one.answers.values() for answer in answers):
                    answer.news.set()

    def close(self, lease: str, end: LeaseEnd, reason: str) -> None:
        """Note that an attempt is over; repeated, or unknown, it changes nothing."""
        if (episode := self._open.pop(lease, None)) is None:
            return
        episode.ended, episode.end = ended(f"{end}{': ' if reason else ''}{reason}"), end
        self._ended[lease] = episode
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        for part in episode.played:
            part.ended = episode.ended
            for answers in part.answers.values():
                for answer in answers:
                    if not answer.done.done():
                        answer.done.set_exception(episode.ended)
                        answer.done.exception()  # whoever waited may be gone
                    answer.news.set()
            part.nodes.clear()
            part.answers.clear()
        episode.over.set()

    def close_all(self, reason: str) -> None:
        """End every attempt: the orchestrator is another one."""
        for lease in list(self._open):
            self.close(lease, LeaseEnd.LOST, reason)

    def token(self, episode: Episode) -> str:
        """Return the token of an attempt."""
        return f"{PREFIX}{episode.lease}-{self._signature(episode.lease)}"

    def find(self, token: str, *, episode_id: str | None, may_be_over: bool = False) -> Episode:
        """Return the episode of a token. Raises `RequestRefused`: 401 for a token that is none, or of another episode; 409 for an old one.

        With `may_be_over`, an episode that has ended is returned, too, while it is remembered.
        """
        lease, _, signature = token.removeprefix(PREFIX).partition("-")
        if not token.startswith(PREFIX) or not hmac.compare_digest(signature.encode(), self._signature(lease).encode()):
            raise RequestRefused(401, "no token of an attempt: send the one that /episodes/next gave, as a bearer", code="invalid_api_key")
        episode = self._open.get(lease) or self._ended.get(lease)
        if episode is not None and episode_id is not None and episode.episode_id != episode_id:
            raise RequestRefused(401, f"the token is one of episode {episode.episode_id}, not of {episode_id}", code="invalid_api_key")
        if episode is None:
            raise ended("it was lent before this gateway began")
        if episode.ended is not None and not may_be_over:
            raise RequestRefused(409, str(episode.ended), code="attempt_over")
        return episode

    def _signature(self, lease: str) -> str:
        return hmac.new(self._secret, lease.encode(), hashlib.sha256).hexdigest()[:32]
