"""Arithmetic as data: rows of formulas that Python evaluates, a page evaluates as JavaScript, and a person reads.

A formula is one expression of Python over names of inputs and of earlier rows: `+ - * / **`, comparisons, `and`, `or`, `a if c else b`, and
the functions of `FUNCTIONS`. It is parsed once. Python evaluates the tree, `javascript` writes the same tree in the other language, and
`explain` writes it with numbers in the places of names, so that no formula stands anywhere twice.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator as operators
from collections.abc import Callable, Iterable, Mapping, Sequence

Values = dict[str, float]
_Computed = Callable[[Values], float]
FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt}
"""What a formula may call, each there by the same name in JavaScript's Math."""
_OPERATORS: dict[type[ast.AST], tuple[str, Callable[[float, float], float]]] = {
    ast.Add: ("+", operators.add),
    ast.Sub: ("-", operators.sub),
    ast.Mult: ("*", operators.mul),
    ast.Div: ("/", operators.truediv),
    ast.Lt: ("<", operators.lt),
    ast.LtE: ("<=", operators.le),
    ast.Gt: (">", operators.gt),
    ast.GtE: (">=", operators.ge),
    ast.Eq: ("===", operators.eq),
}
"""Operators as JavaScript writes them, and as Python computes them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One figure and how it is made of others."""

    name: str
    unit: str
    formula: str
    what: str
    """A short phrase for a person."""
    source: str = ""
    """Where the formula comes from, where it is nobody's own algebra."""


class Sheet:
    """Rows in the order in which they are computed."""

    def __init__(self, rows: Sequence[Row], *, inputs: Iterable[str]) -> None:
        """Raises `ValueError` for a formula that is no expression of the language, or names what is no input and no earlier row."""
        self.rows = {row.name: row for row in rows}
        self.inputs = frozenset(inputs)
        self._trees = {row.name: _parse(row) for row in rows}
        known = set(self.inputs)
        for name, tree in self._trees.items():
            if unknown := sorted(_names(tree) - known):
                raise ValueError(f"{name} = {self.rows[name].formula}: {', '.join(unknown)} is no input and no earlier row")
            if name in known:
                raise ValueError(f"{name} stands twice")
            known.add(name)
        self._leaves: dict[str, frozenset[str]] = {}
        for name, tree in self._trees.items():
            self._leaves[name] = frozenset().union(*(self._leaves.get(used, {used}) for used in _names(tree)))
        self._computed = {name: _computed(tree) for name, tree in self._trees.items()}

    def evaluate(self, inputs: Mapping[str, float], *, fixed: Mapping[str, float] | None = None) -> Values:
        """Compute every row; `fixed` rows have a value of their own, and their formula is not looked at."""
        values, fixed = dict(inputs), fixed or {}
        for name, computed in self._computed.items():
            values[name] = fixed[name] if name in fixed else float(computed(values))
        return values

    def operands(self, name: str) -> list[str]:
        """The names in a row's formula, in the order in which they stand there; empty for an input."""
        tree = self._trees.get(name)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in FUNCTIONS] if tree else []
        return list(dict.fromkeys(node.id for node in sorted(names, key=lambda node: (node.lineno, node.col_offset))))

    def leaves(self, name: str) -> frozenset[str]:
        """The inputs that a figure hangs on, through other rows, too."""
        return self._leaves.get(name, frozenset())

    def sensitivity(
        self, name: str, inputs: Mapping[str, float], *, of: Iterable[str], fixed: Mapping[str, float] | None = None, change: float = 0.1
    ) -> list[tuple[str, float, float]]:
        """The change of a figure, in parts of itself, where an input is `change` lower and higher: those with an effect, strongest first.

        What rounds to whole engines or sequences may change by a step or not at all.
        """
        usual, found = self.evaluate(inputs, fixed=fixed)[name], []
        for leaf in of:
            if leaf not in self.leaves(name) or not usual or not inputs[leaf]:
                continue
            low, high = (
                self.evaluate({**inputs, leaf: inputs[leaf] * factor}, fixed=fixed)[name] / usual - 1 for factor in (1 - change, 1 + change)
            )
            if max(abs(low), abs(high)) > 1e-9:
                found.append((leaf, low, high))
        return sorted(found, key=lambda each: -max(abs(each[1]), abs(each[2])))

    def numbers(self, name: str, values: Mapping[str, float], *, write: Callable[[float], str]) -> str:
        """A row's formula with numbers in the places of names."""
        tree = ast.parse(self.rows[name].formula.strip(), mode="eval").body
        return ast.unparse(_Written(values, write).visit(tree)).replace("_n_", "").replace("'", "")

    def javascript(self) -> str:
        """A function of an object of inputs, which returns an object of inputs and rows."""
        lines = [f"  v.{name} = +({_javascript(tree)});" for name, tree in self._trees.items()]
        return "\n".join(["function evaluate(inputs) {", "  const v = { ...inputs };", *lines, "  return v;", "}"])


class _Written(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, float], write: Callable[[float], str]) -> None:
        self._values, self._write = values, write

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return node if node.id in FUNCTIONS else ast.Constant(self._write(self._values[node.id]))


def _parse(row: Row) -> ast.expr:
    try:
        tree = ast.parse(row.formula.strip(), mode="eval").body
        _javascript(tree)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{row.name} = {row.formula}: {error}") from None
    return tree


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - FUNCTIONS.keys()


def _javascript(tree: ast.AST) -> str:
    """Write a tree in JavaScript, every part in brackets. Raises `TypeError` for what no formula has."""
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return repr(value)
        case ast.Name(id=name):
            return f"v.{name}"
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return f"Math.pow({_javascript(left)}, {_javascript(right)})"
        case ast.BinOp(left=left, op=operator, right=right) | ast.Compare(left=left, ops=[operator], comparators=[right]) if (
            type(operator) in _OPERATORS
        ):
            return f"({_javascript(left)} {_OPERATORS[type(operator)][0]} {_javascript(right)})"
        case ast.BoolOp(op=junction, values=values):
            return f"({(' || ' if isinstance(junction, ast.Or) else ' && ').join(map(_javascript, values))})"
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return f"({_javascript(test)} ? {_javascript(body)} : {_javascript(otherwise)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(-{_javascript(operand)})"
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return f"Math.{name}({', '.join(map(_javascript, arguments))})"
    raise TypeError(f"{type(tree).__name__} is no part of a formula")


def _computed(tree: ast.AST) -> _Computed:
    """Make a function of a tree that `_javascript` takes: the same operations, of Python, in the same order."""
    match tree:
        case ast.Constant(value=int() | float() as value):
            return lambda values: value
        case ast.Name(id=name):
            return lambda values: values[name]
        case ast.BinOp(left=left, op=operator, right=right) | ast.Compare(left=left, ops=[operator], comparators=[right]):
            apply = operators.pow if isinstance(operator, ast.Pow) else _OPERATORS[type(operator)][1]
            first, second = _computed(left), _computed(right)
            return lambda values: apply(first(values), second(values))
        case ast.BoolOp(op=junction, values=parts):
            return _junction([_computed(part) for part in parts], ends_at=isinstance(junction, ast.Or))
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            chooses, chosen, other = _computed(test), _computed(body), _computed(otherwise)
            return lambda values: chosen(values) if chooses(values) else other(values)
        case ast.UnaryOp(operand=operand):
            positive = _computed(operand)
            return lambda values: -positive(values)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            function, parts = FUNCTIONS[name], [_computed(argument) for argument in arguments]
            return lambda values: function(*(part(values) for part in parts))
    raise TypeError(f"{type(tree).__name__} is no part of a formula")


def _junction(parts: Sequence[_Computed], *, ends_at: bool) -> _Computed:
    def computed(values: Values) -> float:
        value = 0.0
        for part in parts:
            value = part(values)
            if bool(value) is ends_at:
                break
        return value

    return computed
