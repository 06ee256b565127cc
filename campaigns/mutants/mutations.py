"""Planted faults: one operator, constant or statement of a module changed."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

COMPARED: Final = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
CALCULATED: Final = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
RENAMED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a tree, in place."""

    line: int
    what: str
    apply: Callable[[], None]


def mutations(tree: ast.Module) -> list[Mutation]:
    """Return all changes of a module, in the order of its nodes."""
    return [m for node in _walk(tree) for m in _of(node)]


def mutated(source: str, number: int) -> tuple[Mutation, str]:
    """Return a change by its number, and the source after it."""
    tree = ast.parse(source)
    mutation = mutations(tree)[number]
    mutation.apply()
    return mutation, ast.unparse(ast.fix_missing_locations(tree))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, texts, assertions, errors and what only types see."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(
                child, ast.JoinedStr | ast.Assert | ast.Raise | ast.Import | ast.ImportFrom
            ):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from _walk(child)


def _of(node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            yield _replaced(node, "ops", [COMPARED[type(op)]()])
        case ast.BinOp(op=op) if type(op) in CALCULATED:
            yield _replaced(node, "op", CALCULATED[type(op)]())
        case ast.AugAssign(op=op) if type(op) in CALCULATED:
            yield _replaced(node, "op", CALCULATED[type(op)]())
        case ast.BoolOp(op=ast.And()):
            yield _replaced(node, "op", ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield _replaced(node, "op", ast.And())
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield _replaced(node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool() as value):
            yield _replaced(node, "value", not value)
        case ast.Constant(value=int() as value):
            yield _replaced(node, "value", value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in RENAMED:
            yield _replaced(node, "func", ast.Name(RENAMED[name], ast.Load()))
    body: object = getattr(node, "body", None)
    if isinstance(body, list) and not isinstance(node, ast.ClassDef):
        for i, statement in enumerate(body):
            if _can_go(statement):
                yield _removed(body, i)


def _can_go(statement: ast.stmt) -> bool:
    """Whether a statement has an effect beyond names of its function."""
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete() | ast.AugAssign():
            return True
        case ast.Continue() | ast.Break():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case _:
            return False


def _replaced(node: ast.AST, name: str, value: object) -> Mutation:
    before = ast.unparse(node)
    line = getattr(node, "lineno", 0)

    def apply() -> None:
        setattr(node, name, value)

    return Mutation(line, f"{before.splitlines()[0][:80]}: other {name}", apply)


def _removed(body: list[ast.stmt], i: int) -> Mutation:
    statement = body[i]

    def apply() -> None:
        body[i] = ast.Pass()

    return Mutation(statement.lineno, f"without {ast.unparse(statement)[:80]}", apply)
