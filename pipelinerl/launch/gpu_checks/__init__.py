"""`pipelinerl doctor --gpu`: the checks of a machine with GPUs before its first run, and what each result means."""
