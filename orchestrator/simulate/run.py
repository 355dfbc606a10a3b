"""One simulated run: the parts, how they are joined, and what becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from orchestrator.advantages import MethodAdvantages
from orchestrator.ledger.rollouts import Counts
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.rules.batch import BatchCut, Verdict
from orchestrator.rules.concurrency import FULL, Concurrency
from orchestrator.rules.dispatch import dispatch_of
from orchestrator.rules.early_stop import Audit, EarlyStop
from orchestrator.rules.group_cut import group_cut_of
from orchestrator.rules.grouping import Grouping
from orchestrator.rules.lengths import Lengths
from orchestrator.rules.roles import Change
from orchestrator.simulate.alternation import Alternation
from orchestrator.simulate.batching import Batching, SimulatedAdvantages
from orchestrator.simulate.books import Books
from orchestrator.simulate.cores import Cores
from orchestrator.simulate.engine import SimulatedEngine
from orchestrator.simulate.events import Events
from orchestrator.simulate.faults import Injection
from orchestrator.simulate.gauges import gauges
from orchestrator.simulate.generation import Generation, Limits
from orchestrator.simulate.interruptions import interrupt
from orchestrator.simulate.links import Link
from orchestrator.simulate.migration import Migration
from orchestrator.simulate.record import MAX_LANES, Record, Totals
from orchestrator.simulate.roles import Elastic, RoleChanges
from orchestrator.simulate.scorers import Slots, prm_of, steps_of
from orchestrator.simulate.scoring import Scoring, Stopping
from orchestrator.simulate.trainer import Trainer
from orchestrator.simulate.waits import Waits
from orchestrator.simulate.weight_sync import WeightSync
from orchestrator.simulate.workload import workload_of
from orchestrator.simulate.world import NO_FAULTS, EngineWorld, Faults, World, world_as_data
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import write_run
from pipelinerl.data.packing import Packing
from pipelinerl.messages import Sample
from pipelinerl.observe.journal import Journal

MAX_DROPPED_STEPS = 10
"""Groups that may fail or be stale in a row before the run ends, in steps, as in `orchestrator.pipeline`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of a simulated run."""

    config: Config
    world: World
    seconds: float
    rollouts: Counts
    reasons: dict[str, int]
    totals: Totals
    num_events: int
    num_generated_tokens: int
    num_evicted: int
    num_moved: int
    """Sequences that went on in another engine."""
    role_changes: tuple[Change, ...] = ()
    """Changes of what devices do, in order."""


def simulate(
    config: Config,
    world: World,
    *,
    seed: int = 0,
    faults: Faults = NO_FAULTS,
    folder: Path | None = None,
    limit_s: float = 1e9,
    migration: int | None = None,
    elastic: Elastic | None = None,
) -> Simulated:
    """Simulate a run to its last step; `folder` becomes a run folder with its journal.

    `migration` has sequences move between engines (`rules.migration`) where the settings do not, and, above 0, engines emptied at the end
    of a round into others that then have so many at most; no live run empties one. `elastic` has devices change roles between steps
    (`rules.roles`), as live runs do with `pipeline.elastic`.

    Raises `Stalled` where the run could not go on, and where it takes more than `limit_s` simulated seconds.
    """
    events = Events()
    with contextlib.ExitStack() as at_end:
        journal = None
        if folder is not None:
            folder.mkdir(parents=True)
            write_run(folder, config)
            journal = at_end.enter_context(contextlib.closing(Journal(folder, "orchestrator", clock=lambda: events.now_s)))
            about = {"seed": seed, "faults": dataclasses.asdict(faults), "world": world_as_data(world)}
            machine = {"cores": 0, "devices": 0}
            journal.write("run", config=config.model_dump(mode="json"), derived=config.derived(), machine=machine, simulated=about)
        run = _Run(config, world, seed=seed, faults=faults, events=events, journal=journal)
        run.migrate(0 if migration is None and config.pipeline.migration != "off" else migration)
        run.change_roles(elastic)
        return run.run(limit_s)


class _Run:
    def __init__(self, config: Config, world: World, *, seed: int, faults: Faults, events: Events, journal: Journal | None) -> None:
        self.config, self.world, self.seed, self.events = config, world, seed, events
        slowdowns = {(kind, other): much for key, much in world.slowdowns.items() for kind, other in [key.split("/")]}
        self.cores = Cores(events, slowdowns=slowdowns)
        self.record, self.books, self.waits = Record(events, journal), Books(), Waits(events)
        method = method_of(config)
        rules = MethodAdvantages(method, config.reward, correct_reward=config.algorithm.correct_reward).step_rules()
        self.num_siblings = config.rollout.group_size + rules.adds_greedy
        schedule = schedule_of(config.pipeline.mode, max_staleness=config.pipeline.max_staleness)
        self.admission = Admission(
            schedule=schedule,
            groups_per_step=config.batch.groups_per_step,
            num_steps=config.trainer.steps,
            max_running=config.max_running_rollouts,
        )
        self.engine_worlds: dict[int, tuple[EngineWorld, int]] = {}
        """Of engines that are not as those that the run begins with, and their slots."""
        self.engines = [self._engine(number) for number in range(config.engine.count)]
        self.trainer = self._trainer(holds_batches=schedule.holds_batches)
        self.slots = Slots(self.cores, kind="scorer", num_slots=config.scorer.slots)
        self.generation = self._generation()
        self.scoring = self._scoring()
        advantages = SimulatedAdvantages(config, forward_part=world.trainer.forward_part)
        self.batching = Batching(
            grouping=Grouping(group_size=self.num_siblings),
            cut=BatchCut(
                groups_per_step=config.batch.groups_per_step,
                max_staleness=schedule.max_staleness,
                min_group_size=config.batch.min_group_size,
                group_advantages=advantages,
                rules=advantages.step_rules(rules),
            ),
            packing=Packing[Sample](max_tokens=config.batch.max_tokens, num_replicas=config.trainer.layout.replicas),
            admission=self.admission,
            trainer=self.trainer,
            books=self.books,
            queue_bytes=config.pipeline.queue_bytes,
            max_dropped=MAX_DROPPED_STEPS * config.batch.groups_per_step,
        )
        self.link = Link(events, sender_rate=world.sync.sender_rate, receiver_rate=world.sync.receiver_rate)
        self.weight_sync = WeightSync(
            events,
            world=world.sync,
            link=self.link,
            generation=self.generation,
            admission=self.admission,
            kv_max_staleness=config.weights.kv_max_staleness,
            seed=seed,
        )
        self.injection = Injection(
            events,
            faults=faults,
            num_steps=config.trainer.steps,
            seed=seed,
            record=self.record,
            generation=self.generation,
            weight_sync=self.weight_sync,
            trainer=self.trainer,
            slots=self.slots,
            link=self.link,
            restart_s=world.engine.restart_s,
            restarted=self._engine,
        )
        self.concurrency: Concurrency | None = None
        self.migration: Migration | None = None
        self.roles: RoleChanges | None = None
        self.is_finished = False
        self._join()

    # --- parts ---

    def _engine(self, number: int) -> SimulatedEngine:
        settings, sync = self.config.engine, self.world.sync
        world, most = self.engine_worlds.get(number, (self.world.engine, settings.max_running))
        keeps_kv = settings.sleep_kv == "keep"
        engine = SimulatedEngine(world, sync, engine_id=number, max_running=most, cores=self.cores, keeps_kv=keeps_kv)
        engine.drafts = settings.drafts
        if number < MAX_LANES:
            engine.on_busy = lambda engine, start, end: self.record.span(f"engine-{engine.engine_id}", "forward", start, end)
        return engine

    def _trainer(self, *, holds_batches: bool) -> Trainer:
        config = self.config
        return Trainer(
            self.world.trainer,
            self.world.sync,
            cores=self.cores,
            num_replicas=config.trainer.layout.replicas,
            num_steps=config.trainer.steps,
            holds_batches=holds_batches,
            epochs=config.trainer.epochs,
            checkpoint_every=config.checkpoint.every,
        )

    def _generation(self) -> Generation:
        config, world = self.config, self.world
        has_environment = config.environment.is_used
        num_calls = config.environment.concurrency or config.scorer.slots
        if config.environment.cls is not None:
            num_calls = config.environment.max_alive
        return Generation(
            self.events,
            engines=self.engines,
            admission=self.admission,
            workload=workload_of(config, world, seed=self.seed, num_siblings=self.num_siblings),
            world=world.scoring,
            limits=Limits(
                group_size=config.rollout.group_size,
                num_siblings=self.num_siblings,
                max_tokens=config.rollout.max_tokens,
                max_turns=config.environment.max_turns if has_environment else 1,
                steps=steps_of(config, world.scoring),
            ),
            books=self.books,
            waits=self.waits,
            num_prompts=config.data.limit or world.num_prompts,
            replies=Slots(self.cores, kind="environment", num_slots=num_calls) if has_environment else None,
            admit_s=world.admit_s,
            dispatch=dispatch_of(config, num_siblings=self.num_siblings),
            group_cut=group_cut_of(config, num_siblings=self.num_siblings),
        )

    def _scoring(self) -> Scoring:
        config, stop = self.config, self.config.prm.early_stop
        stopping = None
        if config.prm.is_used and stop.threshold is not None:
            rule = EarlyStop(
                threshold=stop.threshold, keep_probability=stop.keep_probability, min_steps=stop.min_steps, seed=config.run.seed
            )
            audit = Audit(max_false_stop_fraction=stop.max_false_stop_fraction, correct_reward=config.algorithm.correct_reward)
            stopping = Stopping(rule=rule, audit=audit)
        return Scoring(
            self.events,
            world=self.world.scoring,
            slots=self.slots,
            prm=prm_of(config, self.world.scoring, self.cores),
            stopping=stopping,
            comparing=Grouping(group_size=self.num_siblings) if config.compares_siblings else None,
            min_group_size=config.batch.min_group_size,
            queue_bytes=config.pipeline.queue_bytes,
            deadline_s=config.scorer.deadline_s,
            steps=steps_of(config, self.world.scoring),
            max_waiting_tokens=config.prm.max_waiting_tokens,
            stop=self.generation.stop,
        )

    def _join(self) -> None:
        """Join the parts in the order of the flow."""
        self.events.settle = self.generation.settle
        self.generation.full = self.scoring.full
        self.generation.on_finished = self.scoring.take
        self.generation.on_step = self.scoring.step
        self.scoring.on_scored, self.scoring.group_cut = self.batching.take, self.generation.group_cut
        interrupt(self.trainer, self.world.trainer, generation=self.generation, scoring=self.scoring)
        self.scoring.on_room = self.generation.credit
        self.batching.on_taken = self.scoring.taken
        self.batching.on_verdict = self._verdict
        self.trainer.on_done = self._step_done
        self.trainer.on_published = self._published
        self.trainer.on_span = lambda name, start, end: self.record.span("trainer-0", name, start, end)
        self.weight_sync.on_line = self.record.line
        turns = (self.config, self.trainer, self.weight_sync, self.generation)
        self.alternation = Alternation(*turns) if self.config.is_colocated else None
        self.weight_sync.begin()
        if self.config.pipeline.adaptive_concurrency and self.engines[0].kv_used is not None:
            self.concurrency = Concurrency(
                most=self.admission.max_running,
                least=self.config.engine.count * self.num_siblings,
                group_size=self.num_siblings,
            )
        if self.concurrency is not None or self.generation.dispatch is not None:
            self.events.after(self.world.report_every_s, self._report)
        if self.record.has_journal:
            self.events.after(0.0, self._status)

    # --- the run ---

    def migrate(self, most: int | None) -> None:
        """Have sequences move between engines; see `simulate`."""
        if most is not None:
            lengths = Lengths(group_size=self.num_siblings, max_tokens=self.config.rollout.max_tokens)
            self.migration = Migration(self.generation, world=self.world, lengths=lengths, most=most)

    def change_roles(self, elastic: Elastic | None) -> None:
        """Have devices change roles; see `simulate`."""
        if elastic is None:
            return

        def new_engine(number: int, world: EngineWorld, slots: int) -> SimulatedEngine:
            self.engine_worlds[number] = world, slots
            return self._engine(number)

        self.roles = RoleChanges(
            elastic,
            config=self.config,
            generation=self.generation,
            trainer=self.trainer,
            packing=self.batching.packing,
            weight_sync=self.weight_sync,
            prm=self.scoring.prm,
            new_engine=new_engine,
            line=self.record.line,
            seed=self.seed,
        )

    def run(self, limit_s: float) -> Simulated:
        events = self.events
        events.run(until=lambda: self.is_finished and self.generation.all_hold(self.config.trainer.steps), limit_s=limit_s)
        counts = self.books.finish()
        if self.record.has_journal:
            self.record.status(self._gauges())
        self.record.line("end", reason="finished", rollouts=dataclasses.asdict(counts), elapsed_s=events.now_s)
        return Simulated(
            config=self.config,
            world=self.world,
            seconds=events.now_s,
            rollouts=counts,
            reasons=dict(self.books.reasons),
            totals=self.record.totals,
            num_events=events.num_happened,
            num_generated_tokens=self._num_generated(),
            num_evicted=sum(engine.num_evicted for engine in self.engines),
            num_moved=self.migration.num_moved if self.migration else 0,
            role_changes=tuple(self.roles.changes) if self.roles else (),
        )

    def _verdict(self, verdict: Verdict) -> None:
        self.generation.credit()
        self.record.verdict(verdict)

    def _step_done(self, step: int, metrics: dict[str, float]) -> None:
        gauges = [engine.gauges() for engine in self.engines]
        busy_s, idle_s = (sum(float(one[name] or 0.0) for one in gauges) for name in ("busy_s", "idle_s"))
        self.record.trained(step, metrics, engine_s=(busy_s, idle_s))
        self.batching.trained(step)
        if self.roles is not None:
            self.roles.trained(self.record.last_step)
        self.books.counts()

    def _published(self, version: int) -> None:
        self.weight_sync.announce(version)
        if self.roles is not None:
            self.roles.boundary(version)
        self.generation.credit()
        self.is_finished = version == self.config.trainer.steps

    def _report(self) -> None:
        """Have the live rules hear of every engine's gauges."""
        if self.generation.dispatch is not None:
            for engine in (one for one in self.engines if one.is_alive):
                self.generation.reported(engine)
        if self.concurrency is not None:
            self._adapt(self.concurrency)
        self.events.after(self.world.report_every_s, self._report)

    def _adapt(self, concurrency: Concurrency) -> None:
        """Have the live rule hear how full every KV cache is; it is left out where it could change nothing."""
        used = [(engine.kv_used or 0.0, engine) for engine in self.engines if engine.is_alive]
        most = self.config.max_running_rollouts
        if concurrency.limit < most or max((one for one, _ in used), default=0.0) > FULL:
            for kv_used, engine in sorted(used, key=lambda pair: pair[0] > FULL):
                concurrency.reported(
                    engine.engine_id,
                    kv_used=kv_used,
                    num_held=engine.num_running + engine.num_waiting,
                    num_outstanding=self.generation.num_outstanding,
                )
                if concurrency.limit != self.admission.max_running:
                    self.admission.max_running = concurrency.limit
                    self.generation.credit()
                    self.record.line("limit", max_running=concurrency.limit, engine_id=engine.engine_id, kv_used=kv_used)

    # --- gauges ---

    def _num_generated(self) -> int:
        return self.injection.num_tokens_of_dead + sum(int(engine.gauges()["num_tokens"] or 0) for engine in self.engines)

    def _status(self) -> None:
        self.record.status(self._gauges())
        self.events.after(self.record.every_s, self._status)

    def _gauges(self) -> dict[str, Any]:
        return gauges(
            self.config,
            trainer=self.trainer,
            generation=self.generation,
            scoring=self.scoring,
            batching=self.batching,
            slots=self.slots,
            books=self.books,
            num_generated=self._num_generated(),
        )
