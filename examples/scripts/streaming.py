"""The built-in streaming loop as a script: groups are sampled ahead up to the staleness bound, and trained in the order of their coming.

    .venv/bin/python examples/scripts/streaming.py
    .venv/bin/python examples/scripts/streaming.py my.toml pipeline.max_staleness=2

A batch leaves for the trainer once it is whole; the pipeline of `pipelinerl run` sends each row as it fills. Step rules (`batch` of a
method) would take one group for the step here.
"""

import asyncio
import sys

from orchestrator.scripted_run import ScriptedRun
from pipelinerl import Controller
from pipelinerl.messages import Sample


async def train(run: ScriptedRun) -> None:
    num_groups, max_staleness = run.config.batch.groups_per_step, run.config.pipeline.max_staleness
    ready: asyncio.Queue[list[Sample]] = asyncio.Queue()
    num_asked = 0

    async def answer(step: int) -> None:
        ready.put_nowait(run.advantages(await run.score(run.sample(run.prompts(1), step=step))))

    async with asyncio.TaskGroup() as tasks:
        while run.step < run.num_steps:
            limit = min(max_staleness + run.version + 1, run.num_steps) * num_groups  # as in orchestrator.rules.admission
            for number in range(num_asked, limit):
                tasks.create_task(answer(number // num_groups))
            rows, num_asked = list[Sample](), limit
            for _ in range(num_groups):
                while not (group := await ready.get()):  # the method has dropped it: another takes its place
                    tasks.create_task(answer(run.step))
                rows += group
            await run.train(rows)
            await run.publish()


async def main() -> None:
    async with Controller(*(sys.argv[1:] or ["examples/custom_reward.toml", "run.name=streaming"])) as run:
        await train(run)


if __name__ == "__main__":
    asyncio.run(main())
