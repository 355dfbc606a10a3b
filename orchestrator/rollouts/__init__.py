"""The package describes how a prompt becomes a trajectory: in one turn, or in an episode with an environment."""
