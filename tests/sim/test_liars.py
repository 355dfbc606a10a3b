"""Peers that lie, in whole simulated runs: what cannot be costs its attempt and is counted by kind, and no run ends of it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.rules.validation.penalties import MAX_VIOLATIONS
from orchestrator.rules.validation.violations import Kind
from pipelinerl.messages import Completion, EngineLoad, EngineReady, EngineSequences, Failed, Finish, Message, Result, WeightsCommitted
from tests.sim import peers
from tests.sim.memory import MemoryLink
from tests.sim.run import Cast, Simulated, config, run

Lies = Callable[[Message], tuple[str, Message] | None]
"""Makes a lie of a message, and says of which kind it is; None: it says this one as it is."""


def change(message: Message, **fields: Any) -> Message:
    return msgspec.structs.replace(message, **fields)


def off(column: np.ndarray, value: float) -> np.ndarray:
    """The same with another last entry."""
    return np.append(column[:-1], value).astype(column.dtype)


def about_answers(message: Message) -> list[tuple[str, Message]]:
    """Every lie there is about one completion."""
    if not isinstance(message, Completion) or len(message.token_ids) < 2:
        return []
    is_short = message.finish is Finish.STOP
    return [
        (Kind.TOKENS, change(message, token_ids=off(message.token_ids, 1_000_000))),
        (Kind.LOGPROBS, change(message, logprobs=off(message.logprobs, np.nan))),
        (Kind.LOGPROBS, change(message, logprobs=off(message.logprobs, 3.0))),
        (Kind.VERSIONS, change(message, versions=off(message.versions, 2**31 - 1))),
        (Kind.FINISH, change(message, finish=Finish.LENGTH if is_short else Finish.CANCELLED)),
        (Kind.UNASKED, change(message, attempt=message.attempt + 1)),
        (Kind.UNASKED, change(message, rollout_id="999999/0")),
        (Kind.BOUNDS, change(message, recomputed=(1,) * 100)),
    ]


def liar(
    sent: collections.Counter[str], *, most: int, lies: Lies, who: int | None = None, also: bool
) -> Callable[..., Coroutine[Any, Any, None]]:
    """An engine that lies up to `most` times, beside the truth (`also`) or in its place; `who`: only this one does."""

    async def engine(link: MemoryLink, *, engine_id: int, **options: Any) -> None:
        send, told = link.send, 0

        def say(*messages: Message) -> None:
            nonlocal told
            for message in messages:
                lie = lies(message) if told < most and who in (None, engine_id) else None
                if lie is not None:
                    told += 1
                    sent[lie[0]] += 1
                    send(lie[1])
                if lie is None or also:
                    send(message)

        vars(link).update(send=say)
        await peers.engine(link, engine_id=engine_id, **options)

    return engine


def refused(simulated: Simulated) -> dict[str, int]:
    return [line for line in simulated.lines if line["kind"] == "status"][-1]["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_what_an_engine_cannot_have_sampled_fails_the_attempt_and_what_was_sent_is_what_was_refused(tmp_path: Path, number: int):
    """Said beside the truth: what follows a lie about an attempt is fenced, and the attempt asked of another engine."""

    def lies(message: Message) -> tuple[str, Message] | None:
        found = about_answers(message)
        return found[number] if found else None

    sent: collections.Counter[str] = collections.Counter()
    settings = config(trainer={"steps": 4}, engine={"count": 4})
    simulated = run(settings, folder=tmp_path, cast=Cast(engine=liar(sent, most=MAX_VIOLATIONS - 1, lies=lies, also=True)))
    assert simulated.problems() == []
    assert (simulated.ending.reason, simulated.ending.rollouts.failed) == ("finished", 0)
    assert sum(sent.values()) == 4 * (MAX_VIOLATIONS - 1)
    assert refused(simulated) == sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        (Kind.IDENTITY, lambda said: change(said, engine_id=0) if isinstance(said, EngineLoad) else None),
        (Kind.IDENTITY, lambda said: change(said, engine_id=30_000) if isinstance(said, EngineLoad) else None),
        (Kind.BOUNDS, lambda said: change(said, busy_s=float("nan")) if isinstance(said, EngineLoad) else None),
        (Kind.BOUNDS, lambda said: change(said, waiting={"9/9": 1.0}) if isinstance(said, EngineSequences) else None),
        (Kind.BOUNDS, lambda said: change(said, written={"9/9": -1}) if isinstance(said, EngineSequences) else None),
        (Kind.BOUNDS, lambda said: change(said, written={f"{n}/0": 0 for n in range(9999)}) if isinstance(said, EngineSequences) else None),
        (Kind.BOUNDS, lambda said: change(said, kv_tokens=0) if isinstance(said, EngineReady) else None),
        (Kind.VERSIONS, lambda said: change(said, version=999) if isinstance(said, WeightsCommitted) else None),
        (Kind.BOUNDS, lambda said: change(said, running={f"{n}/0": 0 for n in range(9999)}) if isinstance(said, EngineReady) else None),
    ],
    ids=[
        "another's load",
        "an engine that is not there",
        "no figure",
        "what it has not waits",
        "no number of tokens",
        "more sequences than it can have",
        "no cache",
        "a policy nobody published",
        "more than it can have",
    ],
)
def test_what_an_engine_cannot_say_of_itself_is_counted_and_changes_nothing(
    tmp_path: Path, kind: Kind, lie: Callable[[Message], Message | None]
):
    def lies(message: Message) -> tuple[str, Message] | None:
        found = lie(message)
        return None if found is None else (kind, found)

    sent: collections.Counter[str] = collections.Counter()
    settings = config(trainer={"steps": 4}, pipeline={"migration": "waiting"})
    simulated = run(settings, folder=tmp_path, cast=Cast(engine=liar(sent, most=2, lies=lies, who=1, also=True)))
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    assert sent[kind] >= 1
    assert refused(simulated) == sent
    status = [line for line in simulated.lines if line["kind"] == "status"][-1]
    assert {load["engine_id"] for load in status["engines"]} == {0, 1}


def test_an_engine_that_keeps_lying_is_banned_where_nobody_replaces_it_and_the_run_goes_on_without_it(tmp_path: Path):
    def lies(message: Message) -> tuple[str, Message] | None:
        return about_answers(message)[0] if about_answers(message) else None

    sent: collections.Counter[str] = collections.Counter()
    settings = config(trainer={"steps": 4}, engine={"count": 3})
    simulated = run(settings, folder=tmp_path, cast=Cast(engine=liar(sent, most=10**6, lies=lies, who=1, also=False)))
    assert simulated.problems() == []
    assert (simulated.ending.reason, simulated.ending.rollouts.failed) == ("finished", 0)
    assert refused(simulated) == {Kind.TOKENS: MAX_VIOLATIONS}, "what it says after that is not even looked at"
    told = [(line["peer"], line["what"]) for line in simulated.lines if line["kind"] == "violation"]
    assert told == [("engine-1", Kind.TOKENS), ("engine-1", Kind.TOKENS), ("engine-1", "banned")]


def test_an_engine_whose_announcement_cannot_be_is_not_waited_for(tmp_path: Path):
    """It announces itself but once; each sign of life is held against it from then on."""

    def lies(message: Message) -> tuple[str, Message] | None:
        return (Kind.BOUNDS, change(message, max_running=1 << 20)) if isinstance(message, EngineReady) else None

    sent: collections.Counter[str] = collections.Counter()
    settings = config(trainer={"steps": 4}, engine={"count": 3})
    simulated = run(settings, folder=tmp_path, cast=Cast(engine=liar(sent, most=10**6, lies=lies, who=1, also=False)))
    assert simulated.problems() == []
    assert (simulated.ending.reason, simulated.ending.rollouts.failed) == ("finished", 0)
    told = [(line["peer"], line["what"]) for line in simulated.lines if line["kind"] == "violation"]
    assert told[-1] == ("engine-1", "banned"), "nobody replaces it here"


def test_an_engine_that_forges_plausible_log_probabilities_is_named_in_the_step_that_trains_them(tmp_path: Path, capfd: Any):
    """Half a nat lower than those it sampled with: nothing at the door can tell; e^0.5 - 1 - 0.5 = 0.149."""

    def lies(message: Message) -> tuple[str, Message] | None:
        if not isinstance(message, Completion):
            return None
        return "plausible", change(message, logprobs=(message.logprobs - 0.5).astype(np.float32))

    sent: collections.Counter[str] = collections.Counter()
    settings = config(trainer={"steps": 4}, engine={"count": 3})
    simulated = run(settings, folder=tmp_path, cast=Cast(engine=liar(sent, most=10**6, lies=lies, who=1, also=False)))
    assert simulated.problems() == []
    assert (simulated.ending.reason, simulated.ending.rollouts.failed, refused(simulated)) == ("finished", 0, {})
    told = [(line["step"], line["words"]) for line in simulated.lines if line["kind"] == "mismatch"]
    assert [step for step, _ in told] == [0, 1, 2, 3], "in every step, also in the first"
    assert all(words.startswith("engine 1's log-probabilities differ: KL 0.15 over ") for _, words in told)
    assert "step 0: engine 1's log-probabilities differ: KL 0.15 over" in capfd.readouterr().out
    alarms = [line for line in simulated.lines if line["kind"] == "alarm"]
    assert [(line["name"], line["began"], line["figure"], line["is_over"]) for line in alarms] == [
        ("engine_mismatch", 0, told[0][1], False)
    ], "an alarm of learning from that step on, told once"


@pytest.mark.parametrize("count", [1, 3])
def test_who_says_with_an_engines_key_that_it_has_failed_ends_no_run(tmp_path: Path, count: int):
    """Again and again, by an engine that goes on: where there are others, its attempts are theirs; the only one is not believed."""
    last = count - 1

    def lies(message: Message) -> tuple[str, Message] | None:
        return ("failed", Failed(error="EngineError: so they say")) if isinstance(message, EngineLoad) else None

    sent: collections.Counter[str] = collections.Counter()
    settings = config(trainer={"steps": 4}, engine={"count": count})
    simulated = run(settings, folder=tmp_path, cast=Cast(engine=liar(sent, most=10**6, lies=lies, who=last, also=True)))
    assert simulated.problems() == []
    assert (simulated.ending.reason, simulated.ending.rollouts.failed) == ("finished", 0)
    assert sent["failed"] >= 1
    told = [(line["peer"], line["what"]) for line in simulated.lines if line["kind"] == "violation"]
    assert told == [(f"engine-{last}", "failed")], "a flood is one line"


def test_who_says_with_a_scorers_key_that_it_has_failed_ends_no_run(tmp_path: Path):
    async def scorer(link: MemoryLink, **options: Any) -> None:
        send = link.send

        def say(message: Message) -> None:
            send(message)
            if isinstance(message, Result):
                send(Failed(error="ConfigError: so they say"))

        vars(link).update(send=say)
        await peers.scorer(link, **options)

    simulated = run(config(trainer={"steps": 4}), folder=tmp_path, cast=Cast(scorer=scorer))
    assert simulated.problems() == []
    assert (simulated.ending.reason, simulated.ending.rollouts.failed) == ("finished", 0)


def test_no_engine_of_an_honest_run_is_named(tmp_path: Path):
    simulated = run(config(trainer={"steps": 4}, engine={"count": 3}), folder=tmp_path)
    assert not [line for line in simulated.lines if line["kind"] in ("mismatch", "alarm")]


def test_a_score_that_does_not_add_up_is_asked_for_again(tmp_path: Path):
    sent: collections.Counter[str] = collections.Counter()

    async def scorer(link: MemoryLink, **options: Any) -> None:
        send = link.send

        def say(message: Message) -> None:
            if isinstance(message, Result) and message.components and sent[Kind.SCORES] < MAX_VIOLATIONS - 1:
                sent[Kind.SCORES] += 1
                message = change(message, rewards=(1e6,))
            send(message)

        vars(link).update(send=say)
        await peers.scorer(link, **options)

    simulated = run(config(trainer={"steps": 4}), folder=tmp_path, cast=Cast(scorer=scorer))
    assert simulated.problems() == []
    assert (simulated.ending.reason, simulated.ending.rollouts.failed) == ("finished", 0)
    assert refused(simulated) == sent == {Kind.SCORES: MAX_VIOLATIONS - 1}
