"""Rows, tokenizers and packing: what lies between a dataset and token ids."""
