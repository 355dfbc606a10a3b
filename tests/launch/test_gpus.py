"""Every rank has a GPU of its own, and knows it by its UUID."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.config.scoring import RewardSection
from pipelinerl.engine.__main__ import _gpus_of
from pipelinerl.errors import ConfigError
from pipelinerl.launch.gpus import Placement, place, place_joined, place_reward_process, place_trainer
from pipelinerl.launch.node_roles import check_gpus
from pipelinerl.launch.preflight import _gpus
from pipelinerl.launch.roles import Role, joined_engines, prm_engine, roles_of
from pipelinerl.launch.slurm.__main__ import supervisor_of
from pipelinerl.launch.slurm.submit import prepare
from pipelinerl.launch.trainer_starts import dealt_gpus
from pipelinerl.runtime import devices
from pipelinerl.runtime.devices import Gpu, found_gpus, show_first, usable_gpus
from pipelinerl.runtime.findings import Level
from pipelinerl.runtime.membership import DealtGpu, DealtGpus, Kind, Member, Members, ScaleFolder, StartedBy, State
from tests.pretended import build_nvml, load_nvml
from tests.processes import PATIENCE_S, program
from tests.tiny_models import make_qwen2


def uuid(index: int) -> str:
    """As the pretended NVML gives it."""
    return f"GPU-{index:08}-0000-4000-8000-000000000000"


def some(count: int) -> list[Gpu]:
    return [Gpu(index=index, uuid=uuid(index), name="H100", total_bytes=80 << 30, free_bytes=79 << 30) for index in range(count)]


def settings(**sections: Any) -> Config:
    tree = {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "f:g"}]}
    return parse(tree | sections, origin="test")


def placed(count: int, **sections: Any) -> Placement:
    config = settings(**sections)
    return place(config, roles_of(config, Path("run")), some(count))[1]


def indices(placement: Placement) -> dict[str, list[int]]:
    return {who: [gpu.index for gpu in gpus] for who, gpus in placement.taken.items()}


@pytest.fixture
def pretended(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    load_nvml(tmp_path_factory.getbasetemp())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0")
    return lambda count: monkeypatch.setenv("PRETENDED_GPUS", str(count))


def test_every_rank_of_every_part_has_a_gpu_of_its_own_and_an_engines_ranks_are_neighbours():
    options = {"tensor_parallel_size": 2}
    found = indices(placed(8, engine={"count": 2, "options": options}, prm={"path": "p"}, trainer={"ranks": 3}))
    assert found == {"engine-0": [0, 1], "engine-1": [2, 3], "prm-1": [4], "trainer": [5, 6, 7]}


def test_each_engine_of_a_process_reward_model_is_told_a_gpu_of_its_own(tmp_path: Path) -> None:
    config = settings(prm={"path": "p", "count": 2})
    roles, placement = place(config, roles_of(config, tmp_path), some(5))
    assert indices(placement) == {"engine-0": [0], "prm-1": [1], "prm-2": [2], "trainer": [3]}
    told = {role.name: role.command[-1] for role in roles if role.kind == Kind.PRM}
    assert told == {"scorer-1": some(5)[1].uuid, "scorer-2": some(5)[2].uuid}
    found = indices(placed(4, prm={"path": "p", "count": 2, "gpus": [3, 0]}))
    assert (found["prm-1"], found["prm-2"]) == ([3], [0])
    with pytest.raises(ConfigError, match=r"prm\.gpus names 1 GPUs here, and 2 are needed"):
        placed(4, prm={"path": "p", "count": 2, "gpus": [3]})


def test_an_engines_gpu_is_dealt_to_the_process_reward_model_and_back(tmp_path: Path) -> None:
    config = settings(engine={"count": 2}, prm={"path": "p", "gpus": [2]})
    roles, _ = place(config, roles_of(config, tmp_path), some(4))
    joins = prm_engine(tmp_path, 2, started_by=StartedBy.LAUNCHER)
    with pytest.raises(ConfigError, match=r"every GPU of this machine is taken by the run: .*\. Have an engine leave in the same call"):
        place_joined(config, joins, roles, some(4))
    joined = place_joined(config, joins, roles, some(4), gone={(Kind.ENGINES, 1)})
    assert joined.command[-2:] == ("--gpus", some(4)[1].uuid)
    again = joined_engines(tmp_path, [Member(engine_id=1, state=State.JOINING, started_by=StartedBy.LAUNCHER, request_id=1)])
    with pytest.raises(ConfigError, match="every GPU of this machine is taken"):
        place_joined(config, again, (*roles, joined), some(4), gone={(Kind.ENGINES, 1)})
    back = place_joined(config, again, (*roles, joined), some(4), gone={(Kind.ENGINES, 1), (Kind.PRM, 2)})
    assert back.command[-2:] == ("--gpus", some(4)[1].uuid)
    judged = settings(prm={"judge": {"url": "http://judge/v1", "model": "judge"}})
    assert place_joined(judged, joins, roles, some(4)) == joins, "a judge needs none"


def test_an_engines_gpu_is_dealt_to_a_reward_model_and_back(tmp_path: Path) -> None:
    """Of five GPUs engines have 0 and 1, two processes of reward.1 have 2 and 3, and the trainer 4."""
    config = settings(engine={"count": 2}).model_copy(update={"reward": rewards("f.py:f", "orm", concurrency=2)})
    roles, placement = place(config, roles_of(config, tmp_path), some(5))
    assert indices(placement) == {"engine-0": [0], "engine-1": [1], "reward-orm-0": [2], "reward-orm-1": [3], "trainer": [4]}
    with pytest.raises(ConfigError, match=r"every GPU of this machine is taken by the run: .*\. Have an engine leave in the same call"):
        place_reward_process(config, roles, some(5))
    gone = {(Kind.ENGINES, 1)}
    given = place_reward_process(config, roles, some(5), gone=gone)
    assert given == some(5)[1].uuid
    again = joined_engines(tmp_path, [Member(engine_id=1, state=State.JOINING, started_by=StartedBy.LAUNCHER, request_id=1)])
    with pytest.raises(ConfigError, match="every GPU of this machine is taken"):
        place_joined(config, again, roles, some(5), gone=gone, dealt=[given])
    back = place_joined(config, again, roles, some(5), gone=gone)
    assert back.command[-2:] == ("--gpus", given)
    left = {*gone, ("reward.1", 0)}
    assert place_joined(config, again, roles, some(5), gone=left, dealt=[given]).command[-1] == some(5)[2].uuid, "of one that it began with"
    trainer = next(role for role in roles if role.name == "trainer")
    others = [role for role in roles if role.name != "trainer"]
    ranks = {"ranks": 2, "dealt": [given]}
    with pytest.raises(ConfigError, match="leave 1 of 5"):
        place_trainer(config, trainer, others, some(5), gone=gone, **ranks)
    two = place_trainer(config, trainer, others, some(5), gone=left, **ranks)
    assert two.command[-1] == f"{some(5)[2].uuid},{some(5)[4].uuid}"
    assert place_reward_process(config, roles, ()) == "", "a machine without GPUs"
    shared = settings(engine={"count": 2, "shares_gpus": True, "kv_cache_bytes": 1 << 30}).model_copy(update={"reward": config.reward})
    assert place_reward_process(shared, roles, some(5)) == some(5)[0].uuid


def rewards(*names: str, **keys: Any) -> tuple[RewardSection, ...]:
    found = ({"function": name} if ":" in name else {"model": name, **keys} for name in names)
    return tuple(RewardSection.model_validate(one) for one in found)


def test_what_the_launcher_has_dealt_counts_as_long_as_that_process_is_there(tmp_path: Path) -> None:
    folder = ScaleFolder(tmp_path)
    there = DealtGpu(kind="reward.1", number=1, request_id=7, gpu="GPU-a")
    folder.publish(Members(members=(), num_wanted=0, count=0))
    folder.deal(DealtGpus(dealt=(there, DealtGpu(kind="reward.2", number=1, request_id=7, gpu="GPU-b"))))
    assert dealt_gpus(tmp_path) == {}
    for state, request_id, found in ((State.LIVE, 7, {there: "GPU-a"}), (State.DRAINING, 7, {there: "GPU-a"}), (State.LEFT, 7, {})):
        member = Member(engine_id=1, state=state, started_by=StartedBy.LAUNCHER, request_id=request_id)
        record = Members(members=(member,), num_wanted=1, count=1)
        folder.publish(Members(members=(), num_wanted=0, count=0, rewards={"reward.1": record}))
        assert dealt_gpus(tmp_path) == found
    anew = msgspec.structs.replace(member, state=State.JOINING, request_id=8)
    folder.publish(Members(members=(), num_wanted=0, count=0, rewards={"reward.1": msgspec.structs.replace(record, members=(anew,))}))
    assert dealt_gpus(tmp_path) == {}, "another request has brought it, and what it had may be somebody's"
    folder.forget_dealt()
    assert folder.dealt() == DealtGpus()


def test_each_process_of_a_reward_model_has_a_gpu_of_its_own_and_the_scorer_is_told_them_in_order():
    rewards = [{"model": "m/small", "concurrency": 2}, {"function": "f:g"}, {"model": "m/large"}]
    config = settings(reward=rewards)
    roles, placement = place(config, roles_of(config, Path("run")), some(5))
    given = {"reward-small-0": [1], "reward-small-1": [2], "reward-large-0": [3]}
    assert indices(placement) == {"engine-0": [0], **given, "trainer": [4]}
    (command,) = [role.command for role in roles if role.name == "scorer-0"]
    assert command[-6:] == ("--gpus", uuid(1), "--gpus", uuid(2), "--gpus", uuid(3))


def test_a_pipelines_ranks_count_as_those_that_share_matrices_do():
    options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert indices(placed(8, engine={"options": options}))["engine-0"] == [0, 1, 2, 3]


def test_a_list_is_dealt_in_its_order_by_index_or_uuid_and_what_it_names_is_left_out_of_what_the_others_get():
    found = indices(placed(4, engine={"count": 2, "gpus": [3, uuid(0)]}, trainer={"ranks": 2}))
    assert found == {"engine-0": [3], "engine-1": [0], "trainer": [1, 2]}
    assert indices(placed(4, trainer={"gpus": [0]})) == {"engine-0": [1], "trainer": [0]}


def test_too_few_are_refused_with_what_was_found_and_what_is_needed():
    with pytest.raises(
        ConfigError, match=r"engine 4 and trainer 4 GPUs are needed.*of 4 found .*3 H100 \(80\.0 GiB, GPU-00000003.*Lower engine"
    ):
        placed(4, engine={"count": 4}, trainer={"ranks": 4})
    with pytest.raises(ConfigError, match=r"engine\.gpus names 1 GPUs here, and 2 are needed"):
        placed(8, engine={"count": 2, "gpus": [0]})
    with pytest.raises(ConfigError, match=r"trainer\.gpus names GPU 9, which is not among those found here: 0 H100"):
        placed(2, trainer={"gpus": [9]})


def test_an_overlap_is_refused_unless_it_is_said():
    both = {"engine": {"gpus": [1]}, "trainer": {"gpus": [1]}}
    with pytest.raises(ConfigError, match=r"engine-0 and trainer are both given GPU 1 .*engine\.shares_gpus = true"):
        placed(2, **both)
    shares = {"shares_gpus": True, "kv_cache_bytes": 1 << 30}
    assert indices(placed(2, engine={"gpus": [1]} | shares, trainer={"gpus": [1]})) == {"engine-0": [1], "trainer": [1]}
    assert indices(placed(1, engine=shares)) == {"engine-0": [0], "trainer": [0]}, "the only GPU of a machine serves and trains"
    assert indices(placed(1, engine=shares, trainer={"gpus": [0]})) == {"engine-0": [0], "trainer": [0]}
    assert indices(placed(4, engine={"count": 2} | shares, trainer={"ranks": 4}))["trainer"] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"GPU 0 .*twice"):
        placed(2, trainer={"ranks": 2, "gpus": [0, 0]}, engine=shares)
    with pytest.raises(ConfigError, match=r"Set engine\.kv_cache_bytes"):
        settings(engine={"shares_gpus": True})


def test_the_trainer_of_a_run_in_turns_has_the_gpus_of_its_engines_and_nobody_else_has():
    turns = {"pipeline": {"placement": "colocated"}}
    cache = {"kv_cache_bytes": 1 << 30}
    tensor = {"options": {"tensor_parallel_size": 2}}
    assert indices(placed(1, engine=cache, **turns)) == {"engine-0": [0], "trainer": [0]}
    found = indices(placed(5, engine=cache | tensor | {"count": 2}, trainer={"ranks": 4}, prm={"path": "p"}, **turns))
    assert found == {"engine-0": [0, 1], "engine-1": [2, 3], "prm-1": [4], "trainer": [0, 1, 2, 3]}
    assert indices(placed(4, engine=cache | tensor | {"gpus": [3, 2]}, trainer={"ranks": 2}, **turns))["trainer"] == [3, 2]
    assert indices(placed(2, engine=cache, trainer={"gpus": [1]}, **turns)) == {"engine-0": [1], "trainer": [1]}
    with pytest.raises(ConfigError, match=r"prm-1 and trainer are both given GPU 1 "):
        placed(2, engine=cache | {"gpus": [0]}, prm={"path": "p", "gpus": [1]}, trainer={"gpus": [1]}, **turns)
    with pytest.raises(ConfigError, match=r"engine-0 and prm-1 are both given GPU 0 "):
        placed(2, engine=cache | {"gpus": [0]}, prm={"path": "p", "gpus": [0]}, **turns)
    with pytest.raises(ConfigError, match=r"which starts beside it, nothing\. Set engine\.kv_cache_bytes"):
        placed(1, **turns)


def test_engines_apart_have_gpus_that_the_trainer_has_no_turn_on():
    turns = {"pipeline": {"placement": "colocated"}}
    engine = {"kv_cache_bytes": 1 << 30, "count": 3, "apart": 2}
    assert indices(placed(3, engine=engine, **turns)) == {"engine-0": [0], "engine-1": [1], "engine-2": [2], "trainer": [0]}
    found = indices(placed(5, engine=engine, trainer={"ranks": 2}, prm={"path": "p"}, **turns))
    assert found == {"engine-0": [0], "engine-1": [2], "engine-2": [3], "prm-1": [4], "trainer": [0, 1]}
    found = indices(placed(4, engine=engine, trainer={"gpus": [3]}, prm={"path": "p"}, **turns))
    assert found == {"engine-0": [3], "engine-1": [0], "engine-2": [1], "prm-1": [2], "trainer": [3]}
    with pytest.raises(ConfigError, match=r"engine-1 and trainer are both given GPU 1 "):
        placed(3, engine=engine | {"gpus": [0, 1, 2]}, trainer={"ranks": 2}, **turns)
    with pytest.raises(ConfigError, match=r"engine 3 and trainer 2 GPUs are needed"):
        placed(3, engine=engine, trainer={"ranks": 2}, **turns)


def test_a_machine_without_gpus_runs_on_its_cpus_and_refuses_a_list():
    config = settings()
    roles = roles_of(config, Path("run"))
    assert place(config, roles, ())[0] == roles
    with pytest.raises(ConfigError, match=r"trainer\.gpus names 2, and no GPU was found"):
        placed(0, trainer={"gpus": [2]})


def test_each_process_is_told_its_own_gpus_on_its_command_line():
    config = settings(engine={"count": 2}, trainer={"ranks": 2})
    roles = {role.name: role.command for role in place(config, roles_of(config, Path("run")), some(4))[0]}
    assert roles["engines"][-4:] == ("--gpus", uuid(0), "--gpus", uuid(1))
    assert roles["trainer"][-2:] == ("--gpus", f"{uuid(2)},{uuid(3)}")
    assert "--gpus" not in roles["orchestrator"] + roles["scorer-0"]


def test_the_table_says_who_takes_which_gpu():
    lines = list(placed(4, engine={"options": {"tensor_parallel_size": 2}}).table())
    assert lines == [
        f"{gpu}: {who}" for gpu, who in zip(some(4), ("engine-0 rank 0", "engine-0 rank 1", "trainer rank 0", "free"), strict=True)
    ]


def test_the_driver_is_asked_for_gpus_and_an_inherited_choice_is_kept(pretended: Callable[[int], None], monkeypatch: pytest.MonkeyPatch):
    pretended(4)
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.total_bytes) for gpu in found_gpus()] == [
        (index, uuid(index), "Pretended H100", 80 << 30) for index in range(4)
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3,{uuid(1)[:12]}")
    assert [gpu.index for gpu in found_gpus()] == [3, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found_gpus() == ()


def test_a_torch_for_cpus_uses_no_gpu(pretended: Callable[[int], None], monkeypatch: pytest.MonkeyPatch):
    pretended(2)
    assert len(usable_gpus()) == 2
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0+cpu")
    assert usable_gpus() == ()


def test_a_process_sees_its_own_gpus_first_and_the_others_behind_them(pretended: Callable[[int], None], monkeypatch: pytest.MonkeyPatch):
    pretended(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    show_first(f"{uuid(2)},{uuid(1)}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"{uuid(2)},{uuid(1)},{uuid(0)}", "else what the trainer shares could not be opened"


def test_a_dry_run_shows_the_table_and_says_what_is_too_little(pretended: Callable[[int], None]):
    pretended(2)
    assert [finding.found.rpartition(": ")[2] for finding in _gpus(settings(), is_dry=True)] == ["engine-0", "trainer rank 0"]
    with pytest.raises(ConfigError, match="GPUs are needed"):
        list(_gpus(settings(trainer={"ranks": 2}), is_dry=True))
    pretended(0)
    assert [finding.level for finding in _gpus(settings(engine={"gpus": [0]}), is_dry=True)] == [Level.NOTE]
    with pytest.raises(ConfigError, match="no GPU was found"):
        list(_gpus(settings(engine={"gpus": [0]}), is_dry=False))


def test_a_dry_run_says_how_an_engines_memory_is_divided(pretended: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    make_qwen2(tmp_path)
    pretended(2)
    config = settings(model={"path": str(tmp_path)})
    (said,) = [finding.found for finding in _gpus(config, is_dry=True) if finding.what == "GPU memory"]
    assert said.startswith("engine-0, of 80.0 GiB free on each GPU: weights ")
    assert "the next policy" in said
    monkeypatch.setenv("PRETENDED_FREE_BYTES", str(3 << 30))
    with pytest.raises(ConfigError, match=r"3\.0 GiB of 80\.0 GiB are free"):
        list(_gpus(config, is_dry=True))


def test_engines_started_by_hand_are_not_all_put_on_the_first_gpu(pretended: Callable[[int], None]):
    pretended(2)
    assert _gpus_of(range(1), []) == [""]
    assert _gpus_of(range(2, 4), ["a", "b"]) == ["a", "b"]
    with pytest.raises(ConfigError, match="2 engines were started by hand"):
        _gpus_of(range(2), [])
    with pytest.raises(ConfigError, match="1 times for 2 engines"):
        _gpus_of(range(2), ["a"])


FIRST_LOOK = """
    import os, pathlib, sys
    from pipelinerl.config.file import parse, write_run
    from pipelinerl.engine import __main__ as parent
    write_run(pathlib.Path(folder), parse({"model": {"path": "m"}, "engine": {"kind": "fake", "count": 2}}, origin="", for_run=False))
    parent._run_engine = lambda engine_id, *_, **__: os.write(1, f"{engine_id} {os.environ['CUDA_VISIBLE_DEVICES']}\\n".encode())
    sys.argv = ["engine", "--run-folder", folder, "--gpus", gpus[1], "--gpus", gpus[2]]
    parent.main()
"""


@pytest.mark.process
def test_every_fork_of_the_engines_parent_sees_its_own_gpu_first(tmp_path: Path):
    library = {"LD_LIBRARY_PATH": str(build_nvml(tmp_path)), "PRETENDED_GPUS": "3"}
    command = program(FIRST_LOOK, folder=tmp_path, gpus=[uuid(index) for index in range(3)])
    ended = subprocess.run(command, env=os.environ | library, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    # One that ends while the other lives is started again, so that a line may come twice.
    assert set(ended.stdout.splitlines()) == {f"0 {uuid(1)},{uuid(0)},{uuid(2)}", f"1 {uuid(2)},{uuid(0)},{uuid(1)}"}, ended.stderr


NODES = {"engine": {"count": 4}, "trainer": {"ranks": 4}, "slurm": {"trainer_nodes": 2, "engine_nodes": 2, "gpus_per_node": 2}}


def test_a_job_says_before_it_is_submitted_who_takes_which_gpu_of_which_node(tmp_path: Path):
    assert check_gpus(settings(**NODES), settings(**NODES).slurm, key="slurm.gpus_per_node") == [
        "node 0: GPU 0: trainer rank 0",
        "node 0: GPU 1: trainer rank 1",
        "node 1: GPU 0: trainer rank 2",
        "node 1: GPU 1: trainer rank 3",
        "node 2: GPU 0: engine-0",
        "node 2: GPU 1: engine-1",
        "node 3: GPU 0: engine-2",
        "node 3: GPU 1: engine-3",
    ]
    with pytest.raises(ConfigError, match=r"node 0, of slurm\.gpus_per_node = 1: trainer 2 GPUs are needed"):
        prepare(settings(**NODES | {"slurm": NODES["slurm"] | {"gpus_per_node": 1}, "run": {"folder": str(tmp_path)}}))
    assert list(tmp_path.iterdir()) == [], "what is refused leaves no folder behind"


def test_each_node_of_a_job_deals_its_own_gpus_to_its_own_processes(pretended: Callable[[int], None], tmp_path: Path):
    pretended(2)
    folder = prepare(settings(**NODES | {"run": {"folder": str(tmp_path)}})).parent
    config = settings(**NODES)
    for node, name, words in (
        (1, "trainer-1", ("--gpus", f"{uuid(0)},{uuid(1)}")),
        (3, "engines-1", ("--gpus", uuid(0), "--gpus", uuid(1))),
    ):
        recorded = supervisor_of(folder, attempt=0, node=node)._roles
        roles, _ = place(config, recorded, usable_gpus(), is_alone=False)
        assert {role.name: role.command[-len(words) :] for role in roles}[name] == words
    assert json.loads((folder / "roles.json").read_text()), "written before any node was known"


def test_a_uuid_of_another_node_is_left_to_that_node():
    config = settings(engine={"count": 1, "gpus": ["GPU-elsewhere", uuid(1)]})
    _, placement = place(config, [Role(name="engines", command=())], some(2), is_alone=False)
    assert indices(placement) == {"engine-0": [1]}
