"""Patterns written on the command line as they are in Python, parsed from the syntax tree without `eval`."""

from __future__ import annotations

import ast
import difflib
import warnings
from typing import TYPE_CHECKING, Any

import gossamer
from gossamer import patterns
from gossamer.cli.errors import Refused
from gossamer.patterns.neighborhood import BORDERS

if TYPE_CHECKING:
    from gossamer import Pattern

# Predicate takes a function, which has no form here.
NAMES = tuple(name for name in patterns.__all__ if name not in ("Pattern", "Predicate"))
METHODS = {"Document.from_cu_seqlens"}
ACCEPTED = f"accepted are {', '.join(NAMES)} with numbers, lists and named arguments, joined by &, | and ~"
MAX_LENGTH = 20_000
MAX_DEPTH = 100
SHOWN = 60  # characters of the expression in a message


class ExpressionError(Refused):
    """The text is not a pattern; the message shows the expression, the place and what is accepted."""

    def __init__(self, problem: str, text: str, column: int | None = None, accepted: str = ACCEPTED) -> None:
        place = "" if column is None else f" at column {column + 1}"
        super().__init__(f"{problem}{place} of {_excerpt(text, column or 0)!r}; {accepted}")


def parse_pattern(text: str) -> Pattern:
    """The pattern that `text` describes, such as "SlidingWindow(256) | BigBird(64)".

    Raises ExpressionError (a ValueError) for anything but public pattern names, literals, lists and tuples,
    positional and named arguments, `&`, `|`, `~` and parentheses.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"pattern of {len(text)} characters, at most {MAX_LENGTH}", text)
    source = " ".join(text.split())
    if not source:
        raise ExpressionError("empty pattern", text)
    value = _Reader(source).value(_tree(source), 0)
    if not _is_pattern(value):
        raise ExpressionError(f"a pattern is expected, got {_describe(value)}", source, 0)
    return value


def _tree(source: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(source, mode="eval").body
    except SyntaxError as error:
        column = max((error.offset or 1) - 1, 0)
        raise ExpressionError(f"cannot read the pattern ({error.msg})", source, column) from None
    except ValueError as error:  # null bytes, surrogates
        raise ExpressionError(f"cannot read the pattern ({error})", source) from None
    except (MemoryError, RecursionError):
        raise ExpressionError("cannot read the pattern (nested too deeply)", source) from None


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source

    def error(self, problem: str, node: ast.expr, accepted: str = ACCEPTED) -> ExpressionError:
        # The tree counts bytes of UTF-8.
        column = len(self.source.encode()[: node.col_offset].decode(errors="replace"))
        return ExpressionError(problem, self.source, column, accepted)

    def value(self, node: ast.expr, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(f"pattern nested more than {MAX_DEPTH} deep", node)
        match node:
            case ast.Constant(value=bool() | int() | float() | None as literal):
                return literal
            case ast.Constant(value=str() as word) if word in BORDERS:  # no other argument is a word
                return word
            case ast.List(elts=items):
                return [self.value(item, depth + 1) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item, depth + 1) for item in items)
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as op, right=right):
                return self.combine(node, op, self.pattern(left, depth + 1), self.pattern(right, depth + 1))
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~self.pattern(operand, depth + 1)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                return self.signed(node, op, self.value(operand, depth + 1))
            case ast.Call():
                return self.call(node, depth)
            case ast.Name(id=name) if name in NAMES:
                raise self.error(f"{name} has no arguments; write {name}(...)", node)
            case ast.Name(id=name):
                raise self.unknown(name, node)
        raise self.error(f"{ast.unparse(node)[:SHOWN]!r} is not accepted in a pattern", node)

    def pattern(self, node: ast.expr, depth: int) -> Pattern:
        value = self.value(node, depth)
        if not _is_pattern(value):
            raise self.error(f"&, | and ~ join patterns, got {_describe(value)}", node)
        return value

    def combine(self, node: ast.expr, op: ast.operator, left: Pattern, right: Pattern) -> Pattern:
        try:
            return left & right if isinstance(op, ast.BitAnd) else left | right
        except (TypeError, ValueError) as error:
            raise self.error(f"these patterns do not join ({error})", node) from None

    def signed(self, node: ast.expr, op: ast.unaryop, number: Any) -> Any:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self.error(f"a sign needs a number, got {_describe(number)}", node)
        return -number if isinstance(op, ast.USub) else number

    def call(self, node: ast.Call, depth: int) -> Pattern:
        constructor = self.constructor(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            if isinstance(argument, ast.Starred):
                raise self.error("* is not accepted in a pattern", argument)
        arguments = [self.value(argument, depth + 1) for argument in node.args]
        named = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.error("** is not accepted in a pattern", keyword.value)
            if keyword.arg in named:
                raise self.error(f"the argument {keyword.arg} is repeated", keyword.value)
            named[keyword.arg] = self.value(keyword.value, depth + 1)
        try:
            return constructor(*arguments, **named)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.error(f"{ast.unparse(node.func)}: {error}", node, _signature(constructor)) from None

    def constructor(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name in NAMES:
                return getattr(gossamer, name)
            case ast.Name(id="Predicate"):
                raise self.error("Predicate takes a Python function and cannot be written here", node)
            case ast.Name(id=name):
                raise self.unknown(name, node)
            case ast.Attribute(value=ast.Name(id=name), attr=method) if f"{name}.{method}" in METHODS:
                return getattr(getattr(gossamer, name), method)
        raise self.error(f"{ast.unparse(node)[:SHOWN]!r} is not the name of a pattern", node)

    def unknown(self, name: str, node: ast.expr) -> ExpressionError:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return self.error(f"unknown pattern {name[:SHOWN]!r}{hint}", node)


def _is_pattern(value: Any) -> bool:
    return isinstance(value, gossamer.Pattern)


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:SHOWN]


def _signature(constructor: Any) -> str:
    import inspect

    parameters = inspect.signature(constructor).parameters.values()
    shown = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    owner = getattr(constructor, "__self__", None)
    name = f"{owner.__name__}.{constructor.__name__}" if owner is not None else constructor.__name__
    return f"accepted is {name}({', '.join(shown)})"


def _excerpt(text: str, column: int) -> str:
    if len(text) <= 2 * SHOWN:
        return text
    start = max(0, min(column - SHOWN, len(text) - 2 * SHOWN))
    end = start + 2 * SHOWN
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
