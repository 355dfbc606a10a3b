"""Agents that use OpenAI's own client, unmodified, against the gateway: every token is sampled once, and none is made twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.serving import MODEL, Serving, serving

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path) as one:
        yield one


@pytest.fixture
def lent(desk: Serving) -> dict[str, Any]:
    with desk.client() as client:
        return desk.lend(client, text="question", name="3/1")


@pytest.fixture
def sdk(lent: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=lent["base_url"], api_key=lent["token"], timeout=10.0, max_retries=0) as client:
        yield client


def end(desk: Serving, lent: dict[str, Any], *, reward: float = 1.0) -> Any:
    """Finish the episode; return its trajectory."""
    with desk.client() as client:
        body, headers = {"reward": reward}, {"authorization": f"Bearer {lent['token']}"}
        answer = client.post(f"/episodes/{lent['episode_id']}/finish", json=body, headers=headers)
    assert answer.json() == {"episode_id": lent["episode_id"], "attempt": 0, "end": "finished"}
    return desk.trajectories[-1]


def test_a_second_turn_goes_on_from_the_ids_of_the_first_and_versions_rise_across_a_swap(
    desk: Serving, sdk: openai.OpenAI, lent: dict[str, Any]
) -> None:
    desk.engine.says = lambda prompt: "one" if "more" not in prompt else "two"
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    extra: dict[str, Any] = {"return_token_ids": True}
    first = sdk.chat.completions.create(model="any", messages=messages, extra_body=extra)
    desk.publish()
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "more"}]
    second = sdk.chat.completions.create(model="any", messages=messages, extra_body=extra)
    assert (first.choices[0].message.content, second.choices[0].message.content) == ("one", "two")
    before = [*(first.model_extra or {})["prompt_token_ids"], *(first.choices[0].model_extra or {})["token_ids"]]
    assert (second.model_extra or {})["prompt_token_ids"][: len(before)] == before
    assert desk.tokenizer.decode(desk.engine.asked[1][1]) == desk.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    trajectory = end(desk, lent)
    eos = desk.tokenizer.eos_token
    assert desk.tokenizer.decode(trajectory.token_ids[trajectory.loss_mask]) == f"one{eos}two{eos}"
    assert trajectory.versions[trajectory.loss_mask].tolist() == [0] * 4 + [1] * 4
    assert (trajectory.rollout_id, trajectory.lent.reward, trajectory.turns.states) == ("3/1", 1.0, ("prompt", "turn 1"))
    assert trajectory.lent.prompt_token_ids.tolist() == desk.engine.asked[0][1]


def test_a_retry_gets_the_same_answer_and_the_same_question_once_more_is_sampled_once_more(desk: Serving, sdk: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]

    def ask(retry: int) -> Any:
        headers = {"x-stainless-retry-count": str(retry)}
        return sdk.chat.completions.create(model="any", messages=messages, extra_headers=headers)

    first, retried, again = ask(0), ask(1), ask(0)
    assert retried.id == first.id
    assert again.id != first.id
    assert len(desk.engine.asked) == 2
    assert ask(2).id == again.id, "a retry is of the newest"
    assert desk.orchestrator.counts["num_retried"] == 2


def test_a_retry_of_a_request_that_is_still_being_sampled_waits_for_its_answer(desk: Serving, lent: dict[str, Any]) -> None:
    desk.engine.is_held = True
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=lent["base_url"], api_key=lent["token"], timeout=0.3, max_retries=0) as hasty:
        with pytest.raises(openai.APITimeoutError):
            hasty.chat.completions.create(model="any", messages=messages)
        desk.engine.is_held = False
        headers = {"x-stainless-retry-count": "1"}
        said = hasty.with_options(timeout=10.0).chat.completions.create(model="any", messages=messages, extra_headers=headers)
    assert said.choices[0].message.content == "fine"
    assert len(desk.engine.asked) == 1


def test_tools_are_called_by_what_the_model_writes_and_their_results_go_on_from_it(desk: Serving, sdk: openai.OpenAI) -> None:
    desk.engine.says = lambda prompt: "three" if "<|tool|>" in prompt else f"I add. {CALL}"
    messages: list[Any] = [{"role": "user", "content": "1+2"}]
    first = sdk.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    assert (first.choices[0].finish_reason, message.content) == ("tool_calls", "I add.")
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    second = sdk.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "three"
    assert f"I add. {CALL}{desk.tokenizer.eos_token}<|tool|>3" in desk.engine.asked[1][0]
    assert desk.orchestrator.counts["num_branches"] == desk.orchestrator.counts["num_drifted"] == 0


def test_a_malformed_call_is_text(desk: Serving, sdk: openai.OpenAI) -> None:
    desk.engine.says = lambda prompt: "<tool_call>{oops</tool_call>"
    said = sdk.chat.completions.create(model="any", messages=[{"role": "user", "content": "1"}], tools=TOOLS)
    assert (said.choices[0].message.content, said.choices[0].message.tool_calls) == ("<tool_call>{oops</tool_call>", None)


def test_a_stream_says_what_the_whole_answer_would(desk: Serving, sdk: openai.OpenAI) -> None:
    desk.engine.says = lambda prompt: f"I will add them now. {CALL}"
    options: Any = {"stream": True, "tools": TOOLS, "stream_options": {"include_usage": True}}
    with sdk.chat.completions.create(model="any", messages=[{"role": "user", "content": "1"}], **options) as stream:
        chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(texts).strip() == "I will add them now."
    assert len(texts) > 1, "in parts, as it is sampled"
    (calls,) = [chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices and chunk.choices[0].delta.tool_calls]
    assert json.loads(calls[0].function.arguments) == {"a": 1, "b": 2}
    assert chunks[-1].usage.completion_tokens == len(desk.tokenizer.encode(desk.engine.says(""))) + 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    message = {"role": "assistant", "content": "".join(texts), "tool_calls": [calls[0].model_dump(exclude={"index"})]}
    more: list[Any] = [{"role": "user", "content": "1"}, message, {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
    sdk.chat.completions.create(model="any", messages=more, tools=TOOLS)
    assert desk.orchestrator.counts["num_branches"] == 0


def test_the_responses_api_says_the_same_in_its_own_shape(desk: Serving, sdk: openai.OpenAI) -> None:
    desk.engine.says = lambda prompt: "three" if "<|tool|>" in prompt else CALL
    tools: list[Any] = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    first = sdk.responses.create(model="any", instructions="be brief", input="1+2", tools=tools)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"a": 1, "b": 2}
    given: list[Any] = [
        {"role": "user", "content": "1+2"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    second = sdk.responses.create(model="any", instructions="be brief", input=given, tools=tools)
    assert second.output_text == "three"
    third = sdk.responses.create(
        model="any", instructions="be brief", previous_response_id=second.id, input="thanks", tools=tools, store=True
    )
    assert third.status == "completed"
    assert desk.orchestrator.counts["num_branches"] == 0, "each goes on from the one before"
    assert desk.engine.asked[2][0].startswith(desk.engine.asked[1][0])


def test_a_stream_of_the_responses_api_is_one_that_the_client_assembles(desk: Serving, sdk: openai.OpenAI) -> None:
    desk.engine.says = lambda prompt: f"I will add them now. {CALL}"
    tools: list[Any] = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    with sdk.responses.stream(model="any", input="1+2", tools=tools) as stream:
        kinds = [event.type for event in stream]
        done = stream.get_final_response()
    assert done.output_text.strip() == "I will add them now."
    assert [item.type for item in done.output] == ["message", "function_call"]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 1


def test_a_sub_agent_and_a_compaction_are_contexts_of_their_own(desk: Serving, sdk: openai.OpenAI, lent: dict[str, Any]) -> None:
    def ask(*texts: str) -> str:
        roles = ("user", "assistant")
        messages: list[Any] = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
        return sdk.chat.completions.create(model="any", messages=messages).choices[0].message.content or ""

    ask("hi", ask("hi"), "more")
    ask("you are a sub-agent")
    ask("summary of all that", ask("summary of all that"), "go on")
    with desk.client() as client:
        state = client.get(f"/episodes/{lent['episode_id']}", headers={"authorization": f"Bearer {lent['token']}"}).json()
    assert [turn["parent"] for turn in state["turns"]] == [-1, 1, -1, -1, 7]
    assert desk.orchestrator.counts["num_branches"] == 2
    trajectory = end(desk, lent)
    assert desk.tokenizer.decode(trajectory.prompt.token_ids).startswith("<|user|>hi")
    assert trajectory.nodes is not None
    assert trajectory.nodes.parents.tolist() == [-1, 0, 1, 2, -1, 4, -1, 6, 7, 8]
    assert trajectory.num_trained_tokens == sum(turn["num_sampled"] for turn in state["turns"]), "every turn trains, in its own context"


def test_log_probabilities_models_and_several_answers_are_as_the_client_expects(desk: Serving, sdk: openai.OpenAI) -> None:
    said = sdk.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], logprobs=True, n=3, max_tokens=2)
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in said.choices} == {"length"}
    assert said.choices[0].logprobs is not None
    assert [token.logprob for token in said.choices[0].logprobs.content or ()] == [-0.5, -0.5]
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.BadRequestError, match="frequency_penalty would sample from another distribution") as refused:
        sdk.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], frequency_penalty=0.5)
    assert refused.value.param == "frequency_penalty"


def test_a_stop_text_ends_a_turn_and_is_not_in_it(desk: Serving, sdk: openai.OpenAI) -> None:
    desk.engine.says = lambda prompt: "abc STOP def"
    said = sdk.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], stop=["STOP"])
    assert said.choices[0].message.content in ("abc ",)


def test_tokens_go_in_and_tokens_come_out(desk: Serving, lent: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {lent['token']}", "x-session-id": "whatever"}
    with desk.client() as client:

        def ask(token_ids: list[int]) -> dict[str, Any]:
            body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 8, "temperature": 1.0}}
            return client.post("/inference/v1/generate", json=body, headers=headers).json()["choices"][0]

        first = ask([5, 6, 7])
        ask([5, 6, 7, *first["token_ids"], 9])
    assert first["logprobs"]["content"][0] == {"token": f"token_id:{first['token_ids'][0]}", "logprob": -0.5, "top_logprobs": []}
    trajectory = end(desk, lent)
    assert trajectory.turns.starts.tolist() == [0, len(first["token_ids"]) + 1]
    assert trajectory.token_ids.tolist()[:3] == [5, 6, 7]


def test_each_turn_of_a_conversation_has_the_constraint_of_its_place_and_a_context_of_its_own_begins_anew(tmp_path: Path) -> None:
    first, free, last = {"regex": "a"}, {}, {"choice": ["b"]}
    with serving(tmp_path, structured_outputs=(first, free, last)) as desk:
        with desk.client() as client:
            lent = desk.lend(client)
        with openai.OpenAI(base_url=lent["base_url"], api_key=lent["token"], max_retries=0) as sdk:
            messages: list[Any] = []
            for text in ("one", "two", "three", "four"):
                messages.append({"role": "user", "content": text})
                said = sdk.chat.completions.create(model="any", messages=messages).choices[0].message.content
                messages.append({"role": "assistant", "content": said})
            sdk.chat.completions.create(model="any", messages=[{"role": "user", "content": "a sub-agent"}])
        assert desk.engine.constraints == [first, free, last, last, first]
