"""Engines that join and leave a live run, with real processes of everything but a model: `pipelinerl scale`."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config.file import load, parse, write_run
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.errors import ConfigError, PeerSilent
from pipelinerl.launch import scaling
from pipelinerl.launch.gpus import place
from pipelinerl.launch.joining import joining_engines
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, joined_engines, roles_of
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.launch.run_launcher import _joined
from pipelinerl.launch.slurm import engines as jobs
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.devices import Gpu
from pipelinerl.runtime.membership import Gone, Kind, Member, Members, ScaleFolder, StartedBy, State, is_own
from pipelinerl.runtime.process import register
from scripts.chaos import victims
from tests import processes
from tests.sim.run import config

PLUGINS = Path(__file__).parents[2] / "scripts" / "chaos" / "plugins.py"
LAUNCHER = """
    import asyncio, dataclasses, sys
    from pathlib import Path
    from pipelinerl.config.file import load_run
    from pipelinerl.launch.run_launcher import launcher_of
    from pipelinerl.launch.roles import roles_of
    from pipelinerl.runtime.lease import held
    folder = Path(folder)
    config = load_run(folder)
    trainer = (sys.executable, "-m", "scripts.chaos.trainer", "--run-folder", str(folder))
    roles = tuple(dataclasses.replace(role, command=trainer) if role.name == "trainer" else role for role in roles_of(config, folder))
    with held(folder) as lease:
        asyncio.run(launcher_of(config, roles, folder, lease=lease).run())
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A live run with one engine."""
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    overrides = ["trainer.steps=1000000", "batch.groups_per_step=4", "evaluation.every=0", "evaluation.limit=4", "checkpoint.every=100"]
    overrides += ['engine.kind="fake"', "engine.count=1", "engine.cores=[]", "engine.max_running=16", "engine.max_count=4"]
    overrides += [f'data.source="{PLUGINS}:prompts"', f'reward=[{{function = "{PLUGINS}:reward"}}]', "run.restart_wait_s=0.1"]
    folder = make_run_folder(load(settings, overrides=overrides)).absolute()
    with processes.launched(LAUNCHER, folder):
        wait_for(folder, 0, State.LIVE)
        yield folder


def member(folder: Path, engine_id: int) -> Member | None:
    found = ScaleFolder(folder).members()
    return next((one for one in found.members if one.engine_id == engine_id), None) if found is not None else None


def wait_for(folder: Path, engine_id: int, state: State) -> Member:
    def is_there() -> bool:
        found = member(folder, engine_id)
        return found is not None and found.state is state

    processes.wait_until(is_there, what=f"engine {engine_id} is not {state}: {member(folder, engine_id)}")
    found = member(folder, engine_id)
    assert found is not None
    return found


def steps(folder: Path) -> int:
    return sum(line["kind"] == "step" for line in read_journals(folder))


def has_swapped(folder: Path, engine_id: int) -> bool:
    return any(line["kind"] == "swap" and line["engine_id"] == engine_id for line in read_journals(folder))


def scale(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pipelinerl", "scale", str(folder), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=processes.PATIENCE_S)


def process_of(folder: Path, engine_id: int) -> int:
    return int((folder / "processes" / f"engine-{engine_id}").read_text().rpartition(" ")[2])


@pytest.mark.process
@pytest.mark.slow
def test_a_live_run_grows_shrinks_and_outlives_an_engine_that_is_killed_while_it_drains(live: Path) -> None:
    grown = scale(live, "engines=3")
    assert grown.returncode == 0, grown.stderr
    for number in (1, 2):
        wait_for(live, number, State.LIVE)
    processes.wait_until(lambda: has_swapped(live, 2), what="an engine that joined takes no policy")
    stopped = process_of(live, 2)
    os.kill(stopped, signal.SIGSTOP)  # so that it ends nothing of what it may have
    shrunk = scale(live, "engines=1", "--drain-s", "600")
    assert shrunk.returncode == 0, shrunk.stderr
    assert wait_for(live, 1, State.LEFT).reason == "it has ended all that it had"
    os.kill(stopped, signal.SIGKILL)
    ways = ("it ended before it had answered all that it had", "it has ended all that it had")  # the latter where it had nothing
    assert wait_for(live, 2, State.LEFT).reason in ways
    processes.wait_until(lambda: len(victims.find("engine", live)) == 1, what="an engine that has left goes on")
    before = steps(live)
    processes.wait_until(lambda: steps(live) >= before + 3, what="the run stands still with one engine")
    scaling.ask(live, scaling.Wanted(engines=2), drain_s=1.0, started_by=StartedBy.LAUNCHER)
    wait_for(live, 1, State.LIVE)
    for engines, drain_s, started_by, said in (
        (0, 1.0, StartedBy.LAUNCHER, "engines=0: expected 1 to 4"),
        (5, 1.0, StartedBy.LAUNCHER, "engines=5: expected 1 to 4"),
        (2, -1.0, StartedBy.LAUNCHER, "--drain-s -1: expected 0 to 86400 seconds"),
        (3, 1.0, StartedBy.JOB, "where no other machine reaches it"),
    ):
        with pytest.raises(ConfigError, match=said):
            scaling.ask(live, scaling.Wanted(engines=engines), drain_s=drain_s, started_by=started_by)
    refused = scale(live, "engines=2", "--submit")
    assert refused.returncode == 1
    assert "is not a run under Slurm" in refused.stderr
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(live)], capture_output=True, text=True, check=False)
    assert "every promise was kept" in checked.stdout, checked.stdout


def test_what_cannot_be_asked_of_a_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run's folder"):
        scaling.ask(tmp_path, scaling.Wanted(engines=2), drain_s=1.0, started_by=StartedBy.LAUNCHER)
    with pytest.raises(ConfigError, match=f"^no run at {tmp_path / 'nope'}$"):
        scaling.check_is_run(tmp_path / "nope")
    for words in (["engines=two"], ["4"], ["engines=2", "engines=3"], ["trainer.steps=4"]):
        with pytest.raises(ConfigError, match="expected engines=N"):
            scaling.wanted_of(words)
    settings = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    for sections, said in (
        ({"pipeline": {"placement": "colocated"}}, "keeps its 1 engines: pipeline.placement"),
        ({}, "is not live: no orchestrator listens"),
    ):
        write_run(tmp_path, parse(settings | sections, origin="test"))
        with pytest.raises(ConfigError, match=said):
            scaling.ask(tmp_path, scaling.Wanted(engines=2), drain_s=1.0, started_by=StartedBy.LAUNCHER)
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "orchestrator.jsonl").write_text('{"t": 1.0, "kind": "end", "reason": "finished"}')
    with pytest.raises(ConfigError, match="is finished: it needs no engines"):
        scaling.ask(tmp_path, scaling.Wanted(engines=2), drain_s=1.0, started_by=StartedBy.LAUNCHER)


@pytest.mark.parametrize(
    ("sections", "words", "started_by", "said"),
    [
        ({}, "prm=2", StartedBy.LAUNCHER, "prm=2: .* has no process reward model"),
        ({"prm": {"path": "p"}}, "prm=2", StartedBy.JOB, "^prm=2: models that score have their processes on the machine"),
        ({"prm": {"path": "p"}}, "prm=0", StartedBy.LAUNCHER, "prm=0: expected 1 to 8, the most"),
        ({"prm": {"path": "p", "count": 6}}, "prm=13", StartedBy.LAUNCHER, "prm=13: expected 1 to 12, the most"),
        ({"prm": {"path": "p"}}, "prm=8", StartedBy.LAUNCHER, "is not live: no orchestrator listens"),
    ],
)
def test_what_a_process_reward_model_cannot_have_is_refused_by_name(
    tmp_path: Path, sections: dict[str, Any], words: str, started_by: StartedBy, said: str
) -> None:
    settings = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    write_run(tmp_path, parse(settings | sections, origin="test"))
    wanted = scaling.wanted_of(["engines=1", words])
    assert str(wanted) == f"engines=1 {words}"
    with pytest.raises(ConfigError, match=said):
        scaling.check(tmp_path, wanted, drain_s=1.0, started_by=started_by)


@pytest.mark.parametrize(
    ("sections", "words", "said"),
    [
        ({}, ["tensor_parallel_size=0"], "tensor_parallel_size=0: expected 1 or more"),
        ({}, ["tensor_parallel_size=2", "trainer=2"], "ask for prm=, reward= and trainer= before or after it"),
        ({"pipeline": {"elastic": True}, "engine": {"count": 2}}, ["tensor_parallel_size=2"], "pipeline.elastic is true, whose units"),
        (
            {"pipeline": {"elastic": True, "elastic_tensor_parallel_sizes": [2]}, "engine": {"count": 2}},
            ["tensor_parallel_size=4"],
            r"hold engines of 1, 2\. Start, or resume, the run with pipeline\.elastic_tensor_parallel_sizes = \[1, 2, 4\]",
        ),
        (
            {"pipeline": {"elastic": True, "elastic_tensor_parallel_sizes": [2]}, "engine": {"count": 2}},
            ["tensor_parallel_size=2"],
            "is not live: no orchestrator listens",
        ),
        (
            {"weights": {"transport": "nccl"}},
            ["tensor_parallel_size=2"],
            'weights.transport is "nccl": .* Use shared_memory, files or gloo',
        ),
        ({"weights": {"transport": "sharded"}, "trainer": {"ranks": 2, "parallel": {"shard": 2}}}, ["tensor_parallel_size=2"], '"sharded"'),
        ({"engine": {"quantization": "int8"}}, ["tensor_parallel_size=2"], 'engine.quantization is "int8"'),
        ({}, ["tensor_parallel_size=3"], "the 4 attention heads of .* are not divided by 3"),
        ({}, ["engines=1", "tensor_parallel_size=2"], "is not live: no orchestrator listens"),
    ],
)
def test_a_width_that_engines_cannot_have_is_refused_by_name(tmp_path: Path, sections: dict[str, Any], words: list[str], said: str) -> None:
    shape = {"model_type": "qwen2", "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = {"model": {"path": str(tmp_path)}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}
    (folder := tmp_path / "run").mkdir()
    write_run(folder, parse(settings | sections, origin="test"))
    wanted = scaling.wanted_of(words)
    assert str(wanted) == " ".join(words[::-1] if "trainer=2" in words else words)
    with pytest.raises(ConfigError, match=said):
        scaling.check(folder, wanted, drain_s=1.0, started_by=StartedBy.LAUNCHER)


def pieces(folder: Path) -> set[tuple[int, State, int | None]]:
    found = ScaleFolder(folder).members()
    assert found is not None
    there = (State.JOINING, State.LIVE, State.DRAINING)
    return {(one.engine_id, one.state, one.tensor_parallel_size) for one in found.members if one.state in there}


@pytest.mark.process
@pytest.mark.slow
def test_an_engine_of_another_width_takes_the_place_of_a_live_runs_and_back_also_when_somebody_is_killed_meanwhile(live: Path) -> None:
    asked = scale(live, "engines=2", "tensor_parallel_size=2", "--drain-s", "0")
    assert asked.returncode == 0, asked.stderr
    os.kill(victims.find("orchestrator", live)[0], signal.SIGKILL)
    wide = {(1, State.LIVE, 2), (2, State.LIVE, 2)}
    processes.wait_until(lambda: pieces(live) == wide, what=f"not two of two ranks: {pieces(live)}")
    killed = process_of(live, 2)
    os.kill(killed, signal.SIGKILL)
    processes.wait_until(lambda: process_of(live, 2) != killed and pieces(live) == wide, what="it does not come again as it was")
    shown = scale(live)
    assert "tensor_parallel_size" in shown.stdout
    back = scale(live, "engines=1", "tensor_parallel_size=1")
    assert back.returncode == 0, back.stderr
    processes.wait_until(lambda: pieces(live) == {(0, State.LIVE, 1)}, what=f"not one of one rank: {pieces(live)}")
    processes.wait_until(lambda: len(victims.find("engine", live)) == 1, what="an engine that has left goes on")
    before = steps(live)
    processes.wait_until(lambda: steps(live) >= before + 3, what="the run stands still")
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(live)], capture_output=True, text=True, check=False)
    assert "every promise was kept" in checked.stdout, checked.stdout


def test_one_that_finds_no_gpu_waits_for_those_of_another_width_and_is_lost_where_there_are_none(tmp_path: Path) -> None:
    asked: list[int] = []

    def joined(kind: str, member: Member, others: Iterable[Role]) -> Role:
        asked.append(member.engine_id)
        raise ConfigError("no GPU")

    folder, launcher = ScaleFolder(tmp_path), Launcher(roles_of(config(engine={"count": 1}), tmp_path), tmp_path, joined=joined)

    requests = {StartedBy.RUN: 0, StartedBy.LAUNCHER: 1}
    gone = functools.partial(Gone, kind=Kind.ENGINES, engine_id=1, reason="no GPU")

    def publish(*engines: tuple[State, StartedBy, int]) -> None:
        members = tuple(
            Member(engine_id=number, state=state, started_by=started_by, tensor_parallel_size=size, request_id=requests[started_by])
            for number, (state, started_by, size) in enumerate(engines)
        )
        folder.publish(Members(members=members, num_wanted=1, count=1))
        asyncio.run(launcher._start_joined())

    new = (State.JOINING, StartedBy.LAUNCHER, 2)
    publish((State.LIVE, StartedBy.RUN, 1), new)
    publish((State.LIVE, StartedBy.RUN, 1), new)
    assert (asked, folder.take_no_room(), folder.take_no_room(), folder.take_gone()) == ([1, 1], [1], [], [])
    publish((State.DRAINING, StartedBy.RUN, 1), new)
    assert (folder.take_no_room(), folder.take_gone()) == ([], []), "one leaves, and its GPU may be enough"
    publish((State.LEFT, StartedBy.RUN, 1), new)
    assert (folder.take_no_room(), folder.take_gone()) == ([], [gone(request_id=1)])
    assert launcher._has_left("engines")
    publish((State.LIVE, StartedBy.RUN, 1))
    assert not launcher._has_left("engines")
    publish((State.LIVE, StartedBy.LAUNCHER, 1))
    assert launcher._has_left("engines"), "another process has its number"
    requests[StartedBy.LAUNCHER] = 2
    publish((State.LIVE, StartedBy.RUN, 2), new)
    assert (folder.take_no_room(), folder.take_gone()) == ([], [gone(request_id=2)]), "nobody is to leave for it"


def test_an_engine_joins_once_the_process_that_had_its_number_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, is_there = list[str](), [True]

    async def start(name: str) -> None:
        started.append(name)

    roles = roles_of(config(engine={"count": 1}), tmp_path)
    launcher = Launcher(roles, tmp_path, joined=lambda kind, member, others: joined_engines(tmp_path, [member]))
    monkeypatch.setattr(launcher, "_start", start)
    monkeypatch.setattr(launcher._processes, "owns", lambda process_id: (process_id, is_there[0]) == (os.getpid(), True))
    register(tmp_path, "engine-0")
    member = Member(engine_id=0, state=State.JOINING, started_by=StartedBy.LAUNCHER, request_id=7)
    ScaleFolder(tmp_path).publish(Members(members=(member,), num_wanted=1, count=1))
    asyncio.run(launcher._start_joined())
    assert started == []
    is_there[0] = False
    asyncio.run(launcher._start_joined())
    assert started == ["engines-joined-0"]
    (command,) = (role.command for role in launcher._roles.values() if role.is_spare)
    assert command[-6:-2] == ("--ids", "0", "--request-ids", "7")


def test_an_engine_that_joins_is_told_its_width_and_dealt_as_many_gpus_as_it_has_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    shape = {"model_type": "qwen2", "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    settings = parse(
        {"model": {"path": str(tmp_path / "model")}, "data": {"source": "p"}, "reward": [{"function": "r:f"}], "engine": {"count": 2}},
        origin="test",
    )
    gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="H100", total_bytes=80 << 30, free_bytes=79 << 30) for index in range(3)]
    monkeypatch.setattr("pipelinerl.launch.run_launcher.usable_gpus", lambda: gpus)
    roles, _ = place(settings, roles_of(settings, tmp_path), gpus)

    wide = Member(engine_id=2, state=State.JOINING, started_by=StartedBy.LAUNCHER, tensor_parallel_size=2)

    def publish(first: State) -> None:
        two = tuple(Member(engine_id=number, state=first, started_by=StartedBy.RUN, tensor_parallel_size=1) for number in range(2))
        ScaleFolder(tmp_path).publish(Members(members=(*two, wide), num_wanted=1, count=2))

    publish(State.LIVE)
    with pytest.raises(ConfigError, match="every GPU of this machine is taken"):
        _joined(settings, tmp_path, Kind.ENGINES, wide, roles)
    publish(State.LEFT)
    role = _joined(settings, tmp_path, Kind.ENGINES, wide, roles)
    assert role is not None
    assert role.command[-4:] == ("--tensor-parallel-size", "2", "--gpus", "GPU-0,GPU-1")
    write_run(tmp_path, settings)
    assert not is_own(tmp_path, 2, StartedBy.LAUNCHER, tensor_parallel_size=1), "a process of another width is none of the run's"
    assert is_own(tmp_path, 2, StartedBy.LAUNCHER, tensor_parallel_size=2)


def test_engines_of_a_job_have_the_width_that_was_asked_for_and_one_command_starts_those_of_one(tmp_path: Path) -> None:
    write_run(tmp_path, config(engine={"count": 1, "kind": "fake"}))
    members = tuple(
        Member(engine_id=number, state=State.JOINING, started_by=StartedBy.JOB, request_id=1, tensor_parallel_size=size)
        for number, size in ((1, 2), (2, 2), (3, 1))
    )
    ScaleFolder(tmp_path).publish(Members(members=members, num_wanted=3, count=1))
    found, role = joining_engines(tmp_path, "0/1", "1,2")
    assert (found.engine.num_ranks, role.command[-2:]) == (2, ("--tensor-parallel-size", "2"))
    with pytest.raises(ConfigError, match=r"different tensor_parallel_size \(2: 2, 3: 1\)"):
        joining_engines(tmp_path, "0/1", "2,3")


MODELS = [{"function": "r:f"}, {"model": "models/orm"}, {"model": "models/other", "concurrency": 6}]


@pytest.mark.parametrize(
    ("rewards", "words", "started_by", "said"),
    [
        (MODELS[:1], "reward=2", StartedBy.LAUNCHER, r"^reward=2: .* has no reward model: no \[\[reward\]\] section has a model"),
        (MODELS, "reward=2", StartedBy.LAUNCHER, r"has several reward models: reward.1 \(models/orm\), reward.2 .*Say which: reward.1=2"),
        (MODELS, "reward.0=2", StartedBy.LAUNCHER, r"^reward.0=2: reward.0 of .* is the function r:f. Its reward models are reward.1"),
        (MODELS, "reward.3=2", StartedBy.LAUNCHER, r"^reward.3=2: reward.3 of .* is no section of \[\[reward\]\]\. Its reward models are"),
        (MODELS, "reward.1=0", StartedBy.LAUNCHER, "^reward.1=0: expected 1 to 8, the most"),
        (MODELS, "reward.2=13", StartedBy.LAUNCHER, "^reward.2=13: expected 1 to 12, .* need a larger reward.2.concurrency"),
        (MODELS[:2], "reward=2 reward.1=2", StartedBy.LAUNCHER, "^reward.1=2: reward.1 is asked for twice"),
        (
            MODELS,
            "reward.1=2",
            StartedBy.JOB,
            "^reward.1=2: models that score have their processes on the machine of the run's own launcher",
        ),
        (MODELS, "reward.1=2 reward.2=1", StartedBy.LAUNCHER, "is not live: no orchestrator listens"),
        (MODELS[:2], "reward=2", StartedBy.LAUNCHER, "is not live: no orchestrator listens"),
    ],
)
def test_what_a_reward_model_cannot_have_is_refused_by_name(
    tmp_path: Path, rewards: list[dict[str, Any]], words: str, started_by: StartedBy, said: str
) -> None:
    write_run(tmp_path, parse({"model": {"path": "m"}, "data": {"source": "p"}, "reward": rewards}, origin="test"))
    wanted = scaling.wanted_of(["engines=1", *words.split()])
    assert str(wanted) == f"engines=1 {words}"
    with pytest.raises(ConfigError, match=said):
        scaling.check(tmp_path, wanted, drain_s=1.0, started_by=started_by)


def test_the_engines_of_a_run_that_has_ended_are_told_as_what_was_said_last(tmp_path: Path) -> None:
    write_run(tmp_path, parse({"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}]}, origin="test"))
    members = (Member(engine_id=0, state=State.LIVE, started_by=StartedBy.RUN),)
    record = Members(members=members, num_wanted=1, count=1)
    ScaleFolder(tmp_path).publish(msgspec.structs.replace(record, rewards={"reward.1": msgspec.structs.replace(record, num_wanted=2)}))
    shown = scale(tmp_path)
    assert "2 reward.1 processes asked for" in shown.stdout
    assert "1 engine asked for" in shown.stdout
    assert "no orchestrator of this run listens" in shown.stdout


def test_a_slurm_job_of_engines_asks_for_their_gpus_and_is_one_for_each_node(tmp_path: Path) -> None:
    settings = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}], "run": {"name": "r"}}
    slurm = {"gpus_per_node": 4, "partition": "a100", "engine_options": ["--partition=spot"], "engine_nodes": 1, "setup": ["module load x"]}
    config = parse(settings | {"engine": {"options": {"tensor_parallel_size": 2}}, "slurm": slurm}, origin="test")
    (tmp_path / "scale").mkdir()
    first, second = jobs.prepare(config, tmp_path, [2, 3, 4], python="/opt/python")
    assert [path.name for path in (first, second)] == ["engines-2-3.sbatch", "engines-4.sbatch"]
    lines = first.read_text().splitlines()
    assert {"#SBATCH --gpus-per-node=4", "#SBATCH --partition=spot", "#SBATCH --requeue", "module load x"} <= {*lines}
    assert lines[-1] == f"exec srun --kill-on-bad-exit=1 /opt/python -m pipelinerl engines {tmp_path} --ids 2,3"
    assert "#SBATCH --gpus-per-node=2" in second.read_text().splitlines()
    assert "#SBATCH --partition=a100" not in lines


def test_the_orchestrators_record_says_whose_an_engine_is(tmp_path: Path) -> None:
    assert is_own(tmp_path, 0, StartedBy.RUN), "before the orchestrator has spoken"
    members = (
        Member(engine_id=0, state=State.LIVE, started_by=StartedBy.RUN),
        Member(engine_id=1, state=State.LEFT, started_by=StartedBy.RUN),
        Member(engine_id=2, state=State.JOINING, started_by=StartedBy.LAUNCHER, request_id=2),
        Member(engine_id=3, state=State.LOST, started_by=StartedBy.JOB, request_id=3),
    )
    ScaleFolder(tmp_path).publish(Members(members=members, num_wanted=2, count=2))
    own = {kind: [number for number in range(4) if is_own(tmp_path, number, kind, request_id=number)] for kind in StartedBy}
    assert own == {StartedBy.RUN: [0], StartedBy.LAUNCHER: [2], StartedBy.JOB: [3]}
    assert not is_own(tmp_path, 2, StartedBy.LAUNCHER, request_id=1), "another engine had its number before"


def test_who_has_a_clock_behind_that_of_the_order_before_waits_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "check", lambda folder, wanted, **_: wanted)
    monkeypatch.setattr(scaling, "ANSWER_S", 0.0)
    ahead = 2**62
    ScaleFolder(tmp_path).publish(Members(members=(), num_wanted=1, count=1, request_id=ahead))
    asked, ask = list[int](), ScaleFolder.ask
    monkeypatch.setattr(ScaleFolder, "ask", lambda self, request: ask(self, request) or asked.append(request.request_id))
    with pytest.raises(PeerSilent, match="to answer engines=2, which is asked for no more"):
        scaling.ask(tmp_path, scaling.Wanted(engines=2), drain_s=0.0, started_by=StartedBy.LAUNCHER)
    assert asked == [ahead + 1]
    assert ScaleFolder(tmp_path).asked(after=ahead) is None, "else whoever resumes the run carries it out"
