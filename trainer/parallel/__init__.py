"""Ranks and what they share: replicas, sharding, pipeline stages, context parallelism."""
