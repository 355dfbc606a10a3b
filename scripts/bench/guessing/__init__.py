"""The game `guess_number` for `scripts/bench/credit.py`: what a model is taught, what a policy is worth, an agent that branches."""
