"""Models of the trainer: the policy with its adapters and head, and the reference and teachers beside it."""
