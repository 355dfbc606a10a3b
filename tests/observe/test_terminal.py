"""The live view: what the journals add up to, what is drawn, and when following ends."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelinerl.observe.fold.state import WINDOW_S, RunState
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.plain import PlainLines, plain_line
from pipelinerl.observe.terminal import LiveView, render, show, sparkline

Line = dict[str, Any]


def _run(t: float = 0.0) -> Line:
    config = {"run": {"name": "a run"}, "trainer": {"steps": 100}, "engine": {"max_running": 64}}
    return {"t": t, "kind": "run", "process": "orchestrator", "config": config}


def _status(t: float, **fields: Any) -> Line:
    engines = [{"engine_id": number, "num_running": 30, "idle_s": idle_s} for number, idle_s in enumerate((0.1 * t, 0.3 * t))]
    identity = {"admitted": 20, "in_flight": 8, "trained": 9, "filtered": 1, "stale": 0, "failed": 2, "cancelled": 0}
    return {
        "t": t,
        "kind": "status",
        "version": 7,
        "num_steps": 100,
        "generated_tokens": 500 * t,
        "waited_s": {"trainer: a micro-batch": 0.25 * t, "generation: an admission credit": 0.5 * t},
        "engines": engines,
        "rollouts": identity,
        "waits": [{"stage": "generation", "what": "an admission credit", "seconds": 3.0}] if t >= 10 else [],
        "queues": {"trajectories": {"items": 3, "bytes": 50, "bound_bytes": 100}},
        "last_pause_s": 0.00025,
        **fields,
    }


def _step(step: int, *, t: float, **fields: Any) -> Line:
    return {
        "t": t,
        "kind": "step",
        "step": step,
        "reward_mean": step / 10,
        "num_tokens": 7000,
        "num_trained_tokens": 4000,
        "staleness_mean": 0.5,
        "staleness_max": 2,
    } | fields


def _folded(*lines: Line) -> RunState:
    state = RunState()
    for line in lines:
        state.fold(line)
    return state


def _drawn(lines: list[Line], *, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render(_folded(*lines)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")


def test_gauges_are_shares_of_the_last_seconds() -> None:
    state = _folded(_run(), *(_status(t / 2) for t in range(41)))
    assert state.trainer_wait_fraction == pytest.approx(0.25)
    assert state.engine_idle_fraction == pytest.approx(0.2), "the mean of 0.1 and 0.3"
    assert state.engine_empty_fraction == pytest.approx(1 - 60 / 128), "held back at every gauge of the last ten seconds"
    assert state.generated_tokens_per_s == pytest.approx(500)


def test_gauges_forget_what_is_longer_ago_than_their_window() -> None:
    calm = [_status(float(t)) for t in range(21)]
    waiting = [_status(20.0 + t, waited_s={"trainer: a micro-batch": 5.0 + t}) for t in range(1, 13)]
    state = _folded(_run(), *calm, *waiting)
    assert state.trainer_wait_fraction == pytest.approx(1.0)
    assert state.recent[-1].t - state.recent[0].t <= WINDOW_S


def test_before_the_orchestrator_tells_it_the_wait_is_that_of_the_last_step() -> None:
    spent = {"wait_s": 3.0, "forward_backward_s": 5.0, "optimizer_s": 1.0, "publish_s": 1.0}
    state = _folded(_run(), _status(1.0, waited_s={}), _status(2.0, waited_s={}), _step(0, t=2.0, trainer=spent))
    assert state.trainer_wait_fraction == pytest.approx(0.3)


def test_time_left_follows_the_pace_of_the_last_steps() -> None:
    slow = [_step(step, t=100.0 * step) for step in range(10)]
    fast = [_step(10 + step, t=1000.0 + 2.0 * step) for step in range(30)]
    state = _folded(_run(), *slow, *fast)
    assert state.num_steps_done == 40
    assert state.seconds_left == pytest.approx(2.0 * 60)
    assert _folded(_run(), _step(0, t=1.0)).seconds_left is None


def test_trained_rate_is_that_of_whole_steps() -> None:
    state = _folded(_run(), *(_step(step, t=4.0 * step) for step in range(12)))
    assert state.trained_tokens_per_s == pytest.approx(1000)
    assert state.useful_tokens_per_s is None, "an older run did not tell them"


def test_useful_tokens_stand_beside_those_trained() -> None:
    lines = [_run(), *(_step(step, t=4.0 * step, num_useful_tokens=600) for step in range(12))]
    assert _folded(*lines).useful_tokens_per_s == pytest.approx(150)
    assert "trained 1,000/s, useful 150/s" in _drawn(lines)
    assert "trained 1,000 tok/s, useful 150 tok/s" in plain_line(_folded(*lines)).replace("\N{NO-BREAK SPACE}", " ")


def test_view_shows_every_part() -> None:
    first = {"t": 0.5, "kind": "evaluation", "version": 0, "reward_mean": 0.125}
    last = {"t": 9.0, "kind": "evaluation", "version": 7, "reward_mean": 0.75}
    drawn = _drawn([_run(), first, *(_status(float(t)) for t in range(11)), *(_step(s, t=float(s)) for s in range(8)), last])
    for words in (
        "a run",
        "8/100 steps, version 7",
        "▁▂▃▄▅▆▇█  0.700",
        "held-out 0.125 → 0.750 (version 7)",
        "generated 500/s   trained 4,000/s",
        "mean 0.500, oldest 2 versions   last swap paused 0.250 ms",
        "25 % waited for a batch",
        "20 % without a request   60 of 128 sequences   5 % of slots empty, admission closed",
        "20 admitted = 8 in flight + 9 trained + 1 filtered + 0 stale + 2 failed + 0 cancelled",
        "trajectories ███░░░ 3",
    ):
        assert words in drawn


def test_accounts_that_do_not_balance_are_flagged() -> None:
    wrong = {"admitted": 21, "in_flight": 8, "trained": 9, "filtered": 1, "stale": 0, "failed": 2, "cancelled": 0}
    assert "21 admitted ≠" in _drawn([_run(), _status(1.0, rollouts=wrong)])
    assert "ACCOUNTS OFF BY 1" in plain_line(_folded(_run(), _status(1.0, rollouts=wrong), _step(0, t=1.0)))


def test_view_holds_with_hardly_any_field() -> None:
    assert "waiting for the run's journal" in _drawn([])
    bare = [{"t": 1.0, "kind": kind} for kind in ("run", "status", "step", "swap", "evaluation", "load", "span", "end")]
    for count in range(len(bare) + 1):
        _drawn(bare[:count], width=50)
    assert "not recorded" in _drawn([{"t": 1.0, "kind": "status"}])


def test_name_of_a_run_is_not_markup() -> None:
    line = _run()
    line["config"]["run"]["name"] = "[red]alarm[/red]"
    assert "[red]alarm[/red]" in _drawn([line, _status(1.0)])


def test_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_plain_lines_come_every_few_steps() -> None:
    plain, state = PlainLines(), _folded(_run())  # 100 steps in about 50 lines: every second one
    due = []
    for step in range(8):
        state.fold(_step(step, t=float(step)))
        due.append(plain.due(state) is not None)
        assert plain.due(state) is None, "once per step at most"
    assert due == [True, False, True, False, True, False, True, False]


def test_end_before_a_resume_is_not_the_end() -> None:
    state = _folded(_run(), {"t": 5.0, "kind": "end", "reason": "stopped"}, _run(t=9.0))
    assert state.end_reason is None


def _write(folder: Path, *lines: Line) -> None:
    (folder / "journal").mkdir(exist_ok=True)
    with open(folder / "journal" / "orchestrator.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


async def _shown(
    folder: Path, *, until: asyncio.Event, is_terminal: bool = False, file: io.StringIO | None = None, began: float = 0.0
) -> str:
    file = file or io.StringIO()
    async with asyncio.timeout(30):
        await show(folder, console=Console(width=160, file=file, force_terminal=is_terminal), until=until, began=began)
    return file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_finished_run_is_shown_once(tmp_path: Path, is_terminal: bool) -> None:
    identity = {"admitted": 3, "in_flight": 0, "trained": 3}
    _write(tmp_path, _run(), _status(1.0), _step(0, t=2.0), {"t": 3.0, "kind": "end", "reason": "finished", "rollouts": identity})
    shown = asyncio.run(_shown(tmp_path, until=asyncio.Event(), is_terminal=is_terminal))
    assert "ended: finished" in shown
    assert "3 admitted = 0 in flight + 3 trained" in shown
    assert ("step 1/100  reward 0" in shown) is not is_terminal


class _Reacting(io.StringIO):
    """Output that writes another step to the journal, and ends the following, as soon as the first one is printed."""

    def __init__(self, journal: Journal, until: asyncio.Event) -> None:
        super().__init__()
        self._journal = journal
        self._until = until

    def write(self, text: str) -> int:
        if "reward 0.375" in text:
            self._journal.write("step", step=1, reward_mean=0.625)
            self._until.set()
        return super().write(text)


def test_what_was_written_just_before_following_ends_is_shown(tmp_path: Path) -> None:
    async def follow() -> str:
        until = asyncio.Event()
        journal = Journal(tmp_path, "orchestrator")
        journal.write("step", step=0, reward_mean=0.375)
        shown = await _shown(tmp_path, until=until, file=_Reacting(journal, until))
        journal.close()
        return shown

    assert "reward 0.625" in asyncio.run(follow())


def test_prm_scoring_ends_when_a_process_of_the_run_failed(tmp_path: Path) -> None:
    _write(tmp_path, _run(t=10.0), _status(11.0), _step(0, t=11.0))
    (tmp_path / "failures").mkdir()
    failure = {"t": 12.0, "process": "engine-1", "error": "EngineError: out of memory\nmore"}
    (tmp_path / "failures" / "engine-1.json").write_text(json.dumps(failure))
    assert "ended: engine-1 failed: EngineError: out of memory more" in asyncio.run(_shown(tmp_path, until=asyncio.Event()))


def test_a_failure_from_before_a_resume_is_old(tmp_path: Path) -> None:
    _write(tmp_path, _run(t=10.0))
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "engine-1.json").write_text(json.dumps({"t": 5.0, "process": "engine-1", "error": "EngineError: old"}))
    view = LiveView(tmp_path)
    view.look()
    assert view.state.end_reason is None


def test_a_process_reward_model_shows_what_it_costs_and_what_waits_for_it() -> None:
    prm = {"num_trace_tokens": 1000, "num_computed": 1100, "num_uncached_tokens": 5500, "num_steps": 90, "num_waiting_tokens": 12}
    environment = {"num_awaiting_reply": 7, "num_observations": 1234}
    assert "1,234 replied to by the environment   7 rollouts between two turns" in _drawn([_run(), _status(10.0, environment=environment)])
    drawn = _drawn([_run(), _status(10.0, prm=prm)], width=160)
    assert "90 scored by the process reward model   1.10 of its tokens for each of the policy's, 5.50 without a cache   12 tokens" in drawn
    stops = {"num_hopeless": 50, "num_stopped": 40, "num_saved_tokens": 1200.4}
    assert "40 of 50 hopeless rollouts stopped, about 1,200 tokens saved" in _drawn([_run(), _status(10.0, prm=prm | stops)], width=240)
    assert "process reward model" not in _drawn([_run(), _status(10.0)], width=160)


def test_a_run_that_agents_play_shows_what_they_have_and_what_went_wrong() -> None:
    gateway = {"num_open": 12, "num_offered": 3, "num_agents_waiting": 0, "num_turns": 1234, "num_branches": 5, "num_drifted": 1}
    drawn = _drawn([_run(), _status(10.0, gateway=gateway | {"num_expired": 0})], width=160)
    assert "12 episodes lent, 3 on offer   0 agents wait   1,234 turns, 5 branches, 1 drifted" in drawn
    assert "expired" not in drawn
    assert "drifted   2 leases expired   7 requests refused" in _drawn(
        [_run(), _status(10.0, gateway=gateway | {"num_expired": 2, "num_refused": 7})], width=160
    )
    assert "episodes lent" not in _drawn([_run(), _status(10.0, gateway=None)], width=160)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_that_is_resumed_is_followed_past_ends_and_past_a_process_that_is_started_again(
    tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first life was looked at, with its end and with a failure since, the failed process is started again and the run goes on."""
    _write(tmp_path, _run(100.0), _status(100.5), _step(0, t=101.0), {"t": 102.0, "kind": "end", "reason": "stopped by a signal"})
    (tmp_path / "failures").mkdir()
    failure = tmp_path / "failures" / "engine-1.json"
    failure.write_text(json.dumps({"t": 200.2, "process": "engine-1", "error": "PeerGone: the orchestrator"}))
    looks, look = [], LiveView.look

    def looked(view: LiveView) -> Any:
        found = look(view)
        looks.append(view)
        if len(looks) == 2:
            failure.rename(failure.with_suffix(".healed-1"))
            end = {"t": 205.0, "kind": "end", "reason": "finished"}
            _write(tmp_path, _run(200.5), _status(201.0), _step(1, t=202.0, reward_mean=0.625), end)
            loop.call_soon_threadsafe(until.set)
        return found

    async def follow() -> str:
        nonlocal loop
        loop = asyncio.get_running_loop()
        return await _shown(tmp_path, until=until, is_terminal=is_terminal, began=200.0)

    loop, until = asyncio.new_event_loop(), asyncio.Event()
    loop.close()
    monkeypatch.setattr(LiveView, "look", looked)
    shown = asyncio.run(follow())
    assert "0.625" in shown
    assert "ended: finished" in shown
    assert "stopped by a signal" not in shown


def test_a_process_that_was_started_again_has_not_ended_the_run(tmp_path: Path) -> None:
    _write(tmp_path, _run(t=10.0), _status(11.0))
    (tmp_path / "failures").mkdir()
    failure = tmp_path / "failures" / "engine-1.json"
    failure.write_text(json.dumps({"t": 12.0, "process": "engine-1", "error": "PeerGone: the orchestrator"}))
    view = LiveView(tmp_path, began=9.0)
    view.look()
    assert view.state.end_reason == "engine-1 failed: PeerGone: the orchestrator"
    failure.rename(failure.with_suffix(".healed-1"))
    view.look()
    assert view.state.end_reason is None


def test_alarms_errors_and_what_is_waited_for_are_drawn_while_they_hold() -> None:
    alarm = {
        "t": 3.0,
        "kind": "alarm",
        "name": "truncation",
        "began": 20,
        "step": 28,
        "figure": "54% of samples are cut off",
        "change": "x",
    }
    error = {
        "t": 3.0,
        "kind": "function_error",
        "function": "right",
        "function_kind": "reward",
        "cause": 'ValueError("no")',
        "where": "r.py:3",
    }
    lines = [
        _run(),
        alarm,
        error | {"count": 1},
        error | {"count": 640},
        _status(10.0, waits=[_wait("generation", "a free engine slot", 9.0)]),
    ]
    drawn = _drawn(lines, width=160)
    assert "truncation since step 20: 54% of samples are cut off" in drawn
    assert '640 × right (reward): ValueError("no") at r.py:3' in drawn
    assert "waiting for a free engine slot (generation) for 9 s" in drawn
    assert "truncation" not in _drawn([*lines, alarm | {"is_over": True}], width=160)


def test_held_out_is_shown_by_component() -> None:
    row = {"t": 2.0, "kind": "evaluation", "version": 7, "reward_mean": 0.75, "components": {"right": 0.5, "format": 1.0}}
    assert "held-out 0.750   right 0.500, format 1.00" in _drawn([_run(), _status(1.0), row], width=160)


def _wait(stage: str, what: str, seconds: float) -> Line:
    return {"stage": stage, "what": what, "seconds": seconds}
