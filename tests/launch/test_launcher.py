"""The launcher, with real processes: the first error is the one that is told, and nobody is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.config import Config, EngineSection, TrainerSection
from pipelinerl.config.file import load_run, parse
from pipelinerl.errors import LeaseError, PeerGone
from pipelinerl.launch import launcher as launching
from pipelinerl.launch import processes as started
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.launch.run_folder import make_run_folder
from pipelinerl.runtime import restarts
from pipelinerl.runtime.early import EarlyProcesses
from pipelinerl.runtime.lease import held
from pipelinerl.runtime.restarts import Restarts
from pipelinerl.transport.keys import read_keys
from tests import processes

pytestmark = pytest.mark.process

SLEEP = "import time; time.sleep(100)"
LIVES = """
    import os, pathlib, time
    pathlib.Path(folder, name).write_text(f"{os.getpid()}\\n")
    time.sleep(100)
"""
"""Says its process id and lives on."""
FAILS = """
    import pathlib, time
    from pipelinerl.errors import WeightsError
    from pipelinerl.runtime.process import crash_report

    with crash_report(pathlib.Path(folder), "trainer-1"):
        while not pathlib.Path(folder, "orchestrator").exists():
            time.sleep(0.01)
        raise WeightsError("slot 3: digest is ab")
"""
"""Fails with an error of its own once the orchestrator lives."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run folder; every process that said its id there is ended after the test."""
    yield tmp_path
    for name in ("orchestrator", "engines", "trainer", "child"):
        if (tmp_path / name).exists():
            processes.end(int((tmp_path / name).read_text()))


def role(name: str, code: str, folder: Path) -> Role:
    return Role(name=name, command=processes.program(code, folder=folder, name=name))


def run(folder: Path, **codes: str) -> float:
    """Run roles to the end; the seconds it took."""
    started = time.monotonic()
    asyncio.run(Launcher(tuple(role(name, code, folder) for name, code in codes.items()), folder).run())
    return time.monotonic() - started


def said_id(folder: Path, name: str) -> int:
    return int(processes.read_when_written(folder / name))


def test_a_run_in_which_all_end_well_ends_well_and_each_has_its_log(folder: Path):
    run(folder, orchestrator="print('finished: 3 trained')", engines="import sys; print('bye', file=sys.stderr)")
    assert (folder / "logs" / "orchestrator.log").read_text() == "finished: 3 trained\n"
    assert (folder / "logs" / "engines.log").read_text() == "bye\n"


def test_a_role_that_began_early_is_that_process_and_is_started_again_as_any_other(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    (folder / "program.py").write_text(
        "import os, signal, sys\n"
        "from pipelinerl.runtime import early\n"
        "begun = 'early' if '--early' in sys.argv else 'late'\n"
        "path = early.arguments(lambda settings: None)[0]\n"
        "open(path, 'a').write(f'{begun}\\n')\n"
        "if begun == 'early': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    waits = role(
        "orchestrator", "import pathlib, time\nwhile 'late' not in pathlib.Path(folder, 'said').read_text(): time.sleep(0.01)", folder
    )
    (folder / "said").touch()
    engines = Role(name="engines", command=(sys.executable, "-m", "program", str(folder / "said")), begins_early=True)
    with EarlyProcesses() as early:
        early.start(engines.program, settings="{}")
        restarts = Restarts(budget=1, first_wait_s=0.01)
        asyncio.run(Launcher((waits, engines), folder, restarts=restarts, early=early).run())
    assert (folder / "said").read_text() == "early\nlate\n"


def test_only_what_imports_for_long_begins_early(tmp_path: Path):
    several = settings(tmp_path)
    assert [role.name for role in roles_of(several, tmp_path) if role.begins_early] == ["engines"], (
        "ranks have a parent that imports little"
    )
    alone = several.model_copy(update={"trainer": TrainerSection.model_validate({"ranks": 1})})
    assert [role.name for role in roles_of(alone, tmp_path) if role.begins_early] == ["engines", "trainer"]
    fake = alone.model_copy(update={"engine": EngineSection.model_validate({"kind": "fake"})})
    assert [role.name for role in roles_of(fake, tmp_path) if role.begins_early] == ["trainer"]


def test_a_role_that_fails_ends_the_others_and_its_own_words_are_told(folder: Path):
    started = time.monotonic()
    with pytest.raises(PeerGone, match=r"^trainer-1 failed: WeightsError: slot 3: digest is ab\n\(its traceback is in .*failures\)$"):
        run(folder, orchestrator=LIVES, engines=LIVES, trainer=FAILS)
    assert time.monotonic() - started < 20.0
    assert not processes.is_alive(said_id(folder, "orchestrator"))


def test_a_role_that_fails_without_last_words_is_named_with_its_code_and_the_end_of_its_log(folder: Path):
    code = "import sys\nfor n in range(40): print('line', n)\nsys.exit(3)"
    with pytest.raises(PeerGone, match=r"^engines ended with exit code 3; its log .*engines.log ends:\n") as failed:
        run(folder, orchestrator=SLEEP, engines=code)
    assert str(failed.value).endswith("line 38\nline 39")
    assert "line 24" not in str(failed.value), "only its last 15 lines"


def test_a_role_that_is_killed_is_named_with_the_signal(folder: Path):
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(PeerGone, match=r"^engines was killed by SIGKILL; its log"):
        run(folder, orchestrator=SLEEP, engines=code)


def test_what_others_say_when_they_are_ended_is_not_the_reason(folder: Path):
    """The engines are killed and can say nothing; the trainer then complains that it was interrupted."""
    complains = """
        import pathlib, signal, time
        from pipelinerl.errors import LeaseError, PeerGone
        from pipelinerl.runtime.process import crash_report

        def complain(*_): raise PeerGone("I was interrupted")
        signal.signal(signal.SIGTERM, complain)
        with crash_report(pathlib.Path(folder), name):
            pathlib.Path(folder, "listening").touch()
            time.sleep(100)
    """
    killed = """
        import os, pathlib, signal, time
        while not pathlib.Path(folder, "listening").exists(): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(PeerGone, match=r"^engines was killed by SIGKILL"):
        run(folder, orchestrator=SLEEP, trainer=complains, engines=killed)
    assert (folder / "failures" / "trainer.json").exists()


def test_the_first_of_several_errors_is_told(folder: Path):
    """The trainer fails first; the orchestrator then fails for want of it, and ends before the trainer does."""
    first = """
        import pathlib, time
        from pipelinerl.errors import MismatchError
        from pipelinerl.runtime.process import crash_report

        with crash_report(pathlib.Path(folder), "trainer-0"):
            try:
                raise MismatchError("3.5 apart")
            finally:
                pathlib.Path(folder, "raised").touch()
    """
    second = """
        import pathlib, time
        from pipelinerl.errors import LeaseError, PeerGone
        from pipelinerl.runtime.process import crash_report

        while not pathlib.Path(folder, "failures", "trainer-0.json").exists(): time.sleep(0.01)
        with crash_report(pathlib.Path(folder), name):
            raise PeerGone("trainer-0 is gone")
    """
    with pytest.raises(PeerGone, match=r"^trainer-0 failed: MismatchError: 3.5 apart"):
        run(folder, orchestrator=second, trainer=first)


def test_a_role_that_does_not_listen_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(started, "KILL_GRACE_S", 0.3)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _dedented(LIVES)
    with pytest.raises(PeerGone, match="trainer-1 failed"):
        run(folder, orchestrator=deaf, trainer=FAILS)
    assert not processes.is_alive(said_id(folder, "orchestrator"))


def test_what_a_role_started_ends_with_it(folder: Path):
    """A process in the background that outlives a role which failed."""
    leaves_a_child = """
        import pathlib, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        pathlib.Path(folder, "child").write_text(f"{child.pid}\\n")
        sys.exit(3)
    """
    with pytest.raises(PeerGone, match="engines ended with exit code 3"):
        run(folder, orchestrator=SLEEP, engines=leaves_a_child)
    child_id = said_id(folder, "child")
    processes.wait_until(lambda: not processes.is_alive(child_id), what="the child of a role outlives the run")


def test_who_outlives_the_orchestrator_for_too_long_is_named_and_ended(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "SAVE_GRACE_S", 0.5)
    waits = "import pathlib, time\nwhile not pathlib.Path(folder, 'engines').exists(): time.sleep(0.01)"
    with pytest.raises(PeerGone, match="engines"):
        run(folder, orchestrator=waits, engines=LIVES)
    assert not processes.is_alive(said_id(folder, "engines"))


def test_the_time_to_save_begins_when_the_orchestrator_has_ended(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A role that ends well before it starts no clock."""
    monkeypatch.setattr(launching, "SAVE_GRACE_S", 0.3)
    waits = "import pathlib, time\nwhile not pathlib.Path(folder, 'done').exists(): time.sleep(0.01)\ntime.sleep(1.0)"
    run(folder, orchestrator=waits, engines="import pathlib; pathlib.Path(folder, 'done').touch()")


# --- who is killed is started again --------------------------------------------------------------------------------------------------

DIES_TWICE = """
    import os, pathlib, signal, time
    lives = pathlib.Path(folder, name + ".lives")
    with open(lives, "a") as file: file.write("x")
    if len(lives.read_text()) < 3: os.kill(os.getpid(), signal.SIGKILL)
    pathlib.Path(folder, name + ".done").touch()
"""
"""Is killed in its first two lives, and ends well in its third."""
COUNTS = """
    import pathlib, time
    with open(pathlib.Path(folder, name + ".lives"), "a") as file: file.write("x")
    while not pathlib.Path(folder, other + ".done").exists(): time.sleep(0.01)
"""
"""Counts its lives, and ends well once the other has."""


def run_again(folder: Path, *, num_restarts: int, **codes: str) -> None:
    """Run roles to the end, with restarts."""
    roles = tuple(role(name, code.replace("other", repr(_other(name, codes))), folder) for name, code in codes.items())
    asyncio.run(Launcher(roles, folder, restarts=Restarts(budget=num_restarts, first_wait_s=0.01)).run())


def _other(name: str, codes: dict[str, str]) -> str:
    return next(one for one in codes if one != name)


def lives(folder: Path, name: str) -> int:
    return len((folder / f"{name}.lives").read_text())


def test_a_role_that_is_killed_is_started_again_and_the_others_live_on(folder: Path):
    run_again(folder, num_restarts=2, orchestrator=COUNTS, engines=DIES_TWICE)
    assert lives(folder, "engines") == 3
    assert lives(folder, "orchestrator") == 1
    log = (folder / "logs" / "launcher.log").read_text()
    assert "engines was killed by SIGKILL; starting it again in 0.01 s (restart 1)" in log
    assert "in 0.02 s (restart 2)" in log


def test_an_orchestrator_that_is_killed_is_started_again_alone_and_its_endpoints_are_forgotten(folder: Path):
    (folder / "endpoints").mkdir()
    (folder / "endpoints" / "engine.json").touch()
    run_again(folder, num_restarts=2, orchestrator=DIES_TWICE, engines=COUNTS)
    assert (lives(folder, "orchestrator"), lives(folder, "engines")) == (3, 1)
    assert not list((folder / "endpoints").iterdir())


DIES_AT_ITS_GOODBYE = """
    import os, pathlib, signal, time
    lives = pathlib.Path(folder, name + ".lives")
    with open(lives, "a") as file: file.write("x")
    num_lives, until = len(lives.read_text()), time.monotonic() + 60
    pathlib.Path(folder, f"{name}-{num_lives}").write_text(str(os.getpid()))
    while len(pathlib.Path(folder, "engines.lives").read_text() if pathlib.Path(folder, "engines.lives").exists() else "") < num_lives:
        assert time.monotonic() < until
        time.sleep(0.01)
    if num_lives == 1: os.kill(os.getpid(), signal.SIGKILL)
"""
"""Is killed when the engines have ended, as they were told; its next life waits for theirs."""
ENDS_LAST = """
    import pathlib, time
    lives, last = pathlib.Path(folder, name + ".lives"), pathlib.Path(folder, "orchestrator-2")
    with open(lives, "a") as file: file.write("x")
    while lives.read_text() == "xx" and (not last.exists() or pathlib.Path("/proc", last.read_text()).exists()): time.sleep(0.01)
"""
"""Ends at once in its first life; in its second, once the launcher has taken note of the orchestrator's end."""


def test_an_orchestrator_that_is_asked_to_save_while_it_starts_ends_the_run_well(folder: Path):
    """It has no handler yet, so the signal itself ends it; the engine, whom nobody tells of the end, is ended with the run."""
    starts = "import os, pathlib, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(100)"
    lasts = "import time\ntime.sleep(100)"
    assert run(folder, orchestrator=starts, engines=lasts) < 60
    with pytest.raises(PeerGone, match="engines was killed by SIGTERM"):
        run(folder, orchestrator=lasts, engines="import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")


def test_who_was_told_to_end_by_an_orchestrator_that_is_gone_is_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(restarts, "REJOIN_AFTER_S", 0.2)
    run_again(folder, num_restarts=1, orchestrator=DIES_AT_ITS_GOODBYE, engines=ENDS_LAST)
    assert (lives(folder, "orchestrator"), lives(folder, "engines")) == (2, 2)


STANDS_STILL_ONCE = """
    import os, pathlib, signal, time
    from pipelinerl.runtime.process import ask_to_replace, register

    from pipelinerl.runtime.machine import machine_id
    lives = pathlib.Path(folder, name + ".lives")
    with open(lives, "a") as file: file.write("x")
    if len(lives.read_text()) == 1:
        for peer, process_id in (("engine-0", os.getpid()), ("engine-1", os.getppid()), ("engine-2", 1), ("trainer-0", os.getpid())):
            register(pathlib.Path(folder), peer)
            pathlib.Path(folder, "processes", peer).write_text(f"{machine_id()} {process_id}")
            ask_to_replace(pathlib.Path(folder), peer)
        os.kill(os.getpid(), signal.SIGSTOP)
    pathlib.Path(folder, name + ".done").touch()
"""
"""Is stopped in its first life, when the orchestrator has asked for its end, and for that of processes which are not the run's, or not
what the peer's name says."""


@pytest.mark.parametrize(("who", "is_asked_for"), [("engines", True), ("engines", False), ("orchestrator", False)])
def test_who_stands_still_is_killed_and_started_again_and_nobody_else_is(
    folder: Path, who: str, is_asked_for: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also one that is only starting, for which nobody asks yet."""
    monkeypatch.setattr(launching, "LOOK_EVERY_S", 0.05)
    stands = STANDS_STILL_ONCE if is_asked_for else STANDS_STILL_ONCE.replace("ask_to_replace(pathlib.Path(folder), peer)", "pass")
    codes = {"orchestrator": COUNTS, "engines": COUNTS} | {who: stands}
    roles = tuple(role(name, code.replace("other", repr(_other(name, codes))), folder) for name, code in codes.items())
    asyncio.run(
        Launcher(roles, folder, restarts=Restarts(budget=1, first_wait_s=0.01), stopped_limit_s=60.0 if is_asked_for else 0.2).run()
    )
    assert {name: lives(folder, name) for name in codes} == {name: 2 if name == who else 1 for name in codes}


def test_who_waits_to_be_started_again_is_not_once_the_run_was_told_to_end(folder: Path):
    ends = """
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        log = pathlib.Path(folder, "logs", "launcher.log")
        while not log.exists() or "starting it again in 1 s" not in log.read_text(): time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(100)
    """
    dies = 'import os, pathlib\nwith open(pathlib.Path(folder, name + ".lives"), "a") as file: file.write("x")\nos.kill(os.getpid(), 9)'
    roles = (role("orchestrator", ends, folder), role("trainer", dies, folder))
    asyncio.run(Launcher(roles, folder, restarts=Restarts(budget=9, first_wait_s=1.0)).run())
    assert lives(folder, "trainer") == 1


def test_a_spent_budget_ends_the_run_and_says_how_often_it_was_tried(folder: Path):
    with pytest.raises(PeerGone, match=r"engines was killed by SIGKILL after 1 restarts"):
        run_again(folder, num_restarts=1, orchestrator=COUNTS, engines=DIES_TWICE)
    assert lives(folder, "engines") == 2


def test_a_role_that_fails_by_an_error_of_its_own_is_not_started_again(folder: Path):
    fails = """
        import pathlib
        from pipelinerl.errors import WeightsError
        from pipelinerl.runtime.process import crash_report

        with open(pathlib.Path(folder, name + ".lives"), "a") as file: file.write("x")
        with crash_report(pathlib.Path(folder), "trainer-0"):
            raise WeightsError("slot 3")
    """
    with pytest.raises(PeerGone, match="trainer-0 failed: WeightsError: slot 3"):
        run_again(folder, num_restarts=5, orchestrator=COUNTS, trainer=fails)
    assert lives(folder, "trainer") == 1


def test_a_scorer_whose_fork_server_was_killed_is_started_again(folder: Path):
    loses_a_peer_once = """
        import pathlib
        from pipelinerl.errors import PeerGone
        from pipelinerl.runtime.process import crash_report

        lives = pathlib.Path(folder, name + ".lives")
        with open(lives, "a") as file: file.write("x")
        with crash_report(pathlib.Path(folder), name):
            if len(lives.read_text()) == 1: raise PeerGone("the fork server ended")
        pathlib.Path(folder, name + ".done").touch()
    """
    run_again(folder, num_restarts=1, **{"orchestrator": COUNTS, "scorer-0": loses_a_peer_once})
    assert lives(folder, "scorer-0") == 2


def test_what_a_process_says_of_its_end_stands_when_another_is_started_again_meanwhile(folder: Path):
    says = """
        import pathlib, sys, time
        from pipelinerl.runtime.process import record_failure

        lives = pathlib.Path(folder, name + ".lives")
        with open(lives, "a") as file: file.write("x")
        if len(lives.read_text()) == 1:
            record_failure(pathlib.Path(folder), name, error="PeerGone: x", is_consequence=True)
            while pathlib.Path(folder, "orchestrator.lives").read_text() != "xx": time.sleep(0.01)
            sys.exit(1)
        pathlib.Path(folder, name + ".done").touch()
    """
    dies_meanwhile = """
        import os, pathlib, signal, time
        lives = pathlib.Path(folder, name + ".lives")
        with open(lives, "a") as file: file.write("x")
        wanted = pathlib.Path(folder, "failures", "scorer-0.json") if len(lives.read_text()) == 1 else pathlib.Path(folder, "scorer-0.done")
        while not wanted.exists(): time.sleep(0.01)
        if wanted.suffix == ".json": os.kill(os.getpid(), signal.SIGKILL)
    """
    run_again(folder, num_restarts=1, **{"orchestrator": dies_meanwhile, "scorer-0": says})
    assert (lives(folder, "orchestrator"), lives(folder, "scorer-0")) == (2, 2)


def test_who_is_killed_when_the_orchestrator_has_ended_is_not_started_again(folder: Path):
    dies_late = """
        import os, pathlib, signal, time
        with open(pathlib.Path(folder, name + ".lives"), "a") as file: file.write("x")
        said = pathlib.Path(folder, "said")
        while not said.exists() or pathlib.Path("/proc", said.read_text()).exists(): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    says_id = "import os, pathlib\npathlib.Path(folder, 'said').write_text(str(os.getpid()))"
    with pytest.raises(PeerGone, match=r"trainer was killed by SIGKILL"):
        run_again(folder, num_restarts=5, orchestrator=says_id, trainer=dies_late)
    assert lives(folder, "trainer") == 1


def test_who_cannot_write_why_it_ends_is_told_of_with_what_to_do(folder: Path):
    full = """
        import pathlib, resource
        from pipelinerl.errors import LedgerError
        from pipelinerl.runtime.process import crash_report

        with crash_report(pathlib.Path(folder), "orchestrator"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
            raise LedgerError("cannot write")
    """
    with pytest.raises(PeerGone, match=r"orchestrator ended and could not write why to .*: make room on the disk, and resume the run"):
        run(folder, orchestrator=full, engines=SLEEP)


@pytest.mark.parametrize("first", ["the rank that was killed", "a rank that lost another", "a rank that finds no room to say why"])
def test_a_trainer_whose_rank_was_killed_is_started_again(folder: Path, first: str):
    """The ranks' parent ends as the first of them did: by the signal, or with the code of a rank that says whom it misses."""
    ends = {
        "the rank that was killed": "os.kill(os.getpid(), 9)",
        "a rank that lost another": "record_failure(pathlib.Path(folder), 'trainer-1', error='x', is_consequence=True); sys.exit(1)",
        "a rank that finds no room to say why": "sys.exit(UNWRITTEN)",
    }[first]
    dies_once = f"""
        import os, pathlib, sys, time
        from pipelinerl.runtime.process import UNWRITTEN, record_failure

        lives = pathlib.Path(folder, name + ".lives")
        with open(lives, "a") as file: file.write("x")
        if len(lives.read_text()) == 1: {ends}
        pathlib.Path(folder, name + ".done").touch()
    """
    run_again(folder, num_restarts=2, orchestrator=COUNTS, trainer=dies_once)
    assert lives(folder, "trainer") == 2
    assert not list((folder / "failures").glob("*.json")), "what was healed is not told at the end"


def test_who_started_too_late_to_be_told_is_ended_with_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(started, "KILL_GRACE_S", 0.3)
    waits = "import pathlib, time\nwhile not pathlib.Path(folder, 'engines').exists(): time.sleep(0.01)"
    roles = (role("orchestrator", waits, folder), dataclasses.replace(role("engines", LIVES, folder), has_nothing_to_save=True))
    asyncio.run(Launcher(roles, folder).run())
    assert not processes.is_alive(said_id(folder, "engines"))


@pytest.mark.parametrize("has_nothing_to_save", [True, False])
def test_who_is_killed_once_the_run_has_ended_fails_it_only_where_there_was_something_to_save(folder: Path, has_nothing_to_save: bool):
    """As one that was to be replaced for what it had said."""
    says = "import os, pathlib\npathlib.Path(folder, name).write_text(f'{os.getpid()}\\n')"
    dies = """
        import os, pathlib, time
        from tests import processes
        last = int(processes.read_when_written(pathlib.Path(folder, "orchestrator")))
        while pathlib.Path("/proc", str(last)).exists(): time.sleep(0.01)
        os.kill(os.getpid(), 9)
    """
    roles = (
        role("orchestrator", says, folder),
        dataclasses.replace(role("scorer-0", dies, folder), has_nothing_to_save=has_nothing_to_save),
    )
    if has_nothing_to_save:
        asyncio.run(Launcher(roles, folder).run())
    else:
        with pytest.raises(PeerGone, match="scorer-0 was killed by SIGKILL"):
            asyncio.run(Launcher(roles, folder).run())


# --- another launcher takes the folder over ------------------------------------------------------------------------------------------


def test_processes_learn_the_epoch_of_their_launcher(folder: Path):
    says = "import os, pathlib; pathlib.Path(folder, 'epoch').write_text(os.environ['PIPELINERL_EPOCH'])"
    with held(folder) as lease:
        asyncio.run(Launcher((role("orchestrator", says, folder),), folder, lease=lease).run())
    assert (folder / "epoch").read_text() == str(lease.epoch)


def test_a_launcher_whose_run_was_taken_over_ends_all_at_once_and_says_by_whom(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed, not asked: what they would still write is not theirs to write."""
    monkeypatch.setattr(launching, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("pipelinerl.runtime.lease.RENEW_EVERY_S", 0.0)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _dedented(LIVES)
    taken_over = """
        import msgspec, pathlib, time
        from pipelinerl.runtime.lease import FILE, Holder
        while not pathlib.Path(folder, "trainer").exists(): time.sleep(0.01)
        other = Holder(epoch=9, host="far", boot_id="another", process_id=7, since_s=0.0)
        pathlib.Path(folder, FILE).write_bytes(msgspec.json.encode(other))
        time.sleep(100)
    """
    roles = (role("orchestrator", taken_over, folder), role("trainer", deaf, folder))
    with held(folder) as lease, pytest.raises(LeaseError, match=r"was taken over by process 7 on far"):
        asyncio.run(Launcher(roles, folder, restarts=Restarts(budget=5, first_wait_s=1.0), lease=lease).run())
    assert not processes.is_alive(said_id(folder, "trainer"))


# --- the launcher itself is ended ----------------------------------------------------------------------------------------------------

LAUNCHER = """
    import asyncio, pathlib, sys
    from pipelinerl.errors import LeaseError, PeerGone
    from pipelinerl.launch.launcher import Launcher
    from pipelinerl.launch.roles import Role
    try:
        asyncio.run(Launcher(tuple(Role(name=name, command=command) for name, command in roles), pathlib.Path(folder)).run())
    except PeerGone as error:
        sys.exit(f"PeerGone: {error}")
"""


def launched(folder: Path, **codes: str) -> subprocess.Popen[str]:
    """A launcher in a process of its own."""
    roles = [(name, processes.program(code, folder=folder, name=name)) for name, code in codes.items()]
    return subprocess.Popen(processes.program(LAUNCHER, roles=roles, folder=folder), stderr=subprocess.PIPE, text=True)


def test_a_killed_launcher_leaves_nobody_behind(folder: Path):
    launcher = launched(folder, orchestrator=LIVES, engines=LIVES, trainer=LIVES)
    ids = [said_id(folder, name) for name in ("orchestrator", "engines", "trainer")]
    assert all(processes.is_alive(process_id) for process_id in ids)
    launcher.kill()
    launcher.communicate()
    processes.wait_until(lambda: not any(processes.is_alive(process_id) for process_id in ids), what="a role outlives the launcher")


def test_a_terminated_launcher_lets_everyone_save_and_ends_well(folder: Path):
    orchestrator = """
        import os, pathlib, signal, sys, time
        def stop(*_):
            pathlib.Path(folder, "stop").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        pathlib.Path(folder, name).write_text(f"{os.getpid()}\\n")
        time.sleep(100)
    """
    trainer = """
        import os, pathlib, time
        pathlib.Path(folder, name).write_text(f"{os.getpid()}\\n")
        while not pathlib.Path(folder, "stop").exists(): time.sleep(0.01)
        time.sleep(0.5)
        pathlib.Path(folder, "saved").touch()
    """
    launcher = launched(folder, orchestrator=orchestrator, trainer=trainer)
    ids = [said_id(folder, name) for name in ("orchestrator", "trainer")]
    launcher.terminate()
    _, said = launcher.communicate(timeout=processes.PATIENCE_S)
    assert launcher.returncode == 0, said
    assert (folder / "saved").exists()
    assert not any(processes.is_alive(process_id) for process_id in ids)


def test_a_launcher_terminated_twice_ends_everything_at_once(folder: Path):
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _dedented(LIVES)
    launcher = launched(folder, orchestrator=deaf, trainer=deaf)
    ids = [said_id(folder, name) for name in ("orchestrator", "trainer")]
    launcher.terminate()
    time.sleep(0.5)
    assert launcher.poll() is None, "the first only asks"
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=processes.PATIENCE_S)
    assert launcher.returncode != 0
    assert "the run was ended at once, as a second signal asks" in said
    assert "SIGKILL" not in said, "it was us, and nothing to look into"
    assert not any(processes.is_alive(process_id) for process_id in ids)


# --- what it starts ------------------------------------------------------------------------------------------------------------------


def settings(folder: Path) -> Config:
    return parse(
        {
            "run": {"name": "demo", "folder": str(folder)},
            "model": {"path": "m"},
            "data": {"source": "d"},
            "reward": [{"function": "f:g"}],
            "trainer": {"ranks": 3},
        },
        origin="here",
    )


def test_a_run_is_four_command_lines_with_the_orchestrator_first(tmp_path: Path):
    roles = roles_of(settings(tmp_path), tmp_path / "a run")
    assert [one.name for one in roles] == ["orchestrator", "engines", "scorer-0", "trainer"]
    assert all(one.command[0] == sys.executable for one in roles)
    assert all(str(tmp_path / "a run") in one.command for one in roles)
    assert roles[3].command[1:3] == ("-m", "trainer.parallel.rendezvous"), "three ranks are started by a parent of their own"
    assert shlex.split(str(roles[0]))[1:] == list(roles[0].command), "what is printed can be pasted into a shell"


def test_the_only_rank_of_a_trainer_is_started_by_itself(tmp_path: Path):
    alone = settings(tmp_path).model_copy(update={"trainer": TrainerSection.model_validate({"ranks": 1})})
    assert roles_of(alone, tmp_path)[3].command[1:] == ("-m", "trainer", "--run-folder", str(tmp_path))


def test_a_run_folder_is_its_owners_alone_and_holds_settings_and_keys(tmp_path: Path):
    config = settings(tmp_path)
    first, second = make_run_folder(config), make_run_folder(config)
    assert first != second
    for folder in (first, second):
        assert folder.name.startswith("demo-")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert load_run(folder) == config
    assert read_keys(first, "engine-0") != read_keys(second, "engine-0")


def _dedented(code: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())
