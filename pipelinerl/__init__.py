"""The shared core: words, wires, weights, engines, scorers, maths. It imports neither the orchestrator nor the trainer.

The one exception are two names that users import from here, `Controller` and `Policies`, which are loaded when they are asked for
(`orchestrator.controller`, `orchestrator.policies`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.controller import Controller as Controller
    from orchestrator.policies import Policies as Policies

__version__ = "0.1.0"
__all__ = ["Controller", "Policies"]


def __getattr__(name: str) -> Any:
    if name == "Controller":
        from orchestrator.controller import Controller

        return Controller
    if name == "Policies":
        from orchestrator.policies import Policies

        return Policies
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
