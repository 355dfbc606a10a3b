"""The shared core: words, wires, weights, engines, scorers, maths. It imports neither the orchestrator nor the trainer."""

__version__ = "0.1.0"
