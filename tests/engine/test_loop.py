"""The step loop: which version stamps which token, which order wins, and what becomes of requests when something fails."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import zlib
from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
import pytest

from pipelinerl.engine.base import Sampled
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.errors import EngineError, VersionNotHeld, WeightsError
from pipelinerl.messages import (
    Cancel,
    Completion,
    Finish,
    Generate,
    Message,
    Reattach,
    Sampling,
    StageWeights,
    Stop,
    Tokens,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.transport.codec import encode

PROMPT = np.array([5, 6, 7], np.int32)
SEED = zlib.crc32(PROMPT.tobytes())


class Stager:
    """Staging that ends when the test says so."""

    def __init__(self, engine: FakeEngine) -> None:
        self.orders: list[int] = []
        """Versions in the order in which their staging began."""
        self._engine = engine
        self._futures: dict[int, concurrent.futures.Future[None]] = {}

    def __call__(self, order: StageWeights) -> concurrent.futures.Future[None]:
        self.orders.append(order.version)
        self._futures[order.version] = concurrent.futures.Future()
        return self._futures[order.version]

    def finish(self, version: int) -> None:
        self._engine.stage(StageWeights(version=version, buffer=f"buffer-{version}", digest="digest"))
        self._futures[version].set_result(None)

    def refuse(self, version: int, error: str | BaseException) -> None:
        self._futures[version].set_exception(WeightsError(error) if isinstance(error, str) else error)


class Ticking:
    """A clock that tells the seconds given to it, one after another, then stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A loop around a fake engine whose sequences never stop by themselves."""

    def __init__(self, *, engine: FakeEngine | None = None, max_running: int = 8) -> None:
        self.engine = engine or FakeEngine(max_model_tokens=4096, max_running=max_running, mean_tokens=10**9)
        self.stager = Stager(self.engine)
        self.clock = Ticking()
        self.loop = EngineLoop(self.engine, engine_id=3, stager=self.stager, clock=self.clock)

    def ask(self, rollout_id: str = "0/0", *, attempt: int = 0, max_tokens: int = 10, written: Sequence[int] = ()) -> None:
        sampling, token_ids = Sampling(max_tokens=max_tokens), np.concatenate((PROMPT, np.array(written, np.int32)))
        self.loop.handle(Generate(rollout_id=rollout_id, attempt=attempt, token_ids=token_ids, sampling=sampling, num_written=len(written)))

    def order(
        self,
        version: int,
        *,
        when_idle: bool = False,
        rollback_epoch: int = 0,
        kv_max_staleness: int | None = None,
        kv_max_mean_staleness: float | None = None,
    ) -> None:
        buffer = f"buffer-{version}"
        order = StageWeights(
            version=version,
            buffer=buffer,
            digest="digest",
            when_idle=when_idle,
            rollback_epoch=rollback_epoch,
            kv_max_staleness=kv_max_staleness,
            kv_max_mean_staleness=kv_max_mean_staleness,
        )
        self.loop.handle(order)

    def advance(self, times: int = 1) -> list[Message]:
        """Run forward passes; what the loop said meanwhile."""
        for _ in range(times):
            self.loop.advance()
        return self.said()

    def said(self) -> list[Message]:
        said, self.loop.outbox[:] = list(self.loop.outbox), []
        return said


def completions(messages: list[Message]) -> list[Completion]:
    return [message for message in messages if isinstance(message, Completion)]


def committed(messages: list[Message]) -> list[int]:
    return [message.version for message in messages if isinstance(message, WeightsCommitted)]


def sampled_by(completion: Completion) -> list[int]:
    """How many commits the fake engine had taken when it sampled each token, told by the token itself."""
    commits = range(10)
    found = []
    for position, token in enumerate(completion.token_ids.tolist(), start=1):
        (commit,) = [commit for commit in commits if (SEED + 7919 * position + 104729 * commit) % 1000 == token]
        found.append(commit)
    return found


def test_a_completion_holds_every_token_with_its_logprob_and_version():
    bench = Bench()
    bench.ask(max_tokens=4)
    (completion,) = completions(bench.advance(4))
    assert (completion.rollout_id, completion.attempt, completion.finish, completion.error) == ("0/0", 0, Finish.LENGTH, "")
    assert completion.token_ids.tolist() == [(SEED + 7919 * position) % 1000 for position in (1, 2, 3, 4)]
    assert completion.logprobs.tolist() == pytest.approx([-np.log(1000)] * 4)
    assert completion.versions.tolist() == [0, 0, 0, 0]
    assert not bench.loop.has_work


def test_tokens_are_told_in_chunks_where_that_is_asked_for_and_the_last_ones_with_the_completion_alone():
    bench = Bench()
    for rollout_id, chunk_tokens in (("0/0", 2), ("0/1", 0)):
        sampling = Sampling(max_tokens=4)
        bench.loop.handle(Generate(rollout_id=rollout_id, attempt=1, token_ids=PROMPT, sampling=sampling, chunk_tokens=chunk_tokens))
    said = bench.advance(4)
    tokens = [(SEED + 7919 * position) % 1000 for position in (1, 2, 3, 4)]
    told = [(one.rollout_id, one.attempt, one.start, one.token_ids.tolist()) for one in said if isinstance(one, Tokens)]
    assert told == [("0/0", 1, 0, tokens[:2])]
    assert [one.token_ids.tolist() for one in completions(said)] == [tokens, tokens]


def test_the_stamp_changes_exactly_at_the_forward_pass_that_runs_under_the_new_weights():
    bench = Bench()
    bench.ask(max_tokens=10)
    bench.advance(2)
    bench.order(1)
    bench.advance(3)  # still being staged
    bench.stager.finish(1)
    assert bench.loop.version == 0, "finished, but no forward pass has come by"
    assert committed(bench.advance(1)) == [1]
    bench.order(2)
    bench.stager.finish(2)
    (completion,) = completions(bench.advance(4))
    assert completion.versions.tolist() == [0] * 5 + [1] * 1 + [2] * 4
    assert sampled_by(completion) == completion.versions.tolist(), "the tokens themselves tell which weights sampled them"


def test_what_outlives_an_orchestrator_goes_on_and_only_what_the_next_one_adopts_is_answered():
    bench = Bench()
    for rollout_id, attempt in (("0/0", 0), ("0/1", 2), ("1/0", 0)):
        bench.ask(rollout_id, attempt=attempt, max_tokens=3 if rollout_id != "1/0" else 9)
    bench.ask("2/0", max_tokens=1)
    (never_taken,) = completions(bench.advance(1))
    ready = bench.loop.introduce([encode(never_taken), encode(bench.loop.load(idle_s=0.0))], process_id=7)
    assert ready.running == {"0/0": 0, "0/1": 2, "1/0": 0, "2/0": 0}
    assert bench.advance(4) == [], "nobody may be answered before it is known what is wanted"
    bench.loop.handle(Reattach(rollouts={"0/1": 2, "0/0": 1, "2/0": 0}))
    adopted = completions(bench.said())
    assert [(one.rollout_id, one.attempt, len(one.token_ids)) for one in adopted] == [("2/0", 0, 1), ("0/1", 2, 3)]
    assert not bench.loop.has_work, "what was not named was dropped, without a word"
    bench.ask("1/0", attempt=0, max_tokens=1)
    assert [one.rollout_id for one in completions(bench.advance(1))] == ["1/0"]


def test_what_moved_here_goes_on_after_its_tokens_and_is_dropped_with_the_orchestrator_that_had_them():
    bench = Bench()
    bench.ask("0/0", max_tokens=8)
    bench.advance(3)
    bench.loop.handle(Cancel(rollout_id="0/0", attempt=0))
    (begun,) = completions(bench.said())
    bench.ask("0/0", attempt=1, max_tokens=5, written=begun.token_ids.tolist())
    bench.ask("0/1", attempt=1, max_tokens=1, written=[1, 2])
    (ended,) = completions(bench.advance(1))
    assert (ended.rollout_id, ended.num_written) == ("0/1", 2)
    ready = bench.loop.introduce([encode(ended)], process_id=7)
    assert ready.running == {}, "its answer would lack what came before"
    bench.ask("0/0", attempt=2, max_tokens=5, written=begun.token_ids.tolist())
    (rest,) = completions(bench.advance(5))
    assert [*begun.token_ids.tolist(), *rest.token_ids.tolist()] == [(SEED + 7919 * place) % 1000 for place in range(1, 9)]


@pytest.mark.parametrize(("ordered_after", "staged_after"), list(itertools.product(range(4), range(4))))
def test_stamps_tell_the_weights_whenever_a_policy_comes(ordered_after: int, staged_after: int):
    bench = Bench()
    for sibling in range(3):
        bench.ask(f"0/{sibling}", max_tokens=8 + sibling)
        bench.advance(1)
    said: list[Message] = []
    for version in (1, 2):
        said += bench.advance(ordered_after)
        bench.order(version)
        said += bench.advance(staged_after)
        bench.stager.finish(version)
        said += bench.advance(1)
    said += bench.advance(12)
    done = completions(said)
    assert len(done) == 3
    for completion in done:
        assert sampled_by(completion) == completion.versions.tolist()


def test_a_swap_aborts_nothing_and_says_what_it_cost():
    bench = Bench()
    for sibling in range(5):
        bench.ask(f"0/{sibling}", max_tokens=6)
    bench.advance(2)
    bench.order(1)
    bench.clock.now_s += 2.5
    bench.stager.finish(1)
    (swap,) = [message for message in bench.advance(1) if isinstance(message, WeightsCommitted)]
    assert (swap.engine_id, swap.version, swap.num_running, swap.stage_s, swap.pause_s) == (3, 1, 5, 2.5, 0.0)
    done = completions(bench.advance(3))
    assert [(completion.finish, len(completion.token_ids)) for completion in done] == [(Finish.LENGTH, 6)] * 5


def test_the_newest_of_several_orders_wins_and_one_being_staged_is_finished_first():
    bench = Bench()
    bench.ask()
    for version in (1, 2, 4, 3):
        bench.order(version)
    assert bench.stager.orders == [1], "its thread still reads the buffer"
    bench.stager.finish(1)
    assert committed(bench.advance(1)) == [1]
    assert bench.stager.orders == [1, 4]
    bench.stager.finish(4)
    assert committed(bench.advance(1)) == [4]
    assert bench.loop.version == 4
    assert not bench.loop.is_swapping


def test_a_staged_policy_that_waits_for_idleness_gives_way_to_a_newer_one():
    bench = Bench()
    bench.ask(max_tokens=3)
    bench.order(1, when_idle=True)
    bench.stager.finish(1)
    bench.advance(1)
    bench.order(2, when_idle=True)
    assert bench.stager.orders == [1, 2]
    bench.stager.finish(2)
    assert committed(bench.advance(5)) == [2]


def test_repeated_and_older_orders_are_harmless():
    bench = Bench()
    bench.ask()
    bench.order(2)
    bench.order(2)
    bench.order(1)
    assert bench.stager.orders == [2]
    bench.stager.finish(2)
    assert committed(bench.advance(1)) == [2]
    bench.order(1)
    assert bench.said() == []
    bench.order(2)
    (again,) = bench.said()
    assert isinstance(again, WeightsCommitted)
    assert (again.version, again.pause_s) == (2, 0.0), "who asks again for what is held is told so"
    bench.advance(2)
    assert bench.stager.orders == [2]


def test_a_policy_for_an_idle_engine_waits_until_no_sequence_runs():
    bench = Bench()
    bench.ask("0/0", max_tokens=3)
    bench.ask("0/1", max_tokens=5)
    bench.order(1, when_idle=True)
    bench.stager.finish(1)
    said = bench.advance(5)
    assert committed(said) == []
    assert bench.loop.is_swapping
    assert [completion.versions.tolist() for completion in completions(said)] == [[0] * 3, [0] * 5]
    assert committed(bench.advance(1)) == [1]
    bench.ask("1/0", max_tokens=2)
    (completion,) = completions(bench.advance(2))
    assert completion.versions.tolist() == [1, 1]


def test_an_idle_engine_takes_a_policy_without_a_forward_pass():
    bench = Bench()
    bench.order(1)
    bench.stager.finish(1)
    assert committed(bench.advance(1)) == [1]
    assert bench.loop.load(idle_s=0.0).num_steps == 0


def test_a_refused_policy_is_reported_and_the_old_one_serves_on():
    bench = Bench()
    bench.ask(max_tokens=6)
    bench.advance(2)
    bench.order(1)
    bench.order(2)
    bench.stager.refuse(1, "weight buffer buffer-1: digest of its 8 bytes is ab")
    said = bench.advance(1)
    assert said == [WeightsRefused(engine_id=3, version=1, error="WeightsError: weight buffer buffer-1: digest of its 8 bytes is ab")]
    assert bench.loop.version == 0
    assert bench.stager.orders == [1, 2], "the next one is staged all the same"
    bench.stager.finish(2)
    (completion,) = completions(bench.advance(4))
    assert completion.versions.tolist() == [0, 0, 0, 2, 2, 2]


def test_a_policy_the_engine_cannot_commit_is_refused():
    """Its staging was reported as done, but the engine holds nothing staged."""
    bench = Bench()
    bench.order(1)
    bench.stager.finish(1)
    bench.engine.commit()
    assert bench.advance(1)[1:] == [WeightsRefused(engine_id=3, version=1, error="WeightsError: nothing is staged: commit follows stage")]
    assert bench.loop.version == 0


def test_a_staged_policy_is_acknowledged_before_it_is_committed_and_once():
    bench = Bench()
    bench.ask(max_tokens=3)
    bench.order(1, when_idle=True)
    assert bench.advance(1) == [], "nothing is said of what is still being staged"
    bench.clock.now_s += 0.5
    bench.stager.finish(1)
    assert bench.advance(1) == [WeightsStaged(engine_id=3, version=1, stage_s=0.5)]
    assert completions(bench.advance(1))[0].versions.tolist() == [0, 0, 0], "acknowledged, and not yet in force"
    bench.clock.now_s += 0.5
    (swap,) = bench.advance(1)
    assert isinstance(swap, WeightsCommitted)
    assert (swap.version, swap.stage_s) == (1, 0.5)


def test_a_policy_that_waits_for_idleness_is_refused_as_soon_as_its_staging_fails():
    bench = Bench()
    bench.ask(max_tokens=9)
    bench.order(1, when_idle=True)
    bench.stager.refuse(1, "no")
    assert bench.advance(1) == [WeightsRefused(engine_id=3, version=1, error="WeightsError: no")]
    assert bench.loop.has_work


def test_whatever_a_road_raises_is_reported_in_its_words_and_the_old_policy_serves_on():
    bench = Bench()
    bench.ask(max_tokens=4)
    bench.order(1)
    bench.stager.refuse(1, OSError(28, "No space left on device"))
    said = bench.advance(4)
    assert said[0] == WeightsRefused(engine_id=3, version=1, error="OSError: [Errno 28] No space left on device")
    assert completions(said)[0].versions.tolist() == [0] * 4


def test_an_engine_that_must_end_is_not_kept_by_a_refusal():
    bench = Bench()
    bench.order(1)
    bench.stager.refuse(1, SystemExit(-9))
    with pytest.raises(SystemExit):
        bench.advance(1)


def test_a_refused_policy_can_be_ordered_again():
    bench = Bench()
    bench.order(1)
    bench.stager.refuse(1, "no")
    bench.advance(1)
    bench.order(1)
    bench.stager.finish(1)
    assert committed(bench.advance(1)) == [1]


def swapped_to(*versions: int) -> Bench:
    bench = Bench()
    for version in versions:
        bench.order(version)
        bench.stager.finish(version)
        bench.advance(1)
    return bench


def test_a_version_falls_only_by_a_rollback_which_ends_what_holds_undone_tokens():
    bench = swapped_to(1, 2, 3)
    bench.ask("0/0", max_tokens=9)
    bench.advance(2)
    bench.order(2)
    assert bench.advance(1) == [], "within a rollback epoch a version never falls"
    bench.order(2, rollback_epoch=1)
    bench.stager.finish(2)
    bench.ask("0/1", max_tokens=2)
    said = bench.advance(3)
    assert (bench.loop.version, bench.loop.rollback_epoch) == (2, 1)
    cancelled, kept = completions(said)
    assert (cancelled.rollout_id, cancelled.finish, cancelled.versions.tolist()) == ("0/0", Finish.CANCELLED, [3, 3, 3])
    assert (kept.rollout_id, kept.finish, kept.versions.tolist()) == ("0/1", Finish.LENGTH, [2, 2])


def test_a_rollback_keeps_sequences_that_hold_no_undone_token():
    bench = swapped_to(1, 2)
    bench.ask(max_tokens=5)
    bench.advance(2)
    bench.order(2, rollback_epoch=1)
    bench.stager.finish(2)
    (completion,) = completions(bench.advance(3))
    assert (completion.finish, completion.versions.tolist()) == (Finish.LENGTH, [2] * 5)


def test_an_order_of_an_earlier_lineage_is_ignored_however_high_its_version():
    bench = swapped_to(1)
    bench.order(1, rollback_epoch=1)
    bench.stager.finish(1)
    bench.advance(1)
    bench.order(9)
    assert bench.advance(1) == []
    assert bench.stager.orders == [1, 1]


class Pipelined(FakeEngine):
    """Tells what a forward pass sampled one call later, when the next one is under way already."""

    def __init__(self) -> None:
        super().__init__(max_model_tokens=4096, max_running=8, mean_tokens=10**9)
        self._ordered = self._version = 0
        self._under_way: list[list[Sampled]] = [[]]

    def stage(self, order: StageWeights) -> None:
        super().stage(order)
        self._ordered = order.version

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        dropped = super().commit(recompute)
        self._version = self._ordered
        return dropped

    def step(self) -> list[Sampled]:
        self._under_way.append([dataclasses.replace(sampled, versions=self._version) for sampled in super().step()])
        return self._under_way.pop(0)


def test_what_was_under_way_along_a_pipeline_carries_the_version_it_was_begun_under():
    bench = Bench(engine=Pipelined())
    bench.ask(max_tokens=6)
    bench.advance(3)
    bench.order(1)
    bench.stager.finish(1)
    (completion,) = completions(bench.advance(5))
    assert completion.versions.tolist() == [0, 0, 0, 1, 1, 1]
    assert sampled_by(completion) == completion.versions.tolist()


@pytest.mark.parametrize("max_tokens", [1, 10])
def test_a_rollback_ends_what_was_under_way_under_a_policy_it_undoes(max_tokens: int):
    """Its first token, be it the last or not, is told after the rollback: kept, versions would fall along the sequence."""
    bench = Bench(engine=Pipelined())
    for version in (1, 2):
        bench.order(version)
        bench.stager.finish(version)
        bench.advance(1)
    bench.ask("0/0", max_tokens=max_tokens)
    bench.advance(1)
    bench.order(1, rollback_epoch=1)
    bench.stager.finish(1)
    bench.ask("0/1", max_tokens=2)
    cancelled, kept = completions(bench.advance(4))
    assert (cancelled.rollout_id, cancelled.finish, cancelled.versions.tolist()) == ("0/0", Finish.CANCELLED, [])
    assert (kept.rollout_id, kept.finish, kept.versions.tolist()) == ("0/1", Finish.LENGTH, [1, 1])


class TwoATime(FakeEngine):
    """Samples two tokens of each sequence in a forward pass, as speculative decoding does."""

    def step(self) -> list[Sampled]:
        return [*super().step(), *super().step()]


def test_a_pass_that_samples_several_tokens_of_a_sequence_gives_each_its_place_and_version():
    bench = Bench(engine=TwoATime(max_model_tokens=4096, max_running=8, mean_tokens=10**9))
    bench.ask("0/0", max_tokens=5)
    bench.ask("0/1", max_tokens=8)
    bench.advance(1)
    bench.order(1)
    bench.stager.finish(1)
    shorter, longer = completions(bench.advance(3))
    assert shorter.versions.tolist() == [0, 0, 1, 1, 1]
    assert longer.versions.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [sampled_by(one) for one in (shorter, longer)] == [shorter.versions.tolist(), longer.versions.tolist()]


class Drafting(TwoATime):
    """Says how many drafted tokens its passes have verified."""

    def step(self) -> list[Sampled]:
        first, *more = super().step()
        return [dataclasses.replace(first, num_drafted=3), *more]


def test_tokens_that_passes_read_are_counted_prompts_and_what_other_engines_wrote_included():
    """A prompt of three tokens, read as 3, 4 and 5; beside it in the last two passes one of which two more were written, as 5 and 6."""
    bench = Bench()
    bench.ask("0/0", max_tokens=9)
    bench.advance(1)
    assert bench.loop.load(idle_s=0.0).num_context_tokens == 3
    bench.ask("0/1", max_tokens=9, written=[8, 9])
    bench.advance(2)
    load = bench.loop.load(idle_s=0.0)
    assert (load.num_tokens, load.num_context_tokens) == (5, 3 + 4 + 5 + 5 + 6)


def test_drafted_tokens_are_counted_and_so_are_those_of_them_that_were_kept():
    bench = Bench(engine=Drafting(max_model_tokens=4096, max_running=8, mean_tokens=10**9))
    bench.ask("0/0", max_tokens=5)
    bench.advance(2)
    load = bench.loop.load(idle_s=0.0)
    assert (load.num_tokens, load.num_steps, load.num_drafted, load.num_accepted) == (4, 2, 6, 2)
    without = Bench(engine=TwoATime(max_model_tokens=4096, max_running=8, mean_tokens=10**9))
    without.ask("0/0", max_tokens=5)
    without.advance(2)
    assert without.loop.load(idle_s=0.0).num_accepted == 0


class EndsWith:
    """Finds a token in place of a text."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        return token_ids.index(self._token_id) + 1 if self._token_id in token_ids else None


@pytest.mark.parametrize("max_tokens", [3, 9])
def test_a_stop_string_ends_a_sequence_with_the_token_that_completes_it(max_tokens: int):
    """Also where a pass has sampled a token after it, and where the sequence was to end with it anyway; the others go on."""
    engine = TwoATime(max_model_tokens=4096, max_running=8, mean_tokens=10**9)
    bench = Bench(engine=engine)
    third = (SEED + 7919 * 3) % 1000
    bench.loop = EngineLoop(engine, engine_id=3, stager=bench.stager, finder=lambda prompt, stop: cast("Any", EndsWith(third)))
    sampling = Sampling(max_tokens=max_tokens, stop=("three",))
    bench.loop.handle(Generate(rollout_id="0/0", attempt=0, token_ids=PROMPT, sampling=sampling))
    bench.ask("0/1", max_tokens=6)
    stopped, other = completions(bench.advance(3))
    assert (stopped.rollout_id, stopped.finish, stopped.token_ids.tolist()[-1], len(stopped.token_ids)) == ("0/0", Finish.STOP, third, 3)
    assert (other.rollout_id, other.finish, len(other.token_ids)) == ("0/1", Finish.LENGTH, 6)
    assert not engine.running()


class EndsLater(FakeEngine):
    """Says what ended with a pass after its tokens, as where another sequence has more of them."""

    def step(self) -> list[Sampled]:
        (sampled,) = super().step()
        nothing = sampled.only(np.zeros(len(sampled.rollout_ids), bool))
        return [dataclasses.replace(sampled, finishes={}), dataclasses.replace(nothing, finishes=sampled.finishes)]


def test_a_sequence_that_its_text_has_ended_ends_once():
    engine = EndsLater(max_model_tokens=4096, max_running=8, mean_tokens=10**9)
    bench = Bench(engine=engine)
    third = (SEED + 7919 * 3) % 1000
    bench.loop = EngineLoop(engine, engine_id=3, stager=bench.stager, finder=lambda prompt, stop: cast("Any", EndsWith(third)))
    sampling = Sampling(max_tokens=3, stop=("three",))
    bench.loop.handle(Generate(rollout_id="0/0", attempt=0, token_ids=PROMPT, sampling=sampling))
    bench.ask("0/1", max_tokens=3)
    assert [(one.rollout_id, one.finish, len(one.token_ids)) for one in completions(bench.advance(3))] == [
        ("0/0", Finish.STOP, 3),
        ("0/1", Finish.LENGTH, 3),
    ]


class Remembering(FakeEngine):
    """Notes whose KV cache was dropped at each commit."""

    def __init__(self) -> None:
        super().__init__(max_model_tokens=4096, max_running=8, mean_tokens=10**9)
        self.dropped: list[list[str]] = []

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        self.dropped.append(sorted(recompute))
        return super().commit(recompute)


@pytest.mark.parametrize(
    ("kv_max_staleness", "kv_max_mean_staleness", "dropped", "tokens"),
    [
        (None, None, [[], [], [], []], [0, 0, 0, 0]),
        (0, None, [["a"], ["a", "b"], ["a", "b"], ["a", "b"]], [4, 10, 12, 14]),
        (1, None, [[], ["a"], ["b"], ["a"]], [0, 6, 5, 8]),
        (2, None, [[], [], ["a"], ["b"]], [0, 0, 7, 6]),
        # At the second swap a lags 2 - 2/6, b 1; at the third 3 - 4/7 and 3 - 6/5; at the fourth both lag 1, as both were computed anew.
        (None, 1.7, [[], [], ["a", "b"], []], [0, 0, 12, 0]),
        (None, 1.5, [[], ["a"], ["b"], ["a"]], [0, 6, 5, 8]),
        (1, 1.7, [[], ["a"], ["b"], ["a"]], [0, 6, 5, 8]),
    ],
)
def test_the_kv_cache_of_a_sequence_lags_no_more_versions_than_it_may(
    kv_max_staleness: int | None, kv_max_mean_staleness: float | None, dropped: list[list[str]], tokens: list[int]
):
    """a runs from version 0, b from version 1, each with a prompt of three tokens; a pass before every commit."""
    engine = Remembering()
    bench = Bench(engine=engine)
    bench.ask("a", max_tokens=50)
    said: list[Message] = bench.advance(1)
    for version in (1, 2, 3, 4):
        bench.order(version, kv_max_staleness=kv_max_staleness, kv_max_mean_staleness=kv_max_mean_staleness)
        bench.stager.finish(version)
        said += bench.advance(1)
        if version == 1:
            bench.ask("b", max_tokens=50)
            bench.loop.advance()
    swaps = [message for message in said if isinstance(message, WeightsCommitted)]
    assert engine.dropped == dropped
    assert [swap.num_recomputed_tokens for swap in swaps] == tokens
    recomputed = [3 + place for message in bench.advance(50) if isinstance(message, Completion) for place in message.recomputed]
    assert sum(recomputed) == sum(tokens), "completions say when"


class Failing(FakeEngine):
    """Fails its third forward pass, and has then lost everything."""

    num_steps = 0

    def step(self) -> list[Sampled]:
        self.num_steps += 1
        if self.num_steps == 3:
            for rollout_id in list(self._requests):
                self.cancel(rollout_id)
            raise EngineError("forward pass failed: RuntimeError: out of memory")
        return super().step()


def test_a_failed_forward_pass_loses_what_ran_with_the_engines_words_and_serves_on():
    bench = Bench(engine=Failing(max_model_tokens=4096, max_running=2, mean_tokens=10**9))
    for sibling in range(3):
        bench.ask(f"0/{sibling}", max_tokens=8)
    said = bench.advance(3)
    lost = completions(said)
    assert [(completion.rollout_id, completion.finish, completion.error, len(completion.token_ids)) for completion in lost] == [
        ("0/0", Finish.ERROR, "forward pass failed: RuntimeError: out of memory", 2),
        ("0/1", Finish.ERROR, "forward pass failed: RuntimeError: out of memory", 2),
        ("0/2", Finish.ERROR, "forward pass failed: RuntimeError: out of memory", 0),
    ]
    assert not bench.loop.has_work
    bench.ask("1/0", max_tokens=2)
    (completion,) = completions(bench.advance(2))
    assert completion.finish is Finish.LENGTH


def test_a_request_the_engine_cannot_serve_is_answered_at_once_and_harms_nobody():
    bench = Bench()
    bench.ask("0/0", max_tokens=2)
    bench.loop.handle(Generate(rollout_id="1/0", attempt=0, token_ids=np.zeros(0, np.int32), sampling=Sampling(max_tokens=1)))
    (refused,) = completions(bench.said())
    assert (refused.rollout_id, refused.finish, len(refused.token_ids)) == ("1/0", Finish.ERROR, 0)
    assert "prompt of 0 tokens" in refused.error
    (completion,) = completions(bench.advance(2))
    assert completion.rollout_id == "0/0"


def test_a_reissued_attempt_supersedes_the_one_that_runs():
    bench = Bench()
    bench.ask(attempt=0, max_tokens=6)
    bench.advance(4)
    bench.ask(attempt=1, max_tokens=6)
    (completion,) = completions(bench.advance(6))
    assert (completion.attempt, len(completion.token_ids)) == (1, 6)
    assert not bench.loop.has_work


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_repeated_or_older_attempt_changes_nothing(attempt: int):
    bench = Bench()
    bench.ask(attempt=1, max_tokens=6)
    bench.advance(4)
    bench.ask(attempt=attempt, max_tokens=6)
    (completion,) = completions(bench.advance(2))
    assert (completion.attempt, len(completion.token_ids)) == (1, 6)


def test_a_cancelled_request_is_answered_with_what_it_has():
    bench = Bench()
    bench.ask("0/0", max_tokens=9)
    bench.ask("0/1", max_tokens=9)
    bench.advance(3)
    bench.loop.handle(Cancel(rollout_id="0/0", attempt=0))
    (cancelled,) = completions(bench.said())
    assert (cancelled.rollout_id, cancelled.finish, len(cancelled.token_ids)) == ("0/0", Finish.CANCELLED, 3)
    (other,) = completions(bench.advance(6))
    assert (other.rollout_id, other.finish) == ("0/1", Finish.LENGTH)


def test_cancelling_another_attempt_or_an_unknown_request_changes_nothing():
    bench = Bench()
    bench.ask(attempt=1)
    bench.loop.handle(Cancel(rollout_id="0/0", attempt=0))
    bench.loop.handle(Cancel(rollout_id="9/9", attempt=0))
    assert bench.said() == []
    assert bench.loop.has_work


def test_an_engine_takes_no_other_message():
    with pytest.raises(TypeError, match="an engine does not take Stop"):
        Bench().loop.handle(Stop(reason="finished"))


def test_gauges_tell_what_runs_what_waits_and_what_was_done():
    bench = Bench(max_running=2)
    for sibling in range(5):
        bench.ask(f"0/{sibling}", max_tokens=4)
    bench.advance(3)
    load = bench.loop.load(idle_s=1.5)
    assert (load.engine_id, load.version, load.num_running, load.num_waiting) == (3, 0, 2, 3)
    assert (load.num_tokens, load.num_steps, load.idle_s, load.busy_s) == (6, 3, 1.5, 0.0)
    bench.advance(20)
    assert bench.loop.load(idle_s=0.0).num_tokens == 20


def test_an_engine_announces_what_it_serves():
    ready = Bench().loop.introduce(process_id=77)
    assert (ready.engine_id, ready.process_id, ready.max_model_tokens, ready.max_running) == (3, 77, 4096, 8)


def test_times_of_a_completion_are_those_of_its_first_and_last_moment():
    bench = Bench()
    bench.ask(max_tokens=2)
    bench.clock.now_s = 107.0
    (completion,) = completions(bench.advance(2))
    assert (completion.started_at, completion.finished_at) == (100.0, 107.0)


def test_a_version_that_the_engine_does_not_hold_is_an_answer_of_its_own():
    class Holding(FakeEngine):
        def submit(self, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
            raise VersionNotHeld("not here")

    engine = Holding(max_model_tokens=64, max_running=4)
    loop = EngineLoop(engine, engine_id=0, stager=Stager(engine))
    loop.handle(Generate(rollout_id="a", attempt=0, token_ids=PROMPT, sampling=Sampling(max_tokens=2), version=3))
    (completion,) = loop.outbox
    assert isinstance(completion, Completion)
    assert (completion.finish, completion.error) == (Finish.NOT_HELD, "")
