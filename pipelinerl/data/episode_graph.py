"""An episode as a graph: what was said to the model and what it sampled, each token once, whatever the shape of the episode.

A node is a stretch of tokens that continues its parent's: *given* (a prompt, an observation, a message of another agent) or *sampled* by a
policy. Turns are a chain; parallel calls and re-samples are children of one node; a sub-agent, a fresh context or a compaction is another
root, or a branch of the last node that its context still begins with. It is a value without clock and socket: every change gives a new one.

    graph = EpisodeGraph()
    graph = graph.append(Node.given(prompt_ids))                                    # node 0, a root
    graph = graph.append(Node.sampled_by(completion, parent=0, state="start"))      # node 1, the first turn
    graph = graph.append(Node.given(observation_ids, parent=1))                     # node 2
    engine_is_asked_for(graph.context(2))                                           # all ids from the root on; nothing is tokenised again

An *environment* knows where its turn belongs: it appends the reply under the turn it replies to, and says afterwards what the turn
was worth, `graph.with_reward(1, 0.5)`. The `state` of a sampled node names what the model saw when it began, so that credit can compare
turns of siblings that answered equal states.

The *gateway* is sent whole contexts: one that goes on from a turn becomes its child, and one that a client's template changed becomes a
branch (`pipelinerl.gateway.episodes`). Parallel calls are appended in the order of their answers.

What always holds, also of a graph off the wire: parents stand before their children; a node is wholly sampled or wholly given; versions
never fall along a path from a root, since a child is asked for after its parent was sampled, of an engine that is no older. `rows` are what
trains: each sampled token is in the loss of exactly one of them.

Legend: `T` tokens of a node, `N` nodes, `L` tokens from a root on.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import msgspec
import numpy as np

from pipelinerl.errors import EpisodeError, EpisodeFull
from pipelinerl.messages import UNSAMPLED, Completion, Float32, Id, Int32, Mask, Message, check_lengths

MAX_NODES = 4096
"""Nodes of an episode. Every append looks at all of them: more would let one episode hold up the process that keeps it."""
MAX_TOKENS = 1 << 22
"""Tokens of all nodes of an episode, 48 MiB of columns: as many as one message can carry."""


class Node(Message, frozen=True):
    """A stretch of tokens that continues its parent's; made by `Node.given` or `Node.sampled_by`. Raises `EpisodeError`."""

    parent: int
    """Index of an earlier node of the graph, -1 for a root."""
    token_ids: Int32
    """[T] int32, at least one."""
    logprobs: Float32
    """[T] float32, natural log under the policy that sampled; 0.0 in a given node."""
    versions: Int32
    """[T] int32, version that sampled the token; `UNSAMPLED` in a given node."""
    state: Id = ""
    """Name of the state that a sampled node answers, equal where siblings answered equal states; empty where nobody names states."""
    reward: float | None = None
    """What a sampled node was worth by itself (a turn-level reward); None where nobody said. The whole episode's reward is its score."""

    @staticmethod
    def given(token_ids: Int32, *, parent: int = -1) -> Node:
        """Return a node that no policy sampled."""
        num = len(token_ids)
        return Node(parent=parent, token_ids=token_ids, logprobs=np.zeros(num, np.float32), versions=np.full(num, UNSAMPLED, np.int32))

    @staticmethod
    def sampled_by(completion: Completion, *, parent: int, state: str = "") -> Node:
        """Return the node of an engine's answer to the context of `parent`."""
        ids, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
        return Node(parent=parent, token_ids=ids, logprobs=logprobs, versions=versions, state=state)

    def __post_init__(self) -> None:
        check_lengths(self, "token_ids", "logprobs", "versions")
        if not len(self.versions):
            raise EpisodeError("a node has no tokens, expected at least one: a turn or a reply without any is no node; leave it out")
        if (oldest := int(self.versions.min())) < UNSAMPLED:
            raise EpisodeError(f"a node has a token of version {oldest}, expected one from 0 on, or {UNSAMPLED} for tokens that were given")
        num_sampled = np.count_nonzero(self.versions != UNSAMPLED)
        if num_sampled not in (0, len(self.versions)):
            raise EpisodeError(
                f"a node has {num_sampled} sampled tokens of {len(self.versions)}, expected all or none: what was given and what was"
                " sampled are nodes of their own"
            )
        if not num_sampled and (self.reward is not None or np.any(self.logprobs)):
            raise EpisodeError("a given node has a reward or log-probabilities, expected none: they belong to the turn that was sampled")
        if np.any(self.versions[1:] < self.versions[:-1]):
            raise EpisodeError(f"versions fall along a node: {self.versions.tolist()}; expected those in the order of sampling")
        if self.reward is not None and not math.isfinite(self.reward):
            raise EpisodeError(f"the reward of a node is {self.reward}, expected a finite number, or None where there is none")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_sampled(self) -> bool:
        """True where a policy sampled all its tokens, false where it was given."""
        return int(self.versions[0]) != UNSAMPLED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """A path from a root to a sampled node that no other sampled node follows."""

    path: tuple[int, ...]
    """Indices of its nodes, root first."""
    trained: tuple[int, ...]
    """Those of them whose loss is in this row: sampled ones that no earlier row has; the last of the path is always among them."""
    token_ids: Int32
    """[L] int32."""
    loss_mask: Mask
    """[L] bool, true for the tokens of `trained`."""
    logprobs: Float32
    """[L] float32; 0.0 where `loss_mask` is false."""
    versions: Int32
    """[L] int32; `UNSAMPLED` where `loss_mask` is false."""


class EpisodeGraph(Message, frozen=True):
    """The nodes of an episode, parents before children. Raises `EpisodeError`, or `EpisodeFull` past `MAX_NODES` or `MAX_TOKENS`."""

    nodes: Annotated[tuple[Node, ...], msgspec.Meta(max_length=MAX_NODES)] = ()

    def __post_init__(self) -> None:
        if len(self.nodes) > MAX_NODES:
            raise EpisodeFull(f"an episode of {len(self.nodes)} nodes, expected at most {MAX_NODES}: end it, or start another rollout")
        if (num_tokens := self.num_tokens) > MAX_TOKENS:
            raise EpisodeFull(f"an episode of {num_tokens} tokens, expected at most {MAX_TOKENS}: end it, or start another rollout")
        newest: list[int] = []
        for index, node in enumerate(self.nodes):
            if not -1 <= node.parent < index:
                raise EpisodeError(f"node {index} continues node {node.parent}, expected an earlier one, or -1 for a root")
            before = newest[node.parent] if node.parent >= 0 else UNSAMPLED
            if node.is_sampled and int(node.versions[0]) < before:
                raise EpisodeError(
                    f"node {index} begins under version {int(node.versions[0])}, but its path was sampled under version {before} already:"
                    " versions never fall along a path. Ask an engine that is no older than `newest_version` of the parent"
                )
            newest.append(int(node.versions[-1]) if node.is_sampled else before)

    def append(self, node: Node) -> EpisodeGraph:
        """Return the graph with one more node, whose index is `len(self.nodes)`."""
        return EpisodeGraph(nodes=(*self.nodes, node))

    def with_reward(self, index: int, reward: float) -> EpisodeGraph:
        """Return the graph in which a sampled node has this reward, in place of any before."""
        self._require(index)
        changed = msgspec.structs.replace(self.nodes[index], reward=reward)
        return EpisodeGraph(nodes=(*self.nodes[:index], changed, *self.nodes[index + 1 :]))

    def path(self, index: int) -> tuple[int, ...]:
        """Return the indices from the root to this node."""
        self._require(index)
        found = [index]
        while (parent := self.nodes[found[-1]].parent) >= 0:
            found.append(parent)
        return tuple(reversed(found))

    def context(self, index: int) -> Int32:
        """[L] int32: all tokens from the root to this node, its own included."""
        return np.concatenate([self.nodes[each].token_ids for each in self.path(index)])

    def newest_version(self, index: int) -> int:
        """Return the version of the last sampled token up to this node, -1 for none. No engine that holds an older one may go on here."""
        sampled = (self.nodes[each].versions[-1] for each in reversed(self.path(index)) if self.nodes[each].is_sampled)
        return int(next(sampled, UNSAMPLED))

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes, each once: what a trainer computes that shares the beginnings of rows."""
        return sum(node.num_tokens for node in self.nodes)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes that nothing continues."""
        parents = {node.parent for node in self.nodes}
        return tuple(index for index in range(len(self.nodes)) if index not in parents)

    def rows(self) -> tuple[EpisodeRow, ...]:
        """Return a row for each sampled node that no other sampled one follows, in the order of these.

        A sampled node of several rows has its loss in the first of them only. Given nodes after the last sampled one are in no row.
        """
        followed, seen = self.followed(), set[int]()
        rows: list[EpisodeRow] = []
        for index, node in enumerate(self.nodes):
            if node.is_sampled and index not in followed:
                path = self.path(index)
                trained = tuple(each for each in path if self.nodes[each].is_sampled and each not in seen)
                seen.update(trained)
                rows.append(self._row(path, trained))
        return tuple(rows)

    def followed(self) -> set[int]:
        """Return the nodes that a sampled one follows, next or later; -1 is among them where there is a sampled node at all."""
        found: set[int] = set()
        for index in reversed(range(len(self.nodes))):  # children before parents
            if self.nodes[index].is_sampled or index in found:
                found.add(self.nodes[index].parent)
        return found

    def _row(self, path: tuple[int, ...], trained: tuple[int, ...]) -> EpisodeRow:
        nodes = [self.nodes[each] for each in path]
        loss_mask = np.concatenate([np.full(self.nodes[each].num_tokens, each in trained) for each in path])
        return EpisodeRow(
            path=path,
            trained=trained,
            token_ids=np.concatenate([node.token_ids for node in nodes]),
            loss_mask=loss_mask,
            logprobs=np.where(loss_mask, np.concatenate([node.logprobs for node in nodes]), np.float32(0.0)),
            versions=np.where(loss_mask, np.concatenate([node.versions for node in nodes]), np.int32(UNSAMPLED)),
        )

    def _require(self, index: int) -> None:
        if not 0 <= index < len(self.nodes):
            raise EpisodeError(f"node {index} is asked for, expected one of the {len(self.nodes)} of this episode, from 0 on")
