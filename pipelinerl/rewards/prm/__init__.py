"""Process reward models: steps of a trace, conventions, and the process that serves the model."""
