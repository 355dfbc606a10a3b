"""What survives a kill: the ledger, its store, the snapshot that a restarted orchestrator reads, and the migration of older run folders."""
