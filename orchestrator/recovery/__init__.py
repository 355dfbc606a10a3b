"""The package handles the death of a process: its work is issued again, prompts and rows that killed two processes are quarantined, and a
peer that comes back goes on.
"""
