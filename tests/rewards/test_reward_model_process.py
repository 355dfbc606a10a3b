"""Real reward models of two families in a real scorer, beside a rule: transformers' own scores, and the outcome of killing one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelinerl.messages import Outcome, RewardProcess, ScorerReady
from pipelinerl.runtime.membership import DealtGpu, DealtGpus, Member, Members, ScaleFolder, StartedBy, State
from tests.rewards.conftest import Scorer, descendants_of, score
from tests.tiny_models import make_classifier

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(300)]
MODEL = "reward.1"
TEXTS = ["", "4", "2 + 2 = 4", "word " * 40, *(f"answer {number}" * (number % 7) for number in range(28))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    chat, text = tmp_path_factory.mktemp("models") / "qwen", tmp_path_factory.mktemp("models") / "llama"
    make_classifier(chat, "Qwen2", seed=1)
    make_classifier(text, "Llama", seed=2, template=False)
    return chat, text


@pytest.fixture(scope="module")
def scorer(start_scorer: Callable[..., Scorer], folders: tuple[Path, Path]) -> Scorer:
    chat, text = folders
    of_model = {"dtype": "float32", "deadline_s": 60.0}
    rewards = {"nothing": 1.0, str(chat): of_model | {"weight": 2.0}, str(text): of_model | {"format": "text"}}
    started = start_scorer(rewards)
    started.next(ScorerReady, within_s=200.0)
    return started


def by_transformers(folder: Path, text: str, *, adds_special_tokens: bool) -> float:
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=adds_special_tokens)).logits)


def test_scores_are_transformers_own_and_are_summed_with_the_rule_by_weights(scorer: Scorer, folders: tuple[Path, Path]) -> None:
    chat, text = folders
    for number, completion in enumerate(TEXTS):
        scorer.send(score(f"s{number}", completion))
    found = scorer.scored(*(f"s{number}" for number in range(len(TEXTS))))
    for number, completion in enumerate(TEXTS[:6]):
        one = found[f"s{number}"]
        as_chat = f"[user] what? [assistant] {completion} end."
        assert one.components["qwen"] == pytest.approx(by_transformers(chat, as_chat, adds_special_tokens=False), abs=1e-4)
        assert one.components["llama"] == pytest.approx(by_transformers(text, "what?" + completion, adds_special_tokens=True), abs=1e-4)
        assert one.reward == pytest.approx(one.components["nothing"] + 2.0 * one.components["qwen"] + one.components["llama"])
    assert {one.outcome for one in found.values()} == {Outcome.OK}
    assert len({round(one.components["qwen"], 4) for one in found.values()}) > 10, "the scores do differ"
    loads = scorer.new_load().functions
    assert {"nothing", "qwen", "llama"} == set(loads)


def test_what_is_too_long_for_a_model_is_invalid(scorer: Scorer) -> None:
    answer = scorer.ask("x" * 600)
    assert (answer.outcome, answer.reward) == (Outcome.INVALID, None)
    assert "of its own tokens, and it takes 512" in answer.error


def test_a_model_that_is_killed_comes_back_and_no_rollout_pays_for_it(scorer: Scorer) -> None:
    models = [one for one in descendants_of(scorer.process.pid) if "vllm/_C" in Path(f"/proc/{one}/maps").read_text()]
    assert len(models) == 2
    for number in range(40):
        scorer.send(score(f"k{number}", f"text {number}"))
    os.kill(models[0], signal.SIGKILL)
    found = scorer.scored(*(f"k{number}" for number in range(40)), within_s=150.0)
    assert {one.outcome for one in found.values()} == {Outcome.OK}
    assert len({one.components["qwen"] for one in found.values()}) > 10


def members(*there: tuple[int, int, State]) -> Members:
    """Of the first model, which began with one process: (number, request, state)."""
    found = [
        Member(engine_id=number, state=state, started_by=StartedBy.LAUNCHER if request_id else StartedBy.RUN, request_id=request_id)
        for number, request_id, state in there
    ]
    record = Members(members=tuple(found), num_wanted=len(found), count=1)
    return Members(members=(), num_wanted=0, count=0, rewards={MODEL: record})


def until(scorer: Scorer, claim: Callable[[dict[int, RewardProcess]], bool]) -> dict[int, RewardProcess]:
    """Wait until the scorer says of its first model what the claim is about."""
    end = time.monotonic() + 120.0
    while not claim(found := scorer.new_load().models[MODEL].processes):
        assert time.monotonic() < end, found
    return found


def test_a_process_joins_when_it_is_dealt_a_gpu_and_leaves_once_it_has_ended_its_batch(scorer: Scorer, folders: tuple[Path, Path]) -> None:
    folder = ScaleFolder(scorer.run_folder)
    until(scorer, lambda found: found[0].is_loaded)
    folder.publish(members((0, 0, State.LIVE), (1, 7, State.JOINING)))
    assert scorer.new_load().models[MODEL].processes.keys() == {0}, "its GPU may still be somebody's"
    folder.deal(DealtGpus(dealt=(DealtGpu(kind=MODEL, number=1, request_id=7),)))
    there = until(scorer, lambda found: len(found) == 2 and all(one.is_loaded for one in found.values()))
    assert {number: one.brought_by for number, one in there.items()} == {0: "0", 1: "7"}
    (before,) = {scorer.new_load().models[MODEL].busy_s}
    folder.publish(members((0, 0, State.LEFT), (1, 7, State.LIVE)))
    until(scorer, lambda found: found.keys() == {1})
    for number in range(40):
        scorer.send(score(f"j{number}", f"text {number}"))
    found = scorer.scored(*(f"j{number}" for number in range(40)), within_s=150.0)
    assert {one.outcome for one in found.values()} == {Outcome.OK}, "the one that has joined scores alone"
    assert scorer.new_load().models[MODEL].busy_s > before
    folder.publish(members((0, 9, State.JOINING), (1, 7, State.LIVE)))
    moved = folders[0].with_name("away")
    folders[0].rename(moved)
    try:
        folder.deal(DealtGpus(dealt=(DealtGpu(kind=MODEL, number=1, request_id=7), DealtGpu(kind=MODEL, number=0, request_id=9))))
        lost = until(scorer, lambda found: 0 in found and bool(found[0].failed))
    finally:
        moved.rename(folders[0])
    assert not lost[0].is_loaded
    assert scorer.ask("4").outcome is Outcome.OK, "the scorer goes on without it"
    for number in range(60):
        scorer.send(score(f"d{number}", f"text {number}"))
    folder.publish(members((0, 9, State.LOST), (1, 7, State.DRAINING)))
    until(scorer, lambda found: found[1].is_closed)
    folder.publish(members((0, 9, State.LOST), (1, 7, State.LIVE)))  # it stays after all
    found = scorer.scored(*(f"d{number}" for number in range(60)), within_s=150.0)
    assert {one.outcome for one in found.values()} == {Outcome.OK}
    (folder._folder / "engines.json").write_text("{")
    assert scorer.new_load().models[MODEL].processes[1].is_loaded, "a damaged file is nobody's word"
