"""What the orchestrator says of a run: progress, status, samples worth showing, errors in user functions."""
