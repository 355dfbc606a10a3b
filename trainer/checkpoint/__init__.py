"""The trainer saves checkpoints that training goes on from, and the model as a Hugging Face folder."""
