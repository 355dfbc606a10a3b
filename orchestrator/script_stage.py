"""How the stage of a script is made of the parts of its run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from orchestrator.channels import Channels
from orchestrator.parts import Parts
from orchestrator.rules.script import ScriptBook
from orchestrator.stages.held_policies import HeldPolicies
from orchestrator.stages.prm import PrmScoring
from orchestrator.stages.script import Script
from orchestrator.stages.script_replay import ScriptReplay
from orchestrator.stages.script_steps import ScriptSteps
from orchestrator.stages.script_waits import ScriptWaits
from pipelinerl.messages import EarlyStopDecision, Group, Trajectory
from pipelinerl.runtime.stage import Stage


def script_of(parts: Parts, channels: Channels) -> Script | None:
    """Return the stage of a script, in a run that one drives."""
    config, past, rules = parts.config, parts.past, parts.given.step_rules
    if not parts.given.in_script:
        return None
    next_step, waits = past.num_decided, ScriptWaits(watch=parts.watch, owner=Script.name)
    parts.replay = replay = ScriptReplay(parts.given.record, policy=parts.given.policy, waits=waits, write=parts.given.ledger.flush)
    bound = {"max_staleness": parts.schedule.max_staleness, "withhold": rules.withhold if rules is not None else None}
    trainer = {"trainer": parts.trainer, "num_replicas": config.trainer.layout.replicas, "alternation": parts.alternation}
    held = HeldPolicies(policies=channels.policies, published=channels.published, **trainer)
    held.publish(next_step)  # engines of a script that goes on take what the one before has trained
    book = ScriptBook(
        num_steps=config.trainer.steps, first_step=0 if replay.is_kept else next_step, stops_early=config.stops_early, **bound
    )
    steps = ScriptSteps(
        held=held,
        book=book,
        admission=parts.admission,
        ledger=parts.given.ledger,
        waits=waits,
        replay=replay,
        next_step=next_step,
        past=past,
        max_row_tokens=config.batch.max_tokens,
        teachers=tuple(config.reference.teachers),
    )
    known = {one.trajectory.rollout_id: one for one in past.scored if one.trajectory.group_id in replay.groups}
    ways_in = {"prm": channels.scored, "group_rewards": channels.prm_scored}
    script = Script(
        prompts=channels.prompts,
        sampled=channels.sampled,
        to_score=channels.generated,
        scored=channels.group_scored,
        book=book,
        steps=steps,
        waits=waits,
        replay=replay,
        unscored=replay.sampled & {one.rollout_id for group in past.interrupted for one in group.rollouts},
        known=known,
        unfinished={name: ways_in[stage] for name in known if (stage := parts.next_stage(name)) in ways_in},
        queue_bytes=config.pipeline.queue_bytes,
        num_siblings=config.rollout.group_size,
        adds_greedy=parts.adds_greedy,
        compares_siblings=config.compares_siblings,
        group_sizes=parts.group_sizes,
        position=lambda: parts.given.source.position,
    )
    parts.progress.on_trained = steps.hear_done
    return script


def join(script: Script | None, parts: Parts, stages: Sequence[Stage], *, prm: PrmScoring | None) -> None:
    """Have the stage of a script work with the others, where there is one."""
    if script is not None:
        script.steps.join(stages)
        script.decision_of = functools.partial(_decision_of, parts, prm)


def settled_of(script: Script | None, parts: Parts, *, prm: PrmScoring | None) -> Callable[[Group], None]:
    """Return what hears of every group that is over; a script may have left some of its rollouts unscored."""
    cut, settled = parts.group_cut, parts.prompt_progress.settled
    if script is None:
        return settled

    def hear(group: Group) -> None:
        settled(group)
        parts.group_sizes.pop(group.group_id, None)
        for one in group.members:
            if prm is not None:
                prm.forget(one.trajectory.rollout_id)
            if cut is not None:
                cut.decided(one.trajectory.rollout_id, one.trajectory.attempt)

    return hear


def _decision_of(parts: Parts, prm: PrmScoring | None, trajectory: Trajectory) -> EarlyStopDecision | None:
    """Return what a coin has decided about a trajectory that is not scored; None where none was tossed."""
    attempt = (trajectory.rollout_id, trajectory.attempt)
    if parts.group_cut is not None:
        return parts.group_cut.decisions.get(attempt)
    return None if prm is None else prm.decision_of(*attempt)
