"""The stage of a scripted run between training and weight sync: a policy goes to engines when the script says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from orchestrator.peers.peers import Peers
from pipelinerl.messages import Command, PolicyPublished, TrainerReady, WeightBufferReleased
from pipelinerl.runtime.stage import Channel


@dataclasses.dataclass(slots=True, kw_only=True)
class HeldPolicies:
    """Holds the newest policy until the script publishes it, and gives its buffer back where the trainer goes on to the next before.

    A trainer that starts again publishes what it trains again: up to the version that the script has published, that passes at once. What
    the script wants of the trainer between two steps is asked for when the policy of its version comes: then no replica has begun the step
    that follows, and a trainer that starts again is asked again.

    takes     TrainerReady and PolicyPublished, from training
    gives     the same, to weight sync; WeightBufferReleased and commands, to the trainer
    waits for a policy
    woken by  the trainer; the script
    fails     never
    ends      cancelled, when the run ends
    """

    name = "held_policies"
    policies: Channel[TrainerReady | PolicyPublished]
    published: Channel[TrainerReady | PolicyPublished]
    trainer: Peers
    num_replicas: int
    on_moved: Callable[[], None] = lambda: None
    """The callback hears of every policy."""
    newest: int = 0
    """The newest policy that the trainer has written."""
    _kept: PolicyPublished | None = None
    _published: int = 0
    """The newest version that the script has published, or wants to."""
    _passed_over: int = 0
    """The newest version that is not the newest any more."""
    _wanted: tuple[int, Command] | None = None
    """What the script wants of the trainer, and of which version."""

    async def run(self) -> None:
        async for news in self.policies:
            if isinstance(news, TrainerReady):
                self._kept, self.newest = None, 0  # the buffers of the trainer before are gone
                self.published.put_now(news)  # bounded: a trainer takes seconds to start
                if not news.version:  # the model that the run began with is published by nobody
                    self._ask()
            else:
                self._take(news)
            self.on_moved()

    def publish(self, version: int) -> None:
        """Let policies up to this version pass, now or as soon as the trainer has written them."""
        self._published = max(self._published, version)
        if self._kept is not None and self._kept.version <= self._published:
            kept, self._kept = self._kept, None
            self.published.put_now(kept)  # bounded by the trainer's weight buffers

    def pass_over(self, version: int) -> None:
        """Give the buffer of a policy back that is not published: a newer one is trained."""
        self._passed_over = max(self._passed_over, version)
        if self._kept is not None and self._kept.version <= version:
            self.trainer.send("trainer-0", WeightBufferReleased(buffer=self._kept.buffer))
            self._kept = None

    def command(self, command: Command, *, version: int) -> None:
        """Have the trainer do something with a version, which is its newest; nothing of the next step may be given meanwhile."""
        self._wanted = (version, command)
        self._ask()

    def answered(self) -> None:
        """Hear that the trainer has done what was wanted."""
        self._wanted = None

    def _take(self, policy: PolicyPublished) -> None:
        self.newest = policy.version
        if policy.version <= self._published:
            self.published.put_now(policy)  # bounded as above
        else:
            self._kept = policy
            self.pass_over(self._passed_over)
        self._ask()

    def _ask(self) -> None:
        if self._wanted is not None and self._wanted[0] == self.newest:
            for replica in range(self.num_replicas):
                self.trainer.send(f"trainer-{replica}", self._wanted[1])
