"""Clients with keys of their own: who they are, and how much each may ask for."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final

import msgspec

from heddle_gateway.errors import ApiError

BURST_S: Final = 10.0
"""A tenant that was silent may send what it may send in so many seconds at once."""
UNNAMED: Final = "_"
"""Who has the key that is not in the file; no tenant can have this name."""
_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"


class TenantsError(ValueError):
    """A file of keys cannot be used; names the file and what is wrong in it."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of a file of keys."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Of the key."""
    requests_per_minute: Annotated[float, msgspec.Meta(gt=0.0)] = math.inf
    concurrent: Annotated[int, msgspec.Meta(ge=1)] = 1 << 30
    """Steps at once."""
    priority: Annotated[int, msgspec.Meta(ge=-9, le=9)] = 0
    """Its steps go before all of lower ones."""


_Tables = dict[Annotated[str, msgspec.Meta(pattern=_NAME)], Tenant]


def read_tenants(path: Path) -> Mapping[str, Tenant]:
    """Read a TOML file with a table for each name.

    Raises:
        TenantsError: it cannot be read, names nobody, or has a wrong field, or a key twice.
    """
    try:
        found = msgspec.convert(tomllib.loads(path.read_text()), _Tables)
    except OSError as error:
        raise TenantsError(f"serve.keys: {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TenantsError(
            f"serve.keys: {path}: {error}. Give each name a table with sha256, as "
            "`printf %s KEY | sha256sum` prints it"
        ) from None
    if not found:
        remedy = "give each tenant a table, or leave serve.keys out"
        raise TenantsError(f"serve.keys: {path} names nobody: {remedy}")
    names: dict[str, str] = {}
    for name, tenant in found.items():
        if tenant.sha256 == sha256().hexdigest():
            text = f"the key of {name} is empty, so all without a key would be {name}"
            raise TenantsError(f"serve.keys: {path}: {text}")
        if (other := names.setdefault(tenant.sha256, name)) != name:
            raise TenantsError(f"serve.keys: {path}: {other} and {name} have the same key")
    return found


@dataclass(slots=True)
class _Use:
    """What a tenant uses now."""

    steps: int = 0
    spent: float = 0.0
    """Requests that were not earned back yet."""
    at_s: float = 0.0


@dataclass(slots=True)
class Tenants:
    """Finds tenants by their keys, and holds them to their limits."""

    path: Path | None = None
    """None: nobody has a key of their own."""
    by_name: Mapping[str, Tenant] = field(default_factory=dict)
    _names: Mapping[str, str] = field(default_factory=dict)
    uses: dict[str, _Use] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reload()

    def reload(self) -> None:
        """Read the file again; what tenants use goes on.

        Raises:
            TenantsError: it cannot be used, and the keys are as before.
        """
        if self.path is None:
            return
        self.by_name = read_tenants(self.path)
        self._names = {tenant.sha256: name for name, tenant in self.by_name.items()}

    def name_of(self, key: str) -> str | None:
        """Return who has a key; None: nobody."""
        return self._names.get(sha256(key.encode(errors="replace")).hexdigest())

    def tier(self, name: str) -> int:
        """Return the priority of a tenant."""
        tenant = self.by_name.get(name)
        return tenant.priority if tenant is not None else 0

    def count(self, name: str, now_s: float) -> None:
        """Count a request.

        Raises:
            ApiError: it is one too many; says when the next is not.
        """
        tenant = self.by_name.get(name)
        if tenant is None or tenant.requests_per_minute == math.inf:
            return
        use, rate = self.uses.setdefault(name, _Use(at_s=now_s)), tenant.requests_per_minute / 60
        use.spent = max(0.0, use.spent - rate * (now_s - use.at_s))
        use.at_s = now_s
        over = use.spent + 1.0 - max(1.0, BURST_S * rate)
        if over > 0.0:
            text = f"{name} may send {tenant.requests_per_minute:g} requests a minute"
            raise _too_many(text, retry_after_s=math.ceil(over / rate))
        use.spent += 1.0

    @contextmanager
    def holding(self, name: str, steps: int) -> Iterator[None]:
        """Count steps while they are under way.

        Raises:
            ApiError: they are too many, now or at any time.
        """
        tenant, use = self.by_name.get(name), self.uses.setdefault(name, _Use())
        if tenant is not None and steps > tenant.concurrent:
            text = f"this asks for {steps} answers, and {name} may have {tenant.concurrent} at once"
            raise ApiError(400, text, param="n", ours=True)
        if tenant is not None and use.steps + steps > tenant.concurrent:
            raise _too_many(f"{name} may have {tenant.concurrent} steps at once", retry_after_s=1)
        use.steps += steps
        try:
            yield
        finally:
            use.steps -= steps


def _too_many(message: str, *, retry_after_s: int) -> ApiError:
    kind = "rate_limit_error"
    return ApiError(429, message, kind=kind, code="rate_limit", retry_after_s=retry_after_s)
