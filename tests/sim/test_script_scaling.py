"""A script has engines join and leave its run while it goes on, on the simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from orchestrator.run import Run
from orchestrator.scripted_run import ScriptedRun
from pipelinerl.errors import NotReallocated, ScriptError
from pipelinerl.runtime.membership import ScaleRequest, State
from tests.sim.chaos import Faults, survive
from tests.sim.peers import World
from tests.sim.run import Beside, Simulated, config
from tests.sim.test_scaling import SLOW, Machine, changes
from tests.sim.test_script import scripted


async def starts_what_is_asked_for(given: Beside) -> None:
    """A launcher."""
    machine = Machine(given)
    while True:
        await machine.answered()
        await asyncio.sleep(0.1)


async def starts_nothing(given: Beside) -> None:
    """One that has no room for an engine."""


def engines_of(asked: ScriptedRun) -> set[int]:
    return {engine.engine_id for engine in asked._run.parts.engines}


async def step(asked: ScriptedRun, *, num_prompts: int = 3) -> None:
    await asked.train(asked.advantages(await asked.score(asked.sample(asked.prompts(num_prompts)))))
    await asked.publish()


def played(script: Callable[[ScriptedRun], Coroutine[Any, Any, None]], folder: Path, **circumstances: Any) -> Simulated:
    ended = scripted(script, folder, **{"beside": starts_what_is_asked_for, "world": SLOW} | circumstances)
    assert ended.problems() == []
    return ended


def test_a_call_returns_once_engines_that_join_serve_and_those_that_leave_have_left(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        await step(asked)
        await asked.reallocate(engines=4)
        assert engines_of(asked) == {0, 1, 2, 3}
        ahead = asked.sample(asked.prompts(6))
        await asyncio.sleep(1.0)
        await asked.reallocate(engines=1, drain_s=0.5)
        assert engines_of(asked) == {0}
        await asked.train(asked.advantages(await asked.score(ahead)))
        await asked.publish()
        await asked.reallocate(engines=1)

    ended = played(script, tmp_path)
    assert changes(ended)[3] == ["joining", "live", "draining", "left"]
    assert len(ended.record.sealed) == 2


def test_what_cannot_be_is_said_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        with pytest.raises(NotReallocated, match=r"reallocate: engines=9: engines=9: expected 1 to 8 \(engine\.max_count\)"):
            await asked.reallocate(engines=9)
        with pytest.raises(NotReallocated, match=r"waited 50 s for engine-2 \(joining\)"):
            await asked.reallocate(engines=3, drain_s=10.0)
        await asked.reallocate(engines=2)
        await step(asked)

    played(script, tmp_path, beside=starts_nothing, settings={"engine": {"ready_deadline_s": 10.0}})


def test_what_is_no_number_is_an_error_of_the_call_and_the_run_goes_on(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        wrong: Any
        for wrong in ("2", 2.0, None):
            with pytest.raises(ScriptError, match=f"reallocate: engines is {wrong!r}, expected a whole number"):
                await asked.reallocate(engines=wrong)
        for wrong in (-1.0, float("nan"), "60", None, 1e9):
            with pytest.raises(ScriptError, match=f"reallocate: drain_s is {wrong!r}, expected 0 to 86400 seconds"):
                await asked.reallocate(engines=1, drain_s=wrong)
        await step(asked)
        assert engines_of(asked) == {0, 1}

    played(script, tmp_path)


def test_two_tasks_that_ask_at_once_are_answered_each(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        first, second = await asyncio.gather(asked.reallocate(engines=4), asked.reallocate(engines=3), return_exceptions=True)
        assert str(first) == "reallocate: engines=4: engines=3 was asked for by somebody else meanwhile"
        assert second is None
        assert engines_of(asked) == {0, 1, 2}
        await asyncio.gather(asked.reallocate(engines=1), asked.reallocate(engines=1))
        assert engines_of(asked) == {0}
        await step(asked)

    played(script, tmp_path)


def test_a_run_in_turns_keeps_its_engines(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        with pytest.raises(NotReallocated, match="engines have the trainer's devices"):
            await asked.reallocate(engines=3)

    played(script, tmp_path, settings={"pipeline": {"placement": "colocated"}})


def test_somebody_else_may_ask_for_another_number_meanwhile(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        with pytest.raises(NotReallocated, match="engines=1 was asked for by somebody else meanwhile"):
            await asked.reallocate(engines=3)

    async def asks(given: Beside) -> None:
        while (found := given.folder.members()) is None or found.num_wanted != 3:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        given.folder.ask(ScaleRequest(request_id=1000, engines=1, drain_s=0.0))

    played(script, tmp_path, beside=asks)


def test_an_engine_that_is_lost_before_it_serves_is_named(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        with pytest.raises(NotReallocated, match="engine-2 was lost before it served: its machine is gone"):
            await asked.reallocate(engines=3)

    async def loses(given: Beside) -> None:
        while (found := given.folder.members()) is None or State.JOINING not in [one.state for one in found.members][2:]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        given.tell_gone(2, "its machine is gone")

    played(script, tmp_path, beside=loses)


def test_a_script_that_goes_on_is_given_the_answer_and_asks_for_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for, lives = list[int](), list[str]()

    async def reallocate(self: Run, *, engines: int, drain_s: float) -> str:
        asked_for.append(engines)
        return f"no room for {engines}"

    monkeypatch.setattr(Run, "reallocate", reallocate)

    async def script(asked: ScriptedRun) -> None:
        await step(asked, num_prompts=6)
        with pytest.raises(NotReallocated) as refused:
            await asked.reallocate(engines=3)
        lives.append(str(refused.value))
        while asked.step < asked.num_steps:
            await step(asked, num_prompts=6)

    settings = config(trainer={"steps": 16}, pipeline={"max_staleness": 3})
    faults = Faults(until_s=30.0, seed=1, orchestrator_s=2.0)
    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=2e-3), script=script, replays=True)
    assert survived.problems() == []
    assert len(lives) >= 2
    assert set(lives) == {"reallocate: engines=3: no room for 3"}
    assert len(asked_for) < len(lives)
