"""Rows on their way to the step: the loader, demonstrations, and what the step sees of a row."""
