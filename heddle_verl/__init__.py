"""Heddle in verl: a router for `rollout.router_config_path`; see docs/frameworks.md.

`ray` and `verl` are those of the environment that trains. Agent loops import this package, too, so
what only the router needs is imported with it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `Router`, the class that verl loads by its name."""
    if name == "Router":
        from heddle_verl.router import Router

        return Router
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
