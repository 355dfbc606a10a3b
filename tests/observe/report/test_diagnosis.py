"""The diagnosis names the part that was made slow, by how much, and shows arithmetic that adds up."""

import dataclasses
import json
from pathlib import Path

import pytest

from pipelinerl.observe.report.diagnosis import Diagnosis, Limiter, diagnose
from pipelinerl.observe.report.reading import read_tables
from pipelinerl.observe.report.units import seconds
from tests.observe.report.synthetic import Plan, write_run


def _diagnose(folder: Path, plan: Plan, *, without: frozenset[str] = frozenset()) -> Diagnosis:
    write_run(folder, plan, without=without)
    return diagnose(read_tables(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "limiter"),
    [
        (Plan(), Limiter.GENERATION),
        (Plan(generate_s=5.0, score_s=4.0), Limiter.GENERATION),
        (Plan(train_s=2.0), Limiter.TRAINING),
        (Plan(generate_s=0.7, train_s=0.7), Limiter.TRAINING),
        (Plan(score_s=2.4), Limiter.SCORING),
        (Plan(pause_s=0.9), Limiter.SWAP),
        (Plan(train_s=0.3, publish_s=1.5), Limiter.SWAP),
        (Plan(takes_turns=True, mode="sync"), Limiter.ADMISSION),
        (Plan(takes_turns=True), Limiter.ADMISSION),
        (Plan(num_running=20, is_held=True), Limiter.ADMISSION),
        (Plan(num_running=60, is_held=True), Limiter.GENERATION),
        (Plan(num_running=20, is_held=False), Limiter.GENERATION),
    ],
)
def test_the_injected_bottleneck_is_named(tmp_path: Path, plan: Plan, limiter: Limiter) -> None:
    assert _diagnose(tmp_path / "run", plan).limiter is limiter


def test_generation_bound_run_tells_how_long_the_trainer_waits(tmp_path: Path) -> None:
    # A period is 1.2004 s, of which the trainer works 0.73 s: it waits 0.4704 / 1.2004 = 39.2 %, and could do 1 / 0.608 = 1.64 times more.
    diagnosis = _diagnose(tmp_path / "run", Plan())
    assert diagnosis.trainer_wait_fraction == pytest.approx(0.4704 / 1.2004, abs=1e-4)
    assert diagnosis.engine_wait_fraction == pytest.approx(0.0, abs=1e-6)
    assert diagnosis.factor == pytest.approx(1.2004 / 0.73, rel=1e-3)
    assert "Generation is the limit" in diagnosis.verdict
    assert "at most 1.64 times" in diagnosis.verdict
    assert "2 × 1.64 = 3.3, so 4 (engine.count)" in diagnosis.advice


def test_training_bound_run_tells_how_long_the_engines_wait(tmp_path: Path) -> None:
    # A period is 2.03 s; engines work 1.2004 s and stand 0.8296 s = 40.9 %: 1 / 0.591 = 1.69 times the trainer would balance them.
    diagnosis = _diagnose(tmp_path / "run", Plan(train_s=2.0))
    assert diagnosis.trainer_wait_fraction == pytest.approx(0.0, abs=1e-6)
    assert diagnosis.engine_wait_fraction == pytest.approx(0.8296 / 2.03, abs=2e-3)
    assert diagnosis.factor == pytest.approx(2.03 / 1.2004, rel=5e-3)
    assert "so 2 (trainer.ranks), or fewer engines: 1 would do" in diagnosis.advice


def test_a_trainer_whose_core_others_have_is_told_to_get_its_own(tmp_path: Path) -> None:
    # A period is 2.03 s: 0.6 / 2.03 = 29.6 % of it is worth saying before another rank is, 0.1 / 2.03 = 4.9 % is not.
    diagnosis = _diagnose(tmp_path / "much", Plan(train_s=2.0, core_wait_s=0.6))
    assert "a core of its own (trainer.cores" in diagnosis.advice
    assert "(29.6\N{NO-BREAK SPACE}%) while others had its core" in diagnosis.advice
    assert next(one.value for one in diagnosis.findings if "others had its core" in one.what) == "29.6\N{NO-BREAK SPACE}%"
    assert "trainer.ranks" in _diagnose(tmp_path / "little", Plan(train_s=2.0, core_wait_s=0.1)).advice


def test_scoring_bound_run_says_how_many_slots(tmp_path: Path) -> None:
    # A period is 2.4 s; the busier half, generation, works 1.2004 s of it, so that twice the slots would help and no more.
    diagnosis = _diagnose(tmp_path / "run", Plan(score_s=2.4))
    assert diagnosis.factor == pytest.approx(2.4 / 1.2004, rel=5e-3)
    assert "so 8 (scorer.slots)" in diagnosis.advice


def test_swap_bound_run_says_how_long_a_swap_pauses(tmp_path: Path) -> None:
    diagnosis = _diagnose(tmp_path / "run", Plan(pause_s=0.9))
    assert diagnosis.factor == pytest.approx(2.1 / 1.2, rel=0.03)
    assert "over 78 swaps" in diagnosis.advice  # two engines, one swap each after every step but the last


def test_small_pauses_are_not_blamed_for_a_long_wait(tmp_path: Path) -> None:
    # Engines pause 0.1 of 5.1 s = 2 %, the trainer waits 86 %: swapping for free would change nothing.
    assert _diagnose(tmp_path / "run", Plan(generate_s=5.0, pause_s=0.1)).limiter is Limiter.GENERATION


def test_a_mode_that_takes_turns_is_told_to_stream(tmp_path: Path) -> None:
    # Halves of 1.2004 and 0.73 s in turn: overlapped, a period is the longer of them.
    diagnosis = _diagnose(tmp_path / "run", Plan(takes_turns=True, mode="sync"))
    assert diagnosis.factor == pytest.approx(1.9304 / 1.2004, rel=5e-3)
    assert 'Set pipeline.mode = "streaming"' in diagnosis.advice


def test_streaming_run_whose_halves_wait_is_told_of_its_staleness_bound(tmp_path: Path) -> None:
    assert "pipeline.max_staleness = 4" in _diagnose(tmp_path / "run", Plan(takes_turns=True)).advice


def test_slots_that_admission_keeps_empty_are_told(tmp_path: Path) -> None:
    # 20 of 64 sequences: 44 / 64 = 68.75 % empty.
    diagnosis = _diagnose(tmp_path / "run", Plan(num_running=20, is_held=True))
    row = next(row for row in diagnosis.findings if row.what == "engines: slots empty, admission closed")
    assert row.value.startswith("68.8")
    assert "68.8" in diagnosis.verdict


def test_engines_with_free_slots_are_to_be_filled_first(tmp_path: Path) -> None:
    # 20 of 64 sequences per engine.
    assert "40.0 of 128 sequence slots" in _diagnose(tmp_path / "run", Plan(num_running=20)).advice
    assert "40.0 of 128 sequences" in _diagnose(tmp_path / "trained", Plan(generate_s=0.7, train_s=0.7, num_running=20)).verdict


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [("one_step_off", 'set pipeline.mode = "streaming" (one_step_off now)'), ("streaming", "raise pipeline.max_staleness (4 now)")],
)
def test_slots_that_admission_keeps_empty_are_to_be_opened_before_engines_are_added(tmp_path: Path, mode: str, remedy: str) -> None:
    # 45 of 64 slots in use while admission is closed: 29.7 % empty, too few to be the limit itself.
    diagnosis = _diagnose(tmp_path / "run", Plan(num_running=45, is_held=True, mode=mode))
    assert diagnosis.limiter is Limiter.GENERATION
    assert f"before that, {remedy}" in diagnosis.advice
    assert "29.7" in diagnosis.advice


def test_a_report_tells_how_many_drafts_were_accepted_where_any_were_made(tmp_path: Path) -> None:
    what = "engines: drafts accepted (speculation)"
    (row,) = [row for row in _diagnose(tmp_path / "drafts", Plan(drafted=100.0)).findings if row.what == what]
    assert row.value.startswith("25.0")
    assert what not in [row.what for row in _diagnose(tmp_path / "none", Plan()).findings]


def test_a_report_tells_what_waited_for_room_and_moved_where_sequences_may(tmp_path: Path) -> None:
    def row(name: str, migrated: tuple[int, int] | None) -> list[tuple[str, str]]:
        what = "migration: what waited for room in an engine and moved"
        return [(one.arithmetic, one.value) for one in _diagnose(tmp_path / name, Plan(migrated=migrated)).findings if one.what == what]

    ((arithmetic, value),) = row("moved", (80, 20))
    after = f"20 moved after {seconds(3.0)} on average, 4,000 tokens computed anew"
    assert arithmetic == f"{after} / 80 times that a sequence waited for room"
    assert value.startswith("25.0")
    ((arithmetic, _),) = row("stayed", (80, 0))
    assert arithmetic == "0 moved / 80 times that a sequence waited for room"
    assert row("off", None) == row("idle", (0, 0)) == []


def test_caches_with_room_are_to_be_filled_before_engines_are_added_and_full_ones_enlarged(tmp_path: Path) -> None:
    # 64 slots of an engine, and 45 % of its cache: 64 x 0.9 / 0.45 = 128 would fit.
    roomy = _diagnose(tmp_path / "roomy", Plan(kv_used=0.45))
    assert "more sequences at once in each" in roomy.advice
    assert "= 128 would fit (engine.max_running)" in roomy.advice
    row = next(row for row in roomy.findings if row.what == "engines: KV cache in use")
    assert row.value.startswith("45.0")
    full = _diagnose(tmp_path / "full", Plan(kv_used=0.97)).advice
    assert "engine.kv_cache_bytes" in full
    assert 'pipeline.migration = "waiting" fills those with room' in full
    assert "pipeline.migration" not in _diagnose(tmp_path / "one", Plan(kv_used=0.97, num_engines=1)).advice
    assert "KV" not in _diagnose(tmp_path / "fit", Plan(kv_used=0.75)).advice


def test_arithmetic_adds_up(tmp_path: Path) -> None:
    findings = {row.what: row for row in _diagnose(tmp_path / "run", Plan()).findings}
    window_s = 39 * 1.2004
    waits = findings["trainer: waits for micro-batches"]
    assert waits.arithmetic.replace("\N{NO-BREAK SPACE}", " ") == f"{39 * 0.4704:.1f} s / {window_s:.1f} s"
    engines = ("in forward passes", "without a request", "paused by swaps", "between passes (scheduling, messages)")
    assert sum(float(findings[f"engines: {part}"].value.rstrip("%").strip()) for part in engines) == pytest.approx(100.0, abs=0.2)
    parts = ("waits for micro-batches", "forward, backward, optimizer", "held by writing policies")
    total = sum(float(findings[f"trainer: {part}"].value.rstrip("%").strip()) for part in parts)
    assert total == pytest.approx(100.0, abs=0.2)
    assert findings["trainer: writes policies while it trains"].arithmetic.replace("\N{NO-BREAK SPACE}", " ").startswith("3.9 s /")
    assert findings["scoring: slots inside reward calls"].value.startswith("33.3")
    assert findings["engines: sequence slots in use"].value.startswith("93.8")
    idle = findings["training is the faster and idles for"].value
    assert idle == waits.value, "what R and T say must agree with the wait that was measured"


def test_evenly_fast_halves_are_called_balanced(tmp_path: Path) -> None:
    diagnosis = _diagnose(tmp_path / "run", Plan(generate_s=0.72, train_s=0.7))
    assert "nearly in balance" in diagnosis.verdict
    assert "Nothing to move" in diagnosis.advice


def test_without_steps_nothing_is_blamed(tmp_path: Path) -> None:
    diagnosis = _diagnose(tmp_path / "run", Plan(), without=frozenset({"step"}))
    assert diagnosis.limiter is Limiter.UNKNOWN
    assert "No optimizer step" in diagnosis.verdict


def test_without_gauges_the_trainers_own_times_decide(tmp_path: Path) -> None:
    assert _diagnose(tmp_path / "slow", Plan(), without=frozenset({"status"})).limiter is Limiter.GENERATION
    trained = _diagnose(tmp_path / "fast", Plan(train_s=2.0), without=frozenset({"status"}))
    assert trained.limiter is Limiter.TRAINING
    assert "not recorded" in trained.verdict


def test_without_the_trainers_times_the_orchestrators_wait_decides(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan())
    path = tmp_path / "run" / "journal" / "orchestrator.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | ({"trainer": {}} if line["kind"] == "step" else {})) + "\n" for line in lines))
    diagnosis = diagnose(read_tables(tmp_path / "run"))
    assert diagnosis.limiter is Limiter.GENERATION
    assert diagnosis.trainer_wait_fraction == pytest.approx(0.4704 / 1.2004, abs=2e-3)


def test_start_up_is_left_out_even_of_a_single_step(tmp_path: Path) -> None:
    diagnosis = _diagnose(tmp_path / "run", Plan(num_steps=1))
    assert diagnosis.trainer_wait_fraction == pytest.approx(0.4704 / 1.2004, abs=1e-3)


def _changed(folder: Path, plan: Plan, *, run: dict[str, object] | None = None, step: dict[str, object] | None = None) -> Diagnosis:
    """The diagnosis of a run whose run line and steps have these fields."""
    write_run(folder, plan)
    path = folder / "journal" / "orchestrator.jsonl"
    changes = {"run": run or {}, "step": step or {}}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | changes.get(line["kind"], {})) + "\n" for line in lines))
    return diagnose(read_tables(folder))


def test_what_stops_learning_is_named_with_its_figure_and_what_to_change(tmp_path: Path) -> None:
    found = _changed(
        tmp_path / "run", Plan(), step={"truncated_fraction": 0.86, "trainer": {"ess_fraction": 0.43, "entropy": 0.5}}
    ).learning
    assert [(alarm.name, alarm.began) for alarm in found] == [("truncation", 0), ("off_policy", 0)]
    assert found[0].figure == "86% of samples are cut off at rollout.max_tokens"
    assert "Raise rollout.max_tokens" in found[0].change
    assert "0.43" in found[1].figure
    assert _diagnose(tmp_path / "healthy", Plan()).learning == ()


def test_a_machine_that_is_full_is_not_told_to_start_more(tmp_path: Path) -> None:
    # One engine and one rank on two cores; on sixteen cores, or with four devices, there is room.
    slow_trainer, slow_engine = Plan(train_s=2.0, num_engines=1), Plan(num_engines=1)
    full: dict[str, object] = {"machine": {"cores": 2, "devices": 0}}
    assert _changed(tmp_path / "a", slow_trainer, run=full).advice.startswith(
        "The machine's 2 cores are taken by 1 engine and 1 trainer rank"
    )
    held_up = dataclasses.replace(slow_trainer, core_wait_s=0.6)
    assert _changed(tmp_path / "held up", held_up, run=full).advice.startswith("The machine's 2 cores are taken by")
    on_devices: dict[str, object] = {"machine": {"cores": 16, "devices": 2}}
    assert "a core of its own" in _changed(tmp_path / "on devices", held_up, run=on_devices).advice
    advice = _changed(tmp_path / "b", slow_engine, run=full).advice
    assert advice.startswith("The machine's 2 cores are taken by 1 engine and 1 trainer rank: another engine needs a larger machine")
    assert "(trainer.ranks)" in _changed(tmp_path / "c", slow_trainer, run={"machine": {"cores": 16, "devices": 0}}).advice
    assert "(trainer.ranks)" in _changed(tmp_path / "d", slow_trainer, run={"machine": {"cores": 2, "devices": 4}}).advice
    assert "2 devices" in _changed(tmp_path / "e", slow_trainer, run={"machine": {"cores": 64, "devices": 2}}).advice
