"""The ledger that survives a kill, its store, the snapshot that a restarted orchestrator reads, and the migration of older run folders."""
