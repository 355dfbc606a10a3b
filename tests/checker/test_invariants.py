"""The checker finds what it is there to find: a history worked out by hand passes, and every way of breaking it is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from pipelinerl.checker.history import Checkpoint, Entry, History
from pipelinerl.checker.invariants import check_history
from pipelinerl.checker.state import RunState, digest_of

SETTINGS = {"group_size": 2, "groups_per_step": 1, "max_row_tokens": 100, "max_staleness": 1, "num_steps": 2}
Line = dict[str, Any]


def began() -> Line:
    return {"kind": "began", "data": json.dumps({"settings": SETTINGS, "unix_s": 0.0})}


def rollout(name: str, *, version: int = 0, attempt: int = 0) -> list[Line]:
    """From the engine to its score."""
    return [
        {"kind": "issued", "rollout_id": name, "attempt": attempt, "peer": "engine-0", "version": version},
        {
            "kind": "generated",
            "rollout_id": name,
            "attempt": attempt,
            "oldest_version": version,
            "newest_version": version,
            "num_tokens": 3,
            "reason": "stop",
        },
        {"kind": "scored", "rollout_id": name, "attempt": attempt, "reason": "ok", "reward": 1.0},
    ]


def admitted(name: str) -> Line:
    group_id = int(name.partition("/")[0])
    return {"kind": "admitted", "rollout_id": name, "group_id": group_id, "prompt_id": f"0:{group_id + 10}"}


def placed(name: str, *, step: int, row: int, place: int) -> list[Line]:
    return [
        {"kind": "assigned", "rollout_id": name, "step": step},
        {"kind": "packed", "rollout_id": name, "step": step, "row": row, "position": place},
    ]


def trained(name: str, *, step: int, version: int = 0) -> Line:
    return {"kind": "trained", "rollout_id": name, "step": step, "oldest_version": version, "newest_version": version, "num_tokens": 3}


def whole_step(step: int) -> list[Line]:
    """A group of two, in one row."""
    names = [f"{step}/0", f"{step}/1"]
    return [
        *(admitted(name) for name in names),
        *(line for name in names for line in rollout(name)),
        *({"kind": "assigned", "rollout_id": name, "step": step} for name in names),
        *({"kind": "packed", "rollout_id": name, "step": step, "row": 0, "position": place} for place, name in enumerate(names)),
        {"kind": "closed", "step": step, "num_rows": 1, "num_samples": 2, "num_tokens": 6},
        *(trained(name, step=step) for name in names),
        {"kind": "done", "step": step},
    ]


def good() -> list[Line]:
    """Two steps; the trainer is killed after the first checkpoint and does step 1 once more; a third group is cancelled at the end."""
    lines = [began(), *whole_step(0)]
    lines.append({"kind": "saved", "version": 1, "commit_id": f"me:{number_of(lines, 'closed')}"})
    lines += [*whole_step(1), {"kind": "restarted", "version": 1}, {"kind": "retrained", "step": 1}, admitted("2/0"), admitted("2/1")]
    lines += [{"kind": "cancelled", "rollout_id": f"2/{sibling}", "reason": "the run ended"} for sibling in range(2)]
    counts = {"admitted": 6, "in_flight": 0, "trained": 4, "filtered": 0, "stale": 0, "failed": 0, "cancelled": 2}
    return [*lines, {"kind": "ended", "reason": "finished", "data": json.dumps(counts)}]


def number_of(lines: list[Line], kind: str, rollout_id: str | None = None) -> int:
    """The entry's number of the first line of a kind."""
    return 1 + next(i for i, line in enumerate(lines) if line["kind"] == kind and rollout_id in (None, line.get("rollout_id")))


def check(lines: list[Line], *checkpoints: Checkpoint) -> RunState:
    fields = {field.name for field in dataclasses.fields(Entry)}
    entries = (Entry(**(dict.fromkeys(fields) | {"seq": seq, "t": float(seq)} | line)) for seq, line in enumerate(lines, start=1))  # pyright: ignore[reportArgumentType]
    return check_history(History(ledger_id="me", entries=entries, checkpoints=checkpoints))


def checkpoint(lines: list[Line], *, missing: tuple[str, ...] = (), **changes: Any) -> Checkpoint:
    """Of version 1."""
    digest = sum(digest_of(0, name) for name in ("0/0", "0/1")) % 2**64
    commit = f"me:{number_of(lines, 'closed')}"
    manifest = {"version": 1, "commit": commit, "num_samples": 2, "samples": f"{digest:016x}", "files": {}} | changes
    return Checkpoint(name="step-000001", manifest=manifest, missing=missing)


def test_a_good_history_breaks_no_promise():
    checker = check(good(), checkpoint(good()))
    assert checker.problems == []
    assert (checker.num_done, checker.num_retrained, checker.num_starts, checker.trainer_starts) == (2, 1, 1, [1])
    assert checker.counts()["trained"] == 4


def test_a_rollout_may_be_issued_again_and_a_run_go_on():
    again = [{"kind": "lost", "rollout_id": "0/0", "attempt": 0, "reason": "engine-0 ended"}, *rollout("0/0", attempt=1)]
    lines = good()
    at = number_of(lines, "issued", "0/0")
    lines[at : at + 2] = again
    saved = next(line for line in lines if line["kind"] == "saved")
    saved["commit_id"] = f"me:{number_of(lines, 'closed')}"
    revived = [{"kind": "revived", "rollout_id": f"2/{sibling}"} for sibling in range(2)]
    on = [*lines, began(), *revived, *rollout("2/0")]
    assert check(on, checkpoint(lines)).problems == []
    issued, *answered = rollout("2/1")
    survived = [began(), {"kind": "survived", "version": 2}, {"kind": "reattached", "rollout_id": "2/1", "attempt": 0}]
    assert check([*on, issued, *survived, *answered], checkpoint(lines)).problems == []


def compares(lines: list[Line]) -> None:
    """Make it a run that compares siblings."""
    lines[0] = lines[0] | {"data": json.dumps({"settings": SETTINGS | {"has_group_rewards": True}, "unix_s": 0.0})}
    for step in range(2):
        at = number_of(lines, "assigned", f"{step}/0") - 1
        lines[at:at] = [
            {"kind": "group_scored", "rollout_id": f"{step}/{place}", "attempt": 0, "reason": "ok", "reward": 2.0} for place in range(2)
        ]
    saved = next(line for line in lines if line["kind"] == "saved")
    saved["commit_id"] = f"me:{number_of(lines, 'closed')}"


def test_siblings_may_be_compared_once_each_is_scored():
    lines = good()
    compares(lines)
    assert check(lines, checkpoint(lines)).problems == []


def replace(kind: str, of: str | None = None, **changes: Any) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        at = number_of(lines, kind, of) - 1
        lines[at] = lines[at] | changes

    return change


def repeat(kind: str, of: str | None = None, **changes: Any) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        at = number_of(lines, kind, of)
        lines.insert(at, lines[at - 1] | changes)

    return change


def remove(kind: str, of: str | None = None) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        del lines[number_of(lines, kind, of) - 1]

    return change


def both(*changes: Callable[[list[Line]], None]) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        for one in changes:
            one(lines)

    return change


def append(*more: Line) -> Callable[[list[Line]], None]:
    return lambda lines: lines.extend(more)


BROKEN: dict[str, tuple[Callable[[list[Line]], None], str]] = {
    "an attempt that was over is reattached": (append({"kind": "reattached", "rollout_id": "2/0", "attempt": -1}), "was not in flight"),
    "an attempt is reattached that was never out": (
        both(remove("cancelled", "2/0"), append({"kind": "reattached", "rollout_id": "2/0", "attempt": 0})),
        "reattaches attempt 0, the last was -1",
    ),
    "a trainer survives with steps it was never given": (append({"kind": "survived", "version": 3}), "goes on at 3, saved 1, done 2"),
    "a rollout is lost": (remove("cancelled", "2/0"), "in flight"),
    "a rollout ends twice": (repeat("cancelled", "2/0"), "ends as cancelled, and was cancelled"),
    "a rollout is admitted twice": (repeat("admitted", "0/0"), "is admitted twice"),
    "a rollout nobody admitted": (append({"kind": "failed", "rollout_id": "9/9", "reason": "x"}), "never admitted"),
    "a sibling too many": (repeat("admitted", "2/0", rollout_id="2/2"), "one sibling too many"),
    "a sample is trained twice": (repeat("trained", "0/0"), "ends as trained, and was trained"),
    "a sample is assigned to two steps": (repeat("assigned", "0/0", step=1), "is assigned to step 1, and was in 0"),
    "a sample is packed twice": (repeat("packed", "0/1", position=2), "packed where it was not assigned, or twice"),
    "a position is skipped": (replace("packed", "0/1", position=2), "is not next with row 0, position 2"),
    "a sample is not packed": (remove("packed", "0/1"), "closes"),
    "a step is done twice": (repeat("done"), "finishes step 0, expected 1"),
    "a step is trained again without a restart": (remove("restarted"), "trains step 1"),
    "a restart from too old a checkpoint": (replace("restarted", version=0), "from version 0, the newest checkpoint is 1"),
    "a sample goes untrained": (remove("trained", "0/1"), "finishes step 0 without"),
    "an attempt is skipped": (replace("issued", "0/0", attempt=1), "is attempt 1, after -1"),
    "two attempts are out": (repeat("issued", "0/0", attempt=1), "while attempt 0 is out"),
    "an answer of an older attempt is used": (replace("generated", "0/0", attempt=7), "answers attempt 7"),
    "a score of an older attempt is used": (replace("scored", "0/0", attempt=7), "scores attempt 7"),
    "a failed score has a reward": (replace("scored", "0/0", reason="timeout"), "is timeout with the reward 1.0"),
    "a sample without a reward is trained": (replace("scored", "0/0", reason="timeout", reward=None), "assigned without a reward"),
    "a token is too old": (
        both(replace("generated", "1/0", oldest_version=-1), replace("trained", "1/0", oldest_version=-1)),
        "2 versions after",
    ),
    "a token is of the future": (
        both(replace("generated", "1/0", newest_version=2), replace("trained", "1/0", newest_version=2)),
        "holds versions 0 to 2",
    ),
    "other tokens are trained than generated": (replace("trained", "0/0", num_tokens=4), "is trained with"),
    "a closed step counts wrongly": (replace("closed", num_tokens=7), "closes (rows, samples, tokens)"),
    "a batch is too large": (
        lambda lines: lines.insert(0, lines.pop(0) | {"data": json.dumps({"settings": SETTINGS | {"groups_per_step": 2}, "unix_s": 0})}),
        "closes 1 groups, expected 2",
    ),
    "a checkpoint names another commit": (replace("saved", commit_id="me:3"), "says commit me:3"),
    "the counts are made up": (replace("ended", data="{}"), "counts {}"),
    "what was trained is revived": (append({"kind": "revived", "rollout_id": "0/0"}), "is revived, and was trained"),
    "an end without a reason": (replace("cancelled", "2/0", reason=None), "ends without a reason"),
    "a quarantined prompt is asked for": (
        append(
            {"kind": "suspected", "peer": "engine-0", "suspect": "13"},
            {"kind": "suspected", "peer": "engine-1", "suspect": "13"},
            {"kind": "quarantined", "peer": "engine-1", "suspect": "13"},
            admitted("3/0"),
        ),
        "asks for the quarantined prompt 0:13",
    ),
    "a quarantine after one death": (
        append({"kind": "suspected", "peer": "engine-0", "suspect": "5"}, {"kind": "quarantined", "peer": "engine-0", "suspect": "5"}),
        "quarantines row 5 after 1 deaths",
    ),
    "a sample is assigned before its group was scored": (
        both(compares, remove("group_scored", "0/1")),
        "is assigned before it was compared",
    ),
    "a sample is compared twice": (both(compares, repeat("group_scored", "0/0")), "is compared before its own score, or twice"),
    "a comparison makes up for a failed score": (
        both(compares, replace("scored", "0/0", reason="timeout", reward=None)),
        "has a reward by comparison, and none of its own",
    ),
    "a sample without a reward by comparison is trained": (
        both(compares, replace("group_scored", "0/0", reason="timeout", reward=None)),
        "assigned without a reward",
    ),
    "a comparison nobody asked for": (
        append({"kind": "group_scored", "rollout_id": "2/0", "attempt": 0, "reason": "ok", "reward": 1.0}),
        "in a run that compares nothing",
    ),
    "an unknown entry": (append({"kind": "mystery"}), "unknown kind 'mystery'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_found_and_named(what: str):
    change, expected = BROKEN[what]
    lines = good()
    change(lines)
    problems = check(lines).problems
    assert [problem for problem in problems if expected in problem], problems


def test_a_checkpoint_is_held_against_the_history():
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"commit": "other:9"}, "names commit other:9"),
        ({"num_samples": 3}, "was trained on"),
        ({"samples": "0" * 16}, "was trained on"),
        ({"missing": ("__0_0.distcp",)}, "lacks __0_0.distcp"),
    )
    for changes, expected in cases:
        (problem,) = check(good(), checkpoint(good(), **changes)).problems
        assert expected in problem


def test_a_checkpoint_that_is_gone_is_missed():
    assert check(good()).problems == ["the ledger knows a checkpoint of version 1, on disk is none"]


def early_stop(name: str, *, stops: bool, **changes: Any) -> Line:
    """At a probability of 0.2: the coin of 0/1 falls to 0.99 (seed 3)."""
    data = json.dumps({"stops": stops, "probability": changes.pop("probability", 0.2)})
    return {"kind": "early_stop", "rollout_id": name, "attempt": 0, "prm_step": 1, "score": 0.1, "data": data} | changes


def stops() -> list[Line]:
    """One step of one group: a rollout goes on to be trained, its sibling is stopped early."""
    issued, generated, scored = rollout("0/1")
    settings = SETTINGS | {"has_prm": True, "early_stop_threshold": 0.3, "seed": 3}
    return [
        {"kind": "began", "data": json.dumps({"settings": settings, "unix_s": 0.0})},
        admitted("0/0"),
        admitted("0/1"),
        *rollout("0/0"),
        issued,
        early_stop("0/1", stops=True),
        generated | {"reason": "cancelled"},
        scored | {"reason": "stopped", "reward": None},
        {"kind": "prm_scored", "rollout_id": "0/0", "attempt": 0, "reason": "ok", "reward": 1.0},
        {"kind": "prm_scored", "rollout_id": "0/1", "attempt": 0, "reason": "stopped"},
        {"kind": "filtered", "rollout_id": "0/1", "reason": "stopped early", "step": 0},
        *placed("0/0", step=0, row=0, place=0),
        {"kind": "closed", "step": 0, "num_rows": 1, "num_samples": 2, "num_tokens": 3},
        trained("0/0", step=0),
        {"kind": "done", "step": 0},
    ]


def changed(lines: list[Line], kind: str, rollout_id: str | None = None, **changes: Any) -> list[Line]:
    at = number_of(lines, kind, rollout_id) - 1
    return [*lines[:at], lines[at] | changes, *lines[at + 1 :]]


def moved(lines: list[Line], kind: str, rollout_id: str, *, to: int) -> list[Line]:
    line = lines.pop(number_of(lines, kind, rollout_id) - 1)
    return [*lines[:to], line, *lines[to:]]


def test_a_history_with_a_rollout_stopped_early_breaks_no_promise():
    assert check(stops()).problems == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (changed(stops(), "early_stop", data=json.dumps({"stops": False, "probability": 0.2})), "where the coin fell to"),
        (changed(stops(), "early_stop", data=json.dumps({"stops": True, "probability": 0.0})), "where the coin fell to"),
        (changed(stops(), "early_stop", attempt=1), "which is not out"),
        (changed(stops(), "early_stop", score=0.3), "not below 0.3"),
        ([*stops()[:8], early_stop("0/1", stops=True), *stops()[8:]], "a second time"),
        (moved(stops(), "early_stop", "0/1", to=9), "which is not out"),
        (changed(stops(), "scored", "0/1", reason="ok", reward=1.0), "is scored as ok; stopped early: True"),
        (changed(stops(), "scored", "0/0", reason="stopped", reward=None), "is scored as stopped; stopped early: False"),
        (changed(stops(), "filtered", reason="zero_variance"), "counts in step 0, and was not stopped early"),
        (changed(stops(), "filtered", step=None), "closes (rows, samples, tokens)"),
        (changed(stops(), "filtered", step=1), "counts in step 1, but 0 is being filled"),
        (changed(stops(), "closed", num_samples=1), "closes (rows, samples, tokens)"),
        (changed(stops(), "began", data=json.dumps({"settings": SETTINGS | {"has_prm": True}})), "stops nothing early"),
        (changed(stops(), "prm_scored", "0/0", attempt=1), "scores the steps of attempt 1, scored was 0"),
        (changed(stops(), "prm_scored", "0/1", reason="ok", reward=1.0), "has a reward by its steps, and none of its own"),
        ([*stops()[:11], stops()[10], *stops()[11:]], "or twice"),
        (moved(stops(), "prm_scored", "0/0", to=4), "is scored step by step before its own score"),
        ([line for line in stops() if (line["kind"], line.get("rollout_id")) != ("prm_scored", "0/0")], "before its steps were scored"),
        ([*stops(), stops()[10]], "after it was assigned, or after its end"),
    ],
)
def test_every_broken_promise_about_steps_and_stops_is_named(lines: list[Line], problem: str):
    assert any(problem in found for found in check(lines).problems), check(lines).problems


def remax() -> list[Line]:
    """One step of one group of two, and of a greedy sibling."""
    line = {"kind": "began", "data": json.dumps({"settings": SETTINGS | {"has_greedy_baseline": True}, "unix_s": 0.0})}
    greedy = [admitted("0/2"), *rollout("0/2"), {"kind": "filtered", "rollout_id": "0/2", "reason": "greedy baseline"}]
    return [line, *greedy, *whole_step(0)]


def test_a_history_with_a_greedy_sibling_breaks_no_promise():
    assert check(remax()).problems == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([*remax()[:5], *placed("0/2", step=0, row=0, place=0), *remax()[5:]], "is assigned, and is greedy"),
        (changed(remax(), "scored", "0/2", reason="timeout", reward=None), "without a greedy sibling that has a reward"),
        (remax()[:1] + remax()[6:], "without a greedy sibling that has a reward"),
        (changed(remax(), "filtered", reason="zero_variance"), "is filtered as zero_variance"),
        ([*remax()[:5], remax()[5] | {"kind": "failed", "reason": "ok"}, *remax()[6:]], "fails, is greedy, and has a reward"),
        ([*remax()[:5], remax()[5] | {"kind": "stale", "reason": "old"}, *remax()[6:]], "is stale, and is greedy"),
        (changed(remax(), "began", data=json.dumps({"settings": SETTINGS})), "one sibling too many"),
        ([*remax(), began()], "changes has_greedy_baseline within a run"),
        ([*good()[:-3], {"kind": "filtered", "rollout_id": "2/0", "reason": "greedy baseline"}], "is filtered as greedy baseline"),
    ],
)
def test_every_broken_promise_about_a_greedy_sibling_is_named(lines: list[Line], problem: str):
    assert any(problem in found for found in check(lines).problems), check(lines).problems


def episode(*lines: Line) -> list[Line]:
    """A life in which `0/0` is admitted, and what becomes of it; an environment replies to two turns of three, at most."""
    first = began() | {"data": json.dumps({"settings": SETTINGS | {"max_turns": 3}, "unix_s": 0.0})}
    return [first, admitted("0/0"), *lines]


def observed(turn: int, *, attempt: int = 0, reason: str = "ok") -> Line:
    return {"kind": "observed", "rollout_id": "0/0", "attempt": attempt, "turn": turn, "peer": "engine-0", "reason": reason}


ISSUED, GENERATED, SCORED = rollout("0/0")
LOST = {"kind": "lost", "rollout_id": "0/0", "attempt": 0, "reason": "engine-0 ended"}
AGAIN = ISSUED | {"attempt": 1}
ANEW = episode()[0]


@pytest.mark.parametrize(
    "lines",
    [
        [ISSUED, observed(0), observed(1), GENERATED, SCORED],
        [ISSUED, observed(0), LOST, AGAIN, observed(1, attempt=1, reason="over"), GENERATED | {"attempt": 1}, SCORED | {"attempt": 1}],
        [ISSUED, observed(0), observed(1, reason="over"), ANEW, AGAIN, observed(0, attempt=1)],
    ],
    ids=["all turns", "an engine is lost between two", "a life ends between two"],
)
def test_an_environment_that_replies_to_each_turn_once_breaks_no_promise(lines: list[Line]):
    assert check(episode(*lines)).problems == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([observed(0)], "is answered by the environment for attempt 0, which is not out, or is over"),
        ([ISSUED, observed(1)], "is answered for turn 1, expected 0"),
        ([ISSUED, observed(0), observed(0)], "is answered for turn 0, expected 1"),
        ([ISSUED, observed(0), observed(1), observed(2)], "is answered for turn 2, of at most 3"),
        ([ISSUED, observed(0, reason="over"), observed(1)], "which is not out, or is over"),
        ([ISSUED, observed(0, reason="timeout: reply hung"), LOST, AGAIN], "is issued after its environment said that it is over"),
        ([ISSUED, GENERATED, observed(0)], "which is not out, or is over"),
        ([ISSUED, observed(0), LOST, AGAIN, observed(0, attempt=1)], "is answered for turn 0, expected 1"),
    ],
)
def test_every_broken_promise_about_turns_is_named(lines: list[Line], problem: str):
    assert any(problem in found for found in check(episode(*lines)).problems)


def test_nobody_replies_in_a_run_without_an_environment():
    lines = [began(), admitted("0/0"), ISSUED, observed(0)]
    assert any("of at most 0" in found for found in check(lines).problems)


def test_a_run_that_ended_with_fewer_steps_than_its_newest_checkpoint_holds_is_told_to_be_resumed():
    """Its trainer saved, and the run was over before it heard of it: what it printed is not what a model would be made of."""
    step = [line for line in whole_step(0) if line["kind"] not in ("trained", "done")]
    cut_off = [{"kind": "cancelled", "rollout_id": f"0/{sibling}", "reason": "the run ended"} for sibling in range(2)]
    counts = {"admitted": 2, "in_flight": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0, "cancelled": 2}
    ended = {"kind": "ended", "reason": "Ctrl-C", "data": json.dumps(counts)}
    lines = [began(), *step, *cut_off, ended]
    assert check(lines, checkpoint(lines)).problems == [
        "the run ended saying 0 trained in 0 steps, but step-000001 holds 2: resume it",
    ]
    assert check(lines).problems == []
    assert check(lines[:-3], checkpoint(lines)).problems == [], "a run that is under way, or was killed, says so when it goes on"
