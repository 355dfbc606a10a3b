"""The engine made of vLLM."""
