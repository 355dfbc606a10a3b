"""`python -m scripts.chaos`: a run whose processes are killed and stopped at random instants, seeded, judged by the independent checker.

By default a rehearsal: the real launcher, orchestrator, transport and scorer, with engines and a trainer without a model, so that many
kills fit in minutes. `--real` runs vLLM and the real trainer on the demo's model. `--quick` is what continuous integration runs. The table
at the end says how often each role was killed and what the checker found; any promise broken, or a run that does not end, exits with 1.

    python -m scripts.chaos --seed 1 engine=200 scorer=200 orchestrator=100 trainer=50
    python -m scripts.chaos --real engine=10 scorer=10 orchestrator=3 trainer=10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl import launch
from pipelinerl.config import Config
from pipelinerl.config_file import load
from pipelinerl.demo.settings import demo_config
from scripts.chaos import victims

QUICK = {"engine": 6, "scorer": 4, "orchestrator": 2, "trainer": 3}
FULL = {"engine": 200, "scorer": 200, "orchestrator": 100, "trainer": 50}
STOPPED_FRACTION = 0.1
"""Of all faults: SIGSTOP for up to two seconds in place of SIGKILL."""
PATIENCE_S = 120.0
"""After the last fault, and between two steps: a run that does nothing for so long hangs."""


def main() -> None:
    """Run, kill, judge. Exits with 1 where a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kills", nargs="*", metavar="role=number", help=f"default: {' '.join(f'{r}={n}' for r, n in FULL.items())}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="real vLLM and the real trainer on the demo's model")
    parser.add_argument("--quick", action="store_true", help="a few kills of each role: under a minute")
    parser.add_argument("--pause-s", type=float, default=None, help="mean seconds between two faults; default 0.7, with --real 3")
    parser.add_argument("--folder", type=Path, help="where the run goes; default: a temporary folder")
    given = parser.parse_args()
    kills = {role: int(number) for role, _, number in (word.partition("=") for word in given.kills)} or (QUICK if given.quick else FULL)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        config = _config(folder, is_real=given.real, seed=given.seed)
        run_folder = launch.make_run_folder(config)
        pause_s = given.pause_s or (3.0 if given.real else 0.7)
        chaos = Chaos(config, run_folder, kills=kills, seed=given.seed, pause_s=pause_s, is_real=given.real)
        started = time.monotonic()
        problem = asyncio.run(chaos.run())
        print(f"seed {given.seed}, {time.monotonic() - started:.0f} s, {run_folder}")
        print("role          killed  stopped for a while")
        for role in kills:
            print(f"{role:<12}  {chaos.killed[role]:>6}  {chaos.stopped[role]:>7}")
        verdict = subprocess.call([sys.executable, "-m", "pipelinerl.checker", str(run_folder)])
        if problem:
            print(f"the run did not end well: {problem}")
        sys.exit(1 if problem or verdict else 0)


class Chaos:
    """One run and its faults."""

    def __init__(self, config: Config, run_folder: Path, *, kills: dict[str, int], seed: int, pause_s: float, is_real: bool) -> None:
        self.killed = dict.fromkeys(kills, 0)
        self.stopped = dict.fromkeys(kills, 0)
        self._run_folder = run_folder
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._plan = [role for role, number in kills.items() for _ in range(number)]
        self._chance.shuffle(self._plan)
        self._launcher = launch.Launcher(_roles(config, run_folder, is_real=is_real), run_folder, restarts=10**6, restart_wait_s=0.0)

    async def run(self) -> str:
        """Run until every fault was injected and the run ended well; else say how it ended."""
        running = asyncio.create_task(self._launcher.run())
        try:
            for role in self._plan:
                await asyncio.wait({running}, timeout=self._chance.expovariate(1 / self._pause_s))
                if running.done() or not await self._strike(role, running):
                    break
            os.kill((await self._wait_for("orchestrator", running))[0], signal.SIGTERM)
            await asyncio.wait_for(running, PATIENCE_S)
        except (TimeoutError, launch.PeerGone) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            running.cancel()
            await asyncio.wait({running})
        return ""

    async def _strike(self, role: str, running: asyncio.Task[None]) -> bool:
        """Kill or stop one process of a role; False where the run has ended."""
        found = await self._wait_for(role, running)
        if not found:
            return False
        process_id = self._chance.choice(found)
        with contextlib.suppress(ProcessLookupError):
            if self._chance.random() < STOPPED_FRACTION:
                os.kill(process_id, signal.SIGSTOP)
                await asyncio.sleep(2 * self._chance.random())
                os.kill(process_id, signal.SIGCONT)
                self.stopped[role] += 1
                await asyncio.sleep(0.1)
            os.kill(process_id, signal.SIGKILL)
            self.killed[role] += 1
        return True

    async def _wait_for(self, role: str, running: asyncio.Task[None]) -> Sequence[int]:
        end = time.monotonic() + PATIENCE_S
        while not (found := victims.find(role, self._run_folder)):  # a process table tells nobody of a new process
            if running.done():
                return []
            if time.monotonic() > end:
                raise TimeoutError(f"no {role} for {PATIENCE_S:g} s")
            await asyncio.sleep(0.05)
        return found


def _roles(config: Config, run_folder: Path, *, is_real: bool) -> tuple[launch.Role, ...]:
    roles = launch.roles_of(config, run_folder)
    if is_real:
        return roles
    rehearsal = (sys.executable, "-m", "scripts.chaos.trainer", "--run-folder", str(run_folder))
    return tuple(launch.Role(name="trainer", command=rehearsal) if role.name == "trainer" else role for role in roles)


def _config(folder: Path, *, is_real: bool, seed: int) -> Config:
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
        f'data.source="{source}:prompts"',
        f'reward=[{{function = "{source}:reward"}}]',
    ]
    overrides += ["evaluation.limit=8"] if is_real else ['engine.kind="fake"', "engine.count=2", "engine.cores=[]", "engine.max_running=16"]
    config = load(path, overrides=overrides)
    return config if is_real else config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"source": None})})


if __name__ == "__main__":
    main()
