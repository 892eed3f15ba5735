"""The places of a module where one small change is tried, and the changed code.

Only bodies of functions are changed: their code can be exchanged in a running process, so that a
mutant needs no new interpreter. Messages, logging, assertions and defaults stay as they are.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}  # fmt: skip
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)
CALLS = "calls_of_the_mutant"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """The `number`th change of a module."""

    module: str
    function: str  # the outermost one, by its qualified name
    line: int
    change: str
    number: int
    identity: str  # the same for as long as the function stays as it is, wherever it lies

    @property
    def key(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.change} ({self.number})"


class _Site(NamedTuple):
    function: str
    body: str
    line: int
    change: str
    apply: Callable[[], None]


def mutants_of(module: str, source: Path) -> list[Mutant]:
    seen: Counter[str] = Counter()
    mutants = []
    for number, site in enumerate(_sites(ast.parse(source.read_text()))):
        named = f"{site.function} {seen[site.function]} {site.change} {site.body}"
        identity = hashlib.sha256(named.encode()).hexdigest()[:24]
        mutants.append(Mutant(module, site.function, site.line, site.change, number, identity))
        seen[site.function] += 1
    return mutants


def install(mutant: Mutant) -> list[None]:
    """Exchange the code of the function, in this process, for whoever holds it.

    The list that is returned grows with every call of the function.
    """
    module = import_module(mutant.module)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    next(site for n, site in enumerate(_sites(tree)) if n == mutant.number).apply()
    body = next(node.body for path, node in _outermost(tree, "") if path == mutant.function)
    body[:0] = ast.parse(f"{CALLS}.append(None)").body
    whole = compile(ast.fix_missing_locations(tree), module.__file__, "exec")
    changed = next(code for code in _codes(whole) if code.co_qualname == mutant.function)
    function = _function(module, mutant.function)
    function.__code__ = changed
    calls: list[None] = []
    function.__globals__[CALLS] = calls
    return calls


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _function(module: Any, name: str) -> FunctionType:
    """The plain function behind a method, a property or decorators."""
    *owners, last = name.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, last)
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, cached_property):
            found = found.func
        else:
            found = found.__func__ if hasattr(found, "__func__") else found.__wrapped__
    return found


def _sites(tree: ast.Module) -> Iterator[_Site]:
    for path, function in _outermost(tree, ""):
        body = _normalised(function)
        for statement in function.body:
            for node, line in _inside(statement):
                for change, apply in _changes(node):
                    yield _Site(path, body, line, change, apply)


def _normalised(function: Any) -> str:
    """What the function does, as text without docstrings, comments and layout."""
    body = [statement for statement in function.body if not _is_text(statement)]
    return "\n".join(ast.unparse(statement) for statement in body)


def _outermost(node: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _outermost(child, f"{prefix}{child.name}.")


def _inside(node: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """The node and what it contains, without annotations and what is never changed."""
    if isinstance(node, UNTOUCHED) or _is_text(node):
        return
    yield node, getattr(node, "lineno", 0)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _inside(child)


def _is_text(node: ast.AST) -> bool:
    """A docstring, or a line for the log."""
    return isinstance(node, ast.Expr) and (
        isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith("LOG.")
    )


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _swap(node.ops[0], lambda op: setattr(node, "ops", [op]))
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        yield from _swap(node.op, lambda op: setattr(node, "op", op))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        value = node.value
        other = not value if isinstance(value, bool) else value + 1
        yield f"{value} → {other}", lambda: setattr(node, "value", other)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        test = node.test
        negated = ast.UnaryOp(ast.Not(), test)
        text = ast.unparse(test)[:60]
        yield f"{text} → not", lambda: setattr(node, "test", negated)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        text = ast.unparse(node.value)[:60]
        yield f"{text} → nothing", lambda: setattr(node, "value", ast.Constant(None))


def _swap(op: Any, put: Callable[[Any], None]) -> Iterator[tuple[str, Callable[[], None]]]:
    if other := SWAPS.get(type(op)):
        yield f"{type(op).__name__} → {other.__name__}", lambda: put(other())
