"""Recipes of tinker-cookbook, their files unchanged, with `pipelinerl serve`: what they need, and what came out."""
