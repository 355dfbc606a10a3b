"""Sequences move between simulated engines as the live rules say (`rules.migration`), at each report of the engines' gauges."""

from __future__ import annotations

from orchestrator.rules.lengths import Lengths
from orchestrator.rules.migration import Held, Holding, Move, relieve, repack
from orchestrator.simulate.generation import Generation
from orchestrator.simulate.rollouts import Rollout
from orchestrator.simulate.sequence import interpolate
from orchestrator.simulate.world import World


class Migration:
    """Asks the rules, and has the simulation do what they say."""

    def __init__(self, generation: Generation, *, world: World, lengths: Lengths, most: int) -> None:
        """In rounds, the last sequences are packed into engines of `most` at most; 0: they stay."""
        self.num_moved = 0
        self._events, self._generation, self._world, self._every_s = generation.events, generation, world.engine, world.report_every_s
        self._lengths, self._most = lengths, most
        self._pass_on, generation.on_finished = generation.on_finished, self._finished
        self._events.after(self._every_s, self._act)

    def _finished(self, rollout: Rollout) -> None:
        self._lengths.finished(rollout.group_id, rollout.num_sampled)
        self._pass_on(rollout)

    def _act(self) -> None:
        generation = self._generation
        engines = [
            self._holding(number) for number, one in enumerate(generation.engines) if one.is_alive and number not in generation.leaving
        ]
        relieved = relieve(engines)
        repacked: list[Move[Rollout]] = []
        dispatch, schedule = self._generation.dispatch, self._generation.admission.schedule
        if self._most and not relieved and schedule.in_rounds and (dispatch is None or not dispatch.num_waiting):
            pass_s = interpolate(self._world.pass_s, 1.0)
            repacked = repack(engines, most=self._most, prefill_passes=self._world.prefill_token_s / pass_s)
        self.num_moved += len(relieved) + len(repacked)
        for move in (*relieved, *repacked):
            self._generation.move(move.rollout, move.target)
        self._events.after(self._every_s, self._act)

    def _holding(self, engine_id: int) -> Holding[Rollout]:
        engine, held = self._generation.engines[engine_id], list[Held[Rollout]]()
        for rollout in self._generation.in_engine(engine_id):
            sequence = rollout.sequence
            if sequence is None or sequence.is_over or rollout.moves_to is not None:
                continue
            here = engine.written_of(sequence)
            written = rollout.num_sampled + here
            to_come = max(1.0, self._lengths.expected(rollout.group_id, written=written) - written)
            version = engine.version if written else rollout.version
            held.append(
                Held(rollout=rollout, num_tokens=sequence.num_context + here, to_come=to_come, version=version, waits=not sequence.is_held)
            )
        return Holding(engine_id=engine_id, version=engine.version, slots=engine.slots, room=engine.room, held=held)
