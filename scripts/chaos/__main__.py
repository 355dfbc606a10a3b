"""`python -m scripts.chaos`: a run that suffers faults at random instants, seeded, and is judged by the independent checker.

By default a rehearsal: the real launcher, orchestrator, transport and scorer, with engines and a trainer without a model, so that many
faults fit in minutes. `--real` runs vLLM and the real trainer on the demo's model. `--quick` is what continuous integration runs.

    engine, scorer, orchestrator, trainer    SIGKILL, one in ten after a SIGSTOP of up to two seconds
    worker                                   SIGKILL of a process that runs a reward function, or of the one that forks them
    goodbye                                  SIGKILL of an orchestrator that was asked to end; the launcher calls back whom it told to
    slow                                     one that consumes: nine tenths of three seconds stopped, in turns
    freeze                                   SIGSTOP for ever: somebody has to notice, and replace the process
    full                                     trainer or orchestrator can write no file any more, as on a full disk; then there is room again
    rot                                      a bit of the newest checkpoint flips, and the trainer is killed: it must tell, and fall back
    ledger                                   the run is stopped and a bit of its ledger flips: a resumed run or the checker must tell
    cut, corrupt, hold                       of a connection, on the wire: closed, a byte changed, nothing passes for up to three seconds
    --storm FRACTION                         of all messages lost, doubled, delayed by up to half a second, or overtaken by the next
    --liars FRACTION                         of what engine-0, scorer-0 and trainer-0 say comes with a lie (`scripts.chaos.lies` has
                                             them): ids, log-probabilities, versions, lengths and lists that cannot be, others' answers,
                                             steps and checkpoints that are not the next, floods, bytes that are none; up to 20 times as
                                             many with what they say seldom. In a rehearsal engine-1 says of all its tokens that they were
                                             less likely by half a nat, too

The table at the end says what was done and what the checker found; any promise broken, a run that does not end, or an orchestrator that
took `MEMORY_BOUND` more memory than it began with, exits with 1. `--record FILE` appends the same as a line of JSON.

With liars it also says, by kind, how many lies were sent, refused, fenced and died on their way (`scripts.chaos.account` has the rules),
and exits with 1 where one was not refused as what it is, where a truth was, or where a step trained forged log-probabilities and the run
did not name engine-1. Liars are replaced any number of times, where a run would ban them after three: else they would soon be gone.

    python -m scripts.chaos --seed 1 engine=200 scorer=200 orchestrator=100 trainer=50
    python -m scripts.chaos --liars 0.02 --within-s 600 engine=60 scorer=30 orchestrator=60 trainer=20 rot=10 ledger=10 cut=20 hold=20
    python -m scripts.chaos --real --storm 0.01 engine=10 scorer=10 orchestrator=10 trainer=10 freeze=4 cut=5 corrupt=5 hold=5
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config
from pipelinerl.errors import PeerGone
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.launch.run_folder import forget_endpoints, make_run_folder
from scripts.chaos import rot, victims
from scripts.chaos.account import account_of
from scripts.chaos.detours import ROLES, Detours
from scripts.chaos.liar import make_liars
from scripts.chaos.storm import LETTERS

KILLED = ("engine", "scorer", "orchestrator", "trainer")
WIRE = ("cut", "corrupt", "hold")
STRUCK = {"freeze": KILLED, "full": ("orchestrator", "trainer"), "slow": KILLED, "goodbye": ("orchestrator",)}
STRUCK |= {"rot": ("trainer",), "ledger": ("orchestrator",)}
"""Faults that may strike one of several roles."""
QUICK = {
    "engine": 6,
    "scorer": 4,
    "worker": 2,
    "orchestrator": 3,
    "trainer": 3,
    "freeze": 1,
    "full": 1,
    "slow": 2,
    "rot": 2,
    "ledger": 2,
} | dict.fromkeys(WIRE, 2)
OTHERS = ("worker", "goodbye", "slow", "freeze", "full", "rot", "ledger")
FULL = {"engine": 200, "scorer": 200, "orchestrator": 100, "trainer": 50}
STOPPED_FRACTION = 0.1
"""Of all kills: SIGSTOP for up to two seconds before."""
BREATHER_FRACTION = 0.2
"""Of all faults: the next comes only after a step. Less, and nothing is trained that could be lost."""
GOODBYE_S = 0.1
"""About what an orchestrator takes to end."""
PATIENCE_S = 120.0
"""After the last fault, and between two steps: a run that does nothing for so long hangs."""
MEMORY_BOUND = 512 << 20
"""Bytes an orchestrator may take beyond what its first life had at its first look: its queues' bound in this config, and the reading back
of a ledger that grows."""


def main() -> None:
    """Run, harm, judge. Exits with 1 where a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", metavar="fault=number", help=f"default: {' '.join(f'{r}={n}' for r, n in FULL.items())}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="real vLLM and the real trainer on the demo's model")
    parser.add_argument("--episodes", action="store_true", help="rollouts of several turns, with an environment")
    parser.add_argument("--quick", action="store_true", help="a few faults of each kind: under a minute")
    parser.add_argument(
        "--storm", type=float, default=None, metavar="FRACTION", help="of messages that suffer; default 0, with --quick 0.01"
    )
    parser.add_argument("--liars", type=float, default=0.0, metavar="FRACTION", help="of what some peers say comes with a lie; default 0")
    parser.add_argument("--pause-s", type=float, default=None, help="mean seconds between two faults; default 0.7, with --real 3")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="inject no more faults after so many seconds")
    parser.add_argument("--folder", type=Path, help="where the run goes; default: a temporary folder")
    parser.add_argument("--record", type=Path, help="append the outcome to this file, as a line of JSON")
    given = parser.parse_args()
    faults = {name: int(number) for name, _, number in (word.partition("=") for word in given.faults)} or (QUICK if given.quick else FULL)
    if unknown := faults.keys() - {*KILLED, *WIRE, *OTHERS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(0 if _run(given, faults, folder=given.folder or Path(temporary)) else 1)


def _run(given: argparse.Namespace, faults: dict[str, int], *, folder: Path) -> bool:
    """Run, harm, and say what was found; False where a promise was broken."""
    has_forger = given.liars > 0 and not given.real  # the real trainer ends a run of which half is forged, as it should
    config = _config(folder, is_real=given.real, has_environment=given.episodes, has_forger=has_forger, seed=given.seed)
    run_folder = make_run_folder(config)
    fraction = given.storm if given.storm is not None else 0.01 if given.quick else 0.0
    liars = make_liars(run_folder, fraction=given.liars, has_forger=has_forger)
    (run_folder / "storm.json").write_text(json.dumps({"seed": given.seed, "fraction": fraction, "liars": liars}))
    chaos = Chaos(
        config,
        run_folder,
        faults=faults,
        seed=given.seed,
        pause_s=given.pause_s or (3.0 if given.real else 0.7),
        within_s=given.within_s,
        is_real=given.real,
    )
    started = time.monotonic()
    problem = asyncio.run(chaos.run())
    seconds = time.monotonic() - started
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, text=True, check=False)
    print(checked.stdout + checked.stderr, end="")
    problem = problem or _too_much_memory(chaos.memory)
    letters = (run_folder / "storm.log").read_bytes() if (run_folder / "storm.log").exists() else b""
    done = dict(chaos.done) | {name: letters.count(letter) for name, letter in LETTERS.items() if fraction}
    print(f"seed {given.seed}, {seconds:.0f} s, {'real' if given.real else 'rehearsal'}, {run_folder}")
    for name, count in done.items():
        print(f"{name:<30} {count:>6}")
    print(f"orchestrator's memory, MiB: {chaos.memory[0] >> 20} at first, {max(chaos.memory) >> 20} at most")
    account = account_of(run_folder, is_wire_faulty=any(fault in WIRE for fault in faults)) if liars else None
    if account is not None:
        print(account.words())
    if problem:
        print(f"the run did not end well: {problem}")
    if given.record:
        record = {"seed": given.seed, "real": given.real, "storm": fraction, "seconds": round(seconds), "done": done, "problem": problem}
        record |= {"checker": checked.stdout.splitlines()[-1:], "memory_mib": [chaos.memory[0] >> 20, max(chaos.memory) >> 20]}
        record |= {"lies": account.record()} if account is not None else {}
        with open(given.record, "a") as file:
            file.write(json.dumps(record) + "\n")
    return not (problem or checked.returncode or (account is not None and account.problems))


class Chaos:
    """One run and its faults."""

    def __init__(
        self, config: Config, run_folder: Path, *, faults: dict[str, int], seed: int, pause_s: float, within_s: float, is_real: bool
    ) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        """Faults by kind."""
        self.memory: list[int] = [0]
        """Bytes of the orchestrator: when it was first looked at, then before every fault."""
        self._run_folder = run_folder
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._within_s = within_s
        self._plan = [fault for fault, number in faults.items() for _ in range(number)]
        self._chance.shuffle(self._plan)
        self._is_real = is_real
        self._roles = _roles(config, run_folder, is_real=is_real)
        self._running: asyncio.Task[None]

    async def run(self) -> str:
        """Run until every fault was injected and the run ended well; else say how it ended."""
        async with Detours(self._run_folder, chance=self._chance) as detours:
            return await self._run(detours)

    async def _run(self, detours: Detours) -> str:
        self._launch()
        until = time.monotonic() + self._within_s
        try:
            for fault in self._plan:
                await asyncio.wait({self._running}, timeout=self._chance.expovariate(1 / self._pause_s))
                if self._running.done() or time.monotonic() > until:
                    break
                await self._strike(fault, detours)
            await self._end()
        except (TimeoutError, PeerGone) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._running.cancel()
            await asyncio.wait({self._running})
        return ""

    def _launch(self) -> None:
        launcher = Launcher(self._roles, self._run_folder, restarts=10**6, restart_wait_s=0.0, stopped_limit_s=5.0)
        self._running = asyncio.create_task(launcher.run())

    def _resume(self) -> None:
        for path in (self._run_folder / "failures").glob("*.json"):
            path.unlink()
        forget_endpoints(self._run_folder)
        self._launch()

    async def _end(self) -> None:
        """Have the orchestrator end the run; one that is only starting may be ended by this itself, and the next one is asked again."""
        await self._wait_for_progress(2)
        for _ in range(4):
            for process_id in await self._wait_for("orchestrator"):
                os.kill(process_id, signal.SIGTERM)
            await asyncio.wait({self._running}, timeout=PATIENCE_S / 4)
            if self._running.done():
                return self._running.result()
        raise TimeoutError(f"the run did not end within {PATIENCE_S:g} s of being asked to")

    async def _strike(self, fault: str, detours: Detours) -> None:
        self._look_at_memory()
        if fault in WIRE:
            role = self._chance.choice(ROLES)
            if detours.strike(role, fault):
                self.done[f"{fault}, {role}"] += 1
            return
        role = self._chance.choice(STRUCK[fault]) if fault in STRUCK else fault
        found = await self._wait_for(role)
        if not found:
            return
        process_id = self._chance.choice(found)
        strikes = {"freeze": self._freeze, "full": self._fill, "slow": self._slow_down, "goodbye": self._kill_at_goodbye}
        strike = (strikes | {"rot": self._rot, "ledger": self._rot_ledger}).get(fault, self._kill)
        with contextlib.suppress(ProcessLookupError):
            await strike(role, process_id)
        if self._chance.random() < BREATHER_FRACTION:
            await self._wait_for_progress(1)

    async def _kill(self, role: str, process_id: int) -> None:
        if self._chance.random() < STOPPED_FRACTION:
            os.kill(process_id, signal.SIGSTOP)
            await asyncio.sleep(2 * self._chance.random())
            os.kill(process_id, signal.SIGCONT)
            self.done[f"stopped for a while, {role}"] += 1
            await asyncio.sleep(0.1)
        os.kill(process_id, signal.SIGKILL)
        self.done[f"kill, {role}"] += 1
        if role == "trainer" and self._is_real:  # it takes long to start: killed again at once, it would never train
            await self._wait_for_progress(1)

    async def _freeze(self, role: str, process_id: int) -> None:
        os.kill(process_id, signal.SIGSTOP)
        await self._wait_for_end(process_id)
        self.done[f"freeze, {role}"] += 1

    async def _slow_down(self, role: str, process_id: int) -> None:
        for _ in range(30):
            os.kill(process_id, signal.SIGSTOP)
            await asyncio.sleep(0.09)
            os.kill(process_id, signal.SIGCONT)
            await asyncio.sleep(0.01)
        self.done[f"slow, {role}"] += 1

    async def _kill_at_goodbye(self, role: str, process_id: int) -> None:
        """Kill the orchestrator between being asked to end and having ended; where it was quicker, resume the run."""
        os.kill(process_id, signal.SIGTERM)
        await asyncio.sleep(GOODBYE_S * self._chance.random())
        if victims.is_alive(process_id):
            os.kill(process_id, signal.SIGKILL)
            self.done[f"kill at its goodbye, {role}"] += 1
        else:
            await self._wait_for(role)  # one that was only starting was ended by this, and is started again
            if self._running.done():
                self._resume()
        await self._wait_for_progress(1)

    async def _wait_for_progress(self, num_steps: int) -> None:
        """Wait until so many more steps were done, or done again."""
        end, before = time.monotonic() + PATIENCE_S, self._num_done()
        while self._num_done() < before + num_steps and not self._running.done():
            if time.monotonic() > end:
                raise TimeoutError(f"no {num_steps} steps were done within {PATIENCE_S:g} s")
            await asyncio.sleep(0.2)

    def _num_done(self) -> int:
        if not (self._run_folder / "ledger.sqlite").exists():
            return 0
        with contextlib.closing(sqlite3.connect(f"file:{self._run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as database:
            query = "SELECT count(*) FROM events WHERE kind IN ('done', 'retrained') AND rollout_id IS NULL"
            return database.execute(query).fetchone()[0]

    async def _fill(self, role: str, process_id: int) -> None:
        """A trainer goes on without a checkpoint. An orchestrator ends the run and says why; with room again, the run is resumed."""
        before = resource.prlimit(process_id, resource.RLIMIT_FSIZE)
        resource.prlimit(process_id, resource.RLIMIT_FSIZE, (1, before[1]))
        await asyncio.wait({self._running}, timeout=3.0 if role == "trainer" else PATIENCE_S)
        if role == "trainer":
            resource.prlimit(process_id, resource.RLIMIT_FSIZE, before)
        else:
            error = self._running.exception() if self._running.done() else None
            if error is None or "make room on the disk" not in str(error):
                raise TimeoutError(f"a full disk did not end the run in words, but: {error}")
            self._resume()
        self.done[f"full disk, {role}"] += 1

    async def _rot(self, role: str, process_id: int) -> None:
        """The next trainer finds the newest checkpoint damaged. It may be too early for that, or the damage may be a blank's."""
        if rot.rot_checkpoint(self._run_folder, chance=self._chance):
            os.kill(process_id, signal.SIGKILL)
            self.done["a bit of a checkpoint"] += 1
            await self._wait_for_progress(1)

    async def _rot_ledger(self, role: str, process_id: int) -> None:
        """Stop the run, flip a bit, see who tells; then go on with the ledger as it was."""
        os.kill(process_id, signal.SIGTERM)
        await asyncio.wait({self._running}, timeout=PATIENCE_S)
        if not self._running.done():  # one that was only starting was ended by this, and was started again
            return
        self._running.result()
        teller = await asyncio.to_thread(rot.rot_ledger, self._run_folder, chance=self._chance)
        self.done[f"a bit of the ledger, told by {teller}"] += 1
        self._resume()
        await self._wait_for_progress(1)

    async def _wait_for(self, role: str) -> Sequence[int]:
        """The process ids of a role, once there are some; none where the run has ended."""
        end = time.monotonic() + PATIENCE_S
        while not (found := victims.find(role, self._run_folder)):  # a process table tells nobody of a new process
            if self._running.done():
                return []
            if time.monotonic() > end:
                raise TimeoutError(f"no {role} for {PATIENCE_S:g} s")
            await asyncio.sleep(0.05)
        return found

    async def _wait_for_end(self, process_id: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while victims.is_alive(process_id) and not self._running.done():
            if time.monotonic() > end:
                raise TimeoutError(f"process {process_id} stood still for {PATIENCE_S:g} s, and nobody replaced it")
            await asyncio.sleep(0.1)

    def _look_at_memory(self) -> None:
        for process_id in victims.find("orchestrator", self._run_folder):
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
                self.memory = [self.memory[0] or pages * 4096, *self.memory[1:], pages * 4096]


def _too_much_memory(memory: list[int]) -> str:
    grown = max(memory) - memory[0]
    return f"the orchestrator took {grown >> 20} MiB more than at first" if grown > MEMORY_BOUND else ""


def _roles(config: Config, run_folder: Path, *, is_real: bool) -> tuple[Role, ...]:
    """The run's processes, each in the storm."""
    roles = []
    for role in roles_of(config, run_folder):
        words = list(role.command)
        at = len(words) - 1 - words[::-1].index("-m") + 1
        if role.name == "trainer" and not is_real:
            words = [sys.executable, "-m", "scripts.chaos.trainer", "--run-folder", str(run_folder)]
            at = 2
        words.insert(at, "scripts.chaos.storm")
        roles.append(Role(name=role.name, command=tuple(words), has_nothing_to_save=role.has_nothing_to_save))
    return tuple(roles)


def _config(folder: Path, *, is_real: bool, has_environment: bool, has_forger: bool, seed: int) -> Config:
    """The demo's settings, with a run too long to end by itself and a prompt source that never repeats a row."""
    from pipelinerl.demo.settings import make_demo_model

    path = demo_config(folder=folder, seed=seed)
    make_demo_model(folder / "demo-model", seed=seed)
    source = Path(__file__).with_name("plugins.py")
    overrides = [
        "run.name=chaos",
        "run.restarts=1000000",
        "run.restart_wait_s=0.0",
        "trainer.steps=1000000",
        "trainer.learning_rate=1e-6",
        "batch.groups_per_step=4",
        "evaluation.every=0",
        "checkpoint.every=5",
        "engine.silent_after_s=8",
        "scorer.silent_after_s=8",
        "trainer.silent_after_s=30",
        f'data.source="{source}:prompts"',
        f'reward=[{{function = "{source}:reward"}}]',
    ]
    if has_environment:
        digits = list(range(2, 12))  # one ends a turn: an untrained model hardly ever ends one by itself
        overrides += [f'environment.function="{source}:reply"', "environment.max_turns=4", 'algorithm.name="gigpo"']
        overrides += ["rollout.max_tokens=24", f"rollout.stop_token_ids={digits}"]
    overrides += (
        ["evaluation.limit=8"]
        if is_real
        else [
            'engine.kind="fake"',
            f"engine.count={2 + has_forger}",
            "engine.cores=[]",
            "engine.max_running=16",
        ]
    )
    config = load(path, overrides=overrides)
    return config if is_real else config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"source": None})})


if __name__ == "__main__":
    main()
