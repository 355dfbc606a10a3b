"""An engine's device becomes the process reward model's and back in a live run, with real processes of everything but a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.errors import ConfigError
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, prm_engine
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.membership import Gone, Kind, Member, Members, ScaleFolder, StartedBy, State
from scripts.chaos import victims
from tests import processes
from tests.launch.test_scaling import LAUNCHER, PLUGINS, scale
from tests.rewards.test_pools_process import Endpoint


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A live run with two engines, and one engine of the process reward model: it asks a judge."""
    endpoint = Endpoint()
    endpoint.reply = lambda body: (200, f"SCORE: {len(body['messages'][0]['content']) % 11}")
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    overrides = ["trainer.steps=1000000", "batch.groups_per_step=4", "evaluation.every=0", "evaluation.limit=4", "checkpoint.every=100"]
    overrides += ['engine.kind="fake"', "engine.count=2", "engine.cores=[]", "engine.max_running=16", "run.restart_wait_s=0.1"]
    overrides += [f'data.source="{PLUGINS}:prompts"', f'reward=[{{function = "{PLUGINS}:reward"}}]', "algorithm.name=step_reinforce"]
    overrides += ['algorithm.overrides={aggregation = "seq-mean-token-sum-norm"}', "prm.chunk_tokens=4", 'prm.separator="5"']
    overrides += [f'prm.judge.url="{endpoint.url}"', 'prm.judge.model="judge"']
    folder = make_run_folder(load(settings, overrides=overrides)).absolute()
    with contextlib.closing(endpoint), processes.launched(LAUNCHER, folder):
        wait_for(folder, "engines 0 live, engines 1 live, prm 1 live")
        yield folder


def engines(folder: Path) -> list[tuple[Kind, Member]]:
    found = ScaleFolder(folder).members()
    records = [] if found is None else [(kind, record) for kind in Kind if (record := found.of(kind)) is not None]
    return [(kind, one) for kind, record in records for one in record.members]


def said(folder: Path) -> str:
    return ", ".join(f"{kind} {one.engine_id} {one.state}" for kind, one in engines(folder))


def wait_for(folder: Path, what: str) -> None:
    processes.wait_until(lambda: said(folder) == what, what=f"not {what}, but {said(folder)}")


def scores_of(folder: Path, number: int) -> int:
    loads = [line for line in read_journals(folder) if line["kind"] == "load" and line.get("prm_id") == number]
    return max((line["num_steps"] for line in loads), default=0)


@pytest.mark.process
@pytest.mark.slow
def test_a_live_run_hands_an_engines_device_to_the_model_and_back_also_when_it_is_killed_meanwhile(live: Path) -> None:
    given = scale(live, "engines=1", "prm=2")
    assert given.returncode == 0, given.stderr
    assert "2 PRM engines asked for" in given.stdout
    wait_for(live, "engines 0 live, engines 1 left, prm 1 live, prm 2 live")
    lines = [f"{line['of']} {line['engine_id']} {line['state']}" for line in read_journals(live) if line["kind"] == "member"]
    assert lines.index("engines 1 left") < lines.index("prm 2 live")
    processes.wait_until(lambda: scores_of(live, 2) > 0, what="the engine that joined scores nothing")
    first, second = sorted(victims.find("prm", live))
    os.kill(second, signal.SIGKILL)
    processes.wait_until(lambda: len(set(victims.find("prm", live)) - {first, second}) == 1, what="it is not started again")
    before = scores_of(live, 1)
    processes.wait_until(lambda: scores_of(live, 1) > before, what="the other one scores nothing")
    taken = scale(live, "engines=2", "prm=1", "--drain-s", "5")
    assert taken.returncode == 0, taken.stderr
    wait_for(live, "engines 0 live, engines 1 live, prm 1 live, prm 2 left")
    processes.wait_until(lambda: len(victims.find("prm", live)) == 1, what="an engine of the model that has left goes on")
    refused = scale(live, "prm=0")
    assert refused.returncode != 0
    assert "prm=0: expected 1 to 8" in refused.stdout + refused.stderr
    assert not [line for line in read_journals(live) if line["kind"] == "violation"]


def test_nobody_is_started_while_somebody_leaves_whose_device_may_be_meant_for_it(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def joined(kind: str, member: Member, others: Iterable[Role]) -> Role:
        asked.append((kind, member.engine_id))
        raise ConfigError("no GPU")

    folder, (first, second) = ScaleFolder(tmp_path), (prm_engine(tmp_path, number, started_by=StartedBy.RUN) for number in (1, 2))
    launcher = Launcher((first, second), tmp_path, joined=joined)

    def publish(engine: State, prm: State) -> None:
        members = (
            Members(members=(Member(engine_id=2, state=state, started_by=StartedBy.LAUNCHER),), num_wanted=1, count=1)
            for state in (engine, prm)
        )
        folder.publish(msgspec.structs.replace(next(members), prm=next(members)))

    for engine, prm in ((State.DRAINING, State.JOINING), (State.JOINING, State.DRAINING)):
        publish(engine, prm)
        asyncio.run(launcher._start_joined())
        assert asked == []
    publish(State.LEFT, State.JOINING)
    assert [launcher._has_left(role.name) for role in (first, second)] == [False, False]
    asyncio.run(launcher._start_joined())
    gone = Gone(kind=Kind.PRM, engine_id=2, request_id=0, reason="no GPU")
    assert (asked, folder.take_gone(), folder.take_gone()) == ([(Kind.PRM, 2)], [gone], [])
    publish(State.JOINING, State.LEFT)
    assert [launcher._has_left(role.name) for role in (first, second)] == [False, True]
    asyncio.run(launcher._start_joined())
    assert asked[1:] == [(Kind.ENGINES, 2)]
