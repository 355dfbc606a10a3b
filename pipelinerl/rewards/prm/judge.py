"""A generative process reward model: a language model behind an endpoint is asked about each step as soon as it is complete.

Unlike a model with a head, it costs a generated answer for each step (ThinkPRM, GenPRM). Every question repeats the one before, so the
endpoint's prefix cache saves reading it again. A step without a verdict after `NUM_TRIES` questions fails its trace with an error; it
never becomes 0.0.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

from pipelinerl.config import PrmSection
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Outcome
from pipelinerl.rewards.functions.judge import Judge, NoVerdict, Verdict, client_with
from pipelinerl.rewards.prm.scorer import Convention, Cost, Reading, StepScore, Trace
from pipelinerl.rewards.prm.steps import Splitter, Step, TurnSplitter

QUESTION = """Below are a task and a solution as far as it is written. Rate its last step, and only that, from 0 (wrong, or of no use) to 10
(right, and brings the solution forward). Reason briefly, then end with one line: SCORE: <number>

<task>
{prompt}
</task>
<steps>
{completion}
</steps>
"""
NUM_TRIES = 3
"""Maximum number of questions about one step. A smaller one loses a whole trace to one bad answer; a larger one holds up the rest of the
batch."""
_TEXT = Convention(tag="", reading=Reading.RAW, good=0)


class JudgeScorer:
    """A `StepScorer` that asks a judge about the pending steps of many traces at once, `concurrency` questions at a time."""

    def __init__(self, section: PrmSection) -> None:
        judge = section.judge
        if judge.url is None or judge.model is None:
            raise ConfigError("prm.judge needs both url and model")
        self.cost = Cost()
        self.version = f"{judge.model} at {judge.url}"
        self._client = client_with(None if judge.key_file is None else str(judge.key_file))
        self._ask = Judge(
            url=judge.url,
            model=judge.model,
            question=QUESTION,
            best=10.0,
            max_tokens=judge.max_tokens,
            timeout_s=section.deadline_s / (NUM_TRIES + 1),
            extra=judge.extra,
        ).ask
        self._threads = concurrent.futures.ThreadPoolExecutor(judge.concurrency, thread_name_prefix="judge")

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        self._client.close()

    def begin(self, rollout_id: str, attempt: int, *, prompt: str, splitter: Splitter | TurnSplitter) -> Trace:
        """Begin a trace of texts; nothing is tokenised here."""
        return Trace(rollout_id, attempt, prompt=prompt, splitter=splitter, convention=_TEXT, encode=lambda text: [])

    def score(self, traces: Sequence[Trace]) -> list[StepScore]:
        """Score every pending step of these traces; afterwards none is pending."""
        asked = [(trace, step) for trace in traces for step, _ in trace.pending]
        for trace in traces:
            trace.pending.clear()
        found: list[StepScore] = []
        for score, num_tries, verdict in self._threads.map(lambda one: self._judge(*one), asked):
            found.append(score)
            self.cost.num_requests += num_tries
            if verdict is not None:
                self.cost.num_asked += verdict.num_tokens
                self.cost.num_computed += verdict.num_tokens - verdict.num_cached
        return found

    def _judge(self, trace: Trace, step: Step) -> tuple[StepScore, int, Verdict | None]:
        """Return the score, the number of questions asked for it, and the verdict, None where the last question gave none."""
        steps = "\n\n".join(trace.texts[: step.index + 1])
        error = ""
        for num_tries in range(1, NUM_TRIES + 1):
            try:
                verdict = self._ask(trace.prompt, steps, client=self._client)
            except NoVerdict as failed:
                error = str(failed)
            else:
                return StepScore(trace=trace, step=step, score=verdict.score), num_tries, verdict
        error = f"after {NUM_TRIES} tries: {error}"
        return StepScore(trace=trace, step=step, outcome=Outcome.ERROR, error=error), NUM_TRIES, None
