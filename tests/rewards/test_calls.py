"""Frames on a stream, the environment of workers, and the two ways to a decoding."""

from __future__ import annotations

import json
import os
import select
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import ConfigError, WireError
from pipelinerl.rewards.calls import Call, Component, Loaded, Setup, ToWorker, Withdraw
from pipelinerl.rewards.codec import load_codec
from pipelinerl.rewards.functions.builtin import exact_match
from pipelinerl.rewards.pool.sandbox import Sandbox, clean_environment
from pipelinerl.runtime.function_errors import place_of
from pipelinerl.transport.codec import MAX_MESSAGE_BYTES, Decoder
from pipelinerl.transport.stream import Frames, frame
from tests.rewards.conftest import descendants_of, is_alive, score

pytestmark = pytest.mark.process


def test_frames_cut_at_any_byte_come_out_whole_and_in_order() -> None:
    calls = [
        Call(call_id=n, task=msgspec.structs.replace(score("r", "x", n=n), completions=(np.arange(n, dtype=np.int32),))) for n in (0, 3, 70)
    ]
    stream = b"".join(frame(message) for message in (*calls, Withdraw(call_ids=(1, 2))))
    for size in (1, 3, 64, len(stream)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frames = Frames(theirs)
            bodies: list[bytes] = []
            for start in range(0, len(stream), size):
                ours.sendall(stream[start : start + size])
                bodies += frames.receive() or []
            ours.close()
            assert frames.receive() is None
        decoder: Decoder[Call | Withdraw] = Decoder(ToWorker)
        decoded = [decoder.decode(body) for body in bodies]
        assert [message.call_id for message in decoded[:3] if isinstance(message, Call)] == [0, 3, 70]
        assert isinstance(decoded[2], Call)
        assert decoded[2].task.completions[0].tolist() == list(range(70))
        assert decoded[3] == Withdraw(call_ids=(1, 2))


def test_frame_that_claims_more_than_the_limit_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(WireError, match=f"a frame of {MAX_MESSAGE_BYTES + 1} bytes exceeds the limit"):
            Frames(theirs).receive()


def test_only_what_is_known_to_be_harmless_or_named_is_passed_on() -> None:
    kept = {
        "PATH": "/bin",
        "HOME": "/home/x",
        "HF_HOME": "/cache",
        "PYTHONPATH": "lib",
        "OMP_NUM_THREADS": "4",
        "https_proxy": "http://proxy:80",
    }
    kept |= {"LC_ALL": "C.UTF-8", "TZ": "UTC"}
    secrets: dict[str, str] = dict.fromkeys(
        (
            *("WANDB_API_KEY", "WANDB_ENTITY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SESSION_TOKEN", "AWS_PROFILE", "my_secret"),
            *("DB_PASSWORD", "PGPASSFILE", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "AZURE_TENANT", "openai_api_key"),
            *("SLURM_JWT", "GITHUB_PAT", "DB_PWD", "SENTRY_DSN", "SOMETHING_NOBODY_HAS_HEARD_OF", "PYTHON_KEYRING_PASSWORD"),
        ),
        "hidden",
    )
    cleaned = clean_environment(kept | secrets | {"HTTPS_PROXY": "http://user:hidden@proxy:80"})
    assert "hidden" not in json.dumps(cleaned)
    assert {name: cleaned.pop(name) for name in kept} == kept
    settings = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    assert cleaned == {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | settings
    assert clean_environment(secrets, named=("GITHUB_PAT",))["GITHUB_PAT"] == "hidden"


def test_decoding_leaves_special_tokens_out(tokenizer_folder: Path) -> None:
    assert load_codec(tokenizer_folder).decode([1, 3 + 65 - 32, 3, 3 + 66 - 32, 2, 0]) == "A B"


def test_damaged_tokenizer_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    sandbox = Sandbox(Setup(model_path=str(tmp_path), pools=(), max_tokens=1))
    with pytest.raises(ConfigError, match=rf"model.path: the tokenizer of {tmp_path} cannot be loaded"):
        sandbox.wait_until_prepared()
    sandbox.close()


def test_closing_the_sandbox_waits_until_every_process_is_gone(tokenizer_folder: Path) -> None:
    others = descendants_of(os.getpid())
    component = Component(function="pipelinerl.rewards.functions.builtin:exact_match", name="exact_match", options={})
    sandbox = Sandbox(Setup(model_path=str(tokenizer_folder), pools=((component,),), max_tokens=1))
    sandbox.wait_until_prepared()
    _, channel = sandbox.spawn(0)
    with channel:
        channel.setblocking(True)
        loaded = Loaded(places={"exact_match": place_of(exact_match)})
        assert Frames(channel).receive() == [frame(loaded)[4:]]
        processes = [process_id for process_id in descendants_of(os.getpid()) if process_id not in others]
        assert len(processes) >= 2  # the fork server and the worker
        sandbox.close()
        assert not [process_id for process_id in processes if is_alive(process_id)]


@pytest.mark.slow
def test_tokenizer_without_a_tokenizer_json_is_loaded_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    assert load_codec(tmp_path).decode([3 + 65, 3 + 66, 1]) == "AB"


def test_a_fork_server_ends_in_silence_where_its_scorer_leaves_with_something_unread(
    tokenizer_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sandbox = Sandbox(Setup(model_path=str(tokenizer_folder), pools=(), max_tokens=1))
    assert select.select([sandbox], [], [], 60.0)[0], "it says that it is prepared"
    sandbox.close()
    assert capfd.readouterr().err == ""
