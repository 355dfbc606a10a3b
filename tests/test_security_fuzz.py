"""Every decoder, fed with noise and with damaged samples of the real thing, gives a value of its type or an error of our own tree."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import read_snapshot
from pipelinerl import messages
from pipelinerl.checker.history import _checkpoints
from pipelinerl.config.file import load, load_run, parse
from pipelinerl.errors import ConfigError, LedgerError, WeightsError, WireError
from pipelinerl.observe.lines import JournalTail, read_journals, read_spans
from pipelinerl.rewards import calls
from pipelinerl.storage.checkpoint_folder import read_manifest
from pipelinerl.transport import stream
from pipelinerl.transport.codec import Decoder, encode
from pipelinerl.transport.keys import make_keys, read_keys
from pipelinerl.transport.session import Session
from pipelinerl.transport.zmq import ZmqLink
from pipelinerl.weights import codec as changes_codec
from pipelinerl.weights import manifest
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.delta import Space
from tests.keys import PEERS
from tests.orchestrator import handmade
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


@given(frames=st.lists(damaged([*FRAMES, *[b"PL\x03\x01" + bytes(36) + frame for frame in FRAMES[:3]]]), max_size=5), keeps=st.booleans())
def test_frames_of_a_session(frames: list[bytes], keeps: bool):
    sent: list[bytes] = []
    end = Session("somebody", transmit=sent.append, introduction=lambda kept: kept if keeps else ())
    good: list[bytes] = []
    other = Session("somebody else", transmit=good.append, introduction=lambda kept: kept)
    other.send(FRAMES[0])
    for frame in [*good, *frames]:
        with contextlib.suppress(WireError):
            for body in end.receive_frame(frame):
                assert isinstance(body, memoryview)
    assert len(sent) <= len(frames) + 1, "whatever comes is answered by one frame at most"


@given(data=st.data())
def test_headers_of_a_session_that_are_damaged_anywhere(data: st.DataObject):
    """Beyond what encryption lets through: it takes a peer with a key to send these."""
    frames: list[bytes] = []
    other = Session("somebody else", transmit=frames.append, introduction=lambda kept: kept)
    end = Session("somebody", transmit=frames.append, introduction=lambda kept: ())
    for example in FRAMES[:4]:
        other.send(example)
    other.send(*FRAMES[:4])
    other.probe()
    other.probe()
    other.say_goodbye()
    for frame in list(frames):
        with contextlib.suppress(WireError):
            end.receive_frame(data.draw(damaged([frame])))


@given(pieces=st.lists(damaged([stream.frame(example) for example in EXAMPLES[:4]]), max_size=5))
def test_the_stream_of_a_reward_worker(pieces: list[bytes]):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames = stream.Frames(ours)
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
JOURNAL = b'{"t": 1.5, "kind": "status", "process": "o", "rollouts": {"admitted": 3}}\n'
JOURNAL += b'{"t": 2, "kind": "span", "lane": "a", "name": "b", "start": 1, "end": 2, "count": 3}\n'
ENDPOINT = json.dumps({"address": "tcp://127.0.0.1:1", "server_key": "a" * 40}).encode()


@FOLDER
@given(content=damaged([CONFIG]))
def test_config_json(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)
    with contextlib.suppress(ConfigError):
        load_run(tmp_path)


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


@pytest.mark.slow
@FOLDER
@given(content=damaged([ENDPOINT]))
def test_an_endpoint(tmp_path: Path, content: bytes):
    make_keys(tmp_path, PEERS)
    (tmp_path / "endpoints").mkdir(exist_ok=True)
    (tmp_path / "endpoints" / "engine.json").write_bytes(content)
    with contextlib.suppress(ConfigError), contextlib.closing(ZmqLink(tmp_path, "engine", 0, accepts=messages.ToEngine, deadline_s=0.1)):
        pass


@FOLDER
@given(content=damaged([b"a" * 40 + b"\n" + b"b" * 40 + b"\n"]))
def test_a_key_file(tmp_path: Path, content: bytes):
    make_keys(tmp_path, PEERS)
    (tmp_path / "keys" / "engine-0.key").write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert len(read_keys(tmp_path, "engine-0").secret) == 40


LAYOUT = plan_layout({"a": torch.zeros(40, dtype=torch.bfloat16), "b": torch.zeros(7, 5)})
BUFFER = torch.arange(num_bytes(LAYOUT), dtype=torch.int64).to(torch.uint8)
SPACE = Space(LAYOUT)
CHANGES = changes_codec.encode(SPACE.take(BUFFER, {2: np.array([1, 5, 39]), 4: np.array([0, 34])}))
MANIFEST = manifest.encode(manifest.seal(3, BUFFER, LAYOUT))


@given(content=damaged([MANIFEST]))
def test_a_policys_manifest(content: bytes):
    """As if the trainer itself had announced it: its digest fits."""
    with contextlib.suppress(WeightsError):
        opened = manifest.open_manifest(content, digest=manifest.digest_of(content), name="s")
        manifest.check(opened, version=3, layout=LAYOUT, name="s")
        manifest.verify(opened, BUFFER, name="s")


@given(content=damaged([CHANGES]))
def test_the_changes_of_a_policy(content: bytes):
    with contextlib.suppress(WeightsError):
        changes = changes_codec.decode(content, most=SPACE.num_elements)
        SPACE.check(changes)
        SPACE.lay_over(BUFFER.clone(), changes)


@pytest.mark.parametrize(("size", "count"), [(2, 41), (4, 36), (8, 1), (2, 1 << 39)])
def test_changes_of_more_elements_than_there_are_make_no_room_for_them(size: int, count: int):
    planes = [b""] * size
    part = {"itemsize": size, "count": count, "low_bits": 0, "quotients": b"", "escapes": b"", "remainders": b"", "planes": planes}
    with pytest.raises(WeightsError, match=rf"{count} elements of {size} bytes, of \d+ that there are"):
        changes_codec.decode(msgspec.msgpack.encode([part]), most=SPACE.num_elements)


CHECKPOINT = json.dumps(
    {
        "schema": 4,
        "version": 3,
        "commit": "a:7",
        "num_samples": 2,
        "samples": "ab",
        "files": {"x": {"bytes": 1, "xxh3": "d10b4b6bb8a8d6bd4c0aa15cd6ad0c5b"}},
        "trackers": {},
    }
).encode()


@FOLDER
@given(content=damaged([CHECKPOINT]))
def test_a_checkpoints_manifest(tmp_path: Path, content: bytes):
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(content)
    (folder / "x").write_bytes(b"1")
    with contextlib.suppress(ConfigError):
        assert read_manifest(folder).version >= -(2**63)
    with contextlib.suppress(ValueError):
        _checkpoints(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def ledger_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of a run with a step that is sealed, one that is open, and a rollout that is in flight."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    with contextlib.closing(Ledger(path)) as ledger:
        ledger.begin({}, now_s=0.0, unix_s=0.0)
        for group_id in range(3):
            of = handmade.sample(5, group_id=group_id)
            handmade.admit(ledger, group_id)
            ledger.issue(f"{group_id}/0", attempt=0, engine_id=0, version=0, now_s=0.0)
            if group_id < 2:
                ledger.record_score(handmade.scored(of.trajectory), now_s=0.0)
                ledger.assign(group_id, [of], step=group_id, now_s=0.0)
        ledger.pack([handmade.sample(5, group_id=0)], step=0, row=0, now_s=0.0)
        ledger.close_step(0, num_rows=1, num_tokens=4, num_samples=1, now_s=0.0)
        ledger.flush(durably=True)
        ledger.store.read("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


def resume(path: Path) -> None:
    """What an orchestrator reads when it starts."""
    with contextlib.suppress(LedgerError), contextlib.closing(Ledger(path)) as ledger:
        read_snapshot(ledger)


ROWS = {
    "a sample's trajectory": (
        "UPDATE trajectories SET scored = ? WHERE rollout_id = '1/0'",
        encode(handmade.scored(handmade.trajectory(group_id=1))),
    ),
    "its advantages": ("UPDATE samples SET advantages = ? WHERE group_id = 0", handmade.sample(5).advantages.tobytes()),
    "a prompt": ("UPDATE groups SET prompt = ? WHERE group_id = 2", encode(handmade.prompt())),
    "a rollout's name": ("UPDATE samples SET rollout_id = CAST(? AS TEXT) WHERE group_id = 0", b"0/0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ROWS)
@FOLDER
@given(data=st.data())
def test_a_row_of_the_ledger(memory_path: Path, ledger_bytes: bytes, what: str, data: st.DataObject):
    statement, good = ROWS[what]
    path = memory_path / "ledger.sqlite"
    path.write_bytes(ledger_bytes)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(statement, (data.draw(damaged([good])),))
        database.commit()
    resume(path)


@pytest.mark.slow
@FOLDER
@given(data=st.data())
def test_the_ledgers_file(memory_path: Path, ledger_bytes: bytes, data: st.DataObject):
    path = memory_path / "ledger.sqlite"
    path.write_bytes(data.draw(damaged([ledger_bytes])))
    resume(path)


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
