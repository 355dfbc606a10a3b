"""The package replays stages of a finished run, or of one under way, each alone, on its ledger and journal: without engine and trainer.

The stage itself runs as it does in a run, with a ledger of its own in `<run>/replay/`, and its results are compared with the recorded ones.
With the run's own settings a difference means that a reward, a source or a rule is not deterministic; with some of them changed, the
differences are the effect of the change.

| stage | takes | compared |
| --- | --- | --- |
| prompts | the data source | the order of prompts, and their texts and columns |
| generation | groups, when engines answered, when steps filled and policies came | engine and version of each attempt, their order, when |
| prm | rollouts, written anew, and the step scores recorded of them | step scores; who is stopped early |
| scoring | trajectories; `group_rewards` is part of it | outcome, reward and components of every rollout |
| batching | scored trajectories, as recorded or as scoring has just given them | terminal status and step, advantages, rows |
| training | rows and closed steps, as recorded or as batching has just made them | the micro-batches each replica is given |
| weight_sync | policies, and what engines said of them | which policy each engine is told to fetch, in order; how long it took |

Generation and weight sync run on simulated time, in which everything they wait for happens when it did. The process reward model is
not asked again: its step scores are those recorded.
"""
