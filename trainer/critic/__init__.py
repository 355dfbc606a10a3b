"""Critics: models that say what a token is worth, trained beside the policy."""
