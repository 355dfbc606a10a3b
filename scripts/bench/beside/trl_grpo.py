"""What a user of TRL writes: GRPO with transformers' generation, in an environment of its own. `trl_watch.py` measures it."""

import itertools
import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from scripts.bench.beside import steps, trl_watch

told = steps.settings()
task = trl_watch.task_of(told)
num_prompts = told["steps"] * told["groups_per_step"]


def reward(prompts, completions, answer, **_):
    rows = zip(prompts, completions, answer, strict=True)
    return [task.reward(prompt=prompt, completion=completion, answer=answer) for prompt, completion, answer in rows]


trainer = GRPOTrainer(
    model=told["model"],
    reward_funcs=trl_watch.watched(reward),
    train_dataset=Dataset.from_list(list(itertools.islice(task.train_prompts(told["seed"]), num_prompts))),
    args=GRPOConfig(
        output_dir=told["folder"],
        seed=told["seed"],
        max_steps=told["steps"],
        num_generations=told["group_size"],
        per_device_train_batch_size=told["groups_per_step"] * told["group_size"],
        max_completion_length=told["max_tokens"],
        learning_rate=told["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
    ),
    callbacks=[trl_watch.Watched()],
)
trainer.train()
sys.exit(0)
