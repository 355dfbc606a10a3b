"""What `pipelinerl demo` trains: a task that a laptop can learn, and its settings."""
