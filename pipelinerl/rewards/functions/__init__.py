"""Reward functions that users name in their config, and what runs code safely."""
