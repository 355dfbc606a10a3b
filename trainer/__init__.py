"""Micro-batches in, policies out.

loop           the training loop; read this first
feed, waves    the connection to the orchestrator, and what every rank gets of it: one row per replica at a time, ready on the device
step           raw loss sums of a step and the update; `columns` is its view of a row, `agreement` its check against the engine
engine         what the step asks of the machinery below: five methods
torch_engine   that machinery on plain torch: `model` and `optimizer`, spread over ranks by `sharding`
packed_row     a packed row; `row` lays it out, `attention` attends: samples never see each other, shared prompts are computed once
reference, critic, credit   models beside the policy, and the advantages that need them
build          what a rank is made of, from the config
head, context  log-probabilities without a table of all logits; what ranks that share a row tell each other
parallel       the ranks, and which of them share what
weights        policies for the engines: `publisher` writes, `async_publisher` says when, `sharded_weights` where no rank has the whole
checkpoint     `checkpoints` to go on from, and the model as a Hugging Face folder (`model_folder`)
sft            supervised fine-tuning with the same parts (`supervised`, `demonstrations`); `sft_stream` is some of it in every RL step
"""
