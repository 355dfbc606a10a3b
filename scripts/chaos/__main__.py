"""`python -m scripts.chaos`: a run that suffers faults at random instants, seeded, and is judged by the independent checker.

By default a rehearsal: the real launcher, orchestrator, transport and scorer, with engines and a trainer without a model, so that many
faults fit in minutes. `--real` runs vLLM and the real trainer on the demo's model. `--quick` is what continuous integration runs.

    engine, scorer, orchestrator, trainer    SIGKILL, one in ten after a SIGSTOP of up to two seconds
    gateway                                  the same, with --agents
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
    python -m scripts.chaos --agents
    python -m scripts.chaos --real --images engine=10 scorer=10 orchestrator=10 trainer=10
    python -m scripts.chaos --real --storm 0.01 engine=10 scorer=10 orchestrator=10 trainer=10 freeze=4 cut=5 corrupt=5 hold=5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.launch.run_folder import make_run_folder
from scripts.bench import pictures
from scripts.bench.pictures import make_model as make_pictures_model
from scripts.chaos.account import account_of
from scripts.chaos.liar import make_liars
from scripts.chaos.storm import LETTERS
from scripts.chaos.strikes import STRUCK, WIRE, Chaos

QUICK = {"engine": 6, "scorer": 4, "worker": 2, "orchestrator": 3, "trainer": 3, "freeze": 1, "full": 1, "slow": 2, "rot": 2, "ledger": 2}
QUICK |= dict.fromkeys(WIRE, 2)
AGENTS = {"gateway": 14, "engine": 14, "trainer": 10, "orchestrator": 12}
"""The default with agents."""
FULL = {"engine": 200, "scorer": 200, "orchestrator": 100, "trainer": 50}
AGENTS_END_S = 90.0
"""For agents to end what they play."""
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
    parser.add_argument("--agents", action="store_true", help="agents with OpenAI's SDK play the rollouts, over the gateway")
    parser.add_argument("--images", action="store_true", help="with --real: a random Idefics3 that is shown pictures")
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
    faults = {name: int(number) for name, _, number in (word.partition("=") for word in given.faults)} or (
        AGENTS if given.agents else QUICK if given.quick else FULL
    )
    if "gateway" in faults and not given.agents:
        parser.error("there is a gateway with --agents alone")
    if given.images and not given.real:
        parser.error("--images are for --real: an engine without a model sees none")
    if unknown := faults.keys() - {*STRUCK, *WIRE}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(0 if _run(given, faults, folder=given.folder or Path(temporary)) else 1)


def _run(given: argparse.Namespace, faults: dict[str, int], *, folder: Path) -> bool:
    """Run, harm, and say what was found; False where a promise was broken."""
    has_forger = given.liars > 0 and not given.real  # the real trainer ends a run of which half is forged, as it should
    config = _config(given, folder, has_forger=has_forger)
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
        has_forger=has_forger,
    )
    started = time.monotonic()
    with _agents(run_folder) if given.agents else contextlib.nullcontext({}) as told:
        problem = asyncio.run(chaos.run())
    seconds = time.monotonic() - started
    problem = problem or "; ".join(told.get("broken", ()))
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, text=True, check=False)
    print(checked.stdout + checked.stderr, end="")
    problem = problem or _too_much_memory(chaos.memory)
    letters = (run_folder / "storm.log").read_bytes() if (run_folder / "storm.log").exists() else b""
    done = dict(chaos.done) | {name: letters.count(letter) for name, letter in LETTERS.items() if fraction}
    print(f"seed {given.seed}, {seconds:.0f} s, {'real' if given.real else 'rehearsal'}, {run_folder}")
    for name, count in (done | told.get("counts", {})).items():
        print(f"{name:<36} {count:>6}")
    print(f"orchestrator's memory, MiB: {chaos.memory[0] >> 20} at first, {max(chaos.memory) >> 20} at most")
    account = account_of(run_folder, is_wire_faulty=any(fault in WIRE for fault in faults)) if liars else None
    if account is not None:
        print(account.words())
    if problem:
        print(f"the run did not end well: {problem}")
    if given.record:
        record = {"seed": given.seed, "real": given.real, "storm": fraction, "seconds": round(seconds), "done": done, "problem": problem}
        record |= {"checker": checked.stdout.splitlines()[-1:], "memory_mib": [chaos.memory[0] >> 20, max(chaos.memory) >> 20]}
        record |= {"agents": told} if told else {}
        record |= {"lies": account.record()} if account is not None else {}
        with open(given.record, "a") as file:
            file.write(json.dumps(record) + "\n")
    return not (problem or checked.returncode or (account is not None and account.problems))


@contextlib.contextmanager
def _agents(run_folder: Path) -> Iterator[dict[str, Any]]:
    """Have agents play meanwhile; what they were told is there afterwards."""
    told: dict[str, Any] = {}
    agents = subprocess.Popen([sys.executable, "-m", "scripts.chaos.agents", str(run_folder.absolute())], stdout=subprocess.PIPE, text=True)
    try:
        yield told
        agents.terminate()
        said, _ = agents.communicate(timeout=AGENTS_END_S)
        told |= (
            json.loads(said.splitlines()[-1]) if said and agents.returncode == 0 else {"broken": [f"they ended with {agents.returncode}"]}
        )
    finally:
        agents.kill()
        agents.wait()


def _too_much_memory(memory: list[int]) -> str:
    grown = max(memory) - memory[0]
    return f"the orchestrator took {grown >> 20} MiB more than at first" if grown > MEMORY_BOUND else ""


def _config(given: argparse.Namespace, folder: Path, *, has_forger: bool) -> Config:
    """The demo's settings, with a run too long to end by itself and a prompt source that never repeats a row."""
    path, seed = demo_config(folder=folder, seed=given.seed), given.seed
    source = Path(__file__).with_name("plugins.py")
    if given.images:
        make_pictures_model(folder / "demo-model", seed=seed)
        source = Path(pictures.__file__)
    else:
        make_demo_model(folder / "demo-model", seed=seed)
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
    if given.episodes:
        digits = list(range(2, 12))  # one ends a turn: an untrained model hardly ever ends one by itself
        overrides += [f'environment.function="{source}:reply"', "environment.max_turns=4", 'algorithm.name="gigpo"']
        overrides += ["rollout.max_tokens=24", f"rollout.stop_token_ids={digits}"]
    if given.agents:
        overrides += ["gateway.deadline_s=20.0", "gateway.silent_after_s=8.0", "gateway.max_attempts=1000"]
    if given.images:
        overrides += ["model.max_tokens=64", "rollout.max_tokens=4", "batch.max_tokens=512", f'evaluation.source="{source}:held_out"']
        overrides += ["engine.options={ block_size = 32 }"]
    overrides += (
        ["evaluation.limit=8"]
        if given.real
        else [
            'engine.kind="fake"',
            f"engine.count={2 + has_forger}",
            "engine.cores=[]",
            "engine.max_running=16",
        ]
    )
    config = load(path, overrides=overrides)
    return config if given.real else config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"source": None})})


if __name__ == "__main__":
    main()
