"""Validation checks the messages of peers: each rule names the violation in a message, before any of it becomes durable."""
