"""The turns of agents: engines sample them, and what they sample becomes a node of the episode.

A path of an episode never goes back to older weights: a turn is asked for of an engine that is no older than what it continues, and than
the version that its group was admitted under, by which staleness is bounded as for any other rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import numpy as np

from orchestrator.peers.engines import Engines
from orchestrator.peers.gateway import Gateway
from orchestrator.rollouts.lent import state_of_next, wrong_turn
from orchestrator.rollouts.rollout import Rollout
from orchestrator.rules.routing import route
from orchestrator.rules.validation.violations import shorten
from pipelinerl.config import GatewaySection
from pipelinerl.data.episode_graph import EpisodeGraph, Node
from pipelinerl.errors import EpisodeError
from pipelinerl.messages import NO_NODE, AgentTurn, Completion, Finish, Generate, Int32, Sampling, Tokens, TurnSampled, TurnTokens
from pipelinerl.runtime.watch import Watch

MAX_LOST = 3
"""Engines that may end over one turn before its agent is told so. 1 would blame the turn for its neighbours; a larger value lets one turn
kill as many."""


MAX_STOPS = 64
"""Texts that may end a turn: as many as a request to an engine holds."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Played:
    """An attempt of a rollout as it is being played."""

    lease_id: str
    rollout: Rollout
    graph: EpisodeGraph = dataclasses.field(default_factory=EpisodeGraph)
    turns: dict[int, Turn] = dataclasses.field(default_factory=dict)
    """The turns that are not answered, by request."""
    num_turns: int = 0
    """Turns that were asked for."""
    engine_id: int = -1
    """The engine of the last turn."""
    finish: Finish = Finish.STOP
    """The finish of the last turn."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Turn:
    """A turn that an engine is asked for."""

    played: Played
    asked: AgentTurn
    name: str
    """The name under which engines know it."""
    context: Int32
    """[T] int32, what the turn continues."""
    oldest: int
    """No engine with an older version may sample it."""
    number: int
    """Turns that were sampled before it in its own conversation."""
    max_tokens: int = 0
    """The most tokens that may be sampled for it; 0 where there is no room."""
    num_lost: int = 0
    is_in_engine: bool = False
    asked_at: float = 0.0
    """When the engine was asked, on the loop's clock."""


@dataclasses.dataclass(slots=True, kw_only=True)
class AgentTurns:
    """The turns that are not answered; a part of the stage `leasing`, which owns the attempts."""

    gateway: Gateway
    engines: Engines
    watch: Watch
    section: GatewaySection
    sampling: Sampling
    max_context_tokens: int
    """Tokens of one path of an episode, its prompt included: what the model takes."""
    max_tokens: int
    """Tokens of all nodes of an episode."""
    vocabulary: int | None = None
    """Tokens that the model knows; None where its folder does not say."""
    num_discarded_tokens: int = 0
    """Tokens sampled for attempts that ended without a trajectory, and for turns that nobody waits for any more."""
    _turns: dict[str, Turn] = dataclasses.field(default_factory=dict)
    """By the name under which engines know them."""

    def __post_init__(self) -> None:
        self.engines.requests.on_tokens(self._on_tokens)

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, asked: AgentTurn, played: Played) -> None:
        """Have a turn sampled. The gateway gets one answer to it, whatever happens."""
        if asked.request_id in played.turns:
            return
        if (violation := wrong_turn(asked, played.graph, vocabulary=self.vocabulary)) is not None:
            self.gateway.refuse(violation)
            self.gateway.send(_nothing(asked.request_id, violation.words))
            return
        parent = None if asked.parent == NO_NODE else asked.parent
        before = np.zeros(0, np.int32) if parent is None else played.graph.context(parent)
        turn = Turn(
            played=played,
            asked=asked,
            name=f"{played.rollout.rollout_id}@{played.lease_id}.{played.num_turns}",
            context=np.concatenate((before, asked.token_ids)),
            oldest=max(played.rollout.version, 0 if parent is None else played.graph.newest_version(parent)),
            number=0 if parent is None else sum(played.graph.nodes[each].is_sampled for each in played.graph.path(parent)),
        )
        turn.max_tokens = self._room(turn)
        played.num_turns += 1
        played.turns[asked.request_id] = self._turns[turn.name] = turn
        if (refusal := self._refusal(turn)) is not None:
            self._answer(turn, error=refusal)
        else:
            self._ask(turn)

    def _held(self, turn: Turn) -> int:
        """Return the tokens of a turn's episode without it: what is there, and what the other turns under way add at most."""
        others = (other for other in turn.played.turns.values() if other is not turn)
        return turn.played.graph.num_tokens + sum(len(other.asked.token_ids) + other.max_tokens for other in others)

    def _room(self, turn: Turn) -> int:
        """Return how many tokens may be sampled for a turn, so that its path fits the model, and its episode a packed row."""
        in_all = self.max_tokens - self._held(turn) - len(turn.asked.token_ids)
        return max(0, min(turn.asked.max_tokens, self.sampling.max_tokens, self.max_context_tokens - len(turn.context), in_all))

    def _refusal(self, turn: Turn) -> str | None:
        """Return why a turn is not sampled, for its agent; None where it may be."""
        played, section = turn.played, self.section
        if played.num_turns > section.max_requests:
            return f"{played.num_turns} turns of one episode, at most gateway.max_requests = {section.max_requests} are sampled"
        if len(played.turns) > section.max_parallel:
            return f"{len(played.turns)} turns of one episode at once, at most gateway.max_parallel = {section.max_parallel} are sampled"
        if len(turn.context) >= self.max_context_tokens:
            return f"a context of {len(turn.context)} tokens leaves no room for a turn: at most {self.max_context_tokens} tokens in all"
        if not turn.max_tokens:
            held = f"an episode of {self._held(turn)} tokens, with what its other turns may still sample,"
            key = "batch.max_tokens" if self.section.max_episode_tokens is None else "gateway.max_episode_tokens"
            return f"{held} leaves no room for this turn: at most {key} = {self.max_tokens} in all"
        return None

    def _ask(self, turn: Turn) -> None:
        """Have the least busy engine that is new enough sample a turn; where there is none, `ask_again` does."""
        held = self.engines.outstanding()
        engine_id = route({number: held[number] for number in held if self.engines[number].version >= turn.oldest})
        if engine_id is None:
            return
        asked, rollout = turn.asked, turn.played.rollout
        sampling = msgspec.structs.replace(
            self.sampling.of_turn(turn.number),
            max_tokens=turn.max_tokens,
            temperature=0.0 if rollout.is_greedy else self.sampling.temperature,
            stop=(*self.sampling.stop, *asked.stop)[:MAX_STOPS],
        )
        request = Generate(
            rollout_id=turn.name,
            attempt=rollout.attempt,
            turn=turn.num_lost,
            token_ids=turn.context,
            sampling=sampling,
            chunk_tokens=asked.chunk_tokens,
        )
        turn.is_in_engine, turn.asked_at = True, asyncio.get_running_loop().time()
        self.engines.requests.ask(
            request,
            engine_id,
            sink=lambda completion, engine_id: self._take(turn, completion, engine_id),
            lost=lambda engine_id: self._lose(turn),
        )

    def _take(self, turn: Turn, completion: Completion, engine_id: int) -> None:
        if turn.name not in self._turns:  # its lease has ended
            self.num_discarded_tokens += len(completion.token_ids)
            return
        self.watch.moved()
        if completion.finish not in (Finish.STOP, Finish.LENGTH) or not len(completion.token_ids):
            self._answer(turn, error=completion.error or f"the engine ended the turn: {completion.finish}")
            return
        played, given = turn.played, _given(turn)
        try:
            graph, parent = _with_given(played.graph, given)
            played.graph = graph.append(Node.sampled_by(completion, parent=parent, state=state_of_next(graph)))
        except EpisodeError as error:  # weights were rolled back between two turns, or it holds as much as an episode may
            self.num_discarded_tokens += len(completion.token_ids)
            self._answer(turn, error=str(error))
            return
        played.engine_id, played.finish = engine_id, completion.finish
        self._answer(turn, completion=completion, node=len(played.graph.nodes) - 1)

    def _lose(self, turn: Turn) -> None:
        turn.is_in_engine, turn.num_lost = False, turn.num_lost + 1
        if turn.name not in self._turns:
            return
        if turn.num_lost >= MAX_LOST:
            self._answer(turn, error=f"{MAX_LOST} engines ended before they answered")
        else:
            asyncio.get_running_loop().call_soon(self.ask_again)

    def _answer(self, turn: Turn, *, error: str = "", completion: Completion | None = None, node: int = NO_NODE) -> None:
        del turn.played.turns[turn.asked.request_id], self._turns[turn.name]
        if completion is None:
            self.gateway.send(_nothing(turn.asked.request_id, error))
            return
        self.gateway.send(
            TurnSampled(
                request_id=turn.asked.request_id,
                node=node,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish=completion.finish,
                engine_s=asyncio.get_running_loop().time() - turn.asked_at,
            )
        )

    def _on_tokens(self, request: Generate, tokens: Tokens) -> None:
        if (turn := self._turns.get(request.rollout_id)) is not None:
            self.gateway.send(TurnTokens(request_id=turn.asked.request_id, start=tokens.start, token_ids=tokens.token_ids))

    def ask_again(self) -> None:
        """Ask for the turns that no engine has: none was new enough, or theirs has ended."""
        for turn in list(self._turns.values()):
            if not turn.is_in_engine:
                self._ask(turn)

    def end(self, played: Played) -> None:
        """Answer the turns of an attempt that has ended, and have engines end them."""
        for turn in list(played.turns.values()):
            self._answer(turn, error="the episode has ended")
            if turn.is_in_engine and self.engines.requests.owes(turn.name, played.rollout.attempt):
                self.engines.requests.withdraw(turn.name, played.rollout.attempt)

    def discard(self, played: Played) -> None:
        """Count the tokens of an attempt without a trajectory."""
        self.num_discarded_tokens += sum(node.num_tokens for node in played.graph.nodes if node.is_sampled)

    def owed(self) -> str | None:
        """Name what engines owe, for the report of a stall."""
        for turn in self._turns.values():
            return f"engines owe {len(self)} turns of agents, the first {turn.name}; in an engine: {turn.is_in_engine}"
        return None


def _given(turn: Turn) -> Node:
    return Node.given(turn.asked.token_ids, parent=turn.asked.parent)


def _with_given(graph: EpisodeGraph, given: Node) -> tuple[EpisodeGraph, int]:
    """Return the graph with this given node, and its index: that of an equal one, where a turn is sampled once more."""
    for index, node in enumerate(graph.nodes):
        if node.parent == given.parent and not node.is_sampled and np.array_equal(node.token_ids, given.token_ids):
            return graph, index
    return graph.append(given), len(graph.nodes)


def _nothing(request_id: int, error: str) -> TurnSampled:
    """Return the answer to a turn that was not sampled."""
    ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return TurnSampled(
        request_id=request_id, node=NO_NODE, token_ids=ids, logprobs=logprobs, versions=ids, finish=Finish.ERROR, error=shorten(error)
    )
