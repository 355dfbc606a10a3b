"""`python -m scripts.chaos.serving`: `pipelinerl serve` under load, its processes killed at random instants; then the same in peace.

A client samples from what it trains, trains on what it has sampled, several requests at once, and beside it another one samples without
end. Killed are, by SIGKILL, the engine, the trainer, the server, and all of them with their launcher (which is called again with
`--resume`). At the end the very bytes of the client's requests are sent again under another model, and nothing is killed. The two must be
equal, bit by bit: every loss, log-probability and gradient norm that was answered, and the model that was saved at the end. A gradient
that was lost, or was there twice, would show in all that came after it.

    python -m scripts.chaos.serving --kills 50
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

import httpx
import numpy as np

from pipelinerl.demo.settings import make_demo_model
from pipelinerl.observe.lines import read_journals
from pipelinerl.tinker import wire
from scripts.chaos import victims

WEIGHTS = {"engine": 6, "trainer": 6, "orchestrator": 6, "all": 1}
"""How often each is killed, for each other. All of them start again slowly."""
PATIENCE_S = 240.0
"""A request that is not answered for so long fails the run."""
PROMPT = [5, 9, 12, 7, 3, 6]
_RETRIED = (408, 409, 429)


class Broken(Exception):
    """A promise was broken."""


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


class Client:
    """What the SDK does: sends again, asks again, and begins a sample anew that is gone (410)."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._http = http

    async def post(self, route: str, **content: Any) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = await self._http.post(f"/api/v1/{route}", **content)
            except httpx.TransportError:
                self.counts["connections lost"] += 1
            else:
                if answer.status_code < 500 and answer.status_code not in _RETRIED:
                    return answer
                self.counts[f"told to try again ({answer.status_code})"] += answer.status_code != 408
            await asyncio.sleep(0.1)
        raise Broken(f"{route} was not answered for {PATIENCE_S:g} s")

    async def begin(self, route: str, **content: Any) -> dict[str, Any]:
        answer = await self.post(route, **content)
        if answer.status_code != 200:
            raise Broken(f"{route}: {answer.status_code} {answer.text}")
        return answer.json()

    async def answer(self, request_id: str) -> Any:
        """The answer of a future; None where it is gone."""
        answer = await self.post("retrieve_future", json={"request_id": request_id})
        if answer.status_code == 410:
            return None
        if answer.headers["content-type"] == "application/x-protobuf":
            return answer.content
        said = answer.json()
        if "error" in said:
            raise Broken(f"{request_id}: {said}")
        return said

    async def done(self, route: str, **content: Any) -> Any:
        """The answer of a request that must not be lost."""
        reply = await self.begin(route, **content)
        if (answer := await self.answer(reply["request_id"])) is None:
            raise Broken(f"{route}: {reply['request_id']} is not known any more")
        self.counts["answered"] += 1
        return answer

    async def model(self) -> str:
        session = (await self.begin("create_session", json={"sdk_version": "0.38.0"}))["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "demo-model", "lora_config": {"rank": 8, "seed": 1}}
        return (await self.done("create_model", json=asked))["model_id"]

    async def sample(self, sampler: str, numbers: collections.Counter[str], *, num: int, max_tokens: int) -> list[tuple[str, Any, Any]]:
        """Sequences: name, tokens and log-probabilities."""
        asked = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": PROMPT}]}, "num_samples": num}
        asked["sampling_params"] = {"max_tokens": max_tokens, "stop": []}
        for _ in range(100):
            numbers[sampler] += 1
            reply = await self.begin("asample", json={**asked, "seq_id": numbers[sampler]})
            if (content := await self.answer(reply["request_id"])) is not None:
                said = wire.SampleResponse.FromString(content).sequences
                self.counts["samples answered"] += 1
                pairs = [(np.frombuffer(one.tokens, np.int32), np.frombuffer(one.logprobs, np.float32)) for one in said]
                return [(name, *pair) for name, pair in zip(reply["sample_sequence_ids"], pairs, strict=True)]
            self.counts["samples begun anew (410)"] += 1
        raise Broken("a sample was gone 100 times")


def gradient(sequences: list[tuple[str, Any, Any]], *, model_id: str, seq_id: int) -> bytes:
    said = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="importance_sampling")
    for number, (name, tokens, logprobs) in enumerate(sequences):
        datum, num_given = said.data.add(), len(PROMPT) - 1
        read = [*PROMPT, *tokens[:-1].tolist()]
        datum.model_input.add().encoded_text.tokens = np.array(read, np.int32).tobytes()
        zeros = np.zeros(num_given, np.float32)
        columns = {
            "target_tokens": np.array([*PROMPT[1:], *tokens.tolist()], np.int64),
            "logprobs": np.concatenate([zeros, logprobs]),
            "advantages": np.concatenate([zeros, np.full(len(tokens), 1.0 if number % 2 else -1.0, np.float32)]),
        }
        for column, values in columns.items():
            tensor = datum.loss_fn_inputs[column]
            tensor.dtype, tensor.dense = (2 if values.dtype == np.int64 else 1), values.tobytes()
        given = datum.loss_fn_input_spans.add().prompt_tokens
        given.sequence_id, given.offset, given.length = name, 1, num_given
        sampled = datum.loss_fn_input_spans.add().sampled_tokens
        sampled.sequence_id, sampled.length = name, len(tokens)
    return said.SerializeToString()


@dataclasses.dataclass(slots=True)
class Told:
    """What a client asked and was told: pairs of a request's route and body, and its answer."""

    asked: list[tuple[str, bytes]] = dataclasses.field(default_factory=list)
    answers: list[Any] = dataclasses.field(default_factory=list)
    saved: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the files of the model that was saved at the end."""


async def train(client: Client, told: Told, harmed: asyncio.Event, *, num_least: int) -> None:
    """Sample, add two gradients, step, all three asked for before any is answered; until all harm is done."""
    model_id = await client.model()
    numbers: collections.Counter[str] = collections.Counter()
    seq_id, step = 0, 0
    while not harmed.is_set() or step < num_least:
        seq_id += 1
        said = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": step, "kind": "inflight" if step % 2 else "snapshot"}
        sampler = (await client.done("save_weights_for_sampler", json=said))["sampling_session_id"]
        told.asked.append(("", b""))  # its number is used
        told.answers.append(None)
        sequences = await client.sample(sampler, numbers, num=4, max_tokens=12)
        bodies = [
            ("forward_backward", gradient(half, model_id=model_id, seq_id=seq_id + 1 + n))
            for n, half in enumerate((sequences[:2], sequences[2:]))
        ]
        adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        bodies.append(("optim_step", json.dumps({"model_id": model_id, "seq_id": seq_id + 3, "adam_params": adam}).encode()))
        seq_id += 3
        replies = [await client.begin(route, content=body) for route, body in bodies]
        for reply in replies:
            if (answer := await client.answer(reply["request_id"])) is None:
                raise Broken(f"{reply['request_id']} is not known any more")
            client.counts["answered"] += 1
            told.answers.append(answer)
        told.asked += bodies
        step += 1
    path = (await client.done("save_weights", json={"model_id": model_id, "seq_id": seq_id + 1, "path": "end"}))["path"]
    told.saved = {"path": path}


async def repeat(client: Client, told: Told) -> Told:
    """Ask for the same under another model."""
    again = Told()
    model_id = await client.model()
    for route, body in told.asked:
        if route == "forward_backward":
            said = wire.ForwardBackwardRequest.FromString(body)
            said.model_id = model_id
            again.answers.append(await client.done(route, content=said.SerializeToString()))
        elif route:
            again.answers.append(await client.done(route, json={**json.loads(body), "model_id": model_id}))
        else:
            again.answers.append(None)
    path = (await client.done("save_weights", json={"model_id": model_id, "seq_id": len(told.asked) + 1, "path": "end"}))["path"]
    again.saved = {"path": path}
    return again


async def sample_on(client: Client, harmed: asyncio.Event) -> None:
    """Sample from what all models begin with, several at once."""
    session = (await client.begin("create_session", json={}))["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "demo-model"}
    sampler = (await client.begin("create_sampling_session", json=asked))["sampling_session_id"]
    numbers: collections.Counter[str] = collections.Counter()

    async def one() -> None:
        while not harmed.is_set():
            await client.sample(sampler, numbers, num=2, max_tokens=20)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(one())


async def harm(
    server: Server, client: Client, *, num_kills: int, pause_s: float, chance: random.Random, done: collections.Counter[str]
) -> None:
    """Kill, at random instants; after the trainer or all of them, only once something was answered again."""
    while done.total() < num_kills:
        await asyncio.sleep(chance.expovariate(1 / pause_s))
        (role,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        before = client.counts["answered"]
        if not server.kill(role):
            continue
        done[role] += 1
        if role in ("trainer", "all"):
            while client.counts["answered"] == before:  # noqa: ASYNC110  # a count tells nobody that it changes
                await asyncio.sleep(0.1)


def differences(told: Told, again: Told, saved: Path) -> list[str]:
    found = []
    for number, ((route, _), first, second) in enumerate(zip(told.asked, told.answers, again.answers, strict=True)):
        if route == "optim_step":
            first, second = first["metrics"]["grad_norm"], second["metrics"]["grad_norm"]
        elif route:
            first, second = (wire.ForwardBackwardOutput.FromString(one) for one in (first, second))
        if first != second:
            found.append(f"request {number} ({route}): {str(first)[:80]} and {str(second)[:80]}")
    digests = [_digest(saved, one.saved["path"]) for one in (told, again)]
    if digests[0] != digests[1]:
        found.append(f"the saved models differ: {digests}")
    return found


def _digest(saved: Path, path: str) -> dict[str, str]:
    model, _, rest = path.removeprefix("tinker://").partition("/")
    files = sorted((saved / model.replace(":", "_") / rest).glob("*.safetensors"))
    assert files, f"{path} is saved"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


async def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    make_demo_model(folder / "demo-model", seed=given.seed)
    (folder / "serve.toml").write_text(
        f'[model]\npath = "{folder / "demo-model"}"\ndtype = "float32"\nmax_tokens = 64\n[lora]\nrank = 8\n'
        f'[run]\nname = "chaos"\nfolder = "{folder / "runs"}"\nrestarts = 1000000\nrestart_wait_s = 0.0\n'
        "[tinker]\ncheckpoint_every = 3\n[engine]\nsilent_after_s = 8\nmax_running = 16\n[trainer]\nsilent_after_s = 30\n"
    )
    server = Server(folder)
    server.start()
    kills: collections.Counter[str] = collections.Counter()
    told, harmed, begun = Told(), asyncio.Event(), time.monotonic()
    try:
        address, key = await server.address()
        async with httpx.AsyncClient(base_url=address, headers={"x-api-key": key}, timeout=30.0) as http:
            client, beside = Client(http), Client(http)
            async with asyncio.TaskGroup() as group:
                group.create_task(train(client, told, harmed, num_least=4))
                group.create_task(sample_on(beside, harmed))
                await harm(server, client, num_kills=given.kills, pause_s=given.pause_s, chance=random.Random(given.seed), done=kills)
                harmed.set()
            seconds = time.monotonic() - begun
            again = await repeat(Client(http), told)
    finally:
        code = server.stop()
    problems = differences(told, again, folder / "runs" / "saved")
    assert server.run_folder is not None, "it was there"
    steps = [line for line in read_journals(server.run_folder) if line["kind"] == "client_step"]
    mine = [line for line in steps if line["model_id"] == told.saved["path"].removeprefix("tinker://").partition("/")[0]]
    num_steps = sum(route == "optim_step" for route, _ in told.asked)
    facts = {name: int(sum(line[f"pipelinerl/{name}_tokens"] for line in mine)) for name in ("sampled", "unknown", "repeated", "drifted")}
    if len(mine) != num_steps:
        problems.append(f"the journal tells of {len(mine)} steps, expected {num_steps}")
    problems += [f"{facts[name]} {name} tokens, expected none" for name in ("unknown", "repeated", "drifted") if facts[name]]
    problems += [f"the server ended with {code}"] if code else []
    return {
        "seed": given.seed,
        "kills": dict(kills),
        "seconds": round(seconds),
        "steps": num_steps,
        "gradients": sum(route == "forward_backward" for route, _ in told.asked),
        "tokens": facts,
        "client": dict(client.counts),
        "beside": dict(beside.counts),
        "checkpoints": sum(line["kind"] == "model_checkpoint" for line in read_journals(server.run_folder)),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=None, help="default 50, with --quick 6")
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
