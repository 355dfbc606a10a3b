"""The trainer: rows come in, policies go out. It pulls in lock-step waves of one row for each replica, as `stages.training` answers.

The seconds of a row are `row_s + token_s * tokens + square_s * sum of squared sample lengths`, where a prompt that siblings of the row
share counts once, as does its square. Tokens of samples without a gradient take `forward_part` of that, where a row has enough of them for
the live trainer to split it. A wave lasts as long as its costliest row, and longer where it is held up meanwhile (`interruptions`). A
policy is published beside the next step's rows, and is waited for before the weights change again (`trainer.loop`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from orchestrator.simulate.cores import Cores, Job
from orchestrator.simulate.events import Event
from orchestrator.simulate.rollouts import SimulatedTrajectory
from orchestrator.simulate.world import SyncWorld, TrainerWorld
from pipelinerl.algorithms.signal import MIN_FRACTION
from pipelinerl.messages import Sample


@dataclasses.dataclass(slots=True, kw_only=True)
class OpenStep:
    """The rows of a step that is not trained yet."""

    rows: list[float] = dataclasses.field(default_factory=list)
    """Seconds of each."""
    num_bytes: int = 0
    num_tokens: int = 0
    num_without_gradient: int = 0
    """Tokens of these that have no backward pass."""
    is_closed: bool = False


class Trainer:
    """The trainer of a run. `add` and `close` are what it is given; `on_done` and `on_published` are what it says."""

    def __init__(
        self,
        world: TrainerWorld,
        sync: SyncWorld,
        *,
        cores: Cores,
        num_replicas: int,
        num_steps: int,
        holds_batches: bool,
        epochs: int = 1,
        checkpoint_every: int,
    ) -> None:
        self.on_done: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
        """Called with a step that is trained, and its metrics."""
        self.on_published: Callable[[int], None] = lambda version: None
        self.on_span: Callable[[str, float, float], None] = lambda name, start, end: None
        """Called with each piece of work, by the name of its span."""
        self.on_begun: Callable[[int], None] = lambda step: None
        """Called as the first row of a step begins."""
        self.may_train: Callable[[int], bool] = lambda step: True
        """The callback says whether rows may be taken: where engines share the trainer's devices, in its own phase alone."""
        self.on_moved: Callable[[], None] = lambda: None
        """Called where its phase may be due, or over: a step was closed, a policy published, or the trainer began anew."""
        self.on_resized: Callable[[], None] = lambda: None
        """Called once it has as many replicas as `num_replicas` says."""
        self.num_replicas = num_replicas
        """Another number holds from the next step's beginning, after `regroup_s`."""
        self.regroup_s = 0.0
        """Seconds between two steps in which replicas join or leave the group."""
        self.num_closed = 0
        """Steps that have all their rows."""
        self.step = 0
        """Step being trained."""
        self.steps: dict[int, OpenStep] = collections.defaultdict(OpenStep)
        self._world, self._sync, self._cores, self._events = world, sync, cores, cores.events
        self._num_replicas, self._num_steps, self._epochs, self._every = num_replicas, num_steps, epochs, checkpoint_every
        self._waits_for_step = holds_batches or epochs > 1
        self._wave = 0
        self._waits_since: float | None = self._events.now_s
        """When it began to wait for rows; None while it works."""
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._num_tokens = 0
        self._publishing: Event | None = None
        self._published = 0
        """The newest version that was published."""
        self._waits_for_publication_since: float | None = None
        self._job: Job | None = None
        self._saved = 0
        """Version of the newest checkpoint."""
        self._newest = 0
        """The newest version that was ever trained; after a restart, steps below are trained again."""
        self._past: dict[int, OpenStep] = {}
        """Steps since the newest checkpoint, which a restart trains again."""
        self._is_down = False

    @property
    def now_s(self) -> float:
        """The simulated time, in seconds."""
        return self._events.now_s

    @property
    def published(self) -> int | None:
        """The newest version that it has published; None after a restart, until the steps since its checkpoint are trained again."""
        return None if self._is_down or self.step < self._published else self._published

    @property
    def is_resized(self) -> bool:
        """True where it has as many replicas as it is to have."""
        return self._num_replicas == self.num_replicas

    @property
    def num_bytes_ahead(self) -> int:
        """Bytes of rows of steps after the one being trained."""
        return sum(step.num_bytes for number, step in self.steps.items() if number > self.step)

    # --- what it is given ---

    def add(self, step: int, samples: list[Sample]) -> None:
        """Take a row of a step."""
        world, opened, num_tokens = self._world, self.steps[step], sum(sample.num_tokens for sample in samples)
        without = [sample for sample in samples if not sample.advantages[0]]
        num_without = sum(sample.num_tokens for sample in without)
        if num_without < MIN_FRACTION * num_tokens:
            num_without, without = 0, []
        saved_s = (1 - world.forward_part) * self._tokens_s(without) if without else 0.0
        opened.rows.append(world.row_s + self._tokens_s(samples) - saved_s)
        opened.num_bytes += sum(sample.trajectory.num_bytes for sample in samples)
        opened.num_tokens += num_tokens
        opened.num_without_gradient += num_without
        self.go_on()

    def _tokens_s(self, samples: list[Sample]) -> float:
        """Return the seconds of the tokens of some samples of a row."""
        world, shared = self._world, _shared_prompts(samples)
        squares = sum(sample.num_tokens**2 for sample in samples) - sum(num**2 for num in shared) if world.square_s else 0
        return world.token_s * (sum(sample.num_tokens for sample in samples) - sum(shared)) + world.square_s * squares

    def hold_up(self, seconds: float) -> None:
        """Have its work, if any is under way, last so many seconds longer."""
        if self._job is not None:
            self._job.resize(self._job.seconds + seconds)

    def close(self, step: int) -> None:
        """Note that a step has all its rows."""
        self.steps[step].is_closed = True
        self.num_closed += 1
        self.on_moved()
        self.go_on()

    def die(self) -> None:
        """End, and come back from the newest checkpoint: the steps since are trained again, from the same rows."""
        if self._is_down:
            return
        if self._job is not None:
            self._job.cancel()
            self._job = None
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        self._is_down, self._waits_for_publication_since, self._waits_since = True, None, None
        self.steps.update(self._past)
        self._past.clear()
        self.step, self._wave = self._saved, 0
        self._seconds.clear()
        self.on_moved()
        self._events.after(self._world.restart_s, self._return)

    def _return(self) -> None:
        self._is_down = False
        self._waits_since = self._events.now_s
        self.go_on()

    # --- the loop ---

    def go_on(self) -> None:
        """Train the next wave, or end the step, if what it takes is there."""
        if self._waits_since is None or self._is_down or self.step >= self._num_steps or not self.may_train(self.step):
            return
        if self._wave == 0 and not self.is_resized:
            self._regroup()
            return
        step, first = self.steps.get(self.step), self._wave * self._num_replicas
        if step is None or (self._waits_for_step and not step.is_closed):
            return
        rows = step.rows[first : first + self._num_replicas]
        if len(rows) < self._num_replicas and not step.is_closed:
            return
        self._note("wait", self._waits_since, self._events.now_s)
        self._waits_since = None
        if not rows:
            self._end_rows()
            return
        if self._wave == 0:
            self.on_begun(self.step)
        self._wave += 1
        self._work("forward_backward", max(rows) * self._epochs, self._wait)

    def _wait(self) -> None:
        self._waits_since = self._events.now_s
        self.go_on()

    def _regroup(self) -> None:
        assert self._waits_since is not None
        self._note("wait", self._waits_since, self._events.now_s)
        self._waits_since, self._num_replicas = None, self.num_replicas
        self.on_resized()
        self._work("regroup", self.regroup_s, self._wait)

    def _end_rows(self) -> None:
        """Change the weights, once the last policy is published."""
        if self._publishing is not None:
            self._waits_for_publication_since = self._events.now_s
            return
        self._work("optimizer", self._world.step_s * self._epochs, self._end_step)

    def _end_step(self) -> None:
        number, self._wave = self.step, 0
        step = self._past[number] = self.steps.pop(number)
        self.step += 1
        is_new, self._newest = self.step > self._newest, max(self.step, self._newest)
        working_s = sum(seconds for name, seconds in self._seconds.items() if name not in ("wait_s", "publish_async_s"))
        metrics = {**self._seconds, "num_tokens": float(step.num_tokens), "tokens_per_s": step.num_tokens / max(1e-9, working_s)}
        metrics["num_tokens_without_gradient"] = float(step.num_without_gradient)
        self._seconds.clear()
        if is_new:
            self.on_done(number, metrics)
        if self.step > self._published:
            self._work("publish", self._sync.publish_s, self._publish)
        else:
            self._save()

    def _publish(self) -> None:
        began_s, version = self._events.now_s, self.step

        def end() -> None:
            self._publishing, self._published = None, version
            self._seconds["publish_async_s"] += self._events.now_s - began_s
            self.on_published(version)
            self.on_moved()
            if (since_s := self._waits_for_publication_since) is not None:
                self._waits_for_publication_since = None
                self._note("publish", since_s, self._events.now_s)
                self._end_rows()

        self._publishing = self._events.after(self._sync.publish_beside_s, end)
        self._save()

    def _save(self) -> None:
        self.on_moved()
        if self.step % self._every and self.step < self._num_steps:
            self._wait()
            return
        self._saved = self.step
        self._past.clear()
        self._work("checkpoint", self._world.checkpoint_s, self._wait)

    def _work(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        """Work for so many seconds. What takes none leads on at once."""
        if seconds <= 0:
            then()
            return
        began_s = self._events.now_s

        def end() -> None:
            self._job = None
            self._note(name, began_s, self._events.now_s)
            then()

        self._job = self._cores.start("trainer", seconds, end)

    def _note(self, name: str, start: float, end: float) -> None:
        if end > start:
            self._seconds[f"{name}_s"] += end - start
            self.on_span(name, start, end)


def _shared_prompts(samples: list[Sample]) -> list[int]:
    """Return the tokens of each prompt of a row that is computed with a sibling's: all but the first of each group."""
    seen: set[int] = set()
    shared: list[int] = []
    for sample in samples:
        trajectory = sample.trajectory
        if trajectory.group_id in seen:
            assert isinstance(trajectory, SimulatedTrajectory)
            shared.append(trajectory.num_shared)
        seen.add(trajectory.group_id)
    return shared
