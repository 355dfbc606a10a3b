"""Where engines and trainer share their devices: tells engines to sleep, the trainer that it may begin, and weight sync to wake them.

Engines that have devices of their own, in a run where others take turns, are left alone: they are told of policies at any time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable

import msgspec

from orchestrator.peers.engine import Engine
from orchestrator.peers.engines import Engines
from orchestrator.rules.phases import Phase, Phases
from orchestrator.rules.swaps import Swaps
from orchestrator.rules.validation.announcements import gauges
from pipelinerl.messages import Asleep, Sleep
from pipelinerl.observe.journal import Journal


@dataclasses.dataclass(slots=True, kw_only=True)
class Alternation:
    """The phases of engines and trainer, by `rules.phases`; where each has devices of its own, both always have theirs.

    Training and weight sync call `update` with everything that may end a phase. An engine that does not fall asleep holds up the trainer,
    and so the run: as one that does not commit does, it is found by its silence, or by the watchdog.
    """

    engines: Engines | None = None
    """The engines of a run in which some share their devices with the trainer; None where all have their own."""
    takes_turns: Callable[[int], bool] = lambda engine_id: True
    """The callback says whether an engine, by its id, does."""
    bound: int | None = None
    """See `Phases`; None where all engines take turns."""
    num_closable: Callable[[int], int] = lambda version: sys.maxsize
    """The callback says how many steps can be closed before a policy after this version is published."""
    journal: Journal | None = None
    num_closed: Callable[[], int] = lambda: 0
    """The callback says how many steps the newest policy should hold; training sets it."""
    begin_training: Callable[[], None] = lambda: None
    """The callback gives the trainer its rows; training sets it."""
    begin_computing: Callable[[], None] = lambda: None
    """The callback tells the trainer what a script wants computed; held policies set it."""
    computes: Callable[[], bool] = lambda: False
    """The callback says whether a script has the trainer compute something else than a step; held policies set it."""
    begin_generation: Callable[[], None] = lambda: None
    """The callback orders the newest policy to every engine; weight sync sets it."""
    swaps: Swaps = dataclasses.field(default_factory=Swaps)
    """What engines hold: weight sync's own."""
    _phases: Phases = dataclasses.field(init=False)
    _has_begun: bool = dataclasses.field(default=False, init=False)
    _trained_s: float = dataclasses.field(default=0.0, init=False)
    """Seconds of the training phases that are over."""
    _since_s: float = dataclasses.field(default=0.0, init=False)
    """When the present phase began, on the loop's clock."""
    _phase_id: int = dataclasses.field(default=0, init=False)
    """Of the training phase that began last; those of an orchestrator that is gone were smaller."""

    def __post_init__(self) -> None:
        self._phases = Phases(bound=self.bound)
        if self.engines is not None and self.journal is not None:
            self._phase_id = int(1e6 * self.journal.clock())
            self.engines.peers.on(Asleep, self._hear)
            self.engines.on_joined(self._on_joined)
            self.engines.on_died(self._on_died)

    @property
    def is_used(self) -> bool:
        """True where engines and trainer share their devices."""
        return self.engines is not None

    @property
    def may_train(self) -> bool:
        """True where rows may be given to the trainer."""
        return self.engines is None or self._phases.may_train

    def may_train_step(self, step: int) -> bool:
        """Return whether rows of a step may be given to the trainer."""
        return self.may_train and self._phases.has_turn(step)

    def is_in_turns(self, engine_id: int) -> bool:
        """Return whether an engine shares its devices with the trainer."""
        return self.engines is not None and self.takes_turns(engine_id)

    def is_beside(self, engine_id: int) -> bool:
        """Return whether an engine has devices of its own in a run where others take turns."""
        return self.engines is not None and not self.takes_turns(engine_id)

    def may_order(self, engine_id: int) -> bool:
        """Return whether an engine may be told of policies."""
        return self._is_generation or not self.is_in_turns(engine_id)

    def is_awake(self, engine: Engine) -> bool:
        """Return whether an engine neither sleeps nor is about to."""
        return self.may_order(engine.engine_id) and not self.swaps.is_asleep(engine.engine_id)

    @property
    def _is_generation(self) -> bool:
        return self._phases.phase is Phase.GENERATION

    def begin(self) -> None:
        """Begin with the phases: until then engines generate, for an evaluation before the first step."""
        self._has_begun = True
        self.update()

    def update(self) -> None:
        """Begin the next phase where it is due."""
        if self.engines is None or not self._has_begun:
            return
        published = None if self.swaps.newest is None else self.swaps.newest.age[1]
        is_pinned = any(self.swaps[engine.engine_id].is_pinned and self.is_awake(engine) for engine in self._in_turns())
        num_closed = self.num_closed()
        phase = self._phases.next_phase(
            num_closed=num_closed,
            published=published,
            is_pinned=is_pinned,
            computes=self.computes(),
            num_closable=None if published is None else self.num_closable(published),
        )
        if phase is None:
            self._begin_if_all_sleep()  # it may have the devices for longer
            return
        self._trained_s += self._lasted_s if phase is Phase.GENERATION else 0.0
        self._since_s = asyncio.get_running_loop().time()
        self._write("phase", phase=phase, num_closed=num_closed, version=published)
        if phase is Phase.GENERATION:
            self.begin_generation()
            return
        self._phase_id += 1
        for engine in self._in_turns():
            self._send_to_sleep(engine)
        self._begin_if_all_sleep()

    @property
    def trained_s(self) -> float:
        """Seconds in which the trainer has had the devices, or waited for them: no engine can answer in these."""
        return self._trained_s if self._is_generation else self._trained_s + self._lasted_s

    @property
    def _lasted_s(self) -> float:
        """Seconds of the present phase."""
        return asyncio.get_running_loop().time() - self._since_s

    def ordered(self, engine: Engine) -> None:
        """Note that an engine is told of a policy: until it says that it sleeps again, it may wake at any moment."""
        if self.is_in_turns(engine.engine_id):
            self._phases.woke(engine.engine_id)

    def committed(self, engine: Engine) -> None:
        """Note that an engine has taken a policy, and is awake."""
        if self.engines is not None and self.takes_turns(engine.engine_id):
            self.engines.rest(engine, is_asleep=False)

    def _in_turns(self) -> list[Engine]:
        """Return the engines that share their devices with the trainer."""
        return [engine for engine in self.engines or () if self.takes_turns(engine.engine_id)]

    def _send_to_sleep(self, engine: Engine) -> None:
        if self.engines is None:
            return
        if self.bound is not None:  # others are awake meanwhile; where all sleep, what is asked of them waits there
            self.engines.rest(engine, is_asleep=True)
        self.engines.peers.send(engine.peer, Sleep(phase_id=self._phase_id))

    def _on_joined(self, engine: Engine) -> None:
        if not self.takes_turns(engine.engine_id):
            return
        self._phases.woke(engine.engine_id)  # if an orchestrator that is gone sent it to sleep, it will say so again
        if not self._is_generation:
            self._send_to_sleep(engine)

    def _on_died(self, engine_id: int) -> None:
        self._phases.fell_asleep(engine_id)
        self._begin_if_all_sleep()

    def _hear(self, peer: str, asleep: Asleep) -> None:
        if self.engines is None:
            return
        if (violation := gauges(asleep)) is not None:
            self.engines.peers.refuse(peer, violation)
        elif asleep.phase_id == self._phase_id and (engine := self.engines.find(asleep.engine_id)) is not None:
            self._write("asleep", **msgspec.structs.asdict(asleep))
            self._phases.fell_asleep(engine.engine_id)
            self.swaps.fell_asleep(engine.engine_id)
            self.engines.changed.set()
            self._begin_if_all_sleep()
            if self._is_generation:  # meanwhile engines have the devices again
                self.begin_generation()

    def _begin_if_all_sleep(self) -> None:
        if self._phases.may_train:
            self.begin_training()
            self.begin_computing()

    def _write(self, kind: str, **fields: object) -> None:
        if self.journal is not None:
            self.journal.write(kind, **fields)
