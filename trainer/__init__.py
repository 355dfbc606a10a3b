"""Micro-batches in, policies out.

loop           the training loop; read this first
feed           the one connection to the orchestrator, in a thread of its own
row, attention how a packed row is laid out and attended to: samples never see each other, shared prompts are computed once
model          a Hugging Face model that computes log-probabilities of packed rows
step           raw loss sums of a step, the update, the check against the engine
optimizer      AdamW in float32 over one flat gradient
parallel       replicas that sum their gradients
publish        weights to the engines
checkpoint     the model as a Hugging Face folder
sft            supervised fine-tuning with the same parts (`supervised`, `demonstrations`)
"""
