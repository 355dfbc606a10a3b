"""The transport from shard to shard: every trainer rank sends what it holds straight to the engine ranks that need it."""
