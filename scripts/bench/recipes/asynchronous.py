"""The demo's task as an environment of tinker-cookbook, trained by its own asynchronous RL (`tinker_cookbook.rl.train`, unchanged).

Runs under the cookbook's interpreter, as a recipe does: key=value for the model's name, the folder of its logs, steps and sizes. Before and
after it, the held-out prompts of the demo are answered greedily through the SDK, and the accuracy is one more line of the recipe's metrics.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import chz  # pyright: ignore[reportMissingImports]
import tinker  # pyright: ignore[reportMissingImports]
from tinker_cookbook.rl import train  # pyright: ignore[reportMissingImports]
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult  # pyright: ignore[reportMissingImports]
from tinker_cookbook.tokenizer_utils import get_tokenizer  # pyright: ignore[reportMissingImports]

from pipelinerl.demo.sort_digits import held_out_prompts, train_prompts

END, MAX_TOKENS = 1, 8
"""The model's end of sequence, and the demo's longest answer."""
Row = dict[str, str]


class Sort(Env):
    """One row of digits, to be answered with the same digits in order."""

    def __init__(self, row: Row, tokenizer: Any) -> None:
        self.row, self.tokenizer = row, tokenizer

    async def initial_observation(self) -> tuple[Any, list[int]]:
        return tinker.ModelInput.from_ints(self.tokenizer.encode(self.row["prompt"])), [END]

    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        reward = float(said(action, self.tokenizer) == self.row["answer"])
        return StepResult(reward=reward, episode_done=True, next_observation=tinker.ModelInput.from_ints([]), next_stop_condition=[])


class Group(EnvGroupBuilder):
    """As many answers to one row."""

    def __init__(self, row: Row, size: int, tokenizer: Any) -> None:
        self.row, self.size, self.tokenizer = row, size, tokenizer

    async def make_envs(self) -> list[Sort]:
        return [Sort(self.row, self.tokenizer) for _ in range(self.size)]


class Rows(RLDataset):
    """The rows of the demo, in batches."""

    def __init__(self, num: int, *, num_groups: int, size: int, seed: int, tokenizer: Any) -> None:
        rows = train_prompts(seed=seed)
        self.batches = [[Group(next(rows), size, tokenizer) for _ in range(num_groups)] for _ in range(num)]

    def get_batch(self, index: int) -> list[Group]:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


@chz.chz
class Task(RLDatasetBuilder):
    """What `asynchronous.py` is told: the names are those of the cookbook's recipes."""

    model_name: str
    log_path: str
    max_steps: int
    groups_per_batch: int
    group_size: int
    learning_rate: float
    max_steps_off_policy: int
    loss_fn: str
    seed: int = 0

    async def __call__(self) -> tuple[Rows, None]:
        tokenizer = get_tokenizer(self.model_name)
        size, num = self.group_size, self.max_steps + 8
        return Rows(num, num_groups=self.groups_per_batch, size=size, seed=self.seed, tokenizer=tokenizer), None


def said(token_ids: list[int], tokenizer: Any) -> str:
    return tokenizer.decode([token_id for token_id in token_ids if token_id != END]).replace(" ", "")


async def held_out_accuracy(sampler: Any, tokenizer: Any) -> float:
    """Answer the held-out prompts greedily; return the part that is right."""
    greedy = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=[END])

    async def is_right(row: Row) -> bool:
        prompt = tinker.ModelInput.from_ints(tokenizer.encode(row["prompt"]))
        answer = await sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=greedy)
        return said(answer.sequences[0].tokens, tokenizer) == row["answer"]

    rows = held_out_prompts()
    return sum(await asyncio.gather(*map(is_right, rows))) / len(rows)


async def main(task: Task) -> None:
    service, tokenizer = tinker.ServiceClient(), get_tokenizer(task.model_name)
    accuracies = [await held_out_accuracy(await service.create_sampling_client_async(base_model=task.model_name), tokenizer)]
    await train.main(
        train.Config(
            learning_rate=task.learning_rate,
            dataset_builder=task,
            model_name=task.model_name,
            recipe_name="sort_digits",
            renderer_name="role_colon",
            max_tokens=MAX_TOKENS,
            log_path=task.log_path,
            eval_every=0,
            save_every=0,
            max_steps=task.max_steps,
            rollout_json_export=False,
            num_groups_to_log=0,
            async_config=train.AsyncConfig(
                max_steps_off_policy=task.max_steps_off_policy, groups_per_batch=task.groups_per_batch, loss_fn=task.loss_fn
            ),
        )
    )
    saved = [json.loads(line) for line in (Path(task.log_path) / "checkpoints.jsonl").read_text().splitlines()]
    last = next(line["sampler_path"] for line in reversed(saved) if line.get("sampler_path"))
    accuracies.append(await held_out_accuracy(await service.create_sampling_client_async(model_path=last), tokenizer))
    with (Path(task.log_path) / "metrics.jsonl").open("a") as metrics:
        metrics.writelines(json.dumps({"held_out/accuracy": accuracy}) + "\n" for accuracy in accuracies)


if __name__ == "__main__":
    asyncio.run(main(chz.entrypoint(Task)))
