"""The command line: `app` holds what all commands share; its groups of commands stand beside it."""
