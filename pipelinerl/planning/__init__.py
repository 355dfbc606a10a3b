"""Arithmetic of what a run needs before it starts: memory and trainer layouts."""
