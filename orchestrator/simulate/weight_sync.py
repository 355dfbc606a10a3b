"""Every published policy is brought to every engine, by the live `Swaps`, as `stages.weight_sync` does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from orchestrator.rules.admission import Admission
from orchestrator.rules.swaps import Policy, Swaps
from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.events import Events
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.links import Link
from orchestrator.simulate.staging import Committed
from orchestrator.simulate.world import SyncWorld


class WeightSync:
    """Orders, transfers and commits."""

    def __init__(
        self,
        events: Events,
        *,
        world: SyncWorld,
        link: Link,
        generation: Generation,
        admission: Admission,
        kv_max_staleness: int | None,
        seed: int,
    ) -> None:
        self.on_line: Callable[..., None] = lambda kind, **fields: None
        """Called with what the journal tells of."""
        self.may_order: Callable[[int], bool] = lambda engine_id: True
        """The callback says whether an engine may be told of policies: not while the trainer has its devices."""
        self.on_joined: Callable[[SimulatedEngine], None] = lambda engine: None
        self.on_left: Callable[[int], None] = lambda engine_id: None
        self.on_ordered: Callable[[SimulatedEngine], None] = lambda engine: None
        self.on_committed: Callable[[SimulatedEngine], None] = lambda engine: None
        self.swaps = Swaps()
        self._events, self._world, self._link, self._generation = events, world, link, generation
        self._admission, self._kv_max_staleness = admission, kv_max_staleness
        self._chance = np.random.default_rng((seed, 1))

    def begin(self) -> None:
        """Take the engines that the run begins with."""
        for engine in self._generation.engines:
            self.joined(engine)

    def announce(self, version: int) -> None:
        """Take a policy that the trainer has published."""
        self.on_line("policy", version=version, buffer=f"simulated-{version}", digest="", rollback_epoch=0, copy="")
        self.swaps.published(Policy(age=(0, version), buffer=f"simulated-{version}", digest=""))
        self._admission.published(version)
        self.order_all()
        self.swaps.take_free_buffers()

    def order_all(self) -> None:
        """Tell every engine to fetch the newest policy."""
        for engine in self._generation.engines:
            self._order(engine)

    def joined(self, engine: SimulatedEngine) -> None:
        """Take an engine that announces itself: the first of its name, or one after a death."""
        engine.on_committed = self._committed
        self.on_line("joined", engine_id=engine.engine_id, version=engine.version, rollback_epoch=0, running={})
        self.swaps.joined(engine.engine_id, (0, engine.version))
        self.on_joined(engine)
        self._order(engine)

    def left(self, engine_id: int) -> None:
        """Note that an engine has died."""
        self.on_line("left", engine_id=engine_id)
        self.swaps.left(engine_id)
        self.on_left(engine_id)

    def _order(self, engine: SimulatedEngine) -> None:
        if not engine.is_alive or not self.may_order(engine.engine_id) or (policy := self.swaps.next_order(engine.engine_id)) is None:
            return
        staging = engine.begin_staging(
            version=policy.age[1], when_idle=self._admission.schedule.swaps_when_idle, kv_max_staleness=self._kv_max_staleness
        )

        self.on_ordered(engine)

        def staged() -> None:
            if not engine.is_alive:
                return
            stage_s = engine.staged(staging)
            if self.swaps.staged(engine.engine_id, policy.age):
                self.on_line("staged", engine_id=engine.engine_id, version=staging.version, stage_s=stage_s, rollback_epoch=0)

        when_idle = None if engine.num_running else self._world.idle_stage_s
        stage_s = float((when_idle or self._world.stage_s).at(self._chance.standard_normal(1))[0])
        self._link.send(self._world.num_bytes, lambda: self._events.after(stage_s, lambda: self._generation.sending.when_over(staged)))

    def _committed(self, engine: SimulatedEngine, committed: Committed) -> None:
        if self.swaps.committed(engine.engine_id, (0, committed.version)):
            self._generation.note(engine)
            self.on_committed(engine)
            self.on_line(
                "swap",
                engine_id=engine.engine_id,
                version=committed.version,
                pause_s=committed.pause_s,
                stage_s=committed.stage_s,
                num_running=committed.num_running,
                num_recomputed_tokens=committed.num_recomputed_tokens,
                rollback_epoch=0,
            )
        self._order(engine)
