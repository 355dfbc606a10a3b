"""`python -m scripts.chaos.serving`: `pipelinerl serve` under load, its processes killed at random instants; then the same in peace.

A client samples from what it trains, trains on what it has sampled, several requests at once, and beside it another one samples without
end. Killed are, by SIGKILL, the engine, the trainer, the server, and all of them with their launcher (which is called again with
`--resume`). At the end the very bytes of the client's requests are sent again under another model, and nothing is killed. The two must be
equal, bit by bit: every loss, log-probability and gradient norm that was answered, and the model that was saved at the end. A gradient
that was lost, or was there twice, would show in all that came after it.

    python -m scripts.chaos.serving --kills 50
    python -m scripts.chaos.serving --kills 50 --sdk --rank 0      # by Tinker's own SDK, all weights
    python -m scripts.chaos.serving --quick            # few kills; what continuous integration runs
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipelinerl.demo.settings import make_demo_model
from pipelinerl.observe.lines import read_journals
from scripts.chaos import victims
from scripts.chaos.sdk_load import SdkLoad
from scripts.chaos.wire_client import PATIENCE_S, Broken, WireLoad

WEIGHTS = {"engine": 6, "trainer": 6, "orchestrator": 6, "all": 1}
"""How often each is killed, for each other. All of them start again slowly."""


@dataclasses.dataclass(slots=True)
class Server:
    """`pipelinerl serve`, started again where all of it was killed."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool = False) -> None:
        log = open(self.folder / "serve.log", "ab")  # noqa: SIM115  # the process keeps it
        command = [sys.executable, "-m", "pipelinerl", "serve", str(self.folder / "serve.toml")]
        command += ["--resume"] if resume else []
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def run_folder(self) -> Path | None:
        return next((path.parent for path in (self.folder / "runs").glob("*/config.json")), None)

    async def address(self) -> tuple[str, str]:
        """Where it listens, and its key."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (folder := self.run_folder) is not None and (folder / "tinker.json").exists():
                said = json.loads((folder / "tinker.json").read_text())
                return said["address"], said["api_key"]
            assert self.process is not None, "it was started"
            if self.process.poll() is not None:
                break
            await asyncio.sleep(0.2)
        raise Broken(f"the server does not listen:\n{(self.folder / 'serve.log').read_text()[-3000:]}")

    def kill(self, role: str) -> bool:
        """Kill a process; False where there is none of the role now."""
        if role == "all":
            assert self.process is not None, "it was started"
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.start(resume=True)
            return True
        assert self.run_folder is not None, "it listens"
        found = victims.find(role, self.run_folder)
        for process_id in found[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        return bool(found)

    def stop(self) -> int:
        assert self.process is not None, "it was started"
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(60)
        self.process.kill()
        return self.process.wait()


async def harm(
    server: Server, load: WireLoad | SdkLoad, *, num_kills: int, pause_s: float, chance: random.Random, done: collections.Counter[str]
) -> None:
    """Kill, at random instants; after the trainer or all of them, only once something was answered again."""
    while not load.counts["answered"]:  # noqa: ASYNC110  # a count tells nobody that it changes
        await asyncio.sleep(0.1)
    while done.total() < num_kills:
        await asyncio.sleep(chance.expovariate(1 / pause_s))
        (role,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        before = load.counts["answered"]
        if not server.kill(role):
            continue
        done[role] += 1
        if role in ("trainer", "all"):
            while load.counts["answered"] == before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def _digest(saved: Path, path: str) -> dict[str, str]:
    model, _, rest = path.removeprefix("tinker://").partition("/")
    files = sorted((saved / model.replace(":", "_") / rest).glob("*.safetensors"))
    assert files, f"{path} is saved"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


async def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    make_demo_model(folder / "demo-model", seed=given.seed)
    (folder / "serve.toml").write_text(
        f'[model]\npath = "{folder / "demo-model"}"\ndtype = "float32"\nmax_tokens = 64\n[lora]\nrank = {given.rank}\n'
        f'[run]\nname = "chaos"\nfolder = "{folder / "runs"}"\nrestarts = 1000000\nrestart_wait_s = 0.0\n'
        "[tinker]\ncheckpoint_every = 3\n[engine]\nsilent_after_s = 8\nmax_running = 16\n[trainer]\nsilent_after_s = 30\n"
    )
    server = Server(folder)
    server.start()
    kills: collections.Counter[str] = collections.Counter()
    harmed, begun = asyncio.Event(), time.monotonic()
    try:
        address, key = await server.address()
        load = SdkLoad(address, key, folder=folder, rank=given.rank or 32) if given.sdk else WireLoad(address, key)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.train(harmed))
            await harm(server, load, num_kills=given.kills, pause_s=given.pause_s, chance=random.Random(given.seed), done=kills)
            harmed.set()
        seconds = time.monotonic() - begun
        await load.repeat()
    finally:
        code = server.stop()
    problems = list(load.problems)
    digests = [_digest(folder / "runs" / "saved", path) for path in load.paths]
    problems += [f"the saved models differ: {digests}"] if digests[0] != digests[1] else []
    assert server.run_folder is not None, "it was there"
    steps = [line for line in read_journals(server.run_folder) if line["kind"] == "client_step"]
    mine = [line for line in steps if line["model_id"] == load.paths[0].removeprefix("tinker://").partition("/")[0]]
    facts = {name: int(sum(line[f"pipelinerl/{name}_tokens"] for line in mine)) for name in ("sampled", "unknown", "repeated", "drifted")}
    if len(mine) != load.num_steps:
        problems.append(f"the journal tells of {len(mine)} steps, expected {load.num_steps}")
    problems += [f"{facts[name]} {name} tokens, expected none" for name in ("unknown", "repeated", "drifted") if facts[name]]
    problems += [f"the server ended with {code}"] if code else []
    return {
        "seed": given.seed,
        "kills": dict(kills),
        "seconds": round(seconds),
        "client": "the SDK" if given.sdk else "by hand",
        "trained": f"adapters of rank {given.rank}" if given.rank else "all weights",
        "steps": load.num_steps,
        "gradients": load.num_gradients,
        "tokens": facts,
        "told": dict(load.counts),
        "checkpoints": sum(line["kind"] == "model_checkpoint" for line in read_journals(server.run_folder)),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=None, help="default 50, with --quick 6")
    parser.add_argument("--sdk", action="store_true", help="the client is Tinker's own SDK, in an environment that is made for it")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters that are trained; 0: all weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=2.0, help="mean seconds between two kills")
    parser.add_argument("--quick", action="store_true", help="few kills")
    parser.add_argument("--folder", type=Path, help="where the server runs; default: a temporary folder")
    parser.add_argument("--record", type=Path, help="append the outcome to this file, as a line of JSON")
    given = parser.parse_args()
    given.kills = given.kills or (6 if given.quick else 50)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        try:
            found = asyncio.run(run(given, folder))
        except* Broken as broken:
            log = (folder / "serve.log").read_text()[-2000:]
            print(f"{log}\n{broken.exceptions[0]}")
            sys.exit(1)
    for name, value in found.items():
        print(f"{name:<12} {value}")
    if given.record:
        with open(given.record, "a") as file:
            file.write(json.dumps(found) + "\n")
    print("broken promises" if found["problems"] else "every gradient is in the weights exactly once")
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
