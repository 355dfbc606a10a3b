"""Rows as the model takes them: samples packed side by side."""
