"""The way of a run folder from an earlier schema to the present one, under `pipelinerl migrate RUN`.

Each earlier schema has a module that reads a ledger of it; `run_folder` writes the present form.
"""
