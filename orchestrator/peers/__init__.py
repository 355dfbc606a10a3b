"""The package holds the engines, the scorers, the process reward model and the trainer as the orchestrator knows them."""
