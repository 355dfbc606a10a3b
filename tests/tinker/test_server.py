"""The routes, without an engine or a trainer: who may use them, what is refused how, and what is sent twice."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from pipelinerl.messages import (
    CloseModel,
    Completion,
    Finish,
    ForwardBackward,
    ForwardBackwardDone,
    Generate,
    OptimizerStep,
    OptimizerStepDone,
    RequestDone,
    RequestFailed,
    SaveModel,
    TrainingAnswer,
    TrainingRequest,
)
from pipelinerl.tinker import wire
from pipelinerl.tinker.backend import Publication, Refusal, Weights
from pipelinerl.tinker.futures import Futures
from pipelinerl.tinker.ledger import Ledger
from pipelinerl.tinker.server import Tinker
from pipelinerl.tinker.settings import served as settings_of_server
from tests.tinker.test_wire import REQUEST
from tests.tinker.wiring import KEY, wired


class AnsweringBackend:
    """Answers at once, and remembers what it was asked."""

    max_context_tokens = 16

    def __init__(self) -> None:
        self.publications = {0: Publication(model_id="", num_steps=0)}
        self.num_steps: collections.Counter[str] = collections.Counter()
        self.trained: list[TrainingRequest | CloseModel] = []
        self.sampled: list[tuple[Weights, Sequence[Generate]]] = []
        self.fails: str | None = None

    def train(self, request: TrainingRequest | CloseModel) -> asyncio.Future[TrainingAnswer]:
        self.trained.append(request)
        answer: asyncio.Future[TrainingAnswer] = asyncio.get_running_loop().create_future()
        if self.fails is not None:
            answer.set_result(RequestFailed(request_id=1, error=self.fails, is_asker_wrong=True))
        elif isinstance(request, ForwardBackward):
            logprobs = np.full(len(request.token_ids), -1.0, np.float32)
            answer.set_result(ForwardBackwardDone(request_id=1, logprobs=logprobs, loss=2.5, num_computed=3))
        elif isinstance(request, OptimizerStep):
            answer.set_result(OptimizerStepDone(request_id=1, grad_norm=0.5, learning_rate=1e-3))
        else:
            if isinstance(request, SaveModel):
                Path(request.folder).mkdir(parents=True, exist_ok=True)
            answer.set_result(RequestDone(request_id=1))
        return answer

    def publish(self, weights: Weights) -> asyncio.Future[int]:
        version = len(self.publications)
        self.publications[version] = Publication(model_id=weights.model_id, num_steps=0)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        answer.set_result(version)
        return answer

    async def sample(self, weights: Weights, requests: Sequence[Generate]) -> Sequence[Completion]:
        self.sampled.append((weights, requests))
        if self.fails is not None:
            raise Refusal(self.fails, is_asker_wrong=False)
        ids, ones = np.array([7, 8], np.int32), np.full(2, -0.5, np.float32)
        return [
            Completion(
                rollout_id=request.rollout_id,
                attempt=0,
                token_ids=ids,
                logprobs=ones,
                versions=np.zeros(2, np.int32),
                finish=Finish.STOP,
                prompt_logprobs=np.append(np.float32(np.nan), np.full(len(request.token_ids) - 1, -2.0, np.float32))
                if request.sampling.has_prompt_logprobs
                else None,
            )
            for request in requests
        ]


class Client:
    """Posts JSON with the key, and fetches answers of futures."""

    def __init__(self, http: httpx.AsyncClient, backend: AnsweringBackend, tinker: Tinker) -> None:
        self.http, self.backend, self.tinker = http, backend, tinker
        self.lines: list[tuple[str, dict[str, Any]]] = []

    async def post(self, route: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"/api/v1/{route}", json=body)

    async def done(self, route: str, **body: Any) -> dict[str, Any]:
        """The answer of the future that a request makes."""
        reply = await self.post(route, **body)
        assert reply.status_code == 200, reply.text
        return (await self.post("retrieve_future", request_id=reply.json()["request_id"])).json()

    async def model(self) -> str:
        session = (await self.post("create_session", sdk_version="0.38.0")).json()["session_id"]
        answer = await self.done("create_model", session_id=session, model_seq_id=0, base_model="my-model", lora_config={"rank": 8})
        return answer["model_id"]

    async def passes(self, body: bytes) -> httpx.Response:
        return await self.http.post("/api/v1/forward_backward", content=body, headers={"content-type": "application/x-protobuf"})


@contextlib.asynccontextmanager
async def served(folder: Path, **section: Any) -> AsyncIterator[Client]:
    backend, ledger = AnsweringBackend(), Ledger(None)
    lines: list[tuple[str, dict[str, Any]]] = []
    tinker = wired(backend, folder, ledger=ledger, journal=lambda kind, **fields: lines.append((kind, fields)), **section)
    tinker.dispatch.restart()
    running = asyncio.ensure_future(tinker.dispatch.run())
    transport = httpx.ASGITransport(app=tinker.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers={"x-api-key": KEY}) as http:
        client = Client(http, backend, tinker)
        client.lines = lines
        yield client
    running.cancel()
    tinker.futures.close()
    ledger.close()


def run(test: Callable[[Client], Awaitable[None]], folder: Path, **options: Any) -> None:
    async def whole() -> None:
        async with served(folder, **options) as client:
            await test(client)

    asyncio.run(whole())


def of_model(model_id: str, *, seq_id: int = 3) -> bytes:
    said = wire.ForwardBackwardRequest.FromString(REQUEST)
    said.model_id, said.seq_id = model_id, seq_id
    return said.SerializeToString()


def test_nobody_gets_in_without_the_key(tmp_path: Path):
    async def test(client: Client) -> None:
        answer = await client.http.post("/api/v1/create_session", json={}, headers={"x-api-key": "tml-other"})
        assert answer.status_code == 401
        assert answer.json()["category"] == "user"

    run(test, tmp_path)


def test_a_step_is_asked_of_the_trainer_and_its_numbers_come_back(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        reply = await client.passes(of_model(model))
        answer = await client.post("retrieve_future", request_id=reply.json()["request_id"])
        assert answer.headers["content-type"] == "application/x-protobuf"
        output = wire.ForwardBackwardOutput.FromString(answer.content)
        assert output.metrics["loss:sum"] == 2.5
        step = await client.done("optim_step", model_id=model, seq_id=4, adam_params={"learning_rate": 1e-3, "beta1": 0.9})
        assert step["metrics"]["grad_norm"] == 0.5
        assert step["metrics"]["pipelinerl/unknown_tokens"] == 2
        asked = client.backend.trained[-1]
        assert isinstance(asked, OptimizerStep)
        assert (asked.learning_rate, asked.eps) == (1e-3, 1e-12), "the second is the SDK's default"
        assert client.lines[-1][0] == "client_step"

    run(test, tmp_path)


def test_a_request_that_is_sent_again_is_not_carried_out_again(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        first, again = [await client.passes(of_model(model)) for _ in range(2)]
        assert first.json() == again.json()
        await client.post("retrieve_future", request_id=first.json()["request_id"])
        assert sum(isinstance(one, ForwardBackward) for one in client.backend.trained) == 1
        steps = [(await client.post("optim_step", model_id=model, seq_id=4, adam_params={})).json() for _ in range(2)]
        assert steps[0] == steps[1]
        assert client.tinker.sessions.model(model).num_steps == 1

    run(test, tmp_path)


def test_errors_say_whose_they_are(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        unknown = await client.done("optim_step", model_id="nobody", seq_id=1, adam_params={})
        assert unknown["category"] == "user"
        assert "nobody" in unknown["error"]
        client.backend.fails = "no such column"
        reply = await client.passes(of_model(model, seq_id=7))
        failed = (await client.post("retrieve_future", request_id=reply.json()["request_id"])).json()
        assert failed == {"error": "no such column", "category": "user"}
        session = model.partition(":")[0]
        sampler = (
            await client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="my-model")
        ).json()
        ask = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 2}, "seq_id": 0}
        failed = await client.done("asample", sampling_session_id=sampler["sampling_session_id"], **ask)
        assert failed["category"] == "server"
        gone = await client.post("retrieve_future", request_id="request-999")
        assert gone.status_code == 410
        wrong = await client.post("optim_step", model_id=model)
        assert wrong.status_code == 400
        assert "seq_id" in wrong.json()["error"]
        route = await client.post("billing")
        assert route.status_code == 404
        assert route.json()["category"] == "user"

    run(test, tmp_path)


@pytest.mark.parametrize("params", [{"seed": 10**30}, {"seed": -(1 << 63)}, {"top_k": 1 << 31}, {"top_k": -5}, {"stop": [1 << 31]}])
def test_what_no_engine_can_be_sent_is_refused_by_name(tmp_path: Path, params: dict[str, Any]):
    async def test(client: Client) -> None:
        session = (await client.post("create_session")).json()["session_id"]
        about = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "my-model"}
        sampler = (await client.post("create_sampling_session", **about)).json()["sampling_session_id"]
        ask = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_session_id": sampler, "seq_id": 0}
        refused = await client.post("asample", **ask, sampling_params=params)
        assert refused.status_code == 400
        assert next(iter(params)) in refused.json()["error"]
        assert not client.backend.sampled

    run(test, tmp_path)


@pytest.mark.parametrize("params", [{"learning_rate": -1.0}, {"learning_rate": 1e308}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1.0}])
def test_a_step_that_would_spoil_a_model_is_refused_by_name(tmp_path: Path, params: dict[str, float]):
    async def test(client: Client) -> None:
        refused = await client.post("optim_step", model_id=await client.model(), seq_id=4, adam_params=params)
        assert refused.status_code == 400
        assert next(iter(params)) in refused.json()["error"]

    run(test, tmp_path)


@pytest.mark.parametrize("name", ["a" * 600, "%2e%2e", "*", "a%00b"])
def test_the_checkpoints_of_what_is_no_model_are_none(tmp_path: Path, name: str):
    async def test(client: Client) -> None:
        found = await client.http.get(f"/api/v1/training_runs/{name}/checkpoints")
        assert (found.status_code, found.json()) == (200, {"checkpoints": []})

    (tmp_path / "saved").mkdir()
    run(test, tmp_path)


def test_what_is_sampled_has_names_by_which_it_is_known_again(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        sampler = await client.done("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0, kind="inflight")
        name = sampler["sampling_session_id"]
        ask = {"prompt": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]}, "num_samples": 2, "prompt_logprobs": True}
        reply = (
            await client.post("asample", sampling_session_id=name, seq_id=0, sampling_params={"max_tokens": 4, "stop": ["\n", 9]}, **ask)
        ).json()
        assert reply["sample_sequence_ids"] == [f"{name}/0/0", f"{name}/0/1"]
        answer = await client.post("retrieve_future", request_id=reply["request_id"])
        response = wire.SampleResponse.FromString(answer.content)
        assert [np.frombuffer(one.tokens, np.int32).tolist() for one in response.sequences] == [[7, 8], [7, 8]]
        assert np.isnan(np.frombuffer(response.prompt_logprobs, np.float32)).tolist() == [True, False]
        (weights, (first, second)) = client.backend.sampled[0]
        assert weights == Weights(model_id=model)
        assert first.sampling.stop == ("\n",)
        assert first.sampling.stop_token_ids == (9, 2)
        assert not first.sampling.ignores_ends
        assert first.sampling.has_prompt_logprobs
        assert not second.sampling.has_prompt_logprobs

        said = wire.ForwardBackwardRequest.FromString(of_model(model, seq_id=2))
        for span in said.data[0].loss_fn_input_spans:
            (span.sampled_tokens if span.WhichOneof("choice") == "sampled_tokens" else span.prompt_tokens).sequence_id = f"{name}/0/1"
        for seq_id in (2, 3):
            said.seq_id = seq_id
            await client.passes(said.SerializeToString())
        metrics = (await client.done("optim_step", model_id=model, seq_id=4, adam_params={}))["metrics"]
        assert metrics["pipelinerl/sampled_tokens"] == 4
        assert metrics["pipelinerl/unknown_tokens"] == 0
        assert metrics["pipelinerl/repeated_tokens"] == 2, "the second pass trains on the same tokens again"

    run(test, tmp_path)


def test_the_models_ends_end_a_completion_unless_the_client_says_that_nothing_does(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        session = model.partition(":")[0]
        sampler = (
            await client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="my-model")
        ).json()
        ask = {"sampling_session_id": sampler["sampling_session_id"], "prompt": {"chunks": [{"tokens": [5]}]}}
        for seq_id, stop in enumerate((None, [], [9])):
            await client.post("asample", seq_id=seq_id, sampling_params={"stop": stop} if stop is not None else {}, **ask)
        await asyncio.sleep(0)
        found = [requests[0].sampling for _, requests in client.backend.sampled]
        assert [one.stop_token_ids for one in found] == [(2,), (), (9, 2)]
        assert [one.ignores_ends for one in found] == [False, True, False]
        assert found[0].max_tokens == 15, "to the end of the context"

    run(test, tmp_path)


def test_tokens_that_are_too_old_are_refused_where_the_user_sets_a_bound(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        client.tinker.sampled.provenance.sampled("s/0/0", tokens=np.array([7, 8], np.int32), versions=np.zeros(2, np.int32))
        for seq_id in (1, 2):
            await client.done("optim_step", model_id=model, seq_id=seq_id, adam_params={})
        reply = await client.passes(of_model(model, seq_id=3))
        failed = (await client.post("retrieve_future", request_id=reply.json()["request_id"])).json()
        assert failed["category"] == "user"
        assert "2 optimizer steps ago; the server's bound is 1" in failed["error"]
        assert not any(isinstance(one, ForwardBackward) for one in client.backend.trained)

    run(test, tmp_path, max_staleness=1)


def test_a_saved_model_is_found_by_its_path(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        saved = await client.done("save_weights", model_id=model, seq_id=1, path="000001")
        assert saved["path"] == f"tinker://{model}/weights/000001"
        sampler = await client.done("save_weights_for_sampler", model_id=model, seq_id=2, path="s1")
        assert (await client.post("weights_info", tinker_path=sampler["path"])).json()["lora_rank"] == 8
        session = model.partition(":")[0]
        loaded = await client.done("load_weights", session_id=session, model_seq_id=1, path=saved["path"], optimizer=True)
        assert loaded["model_id"] == f"{session}:train:1"
        for path in (f"tinker://{model}/weights/../../etc", "/etc/passwd", f"tinker://{model}/weights/.hidden"):
            assert (await client.done("load_weights", model_id=model, seq_id=9, path=path, optimizer=False))["category"] == "user", path
        missing = await client.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=f"tinker://{model}/weights/x"
        )
        assert missing.status_code == 404

    run(test, tmp_path)


def test_a_client_that_has_ended_leaves_nothing_behind(tmp_path: Path):
    async def test(client: Client) -> None:
        model = await client.model()
        session = model.partition(":")[0]
        assert (await client.post("session_heartbeat", session_id=session)).status_code == 200
        assert (await client.post(f"sessions/{session}/finish")).status_code == 200
        assert isinstance(client.backend.trained[-1], CloseModel)
        assert (await client.post("session_heartbeat", session_id=session)).status_code == 410
        assert (await client.done("optim_step", model_id=model, seq_id=1, adam_params={}))["category"] == "user"

    run(test, tmp_path)


def test_a_server_that_has_enough_to_do_says_so(tmp_path: Path):
    async def test(client: Client) -> None:
        session = (await client.post("create_session")).json()["session_id"]
        client.tinker.futures.begin("held", asyncio.Event().wait(), num_bytes=1)  # pyright: ignore[reportArgumentType]
        full = await client.post("create_model", session_id=session, model_seq_id=0, base_model="my-model")
        assert full.status_code == 429
        assert full.json()["category"] == "server"

    run(test, tmp_path, max_pending=1)


def test_requests_that_wait_are_bounded_in_bytes_too(tmp_path: Path):
    async def test(client: Client) -> None:
        session = (await client.post("create_session")).json()["session_id"]
        client.tinker.futures.begin("held", asyncio.Event().wait(), num_bytes=101)  # pyright: ignore[reportArgumentType]
        full = await client.post("create_model", session_id=session, model_seq_id=0, base_model="my-model")
        assert full.status_code == 429
        assert "1 requests of 101 bytes" in full.text

    run(test, tmp_path, max_held_bytes=100)


def test_the_bytes_of_a_request_are_those_of_its_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def test(client: Client) -> None:
        sizes: list[int] = []
        begin = client.tinker.futures.begin

        def noted(request_id: str, work: Awaitable[Any], *, num_bytes: int, **options: bool) -> None:
            sizes.append(num_bytes)
            begin(request_id, work, num_bytes=num_bytes, **options)

        monkeypatch.setattr(client.tinker.futures, "begin", noted)
        session = (await client.post("create_session")).json()["session_id"]
        asked = await client.post("create_model", session_id=session, model_seq_id=0, base_model="my-model")
        assert sizes == [len(asked.request.content)]
        assert sizes[0] > 20

    run(test, tmp_path)


async def _of(answer: bytes) -> bytes:
    return answer


def test_the_oldest_answers_are_forgotten_while_all_of_them_take_too_much():
    async def fill() -> None:
        futures = Futures(max_pending=8, max_held_bytes=100)
        futures.begin("waits", asyncio.Event().wait(), num_bytes=1)  # pyright: ignore[reportArgumentType]
        for number in range(3):
            futures.begin(f"{number}", _of(b"x" * 40), num_bytes=60)
        assert futures.num_pending_bytes == 181
        assert futures.is_full
        await asyncio.sleep(0.01)
        assert futures.num_pending_bytes == 1
        assert not futures.is_full
        assert "0" not in futures, "40 of 120 bytes had to go, though the oldest request still waits"
        assert await futures.answer("2") == b"x" * 40
        assert "waits" in futures
        futures.close()

    asyncio.run(fill())


def test_what_a_model_cannot_be_is_said_when_it_is_made(tmp_path: Path):
    async def test(client: Client) -> None:
        session = (await client.post("create_session")).json()["session_id"]
        asks = [
            {"base_model": "another"},
            {"base_model": "my-model", "lora_config": {"rank": 4}},
            {"base_model": "my-model", "lora_config": {"rank": 8, "train_mlp": False}},
            {"base_model": "my-model", "optimizer_config": {"type": "dimuon"}},
        ]
        for number, ask in enumerate(asks):
            failed = await client.done("create_model", session_id=session, model_seq_id=number, **ask)
            assert failed["category"] == "user", ask
        assert not client.backend.trained

    run(test, tmp_path)


def test_engines_and_trainer_in_turns_are_refused_before_anything_starts(tmp_path: Path):
    config = parse({"model": {"path": "m"}, "pipeline": {"placement": "colocated"}}, origin="test", for_run=False)
    with pytest.raises(ConfigError, match=r'pipelinerl serve:\n  - pipeline.placement is "colocated", and clients say themselves'):
        settings_of_server(config)
