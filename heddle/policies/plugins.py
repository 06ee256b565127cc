"""From names to policies and parts, those of other packages included.

``PRESET`` or ``PRESET+PART+PART``. A name is one of `PRESETS` or of `PARTS`, an entry point of the
group ``heddle.policies`` or ``heddle.parts``, or ``package.module:factory``. The factory of a part
declares its kind by its return annotation: ``def mine(context: PolicyContext) -> Placement``.
Loaded objects are compared with the protocols of `heddle_core.policy` before use;
docs/write-a-policy.md shows how to write one.
"""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any, get_type_hints

from heddle_core.hooks import FURTHER
from heddle_core.parts.migration import Never
from heddle_core.parts.planner import EqualProgressPlan
from heddle_core.parts.table import KINDS, PARTS, Kind, Part, kind_of
from heddle_core.policy import Policy, PolicyContext, Predictor
from heddle_core.presets import ADAPTIVE, PRESETS, adaptive

ENTRY_POINTS = "heddle.policies"
PART_ENTRY_POINTS = "heddle.parts"

PRESETS_THAT_WENT: Mapping[str, str] = {
    "heddle-no-migration": "heddle+never",
    "heddle-no-placement": "heddle+sticky+never",
    "heddle-no-plan": "heddle+fixed+keep_engines",
    "heddle-no-priority": "heddle+fcfs",
    "heddle-no-widening": "heddle+keep_engines",
}
"""Presets of heddle 0.1, and the policies that decide the same."""


class PolicyError(ValueError):
    """A policy or a part was found but cannot be used."""


class PolicyNotFound(ValueError):  # noqa: N818 -- reads as what happened
    """No policy or part has this name; the message lists the known ones."""


def load_policy(
    name: str,
    context: PolicyContext,
    *,
    extra: Mapping[str, Part[Predictor]] = MappingProxyType({}),
) -> Policy:
    """Return a new policy by its `name`.

    ``+PART`` puts a part in place of the preset's own: ``heddle+never``, ``verl+lpt+progressive``.
    ``+adaptive`` is `heddle_core.presets.adaptive`.
    `extra` adds predictors that only the caller can make, such as an oracle.

    Raises:
        PolicyNotFound: nothing has this name; the message lists the known ones and the nearest.
        PolicyError: it was found, but importing or calling it failed or gave something else.
    """
    base, *parts = name.split("+")
    factory = PRESETS.get(base) or _installed(base, ENTRY_POINTS)
    if factory is None and ":" in base:
        factory = _imported(base)
    if factory is None:
        raise PolicyNotFound(_unknown(base))
    try:
        policy = factory(context)
    except Exception as error:
        raise PolicyError(f"policy {base!r} cannot be built: {_reason(error)}") from error
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"policy {base!r}: its factory returned {type(policy).__name__}, "
            "not heddle_core.policy.Policy"
        )
    if base not in PRESETS:
        check(f"policy {base!r}", {kind: getattr(policy, kind) for kind in KINDS})
    own = [part for part in parts if part != ADAPTIVE]
    policy = replace(policy, **dict(load_part(part, context, extra=extra) for part in own))
    if isinstance(policy.migration, Never) and isinstance(policy.planner, EqualProgressPlan):
        # Two TP degrees pay by moves.
        policy = replace(policy, planner=EqualProgressPlan(context, mixes=False))
    return policy if own == parts else adaptive(policy, context)


def foreign_names(name: str, extra: Collection[str]) -> list[str]:
    """Return the parts of a name that `load_policy` with the same `extra` would import."""
    base, *parts = name.split("+")
    return [n for n in (base, *(p for p in parts if p not in extra)) if ":" in n]


def load_part(
    name: str,
    context: PolicyContext,
    *,
    extra: Mapping[str, Part[Predictor]] = MappingProxyType({}),
) -> tuple[Kind, Any]:
    """Return the kind of a part, which is the field of `Policy` that it fills, and a new part.

    Raises:
        PolicyNotFound: nothing has this name.
        PolicyError: it was found, but cannot be used.
    """
    kind: Kind | None
    make: Callable[[PolicyContext], Any] | None
    if name in extra:
        kind, make = "predictor", extra[name].make
    elif (kind := kind_of(name)) is not None:
        make = PARTS.of(kind)[name].make
    else:
        make = _installed(name, PART_ENTRY_POINTS) or (_imported(name) if ":" in name else None)
        if make is None:
            known = [ADAPTIVE, *extra, *(part for k in KINDS for part in PARTS.of(k))]
            near = _nearest(name, known)
            raise PolicyNotFound(f"no part is called {name!r}.{near} Parts: {', '.join(known)}")
        kind = _declared(name, make)
    try:
        part = make(context)
    except Exception as error:
        raise PolicyError(f"part {name!r} cannot be built: {_reason(error)}") from error
    if name not in extra and kind_of(name) is None:
        check(f"part {name!r}", {kind: part})
    return kind, part


def check(name: str, parts: Mapping[Kind, object]) -> None:
    """Compare parts with the protocols of their kinds: names and numbers of parameters.

    Raises:
        PolicyError: names everything that is missing.
    """
    protocols = get_type_hints(Policy)
    wrong = [
        f"{kind} {type(part).__name__} {lack}"
        for kind, part in parts.items()
        for protocol in (protocols[kind], *_further(kind, part))
        for lack in _lacks(part, protocol)
    ]
    if wrong:
        raise PolicyError(f"{name}: {'; '.join(wrong)}. docs/write-a-policy.md lists what to have")


def _further(kind: Kind, part: object) -> list[type]:
    """Protocols of further methods of which `part` has some: it needs all of such a protocol."""
    return [
        protocol
        for protocol in FURTHER.get(kind, ())
        if any(hasattr(part, name) for name in vars(protocol) if not name.startswith("_"))
    ]


def _lacks(part: object, protocol: type) -> list[str]:
    """Members of `protocol` that `part` lacks, each as the end of a sentence."""
    found = []
    for name, member in vars(protocol).items():
        if name.startswith("_"):
            continue
        has = getattr(part, name, None)
        if isinstance(member, property):
            if not hasattr(part, name):
                found.append(f"lacks the property {name}")
            elif callable(has):
                found.append(f"has a method {name}, which should be a property")
            continue
        wanted = list(inspect.signature(member).parameters)[1:]
        call = f"{name}({', '.join(wanted)})"
        if not callable(has):
            found.append(f"lacks the method {call}")
            continue
        signature = inspect.signature(has)
        try:
            signature.bind(*wanted)
        except TypeError:
            found.append(f"has {name}{signature}, which should be {call}")
    return found


def _declared(name: str, make: Callable[..., Any]) -> Kind:
    """The kind that the factory of a part declares by its return annotation."""
    try:
        made = make if isinstance(make, type) else get_type_hints(make).get("return")
    except Exception as error:
        raise PolicyError(
            f"part {name!r}: its factory's annotations cannot be read: {_reason(error)}"
        ) from error
    protocols = get_type_hints(Policy)
    for kind in KINDS:
        if protocols[kind] in getattr(made, "__mro__", ()):
            return kind
    names = ", ".join(protocols[kind].__name__ for kind in KINDS)
    raise PolicyError(
        f"part {name!r}: its factory declares no kind of part. Annotate its return as one of "
        f"{names} (heddle_core.policy)"
    )


def installed_policies() -> tuple[str, ...]:
    """Names that installed packages offer in the entry-point group, in alphabetical order."""
    # Imported here because it is slow to import, and few runs need it.
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=ENTRY_POINTS).names))


def _installed(name: str, group: str) -> Callable[[PolicyContext], Any] | None:
    from importlib.metadata import entry_points

    for point in entry_points(group=group, name=name):
        try:
            return _callable(point.load(), name)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(
                f"{name!r} is offered as {point.value!r}, which fails to load: {_reason(error)}"
            ) from error
    return None


def _imported(name: str) -> Callable[[PolicyContext], Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise PolicyNotFound(f"{name!r} is not of the form package.module:factory")
    # A command has the folder of its program in the path, not the one that it is called in.
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = import_module(module_name)
    except Exception as error:
        raise PolicyError(f"{name!r}: cannot import {module_name}: {_reason(error)}") from error
    if not hasattr(module, attribute):
        raise PolicyNotFound(f"{name!r}: module {module_name} has no {attribute!r}")
    return _callable(getattr(module, attribute), name)


def _callable(found: object, name: str) -> Callable[[PolicyContext], Any]:
    if not callable(found):
        raise PolicyError(
            f"{name!r} is {type(found).__name__}, not a function that takes a PolicyContext"
        )
    return found


def _unknown(name: str) -> str:
    if name in PRESETS_THAT_WENT:
        return f"the preset {name!r} is {PRESETS_THAT_WENT[name]!r} now"
    known = [*PRESETS, *(p for p in installed_policies() if p not in PRESETS)]
    return (
        f"no policy is called {name!r}.{_nearest(name, known)} Known: {', '.join(known)}; "
        "or name your own as package.module:factory."
    )


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
