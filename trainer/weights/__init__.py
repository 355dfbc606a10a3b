"""Policies on their way to the engines: written into weight buffers, announced, and replaced."""
