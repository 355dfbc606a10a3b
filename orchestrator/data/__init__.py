"""Prompts and demonstrations: rows of a source, and the prompts made of them."""
