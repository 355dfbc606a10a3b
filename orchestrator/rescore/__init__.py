"""`pipelinerl try`: a few rows go through the rewards, the environment and the process reward model of a config, and each is shown.

The parts are those of a run: prompts as it builds them, rollouts as it plays them, the scorer's pools with their processes, deadlines and
retries, the engine for what is sampled, the rule that joins a group's comparison, and the method's advantages. What differs is that nothing
is trained, and that one row follows the other, so that all that is said of it stands together.
"""
