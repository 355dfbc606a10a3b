"""Stop strings end a sequence with the token that completes one; the tokens are those that were sampled, and none besides."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.stop_strings import Finder, finder_of, found_in
from pipelinerl.messages import Completion, Finish, Generate, Sampling
from tests.tokenizers import make_bytes

STOP = ("</a>", "end", "é\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    make_bytes(folder)
    return folder


@pytest.fixture
def finder(folder: Path) -> Finder:
    return finder_of(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("so </a>!", "so </a>!"),  # one token holds the end of the stop string and the character behind it
        ("the end of it", "the end"),
        ("caf\u00e9\nand", "caf\u00e9\n"),  # a character of two tokens
        ("e n d", None),
        ("eend", "eend"),
        ("\u00e9\u00e9", None),
    ],
)
def test_the_sequence_ends_with_the_token_that_completes_a_stop_string(folder: Path, finder: Finder, text: str, said: str | None) -> None:
    tokenizer = load_tokenizer(folder)
    token_ids = tokenizer.encode(text)
    found = finder(tokenizer.encode("a prompt that says end"), STOP)
    ends = [number for number, token_id in enumerate(token_ids, 1) if found.end_in([token_id]) is not None]
    assert (tokenizer.decode(token_ids[: ends[0]]) if ends else None) == said
    at_once = finder([], STOP).end_in(token_ids)
    assert at_once == (ends[0] if ends else None), "several tokens of one forward pass are cut at the same one"


def test_the_end_is_where_vllm_puts_it(folder: Path, finder: Finder) -> None:
    """Golden: vLLM's own incremental detokeniser, on streams of which many bytes are no text."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    tokenizer = load_tokenizer(folder)
    chance = random.Random(7)
    likely = [*tokenizer.encode("</a>!end\u00e9\n"), *tokenizer.encode("\u00e9"), *tokenizer.encode("\n")]
    num_ended = 0
    for _ in range(300):
        prompt = [chance.randrange(33, 90) for _ in range(4)]
        token_ids = [chance.choice(likely) if chance.random() < 0.9 else chance.randrange(len(tokenizer)) for _ in range(20)]
        params = SamplingParams(stop=list(STOP), include_stop_str_in_output=True, skip_special_tokens=False)
        fields: dict[str, Any] = dict.fromkeys(EngineCoreRequest.__struct_fields__)
        request: Any = EngineCoreRequest(**fields | {"request_id": "0", "prompt_token_ids": prompt, "sampling_params": params})
        theirs = FastIncrementalDetokenizer(tokenizer, request)
        ended = next((number for number, one in enumerate(token_ids, 1) if theirs.update([one], False) is not None), None)
        assert finder(prompt, STOP).end_in(token_ids) == ended
        num_ended += ended is not None
    assert 100 < num_ended < 300


def test_a_stop_string_may_begin_with_what_another_engine_has_sampled_and_never_in_the_prompt(folder: Path, finder: Finder) -> None:
    token_ids = np.array(load_tokenizer(folder).encode("an en"), np.int32)
    (last,) = load_tokenizer(folder).encode("d")
    for num_written, is_end in ((len(token_ids), True), (1, True), (0, False)):
        request = Generate(
            rollout_id="0/0", attempt=1, token_ids=token_ids, sampling=Sampling(max_tokens=5, stop=STOP), num_written=num_written
        )
        assert (found_in(request, finder).end_in([last]) is not None) == is_end


class Saying(FakeEngine):
    """Samples the tokens it is given, one in each pass."""

    said: list[int]

    def token(self, seed: int, position: int) -> int:
        return self.said[(position - 1) % len(self.said)]


def _complete(folder: Path, text: str, *, finder: Finder | None, max_tokens: int = 50, stop: tuple[str, ...] = STOP) -> Completion:
    engine = Saying(max_model_tokens=200, max_running=2, mean_tokens=10**9)
    engine.said = load_tokenizer(folder).encode(text)
    loop = EngineLoop(engine, engine_id=0, stager=lambda order: pytest.fail("no policy"), finder=finder)
    sampling = Sampling(max_tokens=max_tokens, stop=stop)
    loop.handle(Generate(rollout_id="0/0", attempt=0, token_ids=np.array([40], np.int32), sampling=sampling))
    while loop.has_work:
        loop.advance()
    assert engine.running() == [], "the engine has forgotten it"
    (completion,) = loop.outbox
    assert isinstance(completion, Completion)
    return completion


def test_no_token_and_no_log_probability_is_invented_or_lost(folder: Path, finder: Finder) -> None:
    completion = _complete(folder, "so </a>! and more", finder=finder)
    assert completion.token_ids.tolist() == load_tokenizer(folder).encode("so </a>!")
    assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)
    assert completion.finish is Finish.STOP


def test_a_stop_string_in_the_last_token_allowed_is_a_stop_and_not_a_truncation(folder: Path, finder: Finder) -> None:
    num_tokens = len(load_tokenizer(folder).encode("so end"))
    assert _complete(folder, "so end", finder=finder, max_tokens=num_tokens).finish is Finish.STOP
    assert _complete(folder, "so end", finder=finder, max_tokens=num_tokens - 1).finish is Finish.LENGTH


def test_an_engine_without_a_tokenizer_refuses_stop_strings(folder: Path) -> None:
    completion = _complete(folder, "so end", finder=None)
    assert (completion.finish, completion.error) == (
        Finish.ERROR,
        "the request has stop strings, and this engine has no tokenizer to find them with",
    )
    assert _complete(folder, "so end", finder=None, stop=()).finish is Finish.LENGTH
