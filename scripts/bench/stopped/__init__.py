"""A task with steps for `early_stop.py`: its prompts, its reward, and a process reward model that was trained on it."""
