"""What the orchestrator knows of engines, scorers, the process reward model and the trainer."""
