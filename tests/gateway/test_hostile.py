"""Clients that mean no good, or do not know better: each is refused in OpenAI's shape or cut off, and others are served on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette

from pipelinerl.gateway import limits
from pipelinerl.gateway.listening import listen, server_of
from tests.gateway.serving import RUN_TOKEN, Serving, serving

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("desk"), max_body_bytes=1 << 16, max_messages=4) as one:
        yield one


def stranger(desk: Serving) -> socket.socket:
    host, _, port = desk.address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=5.0)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[]", 400, "the body is a list, expected an object"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, 400, "nested deeper than 64 levels"),
        (b'{"a":' * 20000, 413, "more than 65536 bytes"),
        (b'{"messages": []}', 400, "expected a list with a message at least"),
        (b'{"messages": "hi"}', 400, "messages is 'hi'"),
        (b'{"messages": [{"role": "boss", "content": ""}]}', 400, "messages[0].role is 'boss'"),
        (b'{"messages": [3]}', 400, "messages[0].role is '3'"),
        (b'{"messages": [{"role": "user", "content": 7}]}', 400, "a message's content is '7'"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [1]}]}', 400, "a tool call is '1'"),
        (json.dumps({"messages": HI["messages"] * 5}).encode(), 400, "expected at most 4"),
        (json.dumps(HI | {"n": "many"}).encode(), 400, "n is 'many', expected an integer"),
        (json.dumps(HI | {"n": 9}).encode(), 400, "n is 9, expected at most 8 (gateway.max_parallel)"),
        (json.dumps(HI | {"max_tokens": -1}).encode(), 400, "max_tokens is -1"),
        (json.dumps(HI | {"stop": [""]}).encode(), 400, "stop is"),
        (json.dumps(HI | {"tools": {"a": 1}}).encode(), 400, "tools is"),
        (json.dumps(HI | {"tool_choice": "required"}).encode(), 400, "the model is not forced"),
        (json.dumps(HI | {"stream": "yes"}).encode(), 400, "stream is 'yes'"),
    ],
)
def test_a_body_that_says_nothing_is_refused_by_name(desk: Serving, body: bytes, status: int, words: str) -> None:
    with desk.client() as client:
        lent = desk.lend(client)
        answer = client.post(
            f"/episodes/{lent['episode_id']}/v1/chat/completions", content=body, headers={"authorization": f"Bearer {lent['token']}"}
        )
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_route_that_is_none_is_said_in_the_same_shape(desk: Serving) -> None:
    with desk.client() as client:
        assert client.get("/v1/engines").json()["error"]["message"] == "GET /v1/engines: Not Found"
        assert client.get("/episodes/next").status_code in (401, 405)


def test_who_never_ends_a_head_is_cut_off(desk: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.2)
    with stranger(desk) as slow:
        for byte in b"POST /episodes/next HTTP/1.1\r\nHost: x\r\nX-":
            slow.sendall(bytes([byte]))
        began = time.monotonic()
        assert slow.recv(1) == b""
        assert time.monotonic() - began < 4.0


def test_a_head_of_any_size_is_not_read(desk: Serving) -> None:
    with stranger(desk) as long:
        long.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        with pytest.raises(OSError, match=r"reset|Broken"):
            long.sendall(b"x" * (64 << 20))


@pytest.mark.parametrize("endless", [b"a: bbbbbbbbbb\r\n" * 4096, b"b" * 65536], ids=["many trailers", "one long trailer"])
def test_trailers_of_any_size_are_not_kept_from_who_has_no_token(desk: Serving, endless: bytes) -> None:
    with stranger(desk) as long:
        long.sendall(b"POST /episodes/next HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ")
        with pytest.raises(OSError, match=r"reset|Broken"):
            long.sendall(endless * 256)


def test_a_connection_has_one_request_at_a_time_and_others_are_served_on(desk: Serving) -> None:
    request, said = b"GET /episodes/next HTTP/1.1\r\nHost: x\r\n\r\n", b""
    with stranger(desk) as flood:
        for number in (1, 2):  # one after the other, on the same connection
            flood.sendall(request)
            while said.count(b"}}") < number:
                said += flood.recv(4096)
        with contextlib.suppress(OSError):
            flood.sendall(request * 9000)
            while piece := flood.recv(1 << 16):
                said += piece
    assert 2 <= said.count(b"HTTP/1.1 401") <= 3
    with desk.client() as client:
        assert client.get("/episodes/next").status_code == 401


def test_strangers_who_send_garbage_or_come_in_crowds_write_nothing_into_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    async def attack() -> list[bytes]:
        listener, address = listen("127.0.0.1", 0, section="gateway")
        listener.listen()
        server = server_of(Starlette(), max_connections=2)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        host, _, port = address.removeprefix("http://").partition(":")
        crowd = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        said = []
        for garbage in (
            b"\x00\xff\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        ):
            reader, writer = crowd.pop()
            writer.write(garbage)
            said.append(await asyncio.wait_for(reader.read(15), 5.0))
            writer.close()
        server.should_exit = True
        await serving
        return said

    said = asyncio.run(attack())
    assert {answer[:12] for answer in said} == {b"HTTP/1.1 400", b"HTTP/1.1 503"}
    assert "".join(capfd.readouterr()) == ""


def test_a_body_in_many_small_chunks_is_read(desk: Serving) -> None:
    with desk.client() as client:
        lent = desk.lend(client)
        body = iter([b'{"reward": 1, "a": "', *[b"x"] * 30_000, b'"}'])  # six bytes of framing for each of content
        answer = client.post(f"{lent['episode_url']}/reward", content=body, headers={"authorization": f"Bearer {lent['token']}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("route", ["reward", "finish"])
@pytest.mark.parametrize("reward", ["1e308", "-1e13", "1" + "0" * 400, "true", '"1"', "[1]"])
def test_a_reward_that_would_spoil_a_step_is_refused_and_the_episode_goes_on(desk: Serving, reward: str, route: str) -> None:
    with desk.client() as client:
        lent = desk.lend(client)
        headers: dict[str, Any] = {"authorization": f"Bearer {lent['token']}"}
        answer = client.post(f"{lent['episode_url']}/{route}", content=f'{{"reward": {reward}}}', headers=headers)
        assert answer.status_code == 400
        assert "expected a number up to 1e+12 in size" in answer.json()["error"]["message"]
        assert client.post(f"{lent['episode_url']}/reward", json={"reward": -1e12}, headers=headers).json()["reward"] == -1e12


@pytest.mark.parametrize("token_ids", [[-1], [5, 1 << 20], [(1 << 31) - 1], [10**30], []])
def test_tokens_that_the_model_has_not_are_refused_before_they_count_as_the_gateways_own_fault(desk: Serving, token_ids: list[int]) -> None:
    asked = len(desk.engine.asked)
    with desk.client() as client:
        headers: dict[str, Any] = {"authorization": f"Bearer {desk.lend(client)['token']}"}
        answer = client.post("/inference/v1/generate", json={"token_ids": token_ids}, headers=headers)
    assert answer.status_code == 400
    assert "token ids from 0 to" in answer.json()["error"]["message"]
    assert len(desk.engine.asked) == asked


def test_a_wait_of_any_length_is_cut_to_the_longest(desk: Serving) -> None:
    desk.offer()
    with desk.client() as client:
        said = client.post(
            "/episodes/next", content=b'{"timeout_s": 1' + b"0" * 400 + b"}", headers={"authorization": f"Bearer {RUN_TOKEN}"}
        )
    assert said.status_code == 200


def test_who_never_ends_a_body_is_told_so(desk: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.2)
    with desk.client() as client:
        lent = desk.lend(client)
    with stranger(desk) as slow:
        path = f"/episodes/{lent['episode_id']}/finish"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {lent['token']}\r\nContent-Length: 100\r\n\r\n"
        slow.sendall(head.encode() + b"{")
        assert b"408" in slow.recv(4096)


def test_a_stream_that_its_client_closes_is_sampled_to_its_end_and_can_be_had_by_a_retry(desk: Serving) -> None:
    desk.engine.says = lambda prompt: "a long answer " * 8
    before = len(desk.engine.asked)
    with desk.client() as client:
        lent = desk.lend(client)
        url = f"/episodes/{lent['episode_id']}/v1/chat/completions"
        headers: dict[str, Any] = {"authorization": f"Bearer {lent['token']}"}
        with client.stream("POST", url, json=HI | {"stream": True}, headers=headers) as stream:
            next(stream.iter_lines())
        again = client.post(url, json=HI, headers=headers | {"x-stainless-retry-count": "1"})
        assert again.json()["choices"][0]["message"]["content"] == "a long answer " * 8
        assert len(desk.engine.asked) == before + 1
        assert client.post(url, json=HI, headers=headers).status_code == 200, "others are served on"
