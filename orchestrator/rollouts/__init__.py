"""What becomes of a prompt: one turn, or what an environment makes of it."""
