"""The orchestrator's connections to engines, scorers and the trainer, and what each may say over them."""

from __future__ import annotations

import collections
from functools import cached_property

from orchestrator.dependencies import Dependencies
from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.scores import ScoreCheck
from orchestrator.rules.weight_transport import choose_transport
from pipelinerl.config import Config
from pipelinerl.messages import LayoutFixed, TrainerReady
from pipelinerl.rewards.calls import component_names

NUM_SCORERS = 1
"""Scorer processes; each runs `scorer.slots` calls at once in worker processes of its own."""


class Connections:
    """The peers of a run; each kind is made when it is first asked for."""

    def __init__(self, config: Config, given: Dependencies, *, max_staleness: int, num_siblings: int) -> None:
        self._config = config
        self._given = given
        self._max_staleness = max_staleness
        self._num_siblings = num_siblings

    @cached_property
    def all(self) -> tuple[Peers, ...]:
        """The peers of every kind."""
        return (self.engines, self.scorers, self.trainer)

    @cached_property
    def engines(self) -> Peers:
        engine = self._config.engine
        return Peers(
            self._given.engine_hub,
            role="engine",
            expected=engine.count,
            ready_deadline_s=engine.ready_deadline_s,
            silent_after_s=engine.silent_after_s,
            replace=self._given.replace,
            tell=self._report_violation,
            has_spares=True,
            max_processes=self._max_processes,
        )

    @cached_property
    def scorers(self) -> Peers:
        return Peers(
            self._given.scorer_hub,
            role="scorer",
            expected=NUM_SCORERS + self._config.prm.is_used,
            ready_deadline_s=self._config.engine.ready_deadline_s,
            silent_after_s=self._config.scorer.silent_after_s,
            replace=self._given.replace,
            tell=self._report_violation,
            max_processes=self._max_processes,
        )

    @cached_property
    def trainer(self) -> Peers:
        trainer = self._config.trainer
        return Peers(
            self._given.trainer_hub,
            role="trainer",
            expected=trainer.layout.replicas,
            ready_deadline_s=trainer.ready_deadline_s,
            silent_after_s=trainer.silent_after_s,
            failure_ends_run=True,
            replace=self._given.replace,
            tell=self._report_violation,
            max_processes=self._max_processes,
        )

    @property
    def _max_processes(self) -> int | None:
        """The processes that one name may have within an hour: twice `run.restarts` and ten; None without a launcher."""
        return None if self._given.replace is None else 2 * self._config.run.restarts + 10

    def _report_violation(self, peer: str, kind: str, words: str, count: int) -> None:
        """Record a violation of a peer, or its consequence."""
        self._given.journal.write("lie", peer=peer, what=kind, words=words, count=count)
        is_verdict = kind in ("replaced", "banned", "failed")
        print(f"{peer}: {words}" if is_verdict else f"{peer}: refused: {kind}, {count} so far: {words}", flush=True)

    # --- what peers may say ---

    @cached_property
    def completion_check(self) -> CompletionCheck:
        return CompletionCheck(vocabulary=self._given.vocabulary, experts=self._given.experts)

    @cached_property
    def score_check(self) -> ScoreCheck:
        rewards = self._config.reward
        names = component_names([reward.function for reward in rewards])
        return ScoreCheck(
            weights={name: reward.weight for name, reward in zip(names, rewards, strict=True)}, completion_check=self.completion_check
        )

    @cached_property
    def announcement_check(self) -> AnnouncementCheck:
        config = self._config
        num_evaluated = len(self._given.held_out) * config.evaluation.samples
        num_admitted = (self._max_staleness + 1) * config.batch.groups_per_step * self._num_siblings  # `rules.admission`
        max_outstanding = num_admitted + num_evaluated  # not `max_running`: episodes go on, and what was lost is asked for again, above it
        return AnnouncementCheck(max_outstanding=max_outstanding, num_steps=config.trainer.steps)

    def refused(self) -> dict[str, int]:
        """The messages that were refused, by reason and kind, from unknown senders and from peers."""
        counts = [counter for peers in self.all for counter in (peers.hub.refused, peers.refused)]
        return dict(sum(counts, collections.Counter[str]()))

    def layout_for(self, trainer: TrainerReady, *, engines: Engines) -> LayoutFixed:
        """Return what a trainer that starts must know to publish: the layout that the engines want, and the transport to them."""
        weights = self._config.weights
        machines = {engine.peer: engine.ready.machine for engine in engines}
        transports = frozenset(trainer.transports).intersection(*(engine.ready.transports for engine in engines))
        transport, reason = choose_transport(
            weights.transport, trainer=trainer.machine, engines=machines, address=weights.address, device_transports=transports
        )
        self._given.journal.write("choice", text=reason)
        print(reason, flush=True)
        return LayoutFixed(tensors=engines.layout(), num_engines=self._config.engine.count, transport=transport)
