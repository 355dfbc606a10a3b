"""Promises about a rollout: one method for each kind of entry about one."""

from __future__ import annotations

import hashlib
import json

from pipelinerl.checker.history import Entry
from pipelinerl.checker.state import Rollout, RunState, digest_of, row_of

LOST_ENVIRONMENT = "environment: "
"""How the reason begins for which an attempt was lost with its environment's process."""
MAX_REFUSED = 3
"""Answers to a rollout that cannot be true, after which it fails without another."""


class RolloutInvariants:
    """The promises about a rollout, in the order in which it goes its way."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._require = run.require

    def on_issued(self, entry: Entry, rollout: Rollout) -> None:
        self._require(not rollout.status, f"is issued after it was {rollout.status}")
        self._require(not rollout.is_out, f"is issued while attempt {rollout.attempt} is out")
        self._require(not rollout.is_scored, "is issued after it was scored")
        is_reset = rollout.has_environment or not self._run.settings.get("has_stateful_environment")
        self._require(is_reset, "is issued without its environment")
        self._require(not rollout.is_over, "is issued after its environment said that it is over")
        self._require(entry.attempt == rollout.attempt + 1, f"is attempt {entry.attempt}, after {rollout.attempt}")
        self._run.refuse_quarantined(rollout.prompt_id)
        rollout.attempt, rollout.is_out, rollout.is_generated, rollout.is_stopped = entry.attempt or 0, True, False, False

    def on_reattached(self, entry: Entry, rollout: Rollout) -> None:
        self._require(not rollout.status and not rollout.is_scored and not rollout.is_out, "is reattached, but was not in flight")
        self._require(entry.attempt == rollout.attempt, f"reattaches attempt {entry.attempt}, the last was {rollout.attempt}")
        self._run.refuse_quarantined(rollout.prompt_id)
        rollout.is_out, rollout.is_generated = True, False
        self._run.num_reattached += 1

    def on_held(self, entry: Entry, rollout: Rollout) -> None:
        self._require(not rollout.status and not rollout.is_scored and not rollout.is_out, "is held, but was not in flight")
        self._require(entry.attempt == rollout.attempt, f"holds attempt {entry.attempt}, the last was {rollout.attempt}")
        rollout.is_out = rollout.is_generated = True

    def on_lost(self, entry: Entry, rollout: Rollout) -> None:
        self._require(rollout.is_out and entry.attempt == rollout.attempt, f"loses attempt {entry.attempt}, which is not out")
        self._require(not rollout.is_generated, "loses what was generated")
        rollout.is_out = False
        if (entry.reason or "").startswith(LOST_ENVIRONMENT):  # the episode begins again from its prompt
            rollout.num_observations, rollout.has_environment = 0, False
        rollout.num_refused += (entry.reason or "").startswith("refused: ")

    def on_reset(self, entry: Entry, rollout: Rollout) -> None:
        self._require(bool(self._run.settings.get("has_stateful_environment")), "is reset in a run without an environment with state")
        self._require(not rollout.is_out and not rollout.status, "is reset while an attempt is out, or after its end")
        self._require(not rollout.has_environment, "is reset while it has an environment")
        rollout.has_environment, rollout.is_over, rollout.num_observations = entry.reason == "ok", entry.reason != "ok", 0

    def on_observed(self, entry: Entry, rollout: Rollout) -> None:
        num_turns = self._run.settings.get("max_turns") or 0
        is_expected = rollout.is_out and entry.attempt == rollout.attempt and not rollout.is_generated and not rollout.is_over
        self._require(is_expected, f"is answered by the environment for attempt {entry.attempt}, which is not out, or is over")
        self._require(entry.turn == rollout.num_observations, f"is answered for turn {entry.turn}, expected {rollout.num_observations}")
        hears_last = bool(self._run.settings.get("has_stateful_environment"))
        self._require(rollout.num_observations + 1 < num_turns + hears_last, f"is answered for turn {entry.turn}, of at most {num_turns}")
        rollout.num_observations, rollout.is_over = rollout.num_observations + 1, entry.reason != "ok"

    def on_early_stop(self, entry: Entry, rollout: Rollout) -> None:
        below, seed = self._run.settings.get("early_stop_threshold"), self._run.settings.get("seed")
        is_cut = self._run.settings.get("cut_after") is not None
        self._require(below is not None or is_cut, "is decided about in a run that stops nothing early")
        is_flagged = entry.score is not None and (is_cut or entry.score < (below or 0.0))
        self._require(is_flagged, f"is decided about at {entry.score}, not below {below}")
        self._require(rollout.is_out and entry.attempt == rollout.attempt, f"decides about attempt {entry.attempt}, which is not out")
        self._require(rollout.early_stop_attempt != entry.attempt, "is decided about a second time")
        said = json.loads(entry.data or "{}")
        digest = hashlib.blake2b(f"{seed}/{entry.rollout_id}/{entry.attempt}".encode(), digest_size=8).digest()
        coin = (int.from_bytes(digest, "big") >> 11) / 2**53
        is_fair = 0.0 < said["probability"] <= 1.0 and said["stops"] == (coin >= said["probability"])
        self._require(is_fair, f"stops: {said['stops']}, where the coin fell to {coin:.3f} of {said['probability']}")
        rollout.early_stop_attempt, rollout.is_stopped = entry.attempt, said["stops"]

    def on_generated(self, entry: Entry, rollout: Rollout) -> None:
        is_given_up = rollout.is_over or row_of(rollout.prompt_id) in self._run.quarantined or rollout.num_refused >= MAX_REFUSED
        is_refused = entry.reason == "error" and is_given_up and not rollout.is_out
        is_expected = rollout.is_out and entry.attempt == rollout.attempt and not rollout.is_generated
        self._require(is_expected or is_refused, f"answers attempt {entry.attempt}, which is not out")
        rollout.attempt, rollout.is_out, rollout.is_generated = entry.attempt or 0, True, True
        rollout.oldest, rollout.newest, rollout.num_tokens = entry.oldest_version, entry.newest_version, entry.num_tokens or 0

    def on_scored(self, entry: Entry, rollout: Rollout) -> None:
        self._require(rollout.is_out and rollout.is_generated, "is scored before it was generated")
        self._require(entry.attempt == rollout.attempt, f"scores attempt {entry.attempt}, but {rollout.attempt} is out")
        self._require((entry.reason == "ok") == (entry.reward is not None), f"is {entry.reason} with the reward {entry.reward}")
        rollout.is_stopped &= not (entry.reason or "").startswith("error")  # an engine that fails may answer before it hears of the stop
        self._require(
            (entry.reason == "stopped") == rollout.is_stopped, f"is scored as {entry.reason}; stopped early: {rollout.is_stopped}"
        )
        rollout.is_out, rollout.is_scored, rollout.has_reward = False, True, entry.reward is not None
        rollout.is_own_score = entry.peer == "script"

    def on_prm_scored(self, entry: Entry, rollout: Rollout) -> None:
        self._require(bool(self._run.settings.get("has_prm")), "is scored step by step in a run without a process reward model")
        self._require(rollout.is_scored and not rollout.is_prm_scored, "is scored step by step before its own score, or twice")
        self._require(rollout.step is None and not rollout.status, "is scored step by step after it was assigned, or after its end")
        self._require(entry.attempt == rollout.attempt, f"scores the steps of attempt {entry.attempt}, scored was {rollout.attempt}")
        self._require(rollout.has_reward or entry.reward is None, "has a reward by its steps, and none of its own")
        rollout.is_prm_scored, rollout.has_reward = True, entry.reward is not None

    def on_group_scored(self, entry: Entry, rollout: Rollout) -> None:
        self._require(bool(self._run.settings.get("has_group_rewards")), "is compared in a run that compares nothing")
        self._require(rollout.is_scored and not rollout.is_group_scored, "is compared before its own score, or twice")
        self._require(rollout.step is None and not rollout.status, "is compared after it was assigned, or after its end")
        self._require(entry.attempt == rollout.attempt, f"compares attempt {entry.attempt}, scored was {rollout.attempt}")
        self._require((entry.reason == "ok") == (entry.reward is not None), f"is {entry.reason} with the reward {entry.reward}")
        self._require(rollout.has_reward or entry.reward is None, "has a reward by comparison, and none of its own")
        rollout.is_group_scored, rollout.has_reward = True, entry.reward is not None

    def on_assigned(self, entry: Entry, rollout: Rollout) -> None:
        assert entry.step is not None
        self._require(rollout.has_reward and not rollout.status, "is assigned without a reward, or after its end")
        lacks_steps = self._run.settings.get("has_prm") and not rollout.is_prm_scored
        self._require(rollout.is_own_score or not lacks_steps, "is assigned before its steps were scored")
        lacks_comparison = self._run.settings.get("has_group_rewards") and not rollout.is_group_scored
        self._require(rollout.is_own_score or not lacks_comparison, "is assigned before it was compared")
        self._require(rollout.step is None, f"is assigned to step {entry.step}, and was in {rollout.step}")
        self._require(not self._run.is_greedy(), "is assigned, and is greedy")
        greedy = self._run.rollouts.get(f"{rollout.group_id}/{self._run.settings['group_size']}")
        has_baseline = not self._run.settings.get("has_greedy_baseline") or (greedy is not None and greedy.has_reward)
        self._require(has_baseline, "is assigned without a greedy sibling that has a reward")
        self._require(entry.step == self._run.open_step, f"is assigned to step {entry.step}, but {self._run.open_step} is being filled")
        rollout.step = entry.step
        step = self._run.steps[entry.step]
        step.assigned.add(entry.rollout_id or "")
        step.groups.add(rollout.group_id)

    def on_packed(self, entry: Entry, rollout: Rollout) -> None:
        assert entry.step is not None
        assert entry.row is not None
        step = self._run.steps[entry.step]
        self._require(rollout.step == entry.step and not rollout.is_packed, "is packed where it was not assigned, or twice")
        self._require(step.closed_at is None, f"is packed in step {entry.step} after it closed")
        if entry.position == 0:
            self._require(entry.row == len(step.rows), f"begins row {entry.row} of step {entry.step}, which has {len(step.rows)}")
            step.rows.append(0)
        self._require(
            entry.row == len(step.rows) - 1 and entry.position == step.rows[-1],
            f"is not next with row {entry.row}, position {entry.position}",
        )
        step.rows[-1] += 1
        rollout.is_packed, rollout.row = True, entry.row
        step.num_packed += 1
        step.num_tokens += rollout.num_tokens
        step.digest += digest_of(entry.step, entry.rollout_id or "")

    def on_trained(self, entry: Entry, rollout: Rollout) -> None:
        self._end(entry, rollout)
        step = self._run.steps[rollout.step if rollout.step is not None else -1]
        self._require(rollout.row not in step.quarantined_rows, f"is trained in row {rollout.row}, which killed the trainer twice")
        self._require(rollout.is_packed and entry.step == rollout.step, f"is trained in step {entry.step}, packed in {rollout.step}")
        self._require(step.closed_at is not None, "is trained in a step that is not closed")
        said = (entry.oldest_version, entry.newest_version, entry.num_tokens)
        known = (rollout.oldest, rollout.newest, rollout.num_tokens)
        self._require(said == known, f"is trained with (oldest, newest, tokens) {said}, generated with {known}")
        if rollout.oldest is None or rollout.newest is None or entry.step is None:
            self._require(False, "is trained without a token")
            return
        age = entry.step - rollout.oldest
        self._require(age <= self._run.settings["max_staleness"], f"is trained {age} versions after its oldest token")
        self._require(rollout.oldest <= rollout.newest <= entry.step, f"holds versions {rollout.oldest} to {rollout.newest}")

    def on_not_trained(self, entry: Entry, rollout: Rollout) -> None:
        self._end(entry, rollout)
        self._require(bool(entry.reason), "ends without a reason")
        is_refused = rollout.step is not None and rollout.row in self._run.steps[rollout.step].quarantined_rows
        may_be_placed = entry.kind == "cancelled" or (entry.kind == "failed" and is_refused)
        self._require(rollout.step is None or may_be_placed, f"is {entry.kind} after it was assigned")

    def on_filtered(self, entry: Entry, rollout: Rollout) -> None:
        self.on_not_trained(entry, rollout)
        self._require((entry.reason == "stopped early") == rollout.is_stopped, f"{entry.reason}; stopped early: {rollout.is_stopped}")
        self._require((entry.reason == "greedy baseline") == self._run.is_greedy(), f"is filtered as {entry.reason}")
        if entry.step is None:
            return
        self._require(entry.reason == "stopped early", f"counts in step {entry.step}, and was not stopped early")
        self._require(entry.step == self._run.open_step, f"counts in step {entry.step}, but {self._run.open_step} is being filled")
        step = self._run.steps[entry.step]
        step.num_stopped += 1
        step.groups.add(rollout.group_id)

    def on_failed(self, entry: Entry, rollout: Rollout) -> None:
        self.on_not_trained(entry, rollout)
        self._require(not self._run.is_greedy() or not rollout.has_reward, "fails, is greedy, and has a reward")
        if rollout.step is not None:
            step = self._run.steps[rollout.step]
            step.num_quarantined += 1
            step.digest -= digest_of(rollout.step, entry.rollout_id or "")

    def on_stale(self, entry: Entry, rollout: Rollout) -> None:
        self.on_not_trained(entry, rollout)
        self._require(not self._run.is_greedy(), "is stale, and is greedy")

    on_cancelled = on_not_trained

    def on_revived(self, entry: Entry, rollout: Rollout) -> None:
        self._require(rollout.status == "cancelled" and rollout.reason == "the run ended", f"is revived, and was {rollout.status}")
        rollout.status = rollout.reason = ""

    def _end(self, entry: Entry, rollout: Rollout) -> None:
        self._require(not rollout.status, f"ends as {entry.kind}, and was {rollout.status}")
        rollout.status, rollout.reason = entry.kind, entry.reason or ""
        rollout.is_out = False
