"""A small mutation tester: every single change of one module that a slip of the hand could make, tried in this process.

    for mutant in mutants(source):
        module = mutant.load()          # the module as it would be with this one change

Deterministic, always in the same order.  What is changed: a comparison or `and`/`or` is turned round, a `not` or a
negated condition dropped, a number or a truth value replaced, a word of a set or table altered, a call, assignment or
raise left out, a returned value withheld, a filter dropped, `any`/`all`, `min`/`max`, `+`/`-` exchanged.
Messages for people (f-strings, reasons given to `need` or returned, docstrings) are not: tests may not pin words.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
Change = tuple[str, Callable[[], Callable[[], None]]]
"""(what is changed, a function that does it and returns its undoing)"""


@dataclass(frozen=True)
class Mutant:
    """``line`` is the source line of the change, stripped; with ``change`` it names the mutant."""

    line: str
    number: int
    change: str
    code: object

    def load(self) -> ModuleType:
        module = ModuleType("mutant")
        exec(self.code, module.__dict__)  # type: ignore[arg-type]
        return module


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant that is still Python, one after the other."""
    tree, lines = ast.parse(source), source.splitlines()
    for node, change, apply in list(_sites(tree)):
        undo = apply()
        code = compile(ast.fix_missing_locations(tree), "mutant", "exec")
        undo()
        number = getattr(node, "lineno", 0) or node.target.lineno  # type: ignore[attr-defined]  # a comprehension
        yield Mutant(lines[number - 1].strip(), number, change, code)


def _sites(tree: ast.Module) -> Iterator[tuple[ast.AST, str, Callable[[], Callable[[], None]]]]:
    silent = _messages(tree)
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        for change, apply in _changes(node):
            yield node, change, apply
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                for index, statement in enumerate(body):
                    if id(statement) not in silent and _may_be_left_out(statement):
                        yield statement, f"left out: {ast.unparse(statement)[:60]}", _put(body, index, ast.Pass())


def _messages(tree: ast.Module) -> set[int]:
    """Nodes inside what only people read."""
    found: set[int] = set()
    for node in ast.walk(tree):
        texts: list[ast.AST] = []
        if isinstance(node, ast.JoinedStr):
            texts = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("need", "print"):
            texts = list(node.args[1:] if node.func.id == "need" else node.args)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = list(node.exc.args)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value:
            texts = [node.value]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts = [node]
        found |= {id(inner) for text in texts for inner in ast.walk(text)}
    return found


def _may_be_left_out(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Expr, ast.AugAssign, ast.Raise, ast.For, ast.If))


def _put(where: object, key: object, value: object) -> Callable[[], Callable[[], None]]:
    """Set an item of a list or an attribute of a node; the result of calling it puts the old one back."""

    def set_(new: object) -> None:
        if isinstance(where, list):
            where[key] = new  # type: ignore[index]
        else:
            setattr(where, str(key), new)

    def apply() -> Callable[[], None]:
        old = where[key] if isinstance(where, list) else getattr(where, str(key))  # type: ignore[index]
        set_(value)
        return lambda: set_(old)

    return apply


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            new = COMPARISONS[type(op)]
            yield f"{type(op).__name__} → {new.__name__} in {ast.unparse(node)[:60]}", _put(node.ops, i, new())
    elif isinstance(node, ast.BoolOp):
        new = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"and ↔ or in {ast.unparse(node)[:60]}", _put(node, "op", new)
        for i, value in enumerate(node.values):
            neutral = ast.Constant(isinstance(node.op, ast.And))
            yield f"without {ast.unparse(value)[:60]}", _put(node.values, i, neutral)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"without not: {ast.unparse(node)[:60]}", _put(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield "+ ↔ -", _put(node, "op", ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        yield "| ↔ &", _put(node, "op", ast.BitAnd() if isinstance(node.op, ast.BitOr) else ast.BitOr())
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield f"{node.id} → {NAMES[node.id]}", _put(node, "id", NAMES[node.id])
    elif isinstance(node, ast.Return) and node.value is not None:
        yield f"returns nothing instead of {ast.unparse(node.value)[:50]}", _put(node, "value", ast.Constant(None))
    elif isinstance(node, ast.If):
        yield f"if not: {ast.unparse(node.test)[:60]}", _put(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.IfExp):
        yield f"else first: {ast.unparse(node)[:60]}", _put(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            yield f"without filter {ast.unparse(test)[:60]}", _put(node.ifs, i, ast.Constant(True))


def _constant(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield f"{value} → {not value}", _put(node, "value", not value)
    elif isinstance(value, int):
        yield f"{value} → {value + 1}", _put(node, "value", value + 1)
    elif isinstance(value, str) and value:
        yield f"{value!r} altered", _put(node, "value", value + "~")
