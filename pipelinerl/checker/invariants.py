"""The settings, each in one method: the history is played once, in order, and whatever breaks one is written down as a sentence.

conservation   a rollout is admitted once and ends once; what ended stays ended, but what was cancelled with its run may be revived
attempts       count up from 0; the next one only once the last is lost; an answer counts only for the attempt that is out
steps          where steps are scored, a sample's are so once, after its own score, and before it is compared or placed
turns          an environment replies to each turn once, in order, anew only in a new life, while the attempt is out; nothing more is
               asked after the last, or where it said that the episode is over or failed
early stop     where rollouts may be stopped, a coin falls about an attempt once, while it is out, as seed and names say; who is stopped has
               no reward, is never placed, and counts among the samples of the step of its group
baseline       where groups have a greedy sibling, it is never placed, ends as filtered by that reason where it has a reward, and no sibling
               of one without a reward is placed
comparison     where siblings are compared, each is so once, after its own score, and none is placed before
exactly once   a sample is placed in one step, packed in one place of one row, and trained in that step; a step is done once and in turn,
               and is done again only after the trainer started from a checkpoint that does not hold it; a trainer that outlives the
               orchestrator goes on at a step it has not done
staleness      no trained token is more than K versions older than the step that trains it, none is newer
batches        a sealed step has its B groups, each whole, and the rows, samples and tokens its seal says
checkpoints    name the commit under which their last step was sealed, and hold exactly the samples of the steps before them; one that is
               discarded was the newest that was saved; what a run says when it ends is what its newest checkpoint holds
bytes          are those that were written: every row of the ledger and every file of a checkpoint has its checksum
quarantine     a prompt that was there at two deaths is never asked for again; a row of samples that was is trained no more, and its samples
               fail: alone of those that were placed
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable

from pipelinerl.checker.history import Checkpoint, Entry, History

ENDS = ("trained", "filtered", "stale", "failed", "cancelled")

MAX_REFUSED = 3
"""Answers to a rollout that cannot be true, after which it fails without another."""


@dataclasses.dataclass(slots=True)
class Rollout:
    """What is known of a rollout at some point of the history."""

    group_id: int
    prompt_id: str
    attempt: int = -1
    is_out: bool = False
    """Its attempt was issued, and neither lost nor scored."""
    num_refused: int = 0
    """Attempts whose answers could not be true."""
    is_generated: bool = False
    num_observations: int = 0
    """Turns that the environment has replied to."""
    is_over: bool = False
    """It said that the episode is over, or failed."""
    early_stop_attempt: int | None = None
    """Its attempt about which a coin has fallen."""
    is_stopped: bool = False
    is_scored: bool = False
    is_prm_scored: bool = False
    is_group_scored: bool = False
    has_reward: bool = False
    oldest: int | None = None
    newest: int | None = None
    num_tokens: int = 0
    step: int | None = None
    is_packed: bool = False
    row: int | None = None
    """Of its step."""
    status: str = ""
    reason: str = ""


@dataclasses.dataclass(slots=True)
class Step:
    """What is known of a step."""

    assigned: set[str] = dataclasses.field(default_factory=set)
    rows: list[int] = dataclasses.field(default_factory=list)
    """Samples in each row."""
    num_packed: int = 0
    num_stopped: int = 0
    """Rollouts of its groups that were stopped early."""
    num_tokens: int = 0
    groups: set[int] = dataclasses.field(default_factory=set)
    closed_at: int | None = None
    quarantined_rows: set[int] = dataclasses.field(default_factory=set)
    """Rows that killed the trainer twice."""
    num_quarantined: int = 0
    """Samples in them."""
    digest: int = 0
    """Of the samples that are trained."""


class Checker:
    """Plays a history. `problems` then holds everything that breaks a promise."""

    def __init__(self, ledger_id: str) -> None:
        self.problems: list[str] = []
        self.rollouts: dict[str, Rollout] = {}
        self.steps: dict[int, Step] = collections.defaultdict(Step)
        self.num_starts = 0
        self.num_entries = 0
        self.num_done = 0
        self.num_retrained = 0
        self.num_reattached = 0
        self.trainer_starts: list[int] = []
        self.saved: dict[int, str] = {}
        """Commits of the checkpoints that were written and not discarded since, by version."""
        self.num_discarded = 0
        self.has_ended = False
        self._ledger_id = ledger_id
        self._settings: dict[str, int] = {}
        self._next_done = 0
        """The step that the trainer is to finish next."""
        self._open_step = 0
        self._deaths: collections.Counter[tuple[str, str]] = collections.Counter()
        self._quarantined: dict[str, int] = {}
        self._evaluated: set[int] = set()
        """By row of the source: number of the entry."""

    def replay(self, entries: Iterable[Entry]) -> None:
        last = 0
        for entry in entries:
            self._require(entry.seq > last, entry, f"comes after number {last}")
            last = entry.seq
            self.num_entries += 1
            handler = getattr(self, f"_on_{entry.kind}", None)
            if handler is None:
                self.problems.append(f"entry {entry.seq} is of the unknown kind {entry.kind!r}")
            elif entry.rollout_id is not None and entry.kind != "admitted":
                rollout = self.rollouts.get(entry.rollout_id)
                if rollout is None:
                    self._require(False, entry, "speaks of a rollout that was never admitted")
                else:
                    handler(entry, rollout)
            else:
                handler(entry)

    def counts(self) -> dict[str, int]:
        """The conservation identity's right side, and `admitted`."""
        statuses = collections.Counter(rollout.status or "in_flight" for rollout in self.rollouts.values())
        return {"admitted": len(self.rollouts)} | {name: statuses[name] for name in ("in_flight", *ENDS)}

    # --- the run ---

    def _on_began(self, entry: Entry) -> None:
        settings = json.loads(entry.reason or "{}")["settings"]
        for name in ("group_size", "groups_per_step", "adds_greedy"):
            self._require(self._settings.get(name, settings.get(name)) == settings.get(name), entry, f"changes {name} within a run")
        self._settings = settings
        self.num_starts += 1
        self.has_ended = False
        for rollout in self.rollouts.values():  # nobody is left who could take an answer
            rollout.is_out = rollout.is_generated = rollout.is_over = False
            rollout.num_observations = 0

    def _on_ended(self, entry: Entry) -> None:
        self.has_ended = True
        said, counted = json.loads(entry.reason or "{}")["counts"], self.counts()
        self._require(said == counted, entry, f"counts {said}, the history {counted}")
        self._require(not counted["in_flight"], entry, f"leaves {counted['in_flight']} rollouts in flight")

    # --- a rollout ---

    def _on_admitted(self, entry: Entry) -> None:
        assert entry.rollout_id is not None
        self._require(entry.rollout_id not in self.rollouts, entry, "is admitted twice")
        self._require(
            entry.rollout_id.partition("/")[0] == str(entry.group_id), entry, f"is named otherwise than its group {entry.group_id}"
        )
        num_siblings = self._settings["group_size"] + bool(self._settings.get("adds_greedy"))
        self._require(int(entry.rollout_id.partition("/")[2]) < num_siblings, entry, "is one sibling too many")
        self._refuse_quarantined(entry, entry.prompt_id or "")
        self.rollouts[entry.rollout_id] = Rollout(group_id=entry.group_id or 0, prompt_id=entry.prompt_id or "")

    def _on_issued(self, entry: Entry, rollout: Rollout) -> None:
        self._require(not rollout.status, entry, f"is issued after it was {rollout.status}")
        self._require(not rollout.is_out, entry, f"is issued while attempt {rollout.attempt} is out")
        self._require(not rollout.is_scored, entry, "is issued after it was scored")
        self._require(not rollout.is_over, entry, "is issued after its environment said that it is over")
        self._require(entry.attempt == rollout.attempt + 1, entry, f"is attempt {entry.attempt}, after {rollout.attempt}")
        self._refuse_quarantined(entry, rollout.prompt_id)
        rollout.attempt, rollout.is_out, rollout.is_generated, rollout.is_stopped = entry.attempt or 0, True, False, False

    def _on_adopted(self, entry: Entry, rollout: Rollout) -> None:
        self._require(not rollout.status and not rollout.is_scored and not rollout.is_out, entry, "is adopted, but was not in flight")
        self._require(entry.attempt == rollout.attempt, entry, f"adopts attempt {entry.attempt}, the last was {rollout.attempt}")
        self._refuse_quarantined(entry, rollout.prompt_id)
        rollout.is_out, rollout.is_generated = True, False
        self.num_reattached += 1

    def _on_lost(self, entry: Entry, rollout: Rollout) -> None:
        self._require(rollout.is_out and entry.attempt == rollout.attempt, entry, f"loses attempt {entry.attempt}, which is not out")
        self._require(not rollout.is_generated, entry, "loses what was generated")
        rollout.is_out = False
        rollout.num_refused += (entry.reason or "").startswith("refused: ")

    def _on_replied(self, entry: Entry, rollout: Rollout) -> None:
        num_turns = self._settings.get("max_turns") or 0
        is_expected = rollout.is_out and entry.attempt == rollout.attempt and not rollout.is_generated and not rollout.is_over
        self._require(is_expected, entry, f"replies to attempt {entry.attempt}, which is not out, or is over")
        self._require(entry.place == rollout.num_observations, entry, f"replies to turn {entry.place}, expected {rollout.num_observations}")
        self._require(rollout.num_observations + 1 < num_turns, entry, f"replies to turn {entry.place}, of at most {num_turns}")
        rollout.num_observations, rollout.is_over = rollout.num_observations + 1, entry.reason != "ok"

    def _on_flagged(self, entry: Entry, rollout: Rollout) -> None:
        below, seed = self._settings.get("stops_below"), self._settings.get("seed")
        self._require(below is not None, entry, "is flagged in a run that stops nothing early")
        self._require(entry.reward is not None and entry.reward < (below or 0.0), entry, f"is flagged at {entry.reward}, not below {below}")
        self._require(rollout.is_out and entry.attempt == rollout.attempt, entry, f"flags attempt {entry.attempt}, which is not out")
        self._require(rollout.early_stop_attempt != entry.attempt, entry, "is flagged a second time")
        said = json.loads(entry.reason or "{}")
        digest = hashlib.blake2b(f"{seed}/{entry.rollout_id}/{entry.attempt}".encode(), digest_size=8).digest()
        coin = (int.from_bytes(digest, "big") >> 11) / 2**53
        is_fair = 0.0 < said["probability"] <= 1.0 and said["stops"] == (coin >= said["probability"])
        self._require(is_fair, entry, f"stops: {said['stops']}, where the coin fell to {coin:.3f} of {said['probability']}")
        rollout.early_stop_attempt, rollout.is_stopped = entry.attempt, said["stops"]

    def _on_generated(self, entry: Entry, rollout: Rollout) -> None:
        is_given_up = _row(rollout.prompt_id) in self._quarantined or rollout.num_refused >= MAX_REFUSED
        is_refused = entry.reason == "error" and is_given_up and not rollout.is_out
        is_expected = rollout.is_out and entry.attempt == rollout.attempt and not rollout.is_generated
        self._require(is_expected or is_refused, entry, f"answers attempt {entry.attempt}, which is not out")
        rollout.attempt, rollout.is_out, rollout.is_generated = entry.attempt or 0, True, True
        rollout.oldest, rollout.newest, rollout.num_tokens = entry.oldest, entry.newest, entry.num_tokens or 0

    def _on_scored(self, entry: Entry, rollout: Rollout) -> None:
        self._require(rollout.is_out and rollout.is_generated, entry, "is scored before it was generated")
        self._require(entry.attempt == rollout.attempt, entry, f"scores attempt {entry.attempt}, but {rollout.attempt} is out")
        self._require((entry.reason == "ok") == (entry.reward is not None), entry, f"is {entry.reason} with the reward {entry.reward}")
        rollout.is_stopped &= not (entry.reason or "").startswith("error")  # an engine that fails may answer before it hears of the stop
        self._require(
            (entry.reason == "stopped") == rollout.is_stopped, entry, f"is scored as {entry.reason}; stopped early: {rollout.is_stopped}"
        )
        rollout.is_out, rollout.is_scored, rollout.has_reward = False, True, entry.reward is not None

    def _on_followed(self, entry: Entry, rollout: Rollout) -> None:
        self._require(bool(self._settings.get("follows_traces")), entry, "is followed in a run without a process reward model")
        self._require(rollout.is_scored and not rollout.is_prm_scored, entry, "is followed before its own score, or twice")
        self._require(rollout.step is None and not rollout.status, entry, "is followed after it was placed, or after its end")
        self._require(entry.attempt == rollout.attempt, entry, f"follows attempt {entry.attempt}, scored was {rollout.attempt}")
        self._require(rollout.has_reward or entry.reward is None, entry, "has a reward by its steps, and none of its own")
        rollout.is_prm_scored, rollout.has_reward = True, entry.reward is not None

    def _on_compared(self, entry: Entry, rollout: Rollout) -> None:
        self._require(bool(self._settings.get("compares_siblings")), entry, "is compared in a run that compares nothing")
        self._require(rollout.is_scored and not rollout.is_group_scored, entry, "is compared before its own score, or twice")
        self._require(rollout.step is None and not rollout.status, entry, "is compared after it was placed, or after its end")
        self._require(entry.attempt == rollout.attempt, entry, f"compares attempt {entry.attempt}, scored was {rollout.attempt}")
        self._require((entry.reason == "ok") == (entry.reward is not None), entry, f"is {entry.reason} with the reward {entry.reward}")
        self._require(rollout.has_reward or entry.reward is None, entry, "has a reward by comparison, and none of its own")
        rollout.is_group_scored, rollout.has_reward = True, entry.reward is not None

    def _on_placed(self, entry: Entry, rollout: Rollout) -> None:
        assert entry.step is not None
        self._require(rollout.has_reward and not rollout.status, entry, "is placed without a reward, or after its end")
        self._require(rollout.is_prm_scored or not self._settings.get("follows_traces"), entry, "is placed before its steps were scored")
        self._require(rollout.is_group_scored or not self._settings.get("compares_siblings"), entry, "is placed before it was compared")
        self._require(rollout.step is None, entry, f"is placed in step {entry.step}, and was in {rollout.step}")
        self._require(not self._is_greedy(entry), entry, "is placed, and is greedy")
        greedy = self.rollouts.get(f"{rollout.group_id}/{self._settings['group_size']}")
        has_baseline = not self._settings.get("adds_greedy") or (greedy is not None and greedy.has_reward)
        self._require(has_baseline, entry, "is placed without a greedy sibling that has a reward")
        self._require(entry.step == self._open_step, entry, f"is placed in step {entry.step}, but {self._open_step} is being filled")
        rollout.step = entry.step
        step = self.steps[entry.step]
        step.assigned.add(entry.rollout_id or "")
        step.groups.add(rollout.group_id)

    def _on_packed(self, entry: Entry, rollout: Rollout) -> None:
        assert entry.step is not None
        assert entry.row is not None
        step = self.steps[entry.step]
        self._require(rollout.step == entry.step and not rollout.is_packed, entry, "is packed where it was not placed, or twice")
        self._require(step.closed_at is None, entry, f"is packed in step {entry.step} after its seal")
        if entry.place == 0:
            self._require(entry.row == len(step.rows), entry, f"begins row {entry.row} of step {entry.step}, which has {len(step.rows)}")
            step.rows.append(0)
        self._require(
            entry.row == len(step.rows) - 1 and entry.place == step.rows[-1],
            entry,
            f"is not next with row {entry.row}, place {entry.place}",
        )
        step.rows[-1] += 1
        rollout.is_packed, rollout.row = True, entry.row
        step.num_packed += 1
        step.num_tokens += rollout.num_tokens
        step.digest += digest_of(entry.step, entry.rollout_id or "")

    def _on_trained(self, entry: Entry, rollout: Rollout) -> None:
        self._end(entry, rollout)
        step = self.steps[rollout.step if rollout.step is not None else -1]
        self._require(rollout.row not in step.quarantined_rows, entry, f"is trained in row {rollout.row}, which killed the trainer twice")
        self._require(rollout.is_packed and entry.step == rollout.step, entry, f"is trained in step {entry.step}, packed in {rollout.step}")
        self._require(step.closed_at is not None, entry, "is trained in a step without a seal")
        said = (entry.oldest, entry.newest, entry.num_tokens)
        known = (rollout.oldest, rollout.newest, rollout.num_tokens)
        self._require(said == known, entry, f"is trained with (oldest, newest, tokens) {said}, generated with {known}")
        if rollout.oldest is None or rollout.newest is None or entry.step is None:
            self._require(False, entry, "is trained without a token")
            return
        age = entry.step - rollout.oldest
        self._require(age <= self._settings["max_staleness"], entry, f"is trained {age} versions after its oldest token")
        self._require(rollout.oldest <= rollout.newest <= entry.step, entry, f"holds versions {rollout.oldest} to {rollout.newest}")

    def _on_not_trained(self, entry: Entry, rollout: Rollout) -> None:
        self._end(entry, rollout)
        self._require(bool(entry.reason), entry, "ends without a reason")
        is_refused = rollout.step is not None and rollout.row in self.steps[rollout.step].quarantined_rows
        may_be_placed = entry.kind == "cancelled" or (entry.kind == "failed" and is_refused)
        self._require(rollout.step is None or may_be_placed, entry, f"is {entry.kind} after it was placed")

    def _on_filtered(self, entry: Entry, rollout: Rollout) -> None:
        self._on_not_trained(entry, rollout)
        self._require(
            (entry.reason == "stopped early") == rollout.is_stopped, entry, f"{entry.reason}; stopped early: {rollout.is_stopped}"
        )
        self._require((entry.reason == "greedy baseline") == self._is_greedy(entry), entry, f"is filtered as {entry.reason}")
        if entry.step is None:
            return
        self._require(entry.reason == "stopped early", entry, f"counts in step {entry.step}, and was not stopped early")
        self._require(entry.step == self._open_step, entry, f"counts in step {entry.step}, but {self._open_step} is being filled")
        step = self.steps[entry.step]
        step.num_stopped += 1
        step.groups.add(rollout.group_id)

    def _on_failed(self, entry: Entry, rollout: Rollout) -> None:
        self._on_not_trained(entry, rollout)
        self._require(not self._is_greedy(entry) or not rollout.has_reward, entry, "fails, is greedy, and has a reward")
        if rollout.step is not None:
            step = self.steps[rollout.step]
            step.num_quarantined += 1
            step.digest -= digest_of(rollout.step, entry.rollout_id or "")

    def _on_stale(self, entry: Entry, rollout: Rollout) -> None:
        self._on_not_trained(entry, rollout)
        self._require(not self._is_greedy(entry), entry, "is stale, and is greedy")

    _on_cancelled = _on_not_trained

    def _on_revived(self, entry: Entry, rollout: Rollout) -> None:
        self._require(rollout.status == "cancelled" and rollout.reason == "the run ended", entry, f"is revived, and was {rollout.status}")
        rollout.status = rollout.reason = ""

    def _is_greedy(self, entry: Entry) -> bool:
        """True for the sibling after those that are sampled, in a run that adds one."""
        return int((entry.rollout_id or "").partition("/")[2]) >= self._settings["group_size"]

    def _end(self, entry: Entry, rollout: Rollout) -> None:
        self._require(not rollout.status, entry, f"ends as {entry.kind}, and was {rollout.status}")
        rollout.status, rollout.reason = entry.kind, entry.reason or ""
        rollout.is_out = False

    # --- a step ---

    def _on_sealed(self, entry: Entry) -> None:
        assert entry.step is not None
        step = self.steps[entry.step]
        self._require(entry.step == self._open_step, entry, f"seals step {entry.step}, but {self._open_step} is being filled")
        self._open_step += 1
        step.closed_at = entry.seq
        said = (entry.row, entry.place, entry.num_tokens)
        found = (len(step.rows), step.num_packed + step.num_stopped, step.num_tokens)
        self._require(said == found, entry, f"seals (rows, samples, tokens) {said}, packed were {found}")
        self._require(
            step.num_packed == len(step.assigned), entry, f"seals {step.num_packed} packed samples of {len(step.assigned)} placed"
        )
        expected = self._settings["groups_per_step"]
        self._require(len(step.groups) == expected, entry, f"seals {len(step.groups)} groups, expected {expected}")

    def _on_done(self, entry: Entry) -> None:
        assert entry.step is not None
        self._require(entry.step == self.num_done, entry, f"finishes step {entry.step}, expected {self.num_done}")
        step = self.steps[entry.step]
        left = [
            name
            for name in step.assigned
            if self.rollouts[name].status != "trained" and self.rollouts[name].row not in step.quarantined_rows
        ]
        self._require(not left, entry, f"finishes step {entry.step} without {left[:3]}")
        self.num_done += 1
        self._next_done = entry.step + 1

    def _on_replayed(self, entry: Entry) -> None:
        assert entry.step is not None
        self._require(entry.step == self._next_done < self.num_done, entry, f"replays step {entry.step}, expected {self._next_done}")
        self.num_retrained += 1
        self._next_done = entry.step + 1

    def _on_restarted(self, entry: Entry) -> None:
        assert entry.step is not None
        newest = max(self.saved, default=0)
        self._require(entry.step == newest, entry, f"starts the trainer from version {entry.step}, the newest checkpoint is {newest}")
        self.trainer_starts.append(entry.step)
        self._next_done = entry.step

    def _on_outlived(self, entry: Entry) -> None:
        assert entry.step is not None
        newest = max(self.saved, default=0)
        self._require(newest < entry.step <= self.num_done, entry, f"goes on at {entry.step}, saved {newest}, done {self.num_done}")
        self._next_done = entry.step

    def _on_saved(self, entry: Entry) -> None:
        assert entry.step is not None
        self._require(
            entry.reason == self._commit_of(entry.step), entry, f"says commit {entry.reason}, expected {self._commit_of(entry.step)}"
        )
        self._require(entry.step <= self.num_done, entry, f"saves version {entry.step} after {self.num_done} steps")
        self.saved[entry.step] = entry.reason or ""

    def _on_discarded(self, entry: Entry) -> None:
        assert entry.step is not None
        self._require(entry.step in self.saved, entry, f"discards a checkpoint of version {entry.step}, which was not saved")
        self._require(entry.step == max(self.saved, default=None), entry, "discards a checkpoint that is not the newest")
        self._require(bool(entry.reason), entry, "does not say why a checkpoint is used no more")
        self.saved.pop(entry.step, None)
        self.num_discarded += 1

    def _on_unsaved(self, entry: Entry) -> None:
        self._require(bool(entry.reason), entry, "does not say why a checkpoint was not written")

    # --- quarantine ---

    def _on_suspected(self, entry: Entry) -> None:
        role, row = (entry.peer or "").partition("-")[0], entry.reason or ""
        self._deaths[role, row] += 1

    def _on_cleared(self, entry: Entry) -> None:
        role, row = (entry.peer or "").partition("-")[0], entry.reason or ""
        self._require(self._deaths[role, row] == 1, entry, f"clears row {row}, which was there at {self._deaths[role, row]} deaths")
        self._deaths[role, row] = 0

    def _on_quarantined(self, entry: Entry) -> None:
        role, row = (entry.peer or "").partition("-")[0], entry.reason or ""
        self._require(self._deaths[role, row] == 2, entry, f"quarantines row {row} after {self._deaths[role, row]} deaths")
        self._quarantined[row] = entry.seq
        if entry.step is not None and entry.row is not None:
            self._require(row == f"{entry.step}/{entry.row}" and entry.step >= self.num_done, entry, f"refuses row {entry.row} as {row}")
            self.steps[entry.step].quarantined_rows.add(entry.row)

    def _on_skipped(self, entry: Entry) -> None:
        self._require(_row(entry.prompt_id or "") in self._quarantined, entry, "skips a prompt that is not quarantined")

    def _on_evaluated(self, entry: Entry) -> None:
        self._require((entry.step or 0) not in self._evaluated, entry, f"evaluates version {entry.step} a second time")
        self._evaluated.add(entry.step or 0)

    def _on_baselines(self, entry: Entry) -> None:
        means = json.loads(entry.reason or "{}")
        self._require(all(isinstance(mean, float) for mean in means.values()), entry, f"remembers {means}")

    def _refuse_quarantined(self, entry: Entry, prompt_id: str) -> None:
        self._require(_row(prompt_id) not in self._quarantined, entry, f"asks for the quarantined prompt {prompt_id}")

    # --- checkpoints ---

    def check_checkpoints(self, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Hold the checkpoints on disk against the history."""
        for checkpoint in checkpoints:
            version = checkpoint.manifest["version"]
            expected = sum(self.steps[step].digest for step in range(version)) % 2**64
            num_samples = sum(self.steps[step].num_packed - self.steps[step].num_quarantined for step in range(version))
            if checkpoint.missing:
                self.problems.append(f"{checkpoint.name} lacks {', '.join(checkpoint.missing)}, or not as written")
            if checkpoint.manifest["commit"] != self._commit_of(version):
                self.problems.append(f"{checkpoint.name} names commit {checkpoint.manifest['commit']}, expected {self._commit_of(version)}")
            said, found = (checkpoint.manifest["num_samples"], checkpoint.manifest["samples"]), (num_samples, f"{expected:016x}")
            if said != found:
                self.problems.append(
                    f"{checkpoint.name} was trained on (samples, digest) {said}, the ledger has {found} before that version"
                )
        newest, on_disk = max(self.saved, default=0), max((one.manifest["version"] for one in checkpoints), default=0)
        if newest > on_disk:
            self.problems.append(f"the ledger knows a checkpoint of version {newest}, on disk is {on_disk or 'none'}")

        if self.has_ended and on_disk > self.num_done:
            newest_one, said = checkpoints[-1], self.counts()["trained"]
            held = newest_one.manifest["num_samples"]
            self.problems.append(
                f"the run ended saying {said} trained in {self.num_done} steps, but {newest_one.name} holds {held}: resume it"
            )

    def _commit_of(self, version: int) -> str | None:
        """What a checkpoint of `version` must name."""
        closed_at = self.steps[version - 1].closed_at
        return None if closed_at is None else f"{self._ledger_id}:{closed_at}"

    def _require(self, holds: bool, entry: Entry, otherwise: str) -> None:
        if not holds:
            self.problems.append(f"entry {entry.seq} ({entry.kind} {entry.rollout_id or ''}) {otherwise}")


def check_history(history: History, *, with_checkpoints: bool = True) -> Checker:
    """Play a history and hold the checkpoints against it."""
    checker = Checker(history.ledger_id)
    checker.replay(history.entries)
    if with_checkpoints:
        checker.check_checkpoints(history.checkpoints)
    checker.problems += history.damage
    return checker


def digest_of(step: int, rollout_id: str) -> int:
    """A sample's part in a checkpoint's digest, which is their sum modulo 2^64, so that the order of training does not matter."""
    return int.from_bytes(hashlib.blake2b(f"{step}/{rollout_id}".encode(), digest_size=8).digest(), "little")


def _row(prompt_id: str) -> str:
    return prompt_id.rpartition(":")[2]
