"""Reward functions of other projects, imported from them and run as they are. None of them is needed here: absent ones are skipped.

Tried with trl 1.16.0, verl 0.9.1 (without its dependencies, but for ray's name), verifiers 0.1.14 and reasoning-gym 0.1.25.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from pipelinerl.data.tokenizer import Codec
from pipelinerl.messages import Finish, Outcome, Prompt, RequestKind, ScorerTask
from pipelinerl.rewards.calls import Call
from pipelinerl.rewards.reward import inspect_reward
from pipelinerl.rewards.runner import Runner

CHAT = ({"role": "user", "content": "What is a third?"},)


def score(
    function: Any,
    text: str,
    *,
    columns: dict[str, Any],
    chat: tuple[dict[str, Any], ...] = CHAT,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """The components of one call, by the name `f`."""
    nothing = np.zeros(0, np.int32)
    task = ScorerTask(
        kind=RequestKind.REWARD,
        rollout_id="r",
        attempt=0,
        prompt=Prompt(prompt_id="0:0", text="<user>What is a third?", token_ids=nothing, columns=columns, chat=chat),
        completions=(np.array([ord(character) for character in text], np.int32),),
        finishes=(Finish.STOP,),
        turns=(None,),
    )
    reward = inspect_reward(function, reference="file.py:f", options=options)
    codec = Codec(decode=lambda ids: "".join(map(chr, ids)), encode=lambda text: list(map(ord, text)))
    with contextlib.closing(Runner([reward], codec=codec, max_tokens=100, entering=lambda name: None)) as one:
        result = one.run(Call(call_id=0, task=task))
    assert result.outcome is Outcome.OK, result.error
    return result.components[0]


def test_rewards_of_trl() -> None:
    rewards = pytest.importorskip("trl.rewards", reason="trl is not installed")
    accuracy, thinks = rewards.accuracy_reward, rewards.think_format_reward
    assert score(accuracy, r"It is \boxed{\frac{2}{6}}", columns={"solution": r"$\frac{1}{3}$"}) == {"f": 1.0}
    assert score(accuracy, r"It is \boxed{\frac{1}{2}}", columns={"solution": r"$\frac{1}{3}$"}) == {"f": 0.0}
    assert score(accuracy, r"It is \boxed{3}", columns={"solution": "a third, I think"}) == {}, "None: it does not apply"
    assert score(thinks, "<think>a\n</think>b", columns={"any": 1}) == {"f": 1.0}
    assert score(thinks, "b", columns={"any": 1}) == {"f": 0.0}
    long = rewards.get_soft_overlong_punishment
    assert score(long, "x" * 90, columns={"any": 1}, chat=(), options={"max_completion_len": 100, "soft_punish_cache": 20}) == {"f": -0.5}
    assert score(rewards.get_repetition_penalty_reward(ngram_size=2), "xxxxx", columns={"any": 1}) == {"f": -0.75}
    cosine = rewards.get_cosine_scaled_reward(max_len=100)
    assert score(cosine, r"\boxed{3}" + " " * 41, columns={"solution": "$3$"})["f"] == pytest.approx(0.75)


def test_scores_of_verl() -> None:
    gsm8k = pytest.importorskip("verl.utils.reward_score.gsm8k", reason="verl is not installed")
    from verl.utils.reward_score import default_compute_score  # pyright: ignore[reportMissingImports]

    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "42"}}
    for function in (gsm8k.compute_score, default_compute_score):
        assert score(function, "so 6 * 7\n#### 42", columns=row) == {"f": 1.0}
        assert score(function, "so 6 * 8\n#### 48", columns=row) == {"f": 0.0}
    row["data_source"] = "math_dapo"
    assert score(default_compute_score, "so it is\nAnswer: 42", columns=row) == {"f": 1.0}, "a dict with a score"
    assert score(default_compute_score, "so it is\nAnswer: 41", columns=row) == {"f": -1.0}


def test_modules_of_verl_that_are_named_by_themselves() -> None:
    math = pytest.importorskip("verl.utils.reward_score.math_verify", reason="verl is not installed")
    from verl.utils.reward_score import geo3k, math_batch, search_r1_like_qa_em  # pyright: ignore[reportMissingImports]

    assert score(math.compute_score, r"It is \boxed{\frac{2}{6}}", columns={"ground_truth": r"\frac{1}{3}"}) == {"f": 1.0}
    assert score(math.compute_score, r"It is \boxed{4}", columns={"ground_truth": r"\frac{1}{3}"}) == {"f": 0.0}
    assert score(geo3k.compute_score, r"<think>a</think>\boxed{42}", columns={"ground_truth": "42"}) == {"f": 1.0}
    assert score(math_batch.compute_score_batched, r"\boxed{42}", columns={"ground_truth": "42"}) == {"f": 1.0}
    found = "<answer>x</answer> <answer>Paris</answer>"
    assert score(search_r1_like_qa_em.compute_score, found, columns={"ground_truth": {"target": ["paris"]}}) == {"f": 1.0}


def test_datasets_of_reasoning_gym() -> None:
    gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    for name in ("chain_sum", "countdown", "maze"):
        entry = gym.create_dataset(name, size=1, seed=3)[0]
        row = {"answer": entry["answer"], "metadata": entry["metadata"]}
        scores = gym.get_score_answer_fn
        assert score(scores, f"I think <answer>{entry['answer']}</answer>", columns=row, chat=(), options={"name": name})["f"] == 1.0
        assert score(scores, "I do not know", columns=row, chat=(), options={"name": name})["f"] < 0.1


def test_rubrics_of_verifiers() -> None:
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed")
    if not hasattr(verifiers, "Rubric"):
        pytest.skip("this version of verifiers has no rubrics: 0.1 has")

    def brief(completion: list[dict[str, str]], state: dict[str, Any]) -> float:
        return float(len(completion[-1]["content"]) < 20 and state["prompt"][0]["role"] == "user")

    async def names_it(completion: list[dict[str, str]], answer: str, info: dict[str, Any], **kwargs: Any) -> float:
        return float(answer in completion[-1]["content"] and info["level"] == kwargs["extra"])

    rubric = verifiers.Rubric(funcs=[brief, names_it], weights=[0.5, 2.0])
    row = {"answer": "42", "info": {"level": 3}, "extra": 3}
    assert score(rubric, "42", columns=row) == {"f": 2.5}
    assert score(rubric, "forty-two, I should say", columns=row) == {"f": 0.0}
    rubric.add_metric(lambda completion: 7.0)
    assert score(rubric, "42", columns=row) == {"f": 2.5}, "a metric weighs nothing"
    math = verifiers.MathRubric()
    assert score(math, r"\boxed{\frac{2}{6}}", columns={"answer": r"\frac{1}{3}"}) == {"f": 1.0}
    assert score(math, r"\boxed{4}", columns={"answer": r"\frac{1}{3}"}) == {"f": 0.0}
    both = verifiers.RubricGroup([rubric, math])
    assert score(both, r"\boxed{42}", columns=row) == {"f": 3.5}
