"""Every metric, once: its name, where the journal has it, its unit, its formula, and what to do about it.

table    what a metric is, and how its values get their names
steps    metrics of an optimizer step: the orchestrator's and the trainer's
gauges   metrics of the moment, and of evaluations
page     all of them as docs/metrics.md, with the alarms

Trackers send what stands here, the report titles its figures from it, and `pipelinerl metrics` prints it.
"""
