"""The sleep of an engine that shares its device with the trainer: it holds no policy and runs no forward pass, and keeps its sequences."""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.engine.base import Engine, Sleeper
from pipelinerl.messages import Asleep, Sleep


class Nap:
    """Whether an engine sleeps, and through which of the training phases."""

    def __init__(self, engine: Engine, *, engine_id: int, clock: Callable[[], float]) -> None:
        self.is_asleep = False
        self._engine = engine
        self._engine_id = engine_id
        self._clock = clock
        self._told: Sleep | None = None
        self._phase_id = -1
        """The last phase that it slept through."""

    def tell(self, message: Sleep) -> None:
        """Note that the engine is to sleep, at the next boundary between two forward passes."""
        self._told = message

    def begin(self, *, num_running: int) -> Asleep | None:
        """Sleep if told to, and return the answer; None where nothing is to be said. No swap is under way."""
        told, self._told = self._told, None
        if told is None or (not self.is_asleep and told.phase_id <= self._phase_id):  # said twice
            return None
        started, num_bytes = self._clock(), 0
        if not self.is_asleep:
            assert isinstance(self._engine, Sleeper), type(self._engine)
            num_bytes = self._engine.sleep()
        self.is_asleep, self._phase_id = True, told.phase_id
        sleep_s = self._clock() - started
        return Asleep(engine_id=self._engine_id, phase_id=told.phase_id, sleep_s=sleep_s, num_bytes=num_bytes, num_running=num_running)
