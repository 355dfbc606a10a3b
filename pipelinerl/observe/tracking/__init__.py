"""Trackers: Weights & Biases, TensorBoard and Prometheus, fed from a run's journal and from nothing else.

The journal is local and first. Each tracker follows it in a process of its own, so one that is down, slow or crashing costs the run
nothing and loses nothing: `pipelinerl track RUN` sends what is missing, also long after the run.

names        journal lines -> points: what each number is called, and on which axis it stands
samples      `sample` lines -> text, with the version of each token
follow       the loop: journal -> names -> one destination, opened again after a failure
to_wandb, to_tensorboard, to_prometheus    destinations
identity     the id of a run in a tracker, kept in the run folder and with every checkpoint
beside       starts the trackers of a run beside it, and gives them time to finish
trace        spans -> a Chrome trace, for Perfetto
"""
