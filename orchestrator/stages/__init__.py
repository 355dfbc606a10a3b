"""The package holds the six stages, one loop each: they wait and talk, and leave every decision to `orchestrator.rules`."""
