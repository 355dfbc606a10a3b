"""The stage of a scripted run between training and weight sync: a policy goes to engines when the script says so."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from orchestrator.peers.peers import Peers
from orchestrator.stages.alternation import Alternation
from pipelinerl.messages import Command, ComputeLogprobs, PolicyPublished, TrainerReady, WeightBufferReleased
from pipelinerl.runtime.stage import Channel


@dataclasses.dataclass(slots=True, kw_only=True)
class HeldPolicies:
    """Holds the newest policy until the script publishes it, and gives its buffer back where the trainer goes on to the next before.

    A trainer that starts again publishes what it trains again: up to the version that the script has published, that passes at once. What
    the script wants of the trainer between two steps is asked for when the policy of its version comes: then no replica has begun the step
    that follows, and a trainer that starts again is asked again. Where engines share its devices, they sleep while it computes, and while a
    policy is held here: their own is gone, because the trainer has changed it in place.

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
    alternation: Alternation = dataclasses.field(default_factory=Alternation)
    """The phases of engines and trainer."""
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
    _num_computing: int = 0
    """Calls of the script for which the trainer computes something else than a step."""

    def __post_init__(self) -> None:
        self.alternation.computes, self.alternation.begin_computing = lambda: self._num_computing > 0, self._ask

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
        if self._kept is not None and self._passes(self._kept.version):
            kept, self._kept = self._kept, None
            self.published.put_now(kept)  # bounded by the trainer's weight buffers

    def pass_over(self, version: int) -> None:
        """Give the buffer of a policy back that is not published: a newer one is trained. One that is trained in place holds both."""
        self._passed_over = max(self._passed_over, version)
        if self._kept is not None and self._kept.version <= version:
            if not self.alternation.is_used:
                self.trainer.send("trainer-0", WeightBufferReleased(buffer=self._kept.buffer))
            self._kept = None

    def puts_engines_to_sleep(self, num_steps: int) -> bool:
        """Return whether engines sleep until the script publishes what is held here, which is all that it has had trained."""
        is_all = self._kept is not None and self._kept.version == num_steps
        return is_all and self.alternation.is_used and self.alternation.may_train

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Have engines that share the trainer's devices sleep within the block, in which it computes something else than a step."""
        self._num_computing += 1
        self.alternation.update()
        try:
            yield
        finally:
            self._num_computing -= 1
            self.alternation.update()

    def command(self, command: Command, *, version: int) -> None:
        """Have the trainer do something with a version, which is its newest; nothing of the next step may be given meanwhile."""
        self._wanted = (version, command)
        self._ask()

    def answered(self) -> None:
        """Hear that the trainer has done what was wanted."""
        self._wanted = None

    def _passes(self, version: int) -> bool:
        """Return whether a policy may go to engines. One that is trained in place is gone before they have it where a later one may."""
        return version == self._published if self.alternation.is_used else version <= self._published

    def _take(self, policy: PolicyPublished) -> None:
        self.newest = policy.version
        if self._passes(policy.version):
            self.published.put_now(policy)  # bounded as above
        else:
            self._kept = policy
            self.pass_over(self._passed_over)
        self._ask()

    def _ask(self) -> None:
        if self._wanted is None or self._wanted[0] != self.newest:
            return
        if self.alternation.may_train or not isinstance(self._wanted[1], ComputeLogprobs):
            for replica in range(self.num_replicas):
                self.trainer.send(f"trainer-{replica}", self._wanted[1])
