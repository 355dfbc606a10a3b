"""Devices of a simulated run change roles at swap boundaries, as the live rule says (`rules.roles`).

An engine that leaves gives its sequences to others, which compute their caches anew; replicas leave and join between two steps. A unit
then needs `switch_s` until it has its new role: the old process ends, another one loads its part, the group or the swaps take it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from orchestrator.rules.admission import STALENESS_BOUND
from orchestrator.rules.roles import WINDOW_SWITCHES, Change, EngineProfile, Layout, Pool, Role, Roles, Unit, Window, assign
from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.rollouts import Rollout
from orchestrator.simulate.scorers import Slots
from orchestrator.simulate.sequence import interpolate
from orchestrator.simulate.trainer import Trainer
from orchestrator.simulate.weight_sync import WeightSync
from orchestrator.simulate.world import EngineWorld
from pipelinerl.config import Config
from pipelinerl.data.packing import Packing
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Sample

_WHOLE = 2
"""The swap boundary with which a window begins, of those in a row at which every unit has its role: in the step before replicas join."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """The devices that change roles. How they begin, the run's settings say: its engines, and its replicas beyond the core's."""

    unit_devices: int
    """Devices of a unit, which changes as a whole."""
    core_replicas: int
    """Replicas of the trainer that never change."""
    unit_replicas: int
    """Replicas that a unit holds as trainer."""
    width: int
    """Devices of each engine that the run begins with."""
    engines: Mapping[int, EngineWorld]
    """An engine of each width that may be."""
    slots: Mapping[int, int]
    """Sequences that it decodes at once, by width."""
    switch_s: float = 60.0
    away_s: float = 0.0
    """Of these, seconds in which no replica trains, where some join or leave."""
    stuck_fraction: float = 0.0
    """Part of the switches that never end, and are taken back."""
    window_steps: int = 2


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class _Unit:
    unit_id: int
    role: Role
    width: int = 0
    engine_ids: set[int] = dataclasses.field(default_factory=set)
    epoch: int = 0
    """Of the change that gave it its role."""
    is_up: bool = True
    """It has taken its role up."""


class RoleChanges:
    """Measures windows, asks the rule, and has units change."""

    def __init__(
        self,
        elastic: Elastic,
        *,
        config: Config,
        generation: Generation,
        trainer: Trainer,
        packing: Packing[Sample],
        weight_sync: WeightSync,
        prm: Slots | None,
        new_engine: Callable[[int, EngineWorld, int], SimulatedEngine],
        line: Callable[..., None],
        seed: int,
    ) -> None:
        """Raises `ConfigError` where the run's devices are no whole units."""
        self.changes: list[Change] = []
        self._elastic, self._config, self._generation, self._trainer, self._packing = elastic, config, generation, trainer, packing
        self._weight_sync, self._prm, self._new_engine, self._line = weight_sync, prm, new_engine, line
        self._events, self._chance = generation.events, np.random.default_rng((seed, 4))
        self._units = self._first_units(config)
        self._leaving: dict[int, _Unit] = {}
        """Units by each of their engines that leaves."""
        self._resizing: list[_Unit] = []
        """Units that wait for the step to end which their replicas still train."""
        self._version = self._num_whole = 0
        """The newest policy, and swap boundaries in a row at which every unit had its role."""
        num_engines = sum(unit.role is Role.ENGINE for unit in self._units)
        self._roles = Roles(
            self._pool(config),
            Layout(engines=num_engines, width=elastic.width, trainers=len(self._units) - num_engines),
            window_steps=elastic.window_steps,
        )
        generation.on_empty = self._is_empty
        self._pass_on, generation.on_finished = generation.on_finished, self._finished
        trainer.on_resized, trainer.regroup_s = self._resized, elastic.away_s
        self._begin_window()

    def _first_units(self, config: Config) -> list[_Unit]:
        elastic, count, replicas = self._elastic, config.engine.count, config.trainer.layout.replicas
        each = elastic.unit_devices // elastic.width
        further = replicas - elastic.core_replicas
        if count % each or further < 0 or (further and (not elastic.unit_replicas or further % elastic.unit_replicas)):
            raise ConfigError(
                f"roles: {count} engines of {elastic.width} devices and {replicas} replicas, {elastic.core_replicas} of them the core, are"
                f" no whole units of {elastic.unit_devices} devices, each {each} engines or {elastic.unit_replicas} replicas"
            )
        units = [
            _Unit(unit_id=number, role=Role.ENGINE, width=elastic.width, engine_ids=set(range(number * each, (number + 1) * each)))
            for number in range(count // each)
        ]
        num_trainers = further // elastic.unit_replicas if further else 0
        return units + [_Unit(unit_id=len(units) + number, role=Role.TRAINER) for number in range(num_trainers)]

    def _pool(self, config: Config) -> Pool:
        elastic, batch = self._elastic, config.batch.groups_per_step * config.rollout.group_size
        return Pool(
            unit_devices=elastic.unit_devices,
            unit_replicas=elastic.unit_replicas,
            core_replicas=elastic.core_replicas,
            core_scorers=0.0 if self._prm is None else self._prm.num_slots,
            profiles={
                width: EngineProfile(
                    pass_s=_profile(world), slots=elastic.slots[width], room=world.kv_tokens, prompt_token_s=world.prefill_token_s
                )
                for width, world in elastic.engines.items()
            },
            most_running=(self._generation.admission.schedule.max_staleness + 1) * batch,
            switch_s=elastic.switch_s,
            away_s=elastic.away_s,
        )

    # --- what a window shows ---

    def _begin_window(self) -> None:
        self._num_steps = self._trained = self._working_s = 0.0
        self._rows = self._completed = self._completed_rows = 0.0
        self._at_begin, self._began_s = self._totals(), self._events.now_s

    def trained(self, step: Mapping[str, Any]) -> None:
        """Note a step that is trained, with what its line in the journal says."""
        metrics = step["trainer"]
        self._num_steps, self._trained = self._num_steps + 1, self._trained + step["num_trained_tokens"]
        self._rows += step["num_tokens"]
        self._working_s += metrics["num_tokens"] / metrics["tokens_per_s"] * self._trainer.num_replicas

    def _finished(self, rollout: Rollout) -> None:
        self._completed += rollout.num_sampled
        self._completed_rows += rollout.draws.prompt_tokens + rollout.num_observed + rollout.num_sampled
        self._pass_on(rollout)

    def _totals(self) -> tuple[float, ...]:
        """Tokens, passes, tokens read in caches, busy seconds and computed tokens of prompts of all engines so far, the scorers' busy
        seconds, and those in which engines were held back.
        """
        engines = self._generation.engines
        gauges, prompts = [engine.gauges() for engine in engines], float(sum(engine.num_prefilled for engine in engines))
        names = ("num_tokens", "num_steps", "num_context_tokens", "busy_s")
        tokens, passes, read, busy_s = (sum(float(one[name] or 0.0) for one in gauges) for name in names)
        held_s = self._generation.waits.all_waited_s().get(f"generation: {STALENESS_BOUND}", 0.0)
        return tokens, passes, read, busy_s, prompts, self._prm.busy_s if self._prm is not None else 0.0, held_s

    def _window(self) -> Window | None:
        differences = (now - before for now, before in zip(self._totals(), self._at_begin, strict=True))
        tokens, passes, read, busy_s, prompts, scored_s, held_s = differences
        if not (passes and tokens and self._trained and self._working_s) or (self._prm is not None and scored_s <= 0):
            return None
        layout, pool, elapsed_s = self._roles.layout, self._roles.pool, self._events.now_s - self._began_s
        context = read / tokens
        part = self._completed / self._completed_rows if self._completed else self._trained / self._rows
        world, profile = self._elastic.engines[layout.width], pool.profiles[layout.width]
        return Window(
            tokens=self._trained,
            num_steps=int(self._num_steps),
            context=context,
            slowness=busy_s / (passes * profile.pass_s(tokens / passes, context) + prompts * profile.prompt_token_s),
            prompt_tokens=prompts / tokens,
            replica_rate=self._rows / self._working_s * part,
            row_rate=self._rows / self._working_s,
            written_rate=tokens / elapsed_s,
            trainer_wait=1 - self._working_s / (elapsed_s * self._trainer.num_replicas),
            held_back=held_s / elapsed_s,
            scorer_rate=None if self._prm is None else tokens / scored_s,
            held_tokens=sum(map(self._held, self._units)) / max(1, layout.engines),
            recompute_s=world.prefill_token_s,
        )

    def _held(self, unit: _Unit) -> float:
        """Return the tokens of the sequences that a unit's engines have."""
        generation = self._generation
        return float(
            sum(
                rollout.sequence.num_context + generation.engines[engine_id].written_of(rollout.sequence)
                for engine_id in unit.engine_ids
                for rollout in generation.in_engine(engine_id)
                if rollout.sequence is not None and not rollout.sequence.is_over
            )
        )

    # --- changes ---

    def boundary(self, version: int) -> None:
        """Take a swap boundary: the policy `version` is published. As in a live run, no unit changes in a window, which is longer than a
        change takes.
        """
        self._version = version
        self._num_whole = self._num_whole + 1 if self._roles.change is None and self._trainer.is_resized else 0
        if self._num_whole < _WHOLE:
            return
        if self._num_whole == _WHOLE:
            self._begin_window()
        is_long = self._events.now_s - self._began_s >= WINDOW_SWITCHES * self._elastic.switch_s
        if not (is_long and self._num_steps >= self._elastic.window_steps and self._roles.is_due(version)):
            return
        if (window := self._window()) is not None:
            change = self._roles.plan(version, window)
            self._begin_window()
            if change is not None:
                self._begin(change)

    def _begin(self, change: Change) -> None:
        self._num_whole = 0  # also where it is over before the next boundary
        self.changes.append(change)
        self._line("roles", **_told(change))
        units = [
            Unit(unit_id=unit.unit_id, role=unit.role, width=unit.width, held_tokens=self._held(unit) if unit.is_up else -1.0)
            for unit in self._units
        ]
        changing = {self._units[unit_id]: key for unit_id, key in assign(units, change.after).items()}
        before = {unit: unit.role for unit in changing}
        for unit, (role, width) in changing.items():
            unit.role, unit.width, unit.epoch = role, width, change.epoch
        for unit, role in before.items():
            self._leave(unit, role)
        self._events.after(change.deadline_s, lambda: self._late(change.epoch))
        self._end_if_up(change.epoch)

    def _late(self, epoch: int) -> None:
        if (back := self._roles.late(epoch, self._version)) is not None:
            self._begin(back)

    def _leave(self, unit: _Unit, role: Role) -> None:
        """Have a unit leave a role."""
        was_up, unit.is_up = unit.is_up, False
        if not was_up:
            self._vacated(unit)
        elif role is Role.ENGINE:
            self._leaving |= dict.fromkeys(unit.engine_ids, unit)
            for engine_id in list(unit.engine_ids):
                self._generation.leave(engine_id)
                self._emptied(engine_id)
            self._fit()
        elif role is Role.TRAINER:
            self._resizing.append(unit)
            self._resize(-self._elastic.unit_replicas)
        else:
            assert self._prm is not None
            self._prm.num_slots -= 1
            self._vacated(unit)

    def _is_empty(self, engine_id: int) -> None:
        if engine_id in self._leaving:  # once it is between two passes
            self._events.after(0.0, lambda: self._emptied(engine_id))

    def _emptied(self, engine_id: int) -> None:
        """Take away an engine that leaves, once it has nothing."""
        unit, generation = self._leaving.get(engine_id), self._generation
        if unit is None or generation.outstanding[engine_id]:
            return
        del self._leaving[engine_id]
        unit.engine_ids.discard(engine_id)
        engine = generation.engines[engine_id]
        if engine.is_alive:
            engine.die()
            self._weight_sync.left(engine_id)
        if not unit.engine_ids:
            self._vacated(unit)

    def _resize(self, num: int) -> None:
        self._trainer.num_replicas += num
        self._packing.num_replicas = self._trainer.num_replicas
        self._trainer.go_on()
        if self._trainer.is_resized:
            self._resized()

    def _resized(self) -> None:
        units, self._resizing = self._resizing, []
        for unit in units:
            self._vacated(unit)

    def _vacated(self, unit: _Unit) -> None:
        epoch = unit.epoch
        is_back = self._roles.change is not None and not self._roles.change.saved_s
        if is_back or self._chance.random() >= self._elastic.stuck_fraction:
            self._events.after(self._elastic.switch_s, lambda: self._take_up(unit, epoch))

    def _take_up(self, unit: _Unit, epoch: int) -> None:
        if unit.epoch != epoch:
            return
        unit.is_up = True
        if unit.role is Role.ENGINE:
            for _ in range(self._elastic.unit_devices // unit.width):
                world, slots = self._elastic.engines[unit.width], self._elastic.slots[unit.width]
                engine = self._new_engine(len(self._generation.engines), world, slots)
                unit.engine_ids.add(engine.engine_id)
                self._generation.join(engine)
                self._weight_sync.joined(engine)
            self._fit()
        elif unit.role is Role.TRAINER:
            self._resize(self._elastic.unit_replicas)
        elif self._prm is not None:
            self._prm.num_slots += 1
        self._end_if_up(epoch)

    def _end_if_up(self, epoch: int) -> None:
        if all(unit.is_up for unit in self._units):
            self._roles.done(epoch)
            self._line("roles_taken", epoch=epoch)

    def _fit(self) -> None:
        """Have admission count with the engines there are, as a live run does where engines join and leave."""
        generation, set_by_user = self._generation, self._config.pipeline.max_running
        slots = sum(engine.slots for engine in generation.engines if engine.is_alive and engine.engine_id not in generation.leaving)
        generation.admission.max_running = set_by_user or max(1, slots * 5 // 4)
        generation.credit()


def _profile(world: EngineWorld) -> Callable[[float, float], float]:
    return lambda num, context: interpolate(world.pass_s, num) + world.kv_token_s * num * context


def _told(change: Change) -> dict[str, Any]:
    return {
        "epoch": change.epoch,
        "before": dataclasses.asdict(change.before),
        "after": dataclasses.asdict(change.after),
        "saved_s": change.saved_s,
        "cost_s": change.cost_s,
    }
