"""Outcome reward models: what their folders must hold, and the runner that scores completions with one."""
