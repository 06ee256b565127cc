"""Writes docs/policy-attributes.md from the code: `python docs/policy_attributes.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "policy-attributes.md"
CORE = ROOT / "heddle_core"
HEAD = """# What a policy may read

Made from the code by `python docs/policy_attributes.py`; a test compares both. Times are seconds of
the driver's clock, which begins with the run. What is not listed here, such as the ledger's own
state, may change at any time, and a policy that reads it may see more than was observed.
[Write a policy](write-a-policy.md) explains when each method of a part is called.
"""
SECTIONS = (
    ("policy.py", "TrajectoryView", "`t`, a trajectory"),
    ("policy.py", "View", "`view`, the cluster and all trajectories"),
    ("policy.py", "EngineView", "An engine of the view"),
    ("policy.py", "PolicyContext", "`context`, of factories"),
    ("ids.py", "EngineShape", "The shape of an engine"),
    ("estimate/cost.py", "CostModel", "`context.cost`"),
    ("estimate/cost.py", "StepCost", "An entry of `context.cost.by_shape`"),
    ("estimate/history.py", "History", "`context.history`"),
    ("events.py", "StepFinished", "`event` of `observe_step`"),
    ("events.py", "ToolReturned", "`event` of `observe_tool`"),
)
"""File, class and heading of each table."""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(_section(*each) for each in SECTIONS)


def _section(file: str, name: str, heading: str) -> str:
    tree = ast.parse((CORE / file).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = classes[name]
    # What all events have is in a class of no public name.
    bases = [base.id for base in found.bases if isinstance(base, ast.Name) and base.id[0] == "_"]
    members = [each for own in (*bases, name) for each in _members(classes[own])]
    explained = any(text for *_, text in members)
    rows = [["name", "type", "meaning"], ["---", "---", "---"]]
    rows += [[f"`{what}`", f"`{kind}`", text] for what, kind, text in members]
    table = "\n".join(f"| {' | '.join(row if explained else row[:2])} |" for row in rows)
    about = " ".join((ast.get_docstring(found) or "").split())
    return f"\n## {heading}\n\n`{name}` of `heddle_core/{file}`. {about}\n\n{table}\n"


def _members(found: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name with parameters, type, and meaning of each public member, in the order of the code."""
    for node, after in zip(found.body, [*found.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, kind, text = node.target.id, ast.unparse(node.annotation), _string(after)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            name, kind, text = node.name, ast.unparse(node.returns), ast.get_docstring(node)
            if not any(ast.unparse(d) == "property" for d in node.decorator_list):
                name = f"{name}({_parameters(node.args)})"
        else:
            continue
        if not name.startswith("_"):
            yield name, kind.strip("'\"").replace("|", "\\|"), _sentences(text)


def _parameters(args: ast.arguments) -> str:
    return ", ".join(each.arg for each in [*args.args[1:], *args.kwonlyargs])


def _string(node: ast.stmt | None) -> str | None:
    """The docstring of an attribute, which is the statement after it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return None


def _sentences(text: str | None) -> str:
    """The first paragraph in one line, as a cell of a table."""
    line = " ".join((text or "").partition("\n\n")[0].split())
    return line.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
