"""A policy's way from the trainer to the engines: transports, weight buffers, deltas, and the swap in an engine."""
