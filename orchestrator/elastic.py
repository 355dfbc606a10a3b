"""What the settings of a live run say of its elastic roles: the pool, the layout that it begins with, and which layouts it could have."""

from __future__ import annotations

import functools

from orchestrator.parts import Parts
from orchestrator.peers.prm import Prm
from orchestrator.peers.reward_model import RewardModel
from orchestrator.pipeline import Pipeline
from orchestrator.rules.role_orders import Orders, RoleOrders, layout_of, orders_of
from orchestrator.rules.role_window import RoleWindow
from orchestrator.rules.roles import Layout, Pool, Roles
from orchestrator.stages.role_changes import RoleChanges
from pipelinerl.config import Config
from pipelinerl.config.scaling import Units, elastic_sizes, scoring_of, units_of
from pipelinerl.runtime.membership import ScaleRequest

WINDOW_STEPS = 2
"""Steps that a window has at least, as in the simulator: one alone is as short or long as its answers happen to be."""
DEADLINES = 2
"""Of the trainer, each as long as `trainer.ready_deadline_s`, that a change may use up: until it has saved, and until it has started."""


def role_changes_of(parts: Parts, pipeline: Pipeline) -> RoleChanges:
    """Return what drives the roles of a run whose settings say that they are elastic (`pipeline.elastic`)."""
    config = parts.config
    scoring = scoring_of(config.prm, config.reward)
    sizes = elastic_sizes(config.engine, config.pipeline)
    units = units_of(config.engine, config.trainer.layout, scoring, least_ranks=config.trainer.least_ranks, sizes=sizes)
    models = {one.membership.kind: one for one in (parts.prm, *parts.reward_models) if one is not None and one.membership.kind in scoring}
    changing = models.pop(units.scored_by, None)
    count, _ = scoring.get(units.scored_by, (0, 1))
    began = Layout(
        engines=config.engine.count // units.engines(config.engine.tensor_parallel_size),
        width=config.engine.num_ranks,
        trainers=(config.trainer.ranks - units.core_ranks) // units.devices,
        scorers=(count - units.core_scorers) // units.scorers if changing else 0,
    )
    assert parts.given.scale is not None, "who can change its engines has a folder for that"
    membership, earlier = parts.membership, parts.given.scale.roles()
    num_scorers = changing.membership.num_wanted if changing else 0
    ranks = parts.trainer_change.record.wanted  # an earlier orchestrator may have been asked
    size = membership.tensor_parallel_size or config.engine.tensor_parallel_size
    wanted = Orders(membership.num_wanted, ranks, num_scorers, size, scored_by=units.scored_by)
    roles = Roles(_pool(parts, units, changing), layout_of(wanted, units) or began, window_steps=WINDOW_STEPS)
    rule = RoleOrders(roles, units, wanted=wanted, sizes=sizes, num_given_up=membership.num_given_up, now_s=parts.started_s)
    if earlier is not None:
        rule.restore(earlier)
    return RoleChanges(
        rule=rule,
        window=RoleWindow(slots=config.engine.max_running, least_steps=WINDOW_STEPS),
        engines=parts.engines,
        scoring=changing,
        others=tuple(models.values()),
        change=parts.trainer_change,
        training=pipeline.training,
        completions=pipeline.channels.completions,
        progress=parts.progress,
        watch=parts.watch,
        journal=parts.given.journal,
        folder=parts.given.scale,
        stages=units.stages,
        scorers_of_unit=units.scorers,
        drain_s=drain_s_of(config),
        missing_s=config.engine.ready_deadline_s,
        is_first=parts.given.scale.members() is None,
    )


def _pool(parts: Parts, units: Units, scoring: Prm | RewardModel | None) -> Pool:
    config = parts.config
    admitted = (parts.schedule.max_staleness + 1) * config.batch.groups_per_step * parts.num_siblings

    @functools.cache
    def may_train(ranks: int) -> bool:
        return parts.trainer_change.why_not(ranks) is None

    def may_be(layout: Layout) -> bool:
        orders = orders_of(layout, units)
        may_write = parts.membership.why_not(orders.engines + parts.membership.num_given_up, size=orders.tensor_parallel_size) is None
        may_score = scoring is None or scoring.membership.why_not(orders.scorers) is None
        return may_write and may_score and may_train(orders.trainer)

    return Pool(
        unit_devices=units.devices,
        unit_replicas=units.replicas,
        core_replicas=units.core_ranks / units.ranks_per_replica,
        core_scorers=units.core_scorers / max(1, units.scorers),
        profiles={},
        most_running=min(admitted, config.pipeline.max_running or admitted),
        switch_s=0.0,
        least_deadline_s=DEADLINES * config.trainer.ready_deadline_s + config.engine.ready_deadline_s,
        last_step=config.trainer.steps,
        may_be=may_be,
    )


def drain_s_of(config: Config) -> float:
    """Return the seconds that leaving engines may take to end what they have: none where all of it goes on in others with its tokens, as
    many as `pipelinerl scale` gives where it would begin anew.
    """
    return ScaleRequest(request_id=0).drain_s if config.why_sequences_stay else 0.0
