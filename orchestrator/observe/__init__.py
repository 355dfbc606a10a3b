"""The orchestrator's reports of a run: progress, status, a sample log, errors in users' functions."""
