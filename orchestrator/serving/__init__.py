"""Engines and a trainer for training loops outside of this program, in place of the stages of a run (`python -m orchestrator.serving`).

    trainer         requests to the trainer, in their order, and its answers
    publications    which weights engines hold, and how others come to them
    backend         both, and the engines, as `pipelinerl.tinker` sees them

Nothing is decided here about what is sampled or trained: clients do that.
"""
