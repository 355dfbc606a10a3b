"""A run in simulated time: `python -m orchestrator.simulate`, which `pipelinerl simulate` starts.

The decisions are the live ones: admission, routing, grouping, the batch cut, packing, swaps, concurrency, early stop and quarantine are the
classes of `orchestrator.rules` and `pipelinerl.data.packing`, unchanged. Peers are models of how long things take (`world`), and the stages
that wait and talk in a live run are replaced by events (`events`): nothing here runs per token, so a thousand engines fit on one core.

Read in this order: `run`, `generation`, `batching`, `weight_sync`, then the peers: `engine`, `trainer`, `scorers`, `links`.
"""
