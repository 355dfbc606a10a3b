"""Every decoder, fed with noise and with damaged samples of the real thing, gives a value of its type or an error of our own tree."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl import messages
from pipelinerl.config_file import load, parse
from pipelinerl.errors import ConfigError, WireError
from pipelinerl.metrics import read_journals
from pipelinerl.process import read_config
from pipelinerl.report.reading import JournalTail, read_spans
from pipelinerl.scorer import calls
from pipelinerl.transport.codec import Decoder, encode
from pipelinerl.transport.conversation import Conversation
from pipelinerl.transport.curve import make_keys, read_keys
from pipelinerl.transport.zmq import ZmqLink
from tests.transport.test_codec import EXAMPLES

ROLES = ("Engine", "Scorer", "Trainer", "ForkServer", "Worker")
UNIONS = {
    name: getattr(module, name)
    for module in (messages, calls)
    for name in (f"{way}{role}" for role in ROLES for way in ("From", "To"))
    if hasattr(module, name)
}
FRAMES = [encode(example) for example in EXAMPLES]
FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damaged(draw: st.DrawFn, samples: list[bytes]) -> bytes:
    """A sample with a few bytes changed, cut out, doubled or put in; or plain noise."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    content = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        until = min(len(content), at + draw(st.integers(1, 8)))
        match draw(st.sampled_from(["change", "cut", "double", "insert", "truncate"])):
            case "change":
                content[at:until] = draw(st.binary(min_size=until - at, max_size=until - at))
            case "cut":
                del content[at:until]
            case "double":
                content[at:at] = content[at:until]
            case "insert":
                content[at:at] = draw(st.binary(min_size=1, max_size=4))
            case _:
                del content[at:]
    return bytes(content)


@pytest.mark.parametrize("union", UNIONS)
@given(frame=damaged(FRAMES))
def test_messages_of_every_role(union: str, frame: bytes):
    decoder = Decoder(UNIONS[union])
    try:
        message = decoder.decode(frame)
    except WireError:
        return
    assert type(message).__name__ in decoder.names


@given(frames=st.lists(damaged([*FRAMES, *[b"PL\x01\x01" + bytes(36) + frame for frame in FRAMES[:3]]]), max_size=5), keeps=st.booleans())
def test_frames_of_a_conversation(frames: list[bytes], keeps: bool):
    sent: list[bytes] = []
    end = Conversation("somebody", transmit=sent.append, keeps_for_successor=keeps)
    good: list[bytes] = []
    other = Conversation("somebody else", transmit=good.append, keeps_for_successor=True)
    other.send(FRAMES[0])
    for frame in [*good, *frames]:
        with contextlib.suppress(WireError):
            for body in end.hear(frame):
                assert isinstance(body, memoryview)
    assert len(sent) <= len(frames) + 1, "whatever comes is answered by one frame at most"


@given(data=st.data())
def test_headers_of_a_conversation_that_are_damaged_anywhere(data: st.DataObject):
    """Beyond what encryption lets through: it takes a peer with a key to send these."""
    frames: list[bytes] = []
    other = Conversation("somebody else", transmit=frames.append, keeps_for_successor=True)
    end = Conversation("somebody", transmit=frames.append, keeps_for_successor=False)
    for example in FRAMES[:4]:
        other.send(example)
    other.remind()
    other.remind()
    other.say_goodbye()
    for frame in list(frames):
        with contextlib.suppress(WireError):
            end.hear(data.draw(damaged([frame])))


@given(pieces=st.lists(damaged([calls.frame(example) for example in EXAMPLES[:4]]), max_size=5))
def test_the_stream_of_a_reward_worker(pieces: list[bytes]):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames = calls.Frames(ours)
        for piece in filter(None, pieces):
            theirs.sendall(piece)
            try:
                whole = frames.receive()
            except WireError:
                return
            assert whole is not None


SETTINGS = {
    "model": {"path": "m"},
    "data": {"source": "s"},
    "reward": [{"function": "f:g"}],
    "engine": {"options": {"a": [1, {"b": None}]}},
    "trainer": {"betas": [0.9, 0.95]},
}
CONFIG = parse(SETTINGS, origin="test").model_dump_json().encode()
TOML = b'[model]\npath = "m"\n[data]\nsource = "s"\n[[reward]]\nfunction = "f:g"\nweight = 1.5\n[trainer]\nsteps = 5\nbetas = [0.9, 0.95]\n'
JOURNAL = b'{"t": 1.5, "kind": "status", "process": "o", "identity": {"admitted": 3}}\n'
JOURNAL += b'{"t": 2, "kind": "span", "lane": "a", "name": "b", "start": 1, "end": 2, "count": 3}\n'
ENDPOINT = json.dumps({"address": "tcp://127.0.0.1:1", "server_key": "a" * 40}).encode()


@FOLDER
@given(content=damaged([CONFIG]))
def test_config_json(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)
    with contextlib.suppress(ConfigError):
        read_config(tmp_path)


@FOLDER
@given(content=damaged([TOML]))
def test_a_config_file(tmp_path: Path, content: bytes):
    (tmp_path / "run.toml").write_bytes(content)
    with contextlib.suppress(ConfigError):
        load(tmp_path / "run.toml")


@FOLDER
@given(key=st.text(max_size=30), value=st.text(max_size=30))
def test_an_override(tmp_path: Path, key: str, value: str):
    (tmp_path / "run.toml").write_bytes(TOML)
    with contextlib.suppress(ConfigError):
        load(tmp_path / "run.toml", overrides=[f"{key}={value}", key])


@FOLDER
@given(content=damaged([JOURNAL]))
def test_a_journal(tmp_path: Path, content: bytes):
    (tmp_path / "journal").mkdir(exist_ok=True)
    (tmp_path / "journal" / "engine-0.jsonl").write_bytes(content)
    for line in read_journals(tmp_path):
        assert isinstance(line["t"], int | float)
        assert isinstance(line["kind"], str)
    list(read_spans(tmp_path))
    JournalTail(tmp_path)


@FOLDER
@given(content=damaged([ENDPOINT]))
def test_an_endpoint(tmp_path: Path, content: bytes):
    make_keys(tmp_path)
    (tmp_path / "endpoints").mkdir(exist_ok=True)
    (tmp_path / "endpoints" / "engine.json").write_bytes(content)
    with contextlib.suppress(ConfigError), contextlib.closing(ZmqLink(tmp_path, "engine", 0, accepts=messages.ToEngine, deadline_s=0.1)):
        pass


@FOLDER
@given(content=damaged([b"a" * 40 + b"\n" + b"b" * 40 + b"\n"]))
def test_a_key_file(tmp_path: Path, content: bytes):
    make_keys(tmp_path)
    (tmp_path / "keys" / "engine.key").write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert len(read_keys(tmp_path, "engine").secret) == 40


TOO_LONG: dict[str, Callable[[], messages.Message]] = {
    "a name": lambda: messages.Cancel(rollout_id="x" * 513, attempt=0),
    "figures": lambda: messages.StepDone(step=0, metrics={str(number): 0.0 for number in range(4097)}),
    "a shape": lambda: messages.Tensor(name="x", shape=(1,) * 17, dtype="float32", offset_bytes=0, num_bytes=4),
    "stop tokens": lambda: messages.Sampling(max_tokens=1, stop_token_ids=(1,) * 4097),
}


@pytest.mark.parametrize("what", TOO_LONG)
def test_more_than_a_fields_length_is_refused_off_the_wire(what: str):
    message = TOO_LONG[what]()
    with pytest.raises(WireError, match="length <="):
        Decoder(type(message)).decode(encode(message))


@pytest.mark.parametrize(("depth", "is_refused"), [(messages.MAX_DEPTH - 1, False), (messages.MAX_DEPTH + 1, True)])
def test_columns_nested_too_deep_are_refused(depth: int, is_refused: bool):
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    nothing = msgspec.msgpack.Ext(1, b"")
    frame = msgspec.msgpack.encode({"type": "Prompt", "prompt_id": "0:1", "text": "", "token_ids": nothing, "columns": {"a": value}})
    with pytest.raises(WireError, match="nested deeper than 32 levels") if is_refused else contextlib.nullcontext():
        assert Decoder(messages.Prompt).decode(frame).columns == {"a": value}
