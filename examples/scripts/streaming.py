"""The built-in streaming loop as a script: groups are sampled ahead up to the staleness bound, and trained in the order of their coming.

.venv/bin/python examples/scripts/streaming.py my.toml pipeline.max_staleness=2
"""

import asyncio
import sys

from orchestrator.scripted_run import Coming, ScriptedRun
from pipelinerl import Controller
from pipelinerl.messages import Sample, ScoredTrajectory, StepDone


async def train(run: ScriptedRun) -> None:
    num_groups, max_staleness = run.config.batch.groups_per_step, run.config.pipeline.max_staleness
    ready: asyncio.Queue[list[ScoredTrajectory]] = asyncio.Queue()

    async def answer(step: int) -> None:
        ready.put_nowait(await run.score(run.sample(run.prompts(1), step=step)))

    def ask(step: int) -> None:
        for _ in range(num_groups if step < run.num_steps else 0):
            tasks.create_task(answer(step))

    async def publish(step: Coming[StepDone]) -> None:
        done = await step
        await run.publish()
        ask(done.step + 1 + max_staleness)

    async with asyncio.TaskGroup() as tasks:
        for step in range(run.step, run.step + 1 + max_staleness):
            ask(step)
        while run.step < run.num_steps:
            step, rows, taken = list[ScoredTrajectory](), list[Sample](), 0
            while taken < num_groups:
                if made := run.advantages(group := await ready.get()):
                    step, rows, taken = [*step, *group], [*rows, *made], taken + 1
                else:  # the method has dropped it, or it is too old: another takes its place
                    tasks.create_task(answer(run.step))
            tasks.create_task(publish(run.train(run.advantages(step) if run.has_step_rule else rows)))


async def main() -> None:
    async with Controller(*(sys.argv[1:] or ["examples/custom_reward.toml", "run.name=streaming"])) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
