"""A tool for `calculator.toml`: the model asks for the value of an expression, is told it, and answers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_CALL = re.compile(r"CALC\(([0-9+\-* ()]{1,64})\)")
_OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def reply(turns: list[str]) -> str | None:
    """What the tool says to the last turn, as this model's chat template would write it; None where the turn calls no tool."""
    called = _CALL.search(turns[-1])
    if called is None:
        return None
    return f"\n<|im_start|>user\nResult: {value_of(called[1])}<|im_end|>\n<|im_start|>assistant\n"


def value_of(expression: str) -> str:
    """The value of an expression of whole numbers, or that it has none."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError):
        return "not an expression"


def reward(turns: list[str], answer: str) -> float:
    """0.8 for the row's answer, alone, in the last turn; 0.2 for a tool that was called before it."""
    return 0.8 * (turns[-1].strip() == answer) + 0.2 * (len(turns) > 1)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))
