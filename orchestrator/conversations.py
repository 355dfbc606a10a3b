"""Conversations of several roles in a script: each turn is sampled by the policy that plays its role, trained or frozen.

A turn is a rollout of that policy, whose prompt is what the role has seen so far. So every sampled token is in one rollout of one policy,
the one that sampled it, and trains there once, with the reward of its role; what others said is given to it, and has no loss.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from orchestrator.stages.streams import Stream
from pipelinerl.config import Config
from pipelinerl.errors import DataError, ScriptError
from pipelinerl.messages import Prompt, Sample, Trajectory

Row = Mapping[str, Any]


class Player(Protocol):
    """A policy, trained (`ScriptedRun`) or frozen (`FrozenPolicy`)."""

    @property
    def config(self) -> Config: ...

    def sample(self, prompts: Sequence[Prompt | Row], *, group: int | None = None) -> Stream[Trajectory]: ...

    def text(self, rollout: Trajectory) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a role said at once."""

    role: str
    rollout: Trajectory
    text: str


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """One conversation about a prompt; those about the same one are siblings."""

    prompt: Prompt
    turns: list[Turn] = dataclasses.field(default_factory=list)
    end: str = ""
    """Why it ended before its last turn; empty where it did not."""


View = Callable[[Conversation, str, Config], Any]
"""What a role sees of a conversation before its turn: the value of `data.prompt_column` of its policy, a text or chat messages."""


def as_chat(conversation: Conversation, role: str, config: Config) -> Any:
    """Show a role everything that was said: its own turns as the assistant's, all others as the user's, where the prompt is a chat; else
    one text.
    """
    prompt = conversation.prompt
    if not prompt.chat:
        return prompt.text + "".join(turn.text for turn in conversation.turns)
    messages = [dict(message) for message in prompt.chat]
    for turn in conversation.turns:
        speaker = "assistant" if turn.role == role else "user"
        if messages[-1]["role"] == speaker == "user" and isinstance(messages[-1]["content"], str):  # most templates want them to alternate
            messages[-1]["content"] += f"\n\n{turn.text}"
        else:
            messages.append({"role": speaker, "content": turn.text})
    return messages


async def converse(
    cast: Mapping[str, Player],
    prompts: Sequence[Prompt],
    *,
    turns: Sequence[str],
    group: int,
    view: View = as_chat,
    is_over: Callable[[Conversation], bool] = lambda conversation: False,
) -> list[Conversation]:
    """Play `group` conversations about each prompt, siblings together; `turns` are the roles in their order.

    Conversations go on independently of each other. One ends early where `is_over` says so, where a turn could not be sampled, or where
    what a role would see is too long for its policy. Raises `ScriptError` for a role that nobody plays.
    """
    if not turns:
        raise ScriptError("converse: no turns are named")
    if missing := sorted(set(turns) - cast.keys()):
        raise ScriptError(f"converse: nobody plays {', '.join(missing)}; the cast has {', '.join(cast)}")
    found = [[Conversation(prompt=prompt) for _ in range(group)] for prompt in prompts]
    await asyncio.gather(*(_play(siblings, cast, turns, view, is_over) for siblings in found))
    return [conversation for siblings in found for conversation in siblings]


def rows_of(conversations: Sequence[Conversation], role: str, rewards: Sequence[float]) -> list[Sample]:
    """Return the rows that train a role's policy: all its turns, with the role's reward of their conversation.

    The advantage is what that is over the mean of the siblings, the conversations about the same prompt.
    """
    if len(rewards) != len(conversations):
        raise ScriptError(f"rows_of: {len(rewards)} rewards for {len(conversations)} conversations; expected one for each")
    of_prompt: dict[int, list[float]] = {}
    for conversation, reward in zip(conversations, rewards, strict=True):
        of_prompt.setdefault(id(conversation.prompt), []).append(reward)
    rows: list[Sample] = []
    for conversation, reward in zip(conversations, rewards, strict=True):
        gain = np.float32(reward - np.mean(of_prompt[id(conversation.prompt)]))
        own = [turn.rollout for turn in conversation.turns if turn.role == role and turn.rollout.num_trained_tokens]
        rows += [Sample(trajectory=one, reward=float(reward), advantages=gain * one.loss_mask) for one in own]
    return rows


async def _play(
    siblings: Sequence[Conversation],
    cast: Mapping[str, Player],
    turns: Sequence[str],
    view: View,
    is_over: Callable[[Conversation], bool],
) -> None:
    """Play the conversations about one prompt: the first turns are siblings of one group, so that the method may compare them, too."""
    first = await _said(siblings[0], turns[0], cast[turns[0]], view, group=len(siblings))
    said = sorted(first, key=lambda one: one.sibling)
    for conversation, rollout in zip(siblings, said, strict=False):
        _add(conversation, turns[0], cast[turns[0]], rollout, is_over)
    for conversation in siblings[len(said) :]:
        conversation.end = conversation.end or siblings[0].end or "its prompt is quarantined"
    await asyncio.gather(*(_go_on(one, cast, turns[1:], view, is_over) for one in siblings))


async def _go_on(
    conversation: Conversation, cast: Mapping[str, Player], turns: Sequence[str], view: View, is_over: Callable[[Conversation], bool]
) -> None:
    for role in turns:
        if conversation.end:
            return
        said = await _said(conversation, role, cast[role], view, group=1)
        if said:
            _add(conversation, role, cast[role], said[0], is_over)
        else:
            conversation.end = conversation.end or "its prompt is quarantined"


async def _said(conversation: Conversation, role: str, player: Player, view: View, *, group: int) -> list[Trajectory]:
    """Have a role speak; nothing where it cannot, for a reason that is then the conversation's end."""
    seen = view(conversation, role, player.config)
    row = conversation.prompt.columns | {player.config.data.prompt_column: seen}
    try:
        stream = player.sample([row], group=group)
    except DataError as error:
        conversation.end = str(error)
        return []
    return await stream


def _add(conversation: Conversation, role: str, player: Player, rollout: Trajectory, is_over: Callable[[Conversation], bool]) -> None:
    conversation.turns.append(Turn(role=role, rollout=rollout, text=player.text(rollout)))
    if not rollout.num_trained_tokens:
        conversation.end = rollout.error or str(rollout.finish)
    elif is_over(conversation):
        conversation.end = "over"
