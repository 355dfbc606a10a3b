"""Engines and trainer take turns on the same devices, by the live `Phases`, as `stages.alternation` has them do."""

from __future__ import annotations

from orchestrator.rules.phases import Phase, Phases, sleep_bound
from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.trainer import Trainer
from orchestrator.simulate.weight_sync import WeightSync
from pipelinerl.config import Config


class Alternation:
    """Sends engines to sleep, gives the trainer its turn, and has engines woken by the newest policy.

    A run begins with engines that hold the trainer's first policy, so there is no training phase before the first step.
    """

    def __init__(self, config: Config, trainer: Trainer, weight_sync: WeightSync, generation: Generation) -> None:
        """The engines of `generation` change as they die and come back."""
        self._config = config
        self._phases, self._phase_id = Phases(bound=sleep_bound(config)), 0
        self._trainer, self._weight_sync, self._generation = trainer, weight_sync, generation
        trainer.may_train = lambda step: self._phases.may_train and self._phases.has_turn(step)
        trainer.on_moved = self.update
        weight_sync.may_order = lambda engine_id: self._is_generation or not config.takes_turns(engine_id)
        weight_sync.on_joined, weight_sync.on_left = self._joined, self._left
        weight_sync.on_ordered, weight_sync.on_committed = self._ordered, self._committed

    @property
    def _is_generation(self) -> bool:
        return self._phases.phase is Phase.GENERATION

    def update(self) -> None:
        """Begin the next phase where it is due."""
        trainer, published = self._trainer, self._trainer.published
        closable = None if published is None else self._generation.admission.num_closable(published)
        phase = self._phases.next_phase(num_closed=trainer.num_closed, published=published, is_pinned=False, num_closable=closable)
        if phase is None:
            trainer.go_on()  # it may have the devices for longer
            return
        self._weight_sync.on_line("phase", phase=phase, num_closed=trainer.num_closed, version=trainer.published)
        if phase is Phase.GENERATION:
            self._weight_sync.order_all()
            return
        self._phase_id += 1
        for engine in self._generation.engines:
            if engine.is_alive and self._config.takes_turns(engine.engine_id):
                self._send_to_sleep(engine)

    def _send_to_sleep(self, engine: SimulatedEngine) -> None:
        self._rest(engine, is_asleep=True)
        engine.sleep()

    def _ordered(self, engine: SimulatedEngine) -> None:
        if self._config.takes_turns(engine.engine_id):
            self._phases.woke(engine.engine_id)

    def _committed(self, engine: SimulatedEngine) -> None:
        if self._config.takes_turns(engine.engine_id):
            self._rest(engine, is_asleep=False)

    def _rest(self, engine: SimulatedEngine, *, is_asleep: bool) -> None:
        """Give an engine no new work while it is asleep and others are awake."""
        if self._config.is_mixed:
            (self._generation.asleep.add if is_asleep else self._generation.asleep.discard)(engine.engine_id)
            self._generation.note(engine)

    def _joined(self, engine: SimulatedEngine) -> None:
        if not self._config.takes_turns(engine.engine_id):
            return
        engine.on_asleep = self._fell_asleep
        self._phases.woke(engine.engine_id)
        if not self._is_generation:
            self._send_to_sleep(engine)

    def _left(self, engine_id: int) -> None:
        self._generation.asleep.discard(engine_id)
        self._phases.fell_asleep(engine_id)
        self._trainer.go_on()

    def _fell_asleep(self, engine: SimulatedEngine, sleep_s: float) -> None:
        self._weight_sync.on_line(
            "asleep",
            engine_id=engine.engine_id,
            phase_id=self._phase_id,
            sleep_s=sleep_s,
            num_bytes=0,
            num_running=engine.num_running + engine.num_waiting,
        )
        self._phases.fell_asleep(engine.engine_id)
        self._weight_sync.swaps.fell_asleep(engine.engine_id)
        self._trainer.go_on()
        if self._is_generation:  # meanwhile engines have the devices again
            self._weight_sync.order_all()
