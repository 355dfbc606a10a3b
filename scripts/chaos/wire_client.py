"""A client of `pipelinerl serve` that speaks its wire format by hand, as the SDK does: `scripts.chaos.serving` has it train under kills."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
from typing import Any

import httpx
import numpy as np

from pipelinerl.tinker import wire

PATIENCE_S = 240.0
"""A request that is not answered for so long fails the run."""
PROMPT = [5, 9, 12, 7, 3, 6]
_RETRIED = (408, 409, 429)


class Broken(Exception):
    """A promise was broken."""


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


def differences(told: Told, again: Told) -> list[str]:
    """What was answered otherwise when the same was asked again."""
    found = []
    for number, ((route, _), first, second) in enumerate(zip(told.asked, told.answers, again.answers, strict=True)):
        if route == "optim_step":
            first, second = first["metrics"]["grad_norm"], second["metrics"]["grad_norm"]
        elif route:
            first, second = (wire.ForwardBackwardOutput.FromString(one) for one in (first, second))
        if first != second:
            found.append(f"request {number} ({route}): {str(first)[:80]} and {str(second)[:80]}")
    return found


class WireLoad:
    """The load of a server: a client that trains, and one that samples beside it."""

    def __init__(self, address: str, key: str) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_steps = self.num_gradients = 0
        self.paths: list[str] = []
        """Of the models that were saved at the end, of both times."""
        self.problems: list[str] = []
        self._http = httpx.AsyncClient(base_url=address, headers={"x-api-key": key}, timeout=30.0)

    async def train(self, harmed: asyncio.Event) -> None:
        """Train and sample until all harm is done."""
        self._told = Told()
        client, beside = Client(self._http), Client(self._http)
        client.counts = self.counts
        async with asyncio.TaskGroup() as group:
            group.create_task(train(client, self._told, harmed, num_least=4))
            group.create_task(sample_on(beside, harmed))
        self.counts["samples beside"] = beside.counts["samples answered"]
        self.num_steps = sum(route == "optim_step" for route, _ in self._told.asked)
        self.num_gradients = sum(route == "forward_backward" for route, _ in self._told.asked)

    async def repeat(self) -> None:
        """Ask for the same again, of another model, and compare."""
        again = await repeat(Client(self._http), self._told)
        await self._http.aclose()
        self.paths = [self._told.saved["path"], again.saved["path"]]
        self.problems = differences(self._told, again)
