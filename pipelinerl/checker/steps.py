"""Promises about a run, its steps and its checkpoints: one method for each kind of entry that is about no rollout, and for admissions."""

from __future__ import annotations

import json

from pipelinerl.checker.history import Checkpoint, Entry
from pipelinerl.checker.state import Rollout, RunState, row_of


class RunInvariants:
    """The promises about a run, its steps, its quarantine and its checkpoints."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._require = run.require

    # --- the run ---

    def on_began(self, entry: Entry) -> None:
        settings = json.loads(entry.data or "{}")["settings"]
        for name in ("group_size", "groups_per_step", "has_greedy_baseline"):
            self._require(self._run.settings.get(name, settings.get(name)) == settings.get(name), f"changes {name} within a run")
        self._run.settings = settings
        self._run.num_starts += 1
        self._run.has_ended = False
        for rollout in self._run.rollouts.values():  # nobody is left who could take an answer
            rollout.is_out = rollout.is_generated = rollout.is_over = False
            rollout.num_observations, rollout.has_environment = 0, False

    def on_ended(self, entry: Entry) -> None:
        self._run.has_ended = True
        said, counted = json.loads(entry.data or "{}"), self._run.counts()
        self._require(said == counted, f"counts {said}, the history {counted}")
        self._require(not counted["in_flight"], f"leaves {counted['in_flight']} rollouts in flight")

    def on_admitted(self, entry: Entry) -> None:
        assert entry.rollout_id is not None
        self._require(entry.rollout_id not in self._run.rollouts, "is admitted twice")
        self._require(entry.rollout_id.partition("/")[0] == str(entry.group_id), f"is named otherwise than its group {entry.group_id}")
        num_siblings = self._run.settings["group_size"] + bool(self._run.settings.get("has_greedy_baseline"))
        self._require(int(entry.rollout_id.partition("/")[2]) < num_siblings, "is one sibling too many")
        self._run.refuse_quarantined(entry.prompt_id or "")
        self._run.rollouts[entry.rollout_id] = Rollout(group_id=entry.group_id or 0, prompt_id=entry.prompt_id or "")

    # --- a step ---

    def on_closed(self, entry: Entry) -> None:
        assert entry.step is not None
        step = self._run.steps[entry.step]
        self._require(entry.step == self._run.open_step, f"closes step {entry.step}, but {self._run.open_step} is being filled")
        self._run.open_step += 1
        step.closed_at = entry.seq
        said = (entry.num_rows, entry.num_samples, entry.num_tokens)
        found = (len(step.rows), step.num_packed + step.num_stopped, step.num_tokens)
        if num_demonstrations := json.loads(entry.data or "{}").get("num_demonstrations"):
            self._require(found == (0, 0, 0), f"closes a step of demonstrations with (rows, samples, tokens) {found} of rollouts")
            found = (0, num_demonstrations, entry.num_tokens)  # their tokens are in no history
        self._require(said == found, f"closes (rows, samples, tokens) {said}, packed were {found}")
        self._require(step.num_packed == len(step.assigned), f"closes {step.num_packed} packed samples of {len(step.assigned)} assigned")
        expected = self._run.settings["groups_per_step"]  # None where a script says what a step is made of
        self._require(expected in (None, len(step.groups)), f"closes {len(step.groups)} groups, expected {expected}")

    def on_done(self, entry: Entry) -> None:
        assert entry.step is not None
        self._require(entry.step == self._run.num_done, f"finishes step {entry.step}, expected {self._run.num_done}")
        step = self._run.steps[entry.step]
        left = [
            name
            for name in step.assigned
            if self._run.rollouts[name].status != "trained" and self._run.rollouts[name].row not in step.quarantined_rows
        ]
        self._require(not left, f"finishes step {entry.step} without {left[:3]}")
        self._run.num_done += 1
        self._run.next_done = entry.step + 1

    def on_retrained(self, entry: Entry) -> None:
        assert entry.step is not None
        self._require(entry.step == self._run.next_done < self._run.num_done, f"trains step {entry.step}, expected {self._run.next_done}")
        self._run.num_retrained += 1
        self._run.next_done = entry.step + 1

    def on_restarted(self, entry: Entry) -> None:
        assert entry.version is not None
        newest = max(self._run.saved, default=0)
        self._require(entry.version == newest, f"starts the trainer from version {entry.version}, the newest checkpoint is {newest}")
        self._run.trainer_starts.append(entry.version)
        self._run.next_done = entry.version

    def on_survived(self, entry: Entry) -> None:
        assert entry.version is not None
        newest = max(self._run.saved, default=0)
        self._require(
            newest < entry.version <= self._run.num_done, f"goes on at {entry.version}, saved {newest}, done {self._run.num_done}"
        )
        self._run.next_done = entry.version

    def on_saved(self, entry: Entry) -> None:
        assert entry.version is not None
        self._require(
            entry.commit_id == self._run.commit_of(entry.version),
            f"says commit {entry.commit_id}, expected {self._run.commit_of(entry.version)}",
        )
        self._require(entry.version <= self._run.num_done, f"saves version {entry.version} after {self._run.num_done} steps")
        self._run.saved[entry.version] = entry.commit_id or ""

    def on_discarded(self, entry: Entry) -> None:
        assert entry.version is not None
        self._require(entry.version in self._run.saved, f"discards a checkpoint of version {entry.version}, which was not saved")
        self._require(entry.version == max(self._run.saved, default=None), "discards a checkpoint that is not the newest")
        self._require(bool(entry.reason), "does not say why a checkpoint is used no more")
        self._run.saved.pop(entry.version, None)
        self._run.num_discarded += 1

    def on_unsaved(self, entry: Entry) -> None:
        self._require(bool(entry.reason), "does not say why a checkpoint was not written")

    # --- quarantine ---

    def on_suspected(self, entry: Entry) -> None:
        self._run.deaths[_death(entry)] += 1

    def on_cleared(self, entry: Entry) -> None:
        num_deaths = self._run.deaths[_death(entry)]
        self._require(num_deaths == 1, f"clears row {entry.suspect}, which was there at {num_deaths} deaths")
        self._run.deaths[_death(entry)] = 0

    def on_quarantined(self, entry: Entry) -> None:
        num_deaths, suspect = self._run.deaths[_death(entry)], entry.suspect or ""
        self._require(num_deaths == 2, f"quarantines row {suspect} after {num_deaths} deaths")
        self._run.quarantined[suspect] = entry.seq
        if entry.step is not None and entry.row is not None:
            is_ahead = suspect == f"{entry.step}/{entry.row}" and entry.step >= self._run.num_done
            self._require(is_ahead, f"refuses row {entry.row} as {suspect}")
            self._run.steps[entry.step].quarantined_rows.add(entry.row)

    def on_skipped(self, entry: Entry) -> None:
        self._require(row_of(entry.prompt_id or "") in self._run.quarantined, "skips a prompt that is not quarantined")

    def on_evaluated(self, entry: Entry) -> None:
        self._require((entry.version or 0) not in self._run.evaluated, f"evaluates version {entry.version} a second time")
        self._run.evaluated.add(entry.version or 0)

    def on_baselines(self, entry: Entry) -> None:
        means = json.loads(entry.data or "{}")
        self._require(all(isinstance(mean, float) for mean in means.values()), f"remembers {means}")

    # --- checkpoints ---

    def check_checkpoints(self, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Hold the checkpoints on disk against the history."""
        for checkpoint in checkpoints:
            version = checkpoint.manifest["version"]
            expected = sum(self._run.steps[step].digest for step in range(version)) % 2**64
            num_samples = sum(self._run.steps[step].num_packed - self._run.steps[step].num_quarantined for step in range(version))
            if checkpoint.missing:
                self._run.problems.append(f"{checkpoint.name} lacks {', '.join(checkpoint.missing)}, or not as written")
            if checkpoint.manifest["commit"] != self._run.commit_of(version):
                self._run.problems.append(
                    f"{checkpoint.name} names commit {checkpoint.manifest['commit']}, expected {self._run.commit_of(version)}"
                )
            said, found = (checkpoint.manifest["num_samples"], checkpoint.manifest["samples"]), (num_samples, f"{expected:016x}")
            if said != found:
                self._run.problems.append(
                    f"{checkpoint.name} was trained on (samples, digest) {said}, the ledger has {found} before that version"
                )
        newest, on_disk = max(self._run.saved, default=0), max((one.manifest["version"] for one in checkpoints), default=0)
        if newest > on_disk:
            self._run.problems.append(f"the ledger knows a checkpoint of version {newest}, on disk is {on_disk or 'none'}")

        if self._run.has_ended and on_disk > self._run.num_done:
            newest_one, said = checkpoints[-1], self._run.counts()["trained"]
            held = newest_one.manifest["num_samples"]
            self._run.problems.append(
                f"the run ended saying {said} trained in {self._run.num_done} steps, but {newest_one.name} holds {held}: resume it"
            )


def _death(entry: Entry) -> tuple[str, str]:
    """Return the role of the peer that died, and who was there."""
    return (entry.peer or "").partition("-")[0], entry.suspect or ""
