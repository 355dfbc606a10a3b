"""Alarms of learning: what says, while a run goes on, that it learns the wrong thing or nothing.

names   what each alarm is about, and what to change
rules   the figures of steps and evaluations -> alarms, each with the step where it began

The orchestrator feeds the rules as steps are trained, the report feeds them the journal's lines afterwards, and both get the same alarms.
What a run does not record raises nothing, and none ends a run unless `run.fatal_alarms` names it.
"""
