"""Engines and trainer take turns on the same devices, by the live `Phases`, as `stages.alternation` has them do."""

from __future__ import annotations

from orchestrator.rules.phases import Phase, Phases
from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.trainer import Trainer
from orchestrator.simulate.weight_sync import WeightSync


class Alternation:
    """Sends engines to sleep, gives the trainer its turn, and has engines woken by the newest policy.

    A run begins with engines that hold the trainer's first policy, so there is no training phase before the first step.
    """

    def __init__(self, trainer: Trainer, weight_sync: WeightSync, engines: list[SimulatedEngine]) -> None:
        """`engines` changes as they die and come back."""
        self._phases, self._phase_id = Phases(), 0
        self._trainer, self._weight_sync, self._engines = trainer, weight_sync, engines
        trainer.may_train = lambda: self._phases.may_train
        trainer.on_moved = self.update
        weight_sync.may_order = lambda: self._phases.phase is Phase.GENERATION
        weight_sync.on_joined, weight_sync.on_left = self._joined, self._left
        weight_sync.on_committed = lambda engine: self._phases.woke(engine.engine_id)

    def update(self) -> None:
        """Begin the next phase where it is due."""
        trainer = self._trainer
        phase = self._phases.next_phase(num_closed=trainer.num_closed, published=trainer.published, is_pinned=False)
        if phase is None:
            return
        self._weight_sync.on_line("phase", phase=phase, num_closed=trainer.num_closed, version=trainer.published)
        if phase is Phase.GENERATION:
            self._weight_sync.order_all()
            return
        self._phase_id += 1
        for engine in self._engines:
            if engine.is_alive:
                engine.sleep()

    def _joined(self, engine: SimulatedEngine) -> None:
        engine.on_asleep = self._fell_asleep
        self._phases.woke(engine.engine_id)
        if self._phases.phase is Phase.TRAINING:
            engine.sleep()

    def _left(self, engine_id: int) -> None:
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
        if self._phases.phase is Phase.GENERATION:  # meanwhile engines have the devices again
            self._weight_sync.order_all()
