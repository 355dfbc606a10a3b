"""A world is learned from a run: from a journal and a ledger whose seconds were made up, the made-up numbers come back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.simulate.calibrated import _admit_s, _rewards, world_of_runs
from orchestrator.simulate.recorded import RecordedRun, RunJournal, RunRollouts, read_journal, read_ledger, read_run
from orchestrator.simulate.run import simulate
from orchestrator.simulate.sequence import interpolate
from orchestrator.simulate.speeds import _num_computed, _points, _reports, _room, _squares, _steps
from orchestrator.simulate.world import Slowness, World, slowed
from pipelinerl.errors import DataError
from pipelinerl.messages import Finish, Outcome, Prompt, Score, ScoredTrajectory, Trajectory
from pipelinerl.observe.journal import Journal
from tests.orchestrator.simulate.worlds import config

PASS_S, SEQUENCE_S, PREFILL_S, ROW_S, TOKEN_S, SLOWER = 0.010, 0.0004, 1e-4, 0.03, 2e-5, 0.5
FORWARD_PART, LONGEST, CONTEXT_S = 0.4, 32, 1e-6
NUM_STEPS, PROMPT = 12, 6
BATCH_S, SCORED_STEP_S, SCORED_TOKEN_S = 0.004, 0.002, 1e-4
SLOWER_BATCHES = {"prm/trainer": 0.5, "prm/engine": 0.4}


def write_run(
    folder: Path,
    *,
    sequences: tuple[int, int] = (2, 30),
    recomputed: int = 0,
    bend: int = 1000,
    beside_prm: tuple[float, float] = (0, 0),
    room: float | None = None,
) -> None:
    """One engine and a trainer that works every other second: then a pass takes 1.5 times as long.

    With `beside_prm`, a process reward model works in two of three seconds: a pass, and the trainer, last longer by that part beside it.

    The engine has between `sequences[0]` and `sequences[1]` - 1 of them, and computes so many tokens anew at each swap. Sequences beyond
    `bend` take a quarter of what the others add to a pass. It says which part of a KV cache of `room` tokens it uses, or nothing.
    """
    now = [1000.0]
    chance = np.random.default_rng(0)
    engine = Journal(folder, "engine-0", clock=lambda: now[0])
    trainer, scorer, run = (Journal(folder, name, clock=lambda: now[0]) for name in ("trainer-0", "scorer-0", "orchestrator"))
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.begin({}, now_s=0.0, unix_s=1000.0)
    prm = Journal(folder, "scorer-1", clock=lambda: now[0])
    passes = tokens = context = busy_s = 0.0
    for second in range(2 * NUM_STEPS + 4):
        is_working = second % 2 == 1
        num = int(chance.integers(*sequences))
        anew_s, read = PREFILL_S * recomputed * is_working, num * int(chance.integers(20, 800))
        pass_s = PASS_S + SEQUENCE_S * (min(num, bend) + 0.25 * max(0, num - bend)) + CONTEXT_S * read
        asks_prm = any(beside_prm) and second % 3 > 0
        slower = 1 + SLOWER * is_working + beside_prm[0] * asks_prm
        done = round((0.8 - anew_s) / (pass_s * slower))
        spent_s = (done * pass_s + anew_s) * slower
        now[0] += 1.0
        passes, tokens, context, busy_s = passes + done, tokens + done * num, context + done * read, busy_s + spent_s
        idle_s = second + 1 - busy_s
        counts = {"num_tokens": tokens, "num_steps": passes, "num_context_tokens": context}
        engine.write("load", engine_id=0, num_running=num, **counts, busy_s=busy_s, idle_s=idle_s, kv_used=room and read / room)
        engine.span("engine-0", "forward", start=now[0] - 1.0, end=now[0] - 0.2)
        if is_working:
            trainer.span("trainer-0", "forward_backward", start=now[0] - 1.0, end=now[0] - 0.2)
            slower = 1 + beside_prm[1] * asks_prm
            write_step(run, ledger, step=second // 2, chance=chance, now_s=now[0] - 1000, recomputed=recomputed, slower=slower)
        scorer.span("scorer-0/slot-0", "score", start=now[0] - 0.5, end=now[0] - 0.25)
        scorer.span("scorer-0/reply/slot-0", "score", start=now[0] - 0.5, end=now[0] - 0.375)
        if asks_prm:
            prm.span("scorer-1", "score", start=now[0] - 1.0, end=now[0] - 0.2)
            prm.write("load", prm_id=1, num_trace_tokens=1000 * second, busy_s=0.1 * second)
    for journal in (engine, trainer, scorer, prm, run):
        journal.close()
    ledger.finish("finished", now_s=now[0] - 1000)
    ledger.close()


def write_batches(folder: Path, *, step_tokens: int) -> int:
    """A process reward model beside what `write_run` has written: two batches in each second, of three seconds in one while all others
    rest. Return its steps.
    """
    chance, now, total, busy_s = np.random.default_rng(1), [1000.0], 0, 0.0
    with contextlib.closing(Journal(folder, "scorer-1", clock=lambda: now[0])) as prm:
        for second in range(2 * NUM_STEPS + 4):
            works = second % 3 > 0
            for begins_s in (0.1, 0.3) if works else (0.82, 0.9):
                steps, start = int(chance.integers(1, 9)), now[0] + begins_s
                others = SLOWER_BATCHES["prm/engine"] + SLOWER_BATCHES["prm/trainer"] * (second % 2)
                seconds = (BATCH_S + steps * (SCORED_STEP_S + step_tokens * SCORED_TOKEN_S)) * (1 + works * others)
                prm.span("scorer-1", "score", start=start, end=start + seconds, count=steps)
                total, busy_s = total + steps, busy_s + seconds
            now[0] += 1.0
            counted = {"num_trace_tokens": step_tokens * total, "num_steps": total, "num_batches": 2 * (second + 1)}
            prm.write("load", prm_id=1, busy_s=busy_s, **counted)
    return total


def write_step(
    run: Journal, ledger: Ledger, *, step: int, chance: np.random.Generator, now_s: float, recomputed: int, slower: float
) -> None:
    lengths = [max(1, int(chance.integers(4, 9)) * (1 + 3 * (step % 2))) for _ in range(2)]
    prompt = Prompt(prompt_id=f"0:{step}", text="", token_ids=np.ones(PROMPT, np.int32))
    names = ledger.admit(step, prompt, group_size=2, position=(0, step), now_s=now_s)
    for sibling, (name, length) in enumerate(zip(names, lengths, strict=True)):
        ledger.issue(name, attempt=0, engine_id=0, version=step, now_s=now_s)
        num = PROMPT + length
        trajectory = Trajectory(
            rollout_id=name,
            group_id=step,
            sibling=sibling,
            attempt=0,
            prompt=prompt,
            token_ids=np.ones(num, np.int32),
            loss_mask=np.arange(num) >= PROMPT,
            logprobs=np.zeros(num, np.float32),
            versions=np.where(np.arange(num) >= PROMPT, step, -1).astype(np.int32),
            finish=Finish.LENGTH if length == LONGEST else Finish.STOP,
        )
        for turn, reason in enumerate(("ok", "ok", "over") if sibling else ()):
            ledger.record_observation(name, attempt=0, turn=turn, engine_id=0, reason=reason, now_s=now_s)
        ledger.record_completion(trajectory, now_s=now_s)
        score = Score(rollout_id=name, attempt=0, outcome=Outcome.OK, reward=float(step % 4 == 0))
        ledger.record_score(ScoredTrajectory(trajectory=trajectory, score=score), now_s=now_s + 0.3)
    num_tokens, num_rows = 40 * (5 + step), 1 + step % 3
    ledger.close_step(step, num_rows=num_rows, num_tokens=num_tokens, num_samples=2, now_s=now_s)
    num_computed = num_tokens - 2 * PROMPT + PROMPT * min(2, num_rows)
    part = (step % 4) / 8
    seconds = (ROW_S * num_rows + TOKEN_S * num_computed * (1 - part + FORWARD_PART * part)) * slower
    trained = {"num_tokens_without_gradient": part * num_tokens}
    trained |= {"forward_backward_s": seconds, "optimizer_s": 0.02, "publish_async_s": 0.02, "publish_s": 0.01, "wait_s": 1.92 - seconds}
    stage_s = 0.24 if step % 3 else 0.001  # begun in a pass that ends 0.2 s ago, or when nothing was left to write
    run.write("swap", engine_id=0, version=step + 1, stage_s=stage_s, pause_s=0.003, num_running=step % 2, num_recomputed_tokens=recomputed)
    run.write("step", step=step, num_tokens=num_tokens, num_trained_tokens=num_tokens - 2 * PROMPT, num_samples=2, trainer=trained)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("learned") / "run"
    write_run(folder)
    return world_of_runs(config(), [folder])


def test_seconds_of_passes_come_back(learned: World):
    for num in (0, 3, 11, 29):
        assert interpolate(learned.engine.pass_s, num) == pytest.approx(PASS_S + num * SEQUENCE_S, rel=0.05)
    assert learned.engine.kv_token_s == pytest.approx(CONTEXT_S, rel=0.05)


def test_a_pass_may_grow_less_with_more_sequences(tmp_path: Path):
    write_run(tmp_path / "bent", sequences=(2, 60), bend=16)
    pass_s = world_of_runs(config(), [tmp_path / "bent"]).engine.pass_s
    for num in (8, 16, 32, 56):
        assert interpolate(pass_s, num) == pytest.approx(PASS_S + SEQUENCE_S * (min(num, 16) + max(0, num - 16) / 4), rel=0.07)


def test_a_pass_with_more_sequences_takes_no_less(tmp_path: Path):
    write_run(tmp_path / "flat", sequences=(2, 60), bend=0)
    pass_s = [seconds for _, seconds in world_of_runs(config(), [tmp_path / "flat"]).engine.pass_s]
    assert pass_s == sorted(pass_s)
    assert pass_s[0] > 0


def test_blocks_are_those_of_the_run_while_it_is_read_and_of_the_settings_afterwards(tmp_path: Path):
    write_run(tmp_path / "run")
    with contextlib.closing(Journal(tmp_path / "run", "launcher")) as journal:
        journal.write("run", config=config(engine={"options": {"block_size": 64}}).model_dump(mode="json"))
    assert read_journal(tmp_path / "run").block_tokens == 64
    assert world_of_runs(config(), [tmp_path / "run"]).engine.block_tokens == 16
    assert world_of_runs(config(engine={"options": {"block_size": 32}}), [tmp_path / "run"]).engine.block_tokens == 32


def test_a_number_of_sequences_of_which_few_reports_tell_is_no_point_of_the_curve():
    """Of 30 reports, 4 tell of two sequences, 6 of three: each tells half of 2 and half of 4."""
    numbers = np.array([2.0] * 4 + [3.0] * 6 + [16.0] * 20)
    assert _points(numbers) == [0.0, 2.0, 16.0], "4 has three reports; of 2, 7 tell"
    assert _points(np.full(30, 64.0)) == [0.0, 64.0]


def test_so_does_what_the_trainer_costs_the_engine(learned: World):
    assert learned.slowdowns["engine/trainer"] == pytest.approx(SLOWER, abs=0.051)
    assert "engine/engine" not in learned.slowdowns, "one engine says nothing of two"


def test_so_does_what_a_process_reward_model_costs_both(learned: World, tmp_path: Path):
    write_run(tmp_path / "prm", beside_prm=(0.4, 0.8))
    found = world_of_runs(config(), [tmp_path / "prm"])
    assert found.slowdowns["engine/prm"] == pytest.approx(0.4, abs=0.051)
    assert found.slowdowns["engine/trainer"] == pytest.approx(SLOWER, abs=0.051)
    assert found.slowdowns["trainer/prm"] == pytest.approx(0.8, abs=0.051)
    assert found.engine.pass_s[0][1] == pytest.approx(PASS_S, rel=0.05)
    assert found.scoring.score_s == learned.scoring.score_s, "its batches are no reward calls"
    assert found.scoring.prm_token_s == pytest.approx(1e-4)


def test_so_does_what_batches_of_a_process_reward_model_take(tmp_path: Path):
    folders, num_steps = [tmp_path / "short", tmp_path / "long"], 0
    for folder, step_tokens in zip(folders, (10, 40), strict=True):
        write_run(folder)
        num_steps += write_batches(folder, step_tokens=step_tokens)
    found = world_of_runs(config(), folders)
    assert found.scoring.prm_batch_s == pytest.approx(BATCH_S, rel=0.05)
    assert found.scoring.prm_step_s == pytest.approx(SCORED_STEP_S, rel=0.05)
    assert found.scoring.prm_token_s == pytest.approx(SCORED_TOKEN_S, rel=0.05)
    assert {key: found.slowdowns[key] for key in SLOWER_BATCHES} == pytest.approx(SLOWER_BATCHES, abs=0.051)
    num_scored = 2 * 2 * (NUM_STEPS + 2)
    num_tokens = num_steps / 2 * 10 + num_steps / 2 * 40
    assert found.scoring.prm_step_tokens == pytest.approx(num_tokens / (num_steps - num_scored)), "one step of each ends with it"


def test_a_run_on_slower_devices_tells_what_work_takes_usually_and_a_slowed_world_what_it_took_there(tmp_path: Path):
    folder, slowness = tmp_path / "run", Slowness(engine=2.0, trainer=1.25, prm=4.0)
    write_run(folder)
    write_batches(folder, step_tokens=10)
    as_it_was, usual = world_of_runs(config(), [folder]), world_of_runs(config(), [folder], slowness=[slowness])
    again = slowed(usual, slowness)
    for part, factor, names in (
        ("engine", 2.0, ("kv_token_s",)),
        ("trainer", 1.25, ("row_s", "token_s", "step_s")),
        ("scoring", 4.0, ("prm_batch_s", "prm_step_s", "prm_token_s")),
    ):
        for name in names:
            seconds = getattr(getattr(as_it_was, part), name)
            assert getattr(getattr(usual, part), name) == pytest.approx(seconds / factor), name
            assert getattr(getattr(again, part), name) == pytest.approx(seconds), name
    for (_, seconds), (_, halved), (_, doubled) in zip(as_it_was.engine.pass_s, usual.engine.pass_s, again.engine.pass_s, strict=True):
        assert (halved, doubled) == (pytest.approx(seconds / 2), pytest.approx(seconds))
    assert usual.slowdowns == as_it_was.slowdowns
    busy = slowed(dataclasses.replace(usual, trainer=dataclasses.replace(usual.trainer, answer_s=0.01, wake_s=0.02)), slowness)
    assert (busy.trainer.answer_s, busy.trainer.wake_s) == pytest.approx((0.0125, 0.025))


def test_a_few_reports_of_batches_tell_what_a_token_takes_and_no_more(tmp_path: Path):
    write_run(tmp_path / "run")
    write_batches(tmp_path / "run", step_tokens=10)
    few, enough = (world_of_runs(config(), [tmp_path / "run"], until_s=until_s).scoring for until_s in (1009.5, 1014.5))
    assert (few.prm_batch_s, few.prm_step_s) == (0.0, 0.0)
    assert few.prm_token_s > 0
    assert enough.prm_batch_s > 0


def test_what_a_process_reward_model_did_before_is_not_counted(tmp_path: Path):
    write_run(tmp_path / "run")
    num_steps = write_batches(tmp_path / "run", step_tokens=10)
    late = read_journal(tmp_path / "run", since_s=1010.5)
    (reports,), (before,) = late.prms.values(), late.prms_before.values()
    assert before["t"] < 1010.5 < reports[0]["t"], "its reports come once a second"
    assert 0 < late.prm_sum("num_steps") == num_steps - before["num_steps"]
    assert late.prm_sum("num_trace_tokens") == 10 * late.prm_sum("num_steps")


def test_a_process_reward_model_that_was_started_again_counts_from_nothing():
    journal = RunJournal(
        prms={"a": [{"n": 11}, {"n": 3}], "b": [{"n": 9}], "c": [{"n": None}]}, prms_before={"a": {"n": 10}, "b": {"n": 4}}
    )
    assert journal.prm_sum("n") == 3 + 5


def test_of_many_reports_every_second_or_third_one_is_enough(tmp_path: Path):
    write_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    whole, part = ([num_passes for _, num_passes, *_ in _reports(run, most=most)] for most in (1000, 7))
    assert 4 <= len(part) <= 7 < len(whole)
    sums = [[sum(whole[first + 4 * number :][:4]) for number in range(len(part))] for first in range(4)]
    assert part in sums, "each is about four of them together"


def test_tokens_that_are_computed_anew_cost_what_those_of_prompts_do(tmp_path: Path):
    write_run(tmp_path / "anew", recomputed=1000)
    found = world_of_runs(config(), [tmp_path / "anew"]).engine
    assert found.prefill_token_s == pytest.approx(PREFILL_S, rel=0.15)
    assert found.pass_s[0][1] == pytest.approx(PASS_S, rel=0.05), "and no pass is blamed for them"


def test_runs_together_tell_what_each_alone_cannot(tmp_path: Path):
    """An engine that always has four sequences, or always 24, tells not what one of them adds to a pass."""
    folders = [tmp_path / "four", tmp_path / "many"]
    for folder, num in zip(folders, (4, 24), strict=True):
        write_run(folder, sequences=(num, num + 1))
    alone = [world_of_runs(config(), [folder]).engine.pass_s for folder in folders]
    together = world_of_runs(config(), folders).engine.pass_s
    assert [interpolate(together, num) for num in (4, 24)] == pytest.approx([PASS_S + num * SEQUENCE_S for num in (4, 24)], rel=0.05)
    assert all(abs(interpolate(pass_s, 14) / (PASS_S + 14 * SEQUENCE_S) - 1) > 0.1 for pass_s in alone)


def test_the_first_run_that_tells_says_what_a_kv_cache_holds(tmp_path: Path):
    """Runs of other settings may have another one, so their mean is that of none."""
    for name, room in (("silent", None), ("wide", 50_000.0), ("narrow", 30_000.0)):
        write_run(tmp_path / name, room=room)
    assert room_of(tmp_path / "silent", tmp_path / "wide", tmp_path / "narrow") == pytest.approx(50_000)
    assert room_of(tmp_path / "narrow", tmp_path / "wide") == pytest.approx(30_000)
    assert room_of(tmp_path / "silent") == math.inf


def room_of(*folders: Path) -> float:
    return world_of_runs(config(), folders).engine.kv_tokens


def test_siblings_hold_the_whole_blocks_of_their_prompt_once():
    """Eight sequences of two groups, prompts of 20 tokens and blocks of 16: six have 16 less than the 40 that they read in a pass."""
    loads = [
        {"t": t, "num_steps": 10 * t, "num_tokens": 80 * t, "num_context_tokens": 3200 * t, "num_running": 8, "kv_used": 0.5}
        for t in (0, 1)
    ]
    told = rollouts_of({f"{group}/{sibling}": 0.0 for group in range(2) for sibling in range(4)}, set())
    told.issued[0] = [(0.0, group) for group in range(2) for _ in range(4)]
    steps = [{"step": step, "num_samples": 8, "num_tokens": 200, "num_trained_tokens": 40} for step in range(2)]
    assert _room(RecordedRun(Path(), RunJournal(loads={0: loads}, steps=steps, block_tokens=16), told)) == pytest.approx(
        (8 * 40 - 6 * 16) / 0.5
    )


def test_the_first_of_several_runs_tells_what_rollouts_are_like(learned: World, tmp_path: Path):
    write_run(tmp_path / "other")
    together = world_of_runs(config(), [tmp_path / "other", tmp_path / "other"])
    assert together.lengths == learned.lengths, "the same rollouts, once"
    assert (together.origins["lengths"], together.origins["trainer"]) == ("run other", "run other and run other")
    assert together.sync.stage_s == learned.sync.stage_s
    alone, both = learned.sync.idle_stage_s, together.sync.idle_stage_s
    assert alone is not None
    assert both is not None
    assert len(both.recorded) == 2 * len(alone.recorded), "an idle engine of any of them stages alike"


@pytest.mark.parametrize(("passes", "beside"), [((11.0, 13.0), 0.0), ((10.5, 13.0), 0.5), ((9.0, 11.0), 1.0)])
def test_an_engine_is_beside_the_trainer_while_the_trainer_works(passes: tuple[float, float], beside: float):
    """In turns an engine works in most of a step, and in none of the trainer's part of it."""
    journal = RunJournal(steps=[one_step(step=0, t=9.5), one_step(step=1, t=14.0)], work=[(10.0, 11.0)], passes={0: [passes]})
    empty: dict[str, Any] = {"lengths": {}, "rewards": {}, "issued": {}, "waits_s": [], "turns": {}, "replies": {}}
    rollouts = RunRollouts(**empty, rows={1: 2}, group_size=8, num_scored=0, num_failed=0, num_hopeless=0)
    (step,) = _steps(RecordedRun(Path(), journal, rollouts))
    assert (step.seconds, step.rows, step.engines, step.rest_s) == pytest.approx((0.9, 2, beside, 4.5 - 0.9 - 3.0))


def one_step(*, step: int, t: float) -> dict[str, Any]:
    trained = {"forward_backward_s": 0.9, "wait_s": 3.0}
    return {"step": step, "t": t, "num_samples": 16, "num_trained_tokens": 1000, "num_tokens": 1112, "trainer": trained}


def test_seconds_of_rows_and_tokens_are_told_apart(learned: World):
    beside = 1 + learned.slowdowns.get("trainer/engine", 0.0) * 0.8
    assert learned.trainer.row_s * beside == pytest.approx(ROW_S, rel=0.1)
    assert learned.trainer.token_s * beside == pytest.approx(TOKEN_S, rel=0.1)
    assert learned.trainer.forward_part == pytest.approx(FORWARD_PART, rel=0.02), "0 to 3 eighths of a step's tokens have no gradient"
    assert learned.trainer.step_s * beside == pytest.approx(0.07, rel=0.1), "of two seconds, what is neither rows, waiting nor publishing"


def test_policies_scores_and_rewards_come_back(learned: World):
    assert (learned.sync.publish_beside_s, learned.sync.pause_s, learned.sync.stage_s.average) == pytest.approx((0.02, 0.003, 0.24))
    assert learned.sync.idle_stage_s is not None
    assert learned.sync.idle_stage_s.average == pytest.approx(0.001)
    assert (learned.scoring.score_s.average, learned.scoring.reply_s.average) == pytest.approx((0.25, 0.125))
    assert learned.scoring.turns.average == pytest.approx(2.0), "one sibling has three, the other one"
    assert learned.scoring.overhead_s == pytest.approx(0.05, abs=1e-6)
    assert learned.reward_mean == pytest.approx(4 / 14)
    assert learned.reward_spread > 0.9, "siblings always agree"
    assert learned.prompt_tokens.average == pytest.approx(PROMPT)
    assert max(learned.lengths.recorded) == LONGEST + 1, "one that ended at its limit would have gone on"
    assert learned.truncated_reward_mean is None, "too few to tell their rewards apart"
    assert learned.likeness > 0.3, "every other group is four times as long"
    assert learned.origins["engine"] == "run run"


def test_groups_sent_in_one_burst_tell_what_a_group_takes(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin({}, now_s=0.0, unix_s=1000.0)
    prompt = Prompt(prompt_id="0:0", text="", token_ids=np.ones(PROMPT, np.int32))
    for group_id, now_s in enumerate((0.0, 0.001, 0.004, 1.0, 1.002)):
        for name in ledger.admit(group_id, prompt, group_size=2, position=(0, group_id), now_s=now_s):
            ledger.issue(name, attempt=0, engine_id=group_id % 2, version=0, now_s=now_s)
    ledger.close()
    assert _admit_s(read_ledger(tmp_path)) == pytest.approx((0.001 + 0.003 + 0.002) / 3)


def test_a_shared_prompt_counts_once_for_each_row_that_siblings_are_in():
    """Two groups of eight in two rows: one group is cut, so three prompts of 7 tokens are computed."""
    empty: dict[str, Any] = {"lengths": {}, "rewards": {}, "issued": {}, "waits_s": [], "turns": {}, "replies": {}}
    rollouts = RunRollouts(**empty, rows={3: 2}, group_size=8, num_scored=0, num_failed=0, num_hopeless=0)
    step = {"step": 3, "num_samples": 16, "num_trained_tokens": 1000, "num_tokens": 1000 + 16 * 7}
    assert _num_computed(step, rollouts) == pytest.approx(1000 + 3 * 7)


def test_squares_are_of_whole_samples_and_a_shared_prompt_counts_once():
    """Prompts of 7 tokens, replies of 3; samples of 5 and 9 tokens of one group, one of two turns: 12^2 + (16 + 3)^2 - 7^2."""
    empty: dict[str, Any] = {"rewards": {}, "issued": {}, "waits_s": [], "replies": {}}
    names = {"lengths": {"0/0": 5, "0/1": 9, "1/0": 70}, "turns": {"0/0": 1, "0/1": 2}, "trained": {3: ["0/0", "0/1"]}}
    rollouts = RunRollouts(**empty, **names, rows={3: 1}, group_size=2, num_scored=0, num_failed=0, num_hopeless=0)
    assert _squares({"step": 3, "num_samples": 2}, rollouts, 7.0, 3.0) == pytest.approx(144 + 361 - 49)


def test_an_environments_replies_are_told_from_prompts():
    """Prompts of 7 tokens and replies of 3: four samples with two replies, two with five; sixteen with ten compute all of their replies."""
    steps = [one_step(step=0, t=0.0)]
    steps += [
        one_step(step=step, t=float(step)) | {"num_samples": num, "num_tokens": 1000 + 7 * num + 3 * replies}
        for step, num, replies in ((1, 4, 2), (2, 2, 5))
    ]
    empty: dict[str, Any] = {"lengths": {}, "rewards": {}, "issued": {}, "waits_s": [], "turns": {}}
    rollouts = RunRollouts(**empty, replies={1: 2, 2: 5, 3: 10}, rows={3: 2}, group_size=8, num_scored=0, num_failed=0, num_hopeless=0)
    run = RecordedRun(Path(), RunJournal(steps=steps), rollouts)
    assert run.given_tokens() == pytest.approx((7.0, 3.0))
    step = {"step": 3, "num_samples": 16, "num_trained_tokens": 1000, "num_tokens": 1000 + 16 * 7 + 10 * 3}
    assert _num_computed(step, rollouts, 3.0) == pytest.approx(1000 + 3 * 7 + 10 * 3)


def rollouts_of(rewards: dict[str, float], truncated: set[str]) -> RunRollouts:
    empty: dict[str, Any] = {"issued": {}, "waits_s": [], "turns": {}, "replies": {}, "rows": {}, "num_failed": 0, "num_hopeless": 0}
    lengths = dict.fromkeys(rewards, 5)
    return RunRollouts(**empty, lengths=lengths, truncated=frozenset(truncated), rewards=rewards, group_size=8, num_scored=len(rewards))


def test_rewards_of_what_ends_at_its_limit_are_told_apart():
    """Each of 20 groups: four of eight end by themselves, and one of these is right, in groups 0 to 4 all; three of those cut are right."""
    rewards = {f"{group}/{sibling}": float(sibling == 0 or group < 5) for group in range(20) for sibling in range(4)}
    cut = {f"{group}/{sibling}": float(sibling < 7) for group in range(20) for sibling in range(4, 8)}
    mean, truncated_mean, spread = _rewards(rollouts_of(rewards | cut, set(cut)))
    assert (mean, truncated_mean) == (pytest.approx((5 * 4 + 15) / 80), 0.75)
    between = 0.25 * 0.75 * (1 - 0.25) ** 2  # of the means: 1 in a quarter of the groups, 0.25 in the others
    whole = mean * (1 - mean)
    assert spread == pytest.approx((between / whole - 0.25) / 0.75)
    few = dict(list(cut.items())[:19])
    pooled, nothing, _ = _rewards(rollouts_of(rewards | few, set(few)))
    assert (pooled, nothing) == (pytest.approx((35 + sum(few.values())) / 99), None), "of 19 that were cut nothing is said"


def test_what_ended_at_its_limit_would_have_gone_on_and_replies_count_in_the_limit():
    rollouts = dataclasses.replace(rollouts_of({"0/0": 1.0, "0/1": 0.0, "0/2": 0.0}, {"0/1", "0/2"}), turns={"0/0": 2, "0/1": 3})
    assert [rollouts.unlimited(name, 3.0) for name in ("0/0", "0/1", "0/2")] == [5, 5 + 2 * 3 + 1, 5 + 1]


@pytest.mark.parametrize(("block_tokens", "expected"), [(16, 4 * 6 + 2 * (3 + 8)), (32, 4 * 6 + 2 * (3 + 6 + 22 / 2))])
def test_the_next_turn_computes_what_is_in_no_whole_block(block_tokens: int, expected: float):
    """Between two reports four siblings begin, of prompts of 6 tokens, and two go on after replies of 3; completions have 22 in the mean.

    Half a block of 16 is computed anew, or all that a block of 32 does not hold yet: the prompt and half a completion.
    """
    loads = [{"t": t, "num_steps": 10 * t, "num_tokens": 40 * t, "idle_s": 0.0} for t in (0.0, 1.0)]
    steps = [one_step(step=0, t=-1.0)]
    steps += [
        one_step(step=step, t=float(step)) | {"num_samples": num, "num_trained_tokens": 1000, "num_tokens": 1000 + 6 * num + 3 * replies}
        for step, num, replies in ((1, 4, 2), (2, 2, 5))
    ]
    rollouts = RunRollouts(
        lengths={"0/0": 10, "0/1": 34},
        rewards={},
        issued={0: [(0.5, 7)] * 4},
        resumed={0: [0.4, 0.6, 1.4]},
        rows={},
        waits_s=[],
        group_size=4,
        num_scored=0,
        num_failed=0,
        num_hopeless=0,
        turns={},
        replies={1: 2, 2: 5},
    )
    journal = RunJournal(loads={0: loads}, steps=steps, block_tokens=block_tokens)
    ((_, _, _, prompts, *_),) = _reports(RecordedRun(Path(), journal, rollouts))
    assert prompts == pytest.approx(expected)


def test_what_was_learned_simulates(learned: World):
    ended = simulate(config(trainer={"steps": 5}), dataclasses.replace(learned, reward_spread=0.2))
    assert ended.rollouts.trained == 10


def test_a_run_that_tells_too_little_is_refused_by_name(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    with pytest.raises(DataError, match="no ledger at"):
        world_of_runs(config(), [tmp_path])
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin({}, now_s=0.0, unix_s=0.0)
    ledger.close()
    with pytest.raises(DataError, match="trained at least 2 steps"):
        world_of_runs(config(), [tmp_path])
