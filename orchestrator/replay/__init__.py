"""Stages of a finished run, or of one under way, once more and alone, on what its ledger recorded: no engine, no trainer.

What a stage took is read from `<run>/ledger.sqlite`, the stage itself runs as it does in a run, with a ledger of its own in
`<run>/replay/`, and what comes out is compared with what was recorded. With the run's own settings a difference means that a reward, a
source or a rule does not say the same twice; with some of them changed, the differences are what the change does.

| stage | takes | compared |
| --- | --- | --- |
| prompts | the data source | the order of prompts, and their texts and columns |
| scoring | trajectories; `comparing` is part of it | outcome, reward and components of every rollout |
| batching | scored trajectories, as recorded or as scoring has just given them | fate and step, advantages, rows |

Not alone: dispatch and refresh (their input is *when* engines and trainer said something, which only these can repeat), following (its
process reward model; step scores are taken as they were recorded) and delivery (it decides nothing: it hands on the rows of batching).
"""
