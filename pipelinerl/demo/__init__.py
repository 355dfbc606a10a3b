"""The task of `pipelinerl demo`, which a laptop can learn, and its settings."""
