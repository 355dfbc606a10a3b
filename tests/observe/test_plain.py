"""Plain lines: what a log shows from the first second on, and what a run that stands still is waiting for."""

from __future__ import annotations

from typing import Any

from pipelinerl.observe.fold.state import RunState
from pipelinerl.observe.plain import LONGEST_QUIET_S, PlainLines, end_lines
from pipelinerl.observe.renamed import current

Line = dict[str, Any]
BEGAN = 1000.0


class Log:
    """A run that is followed from second 1000 on, line by line of its journal."""

    def __init__(self) -> None:
        self.state, self.plain = RunState(), PlainLines(began=BEGAN)

    def at(self, second: float, *lines: Line) -> list[str]:
        """What is printed at a second after the start, when these lines are new."""
        told = [{"t": BEGAN + second, **line} for line in lines]
        for line in told:
            self.state.fold(line)
        self.plain.take(told)
        return self.plain.lines(self.state, now=BEGAN + second)


def status(**fields: Any) -> Line:
    return {"kind": "status", "num_steps": 10, **fields}


def wait(stage: str, what: str, seconds: float) -> Line:
    return {"stage": stage, "what": what, "seconds": seconds}


def queues(**ever: int) -> Line:
    return {name: {"items": 0, "num_items_total": count} for name, count in ever.items()}


RUN = {"kind": "run", "config": {"trainer": {"steps": 10}, "reward": [{"function": "rewards.py:slow"}]}}
LOADING = status(waits=[wait("start-up", "engines to load the model", 7.0)])


def test_a_start_is_told_part_by_part_and_what_it_waits_for_in_between():
    log = Log()
    assert log.at(0.5) == []
    assert log.at(9) == ["9 s: waiting for the orchestrator to begin"]
    assert log.at(10, RUN) == ["10 s: the orchestrator is up; engines, scorers and trainer load"]
    assert log.at(11, LOADING) == []
    assert log.at(18, LOADING) == ["18 s: waiting for engines to load the model (start-up) for 7 s"]
    assert log.at(20, {"kind": "joined", "engine_id": 0}, {"kind": "trainer", "version": 0}) == [
        "20 s: engine 0 is ready",
        "20 s: the trainer is ready",
    ]
    evaluation = {"kind": "evaluation", "version": 0, "reward_mean": 0.25, "components": {"right": 0.0, "format": 1.0}}
    assert log.at(21, evaluation) == ["21 s: held-out 0.250 at version 0 (right 0, format 1.00)"]
    assert log.at(22, status(queues=queues(trajectories=3, scored=0))) == ["22 s: the first completion is there"]
    assert log.at(23, status(queues=queues(trajectories=9, scored=1))) == ["23 s: the first score is there"]
    assert log.at(24, status(queues=queues(trajectories=9, scored=1))) == []
    (line,) = log.at(25, {"kind": "step", "step": 0, "reward_mean": 0.5})
    assert line.startswith("step 1/10  reward 0.500")


def test_a_reward_that_hangs_is_named_within_ten_seconds_and_ever_less_often():
    log, hanging = Log(), []
    log.at(1, RUN)
    for second in range(2, 200):
        scorers = [{"scorer_id": 0, "num_running": 4, "num_scored": 0}]
        waits = [wait("scoring", "scores", second - 2.0), wait("generation", "a free engine slot", second - 2.0)]
        hanging += [(second, line) for line in log.at(second, status(scorers=scorers, waits=waits))]
    assert hanging[0] == (
        9,
        "9 s: waiting for a free engine slot (generation) for 7 s; 4 reward calls under way, none has ended for 7 s (rewards.py:slow)",
    )
    assert [second for second, _ in hanging] == [9, 25, 57, 121, 185]
    assert LONGEST_QUIET_S == 64


def test_a_reward_that_goes_on_is_not_said_to_hang():
    log = Log()
    log.at(1, RUN)
    said = [
        line
        for second in range(2, 60)
        for line in log.at(second, status(scorers=[{"scorer_id": 0, "num_running": 4, "num_scored": 4 * second}]))
    ]
    assert said
    assert not any("reward calls" in line for line in said)


def test_a_wait_of_a_moment_is_not_told():
    log = Log()
    log.at(1, RUN)
    for second, seconds, words in ((9, 0.4, "9 s: step 0/10"), (25, 1.0, "25 s: waiting for a free engine slot (generation) for 1 s")):
        assert log.at(second, status(waits=[wait("generation", "a free engine slot", seconds)])) == [words]


def test_an_orchestrator_that_says_nothing_is_told():
    log = Log()
    log.at(1, RUN, status())
    assert log.at(20) == ["20 s: the orchestrator has written nothing for 19 s; its log: logs/orchestrator.log"]


def test_the_first_failure_of_each_cause_is_told_at_once_and_all_are_counted_at_the_end():
    log = Log()
    log.at(1, RUN)
    error = {"kind": "function_error", "function": "slow", "function_kind": "reward", "cause": 'ValueError("no")', "where": "rewards.py:3"}
    assert log.at(2, {**error, "count": 1}) == ['2 s: ERROR slow (reward): ValueError("no") at rewards.py:3']
    assert log.at(3, {**error, "count": 500}) == []
    assert len(log.at(4, {**error, "cause": "KeyError()", "count": 1})) == 1
    log.at(5, {"kind": "end", "reason": "stopped"})
    assert end_lines(log.state)[:2] == [
        'ERROR slow (reward): ValueError("no") at rewards.py:3, 500 times',
        "ERROR slow (reward): KeyError() at rewards.py:3, 1 times",
    ]


def test_an_alarm_is_told_with_what_to_change_and_when_it_is_over():
    log = Log()
    alarm = {"kind": "alarm", "name": "truncation", "began": 2, "step": 9, "figure": "60% of samples are cut off", "change": "Do."}
    assert log.at(2, alarm) == ["2 s: ALARM truncation since step 2: 60% of samples are cut off. Do."]
    assert log.at(3, alarm | {"is_over": True}) == ["3 s: alarm over: truncation"]


def test_a_change_of_roles_is_told_with_the_figures_it_was_decided_on_and_a_window_that_changes_nothing_is_no_news() -> None:
    log, line = Log(), {"kind": "roles", "engines": 3, "trainer": 1, "engines_then": 2, "trainer_then": 2}
    weighed = {"speed_now": 280.0, "speed_then": 520.0, "saved_s": 12.0, "cost_s": 3.0}
    assert log.at(1, {**line, **weighed, "word": "stays"}) == []
    begins = log.at(2, {**line, **weighed, "word": "begins"})
    assert begins == ["2 s: roles change to engines=2 trainer=2: 520 tokens/s in place of 280, 12 s saved for 3 s"]
    assert log.at(3, {**line, "word": "taken"}) == ["3 s: roles are engines=2 trainer=2"]
    back = {**line, "engines_then": 3, "trainer_then": 1, "word": "taken back", "reason": "no room"}
    assert log.at(4, back) == ["4 s: roles stay engines=3 trainer=1: the change was taken back: no room"]


def test_processes_of_a_reward_model_are_told_by_the_key_of_its_section() -> None:
    log, line = Log(), {"kind": "member", "engine_id": 1, "of": "reward.1"}
    asked = {"kind": "scale", "engines": 2, "prm": None, "trainer": None, "rewards": {"reward.1": 2}, "refused": ""}
    assert log.at(1, asked) == ["1 s: engines=2 reward.1=2 is asked for"]
    assert log.at(2, {**line, "state": "joining"}) == ["2 s: reward.1 process 1 is joining"]
    assert log.at(3, {**line, "state": "live"}) == ["3 s: reward.1 process 1 is live"]
    assert log.at(4, {**line, "state": "lost", "reason": "no room"}) == ["4 s: reward.1 process 1 is lost: no room"]
    assert log.at(5, {"kind": "member", "engine_id": 1, "state": "live"}) == [], "of an engine another line tells"
    roles = {"kind": "roles", "engines": 3, "trainer": 1, "engines_then": 2, "trainer_then": 1, "word": "taken"}
    assert log.at(6, {**roles, "scorers_then": 2, "scored_by": "reward.1"}) == ["6 s: roles are engines=2 trainer=1 reward.1=2"]
    assert log.at(7, current({**roles, "prm": 1, "prm_then": 2})) == ["7 s: roles are engines=2 trainer=1 prm=2"], (
        "as earlier runs have written it"
    )


def test_what_an_earlier_life_said_is_no_news():
    log = Log()
    assert log.at(-50, RUN, {"kind": "joined", "engine_id": 0}, {"kind": "step", "step": 3, "reward_mean": 0.5}) == []


def test_a_change_of_the_trainers_ranks_is_told_phase_by_phase_and_why_it_was_given_up() -> None:
    log, line = Log(), {"kind": "trainer_ranks", "epoch": 1}
    assert log.at(1, {"kind": "scale", "engines": 2, "trainer": 2, "refused": ""}) == ["1 s: engines=2 trainer=2 is asked for"]
    assert log.at(2, {**line, "ranks": 1, "wanted": 2, "phase": "saving"}) == ["2 s: the trainer of 1 rank is to save, and to go on with 2"]
    assert log.at(3, {**line, "ranks": 2, "before": 1, "phase": "starting"}) == ["3 s: a trainer of 2 ranks starts, in place of one of 1"]
    assert log.at(4, {**line, "ranks": 2, "phase": "settled"}) == ["4 s: the trainer has 2 ranks"]
    given_up = log.at(5, {**line, "ranks": 1, "phase": "settled", "reason": "no room"})
    assert given_up == ["5 s: the trainer has 1 rank, since a change was given up: no room"]
    assert log.at(6, {**line, "epoch": 0, "ranks": 1, "phase": "settled"}) == [], "of a trainer that never changed nothing is said"


def test_where_no_start_is_followed_waits_have_no_seconds_since_1970() -> None:
    plain, state = PlainLines(), RunState()
    assert plain.lines(state, now=1e9) == []
    assert plain.lines(state, now=1e9 + 10) == ["waiting for the orchestrator to begin"]


def test_policies_that_found_no_room_are_told_with_the_log_that_names_the_place() -> None:
    log = Log()
    log.at(1, RUN)
    told = log.at(2, {"kind": "step", "step": 0, "reward_mean": 0.5, "trainer": {"policies_skipped": 1.0}})
    assert told[0] == "2 s: a policy found no room, so engines go on with an earlier one; logs/trainer.log says where"
    assert not any("no room" in line for line in log.at(3, {"kind": "step", "step": 1, "reward_mean": 0.5, "trainer": {}}))
