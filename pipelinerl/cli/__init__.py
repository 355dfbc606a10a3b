"""The command line: `app` holds what all commands share; `train`, `runs` and `reference` are its three groups of commands."""
