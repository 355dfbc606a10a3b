"""The shared core: words, wires, weights, engines, scorers, maths. It imports neither the orchestrator nor the trainer.

The one exception is a name that users import from here: `Controller`, which is loaded when it is asked for (`orchestrator.controller`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.controller import Controller as Controller

__version__ = "0.1.0"
__all__ = ["Controller"]


def __getattr__(name: str) -> Any:
    if name == "Controller":
        from orchestrator.controller import Controller

        return Controller
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
