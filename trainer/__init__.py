"""Micro-batches in, policies out.

loop                  the training loop; read this first
orchestrator_client   the connection to the orchestrator; `session` is what a restarted orchestrator is told again
data                  `loader` gives every rank one row per replica at a time, ready on the device; `token_columns` is the loss's view of it
step                  raw loss sums of a step and the update; `logprob_mismatch` checks trainer against engine, `step_timer` times it
backend               the machinery below the step, in five methods: `model` and `optimizer`, sharded over ranks by `parallel`
rows                  a packed row; `arrange` lays it out: samples never see each other, shared prompts are computed once
model, critic         the policy with its head and adapters, and the models beside it; `advantages` are those that need their outputs
build                 builds a rank from the config
weights               policies for the engines: `publisher` writes, `async_publisher` says when, `sharded_weights` gathers sharded ones
checkpoint            `checkpoints` to go on from, and the model as a Hugging Face folder (`model_folder`)
sft                   supervised fine-tuning with the same parts (`supervised`); `data.sft_stream` is some of it in every RL step
"""
