"""Judges a run by its history alone: `python -m pipelinerl.checker RUN` reads `ledger.sqlite` and the checkpoints, no more.

It shares no code with what it judges (a test holds that), and repeats every promise in its own words: a fault in the product's
idea of a promise does not hide here. Only the standard library is needed, and xxhash for the checksums.
"""
