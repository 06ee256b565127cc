"""What each key of `heddle.toml` means, read from the code of its section."""

import ast
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from heddle.command_config import Config

WIDTH = 98


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    """With its section, as ``cluster.gpus``."""
    kind: str
    """Its type, with bounds."""
    default: str
    """As TOML; None where a key without a value means something."""
    text: str
    """Its meaning."""


def reference() -> list[Key]:
    """Return all keys, those of a section together."""
    return list(_keys(Config, ""))


def template() -> str:
    """Return a heddle.toml in which every key is a comment with its default."""
    lines: list[str] = []
    section = ""
    for key in reference():
        where, _, name = key.name.rpartition(".")
        if where != section:
            lines += ["", f"[{where}]"]
            section = where
        lines += textwrap.wrap(key.text, WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"# {name} = {'' if key.default == 'None' else key.default}".rstrip())
    return "\n".join(lines).lstrip() + "\n"


def _keys(section: Any, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(section, include_extras=True)
    texts = _texts(section)
    ordered = sorted(fields(section), key=lambda each: is_dataclass(hints[each.name]))
    for each in ordered:
        hint = hints[each.name]
        if is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{each.name}.")
        else:
            yield Key(prefix + each.name, _kind(hint), _default(each), texts[each.name])


def _kind(hint: Any) -> str:
    """A type with its bounds, as ``int from 1 to 8 | None``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        first, *none = _kind(args[0]).split(" | ")
        return " | ".join((f"{first} {hint.__metadata__[0]}", *none))
    if origin is typing.Literal:
        return " | ".join(json.dumps(each) for each in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_kind, args))
    if origin is tuple:
        return f"list of {_kind(args[0])}"
    if origin is not None:
        return "table"
    if hint is type(None):
        return "None"
    return "table" if is_dataclass(hint) else str(hint.__name__)


def _default(each: "Field[Any]") -> str:
    value = each.default if each.default_factory is MISSING else each.default_factory()
    if value is MISSING:
        return "none: it must be given"
    return "None" if value is None else json.dumps(value)


def _texts(section: type) -> dict[str, str]:
    """The text of each field, as the code has it; those of base classes too."""
    texts: dict[str, str] = {}
    for cls in reversed(section.__mro__[:-1]):
        tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
        (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
        for node, after in zip(found.body, [*found.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                texts[node.target.id] = _string(after)
    return texts


def _string(node: ast.stmt | None) -> str:
    """The docstring of an attribute, which is the statement after it, in one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split()).replace("``", "`")
    return ""
