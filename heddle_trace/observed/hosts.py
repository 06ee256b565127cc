"""Clocks of hosts that differ by a constant, found from what cannot have come before what."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from heddle_trace.importers.clocks import SLACK_S
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.otel import attributes_of

LEAST_S: Final = 1e-3
_MOST: Final = 256
"""Hosts beyond which no offset is sought."""
_NAMES: Final = ("host.name", "service.instance.id", "service.name")


def spans_of_hosts(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Spans of a resource, or one by itself, with the name of the host or service."""
    for found, span in spans_of_resource(raw):
        yield str(next((found[name] for name in _NAMES if name in found), "")), span


def spans_of_resource(raw: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Spans of a resource, or one by itself, each with the attributes of the resource."""
    resource = raw.get("resource")
    found = attributes_of(resource) if isinstance(resource, dict) else {}
    scopes = raw.get("scopeSpans")
    if not isinstance(scopes, list):
        yield found, raw
        return
    for scope in scopes:
        spans = scope.get("spans") if isinstance(scope, dict) else None
        for span in spans if isinstance(spans, list) else ():
            if isinstance(span, dict):
                yield found, span


class HostClocks:
    """Hosts with their spans, and what of one is not before what of another."""

    def __init__(self) -> None:
        self.spans: Counter[str] = Counter()
        self._least: dict[tuple[str, str], float] = {}

    def after(self, earlier: str, at_s: float, later: str, later_s: float) -> None:
        """A time of host `later` is not before one of host `earlier`."""
        if earlier != later:
            known_s = self._least.get((earlier, later), -np.inf)
            self._least[earlier, later] = max(known_s, at_s - later_s)

    def offsets(self) -> dict[str, float]:
        """Seconds to add to each, as small as possible. Raises DamagedError if no constants fit."""
        hosts = [host for host, _ in self.spans.most_common()]
        if not 1 < len(hosts) <= _MOST:
            return {}
        least = np.full((len(hosts), len(hosts)), -np.inf)
        np.fill_diagonal(least, 0.0)
        for (earlier, later), seconds in self._least.items():
            least[hosts.index(earlier), hosts.index(later)] = seconds
        for k in range(len(hosts)):
            least = np.maximum(least, least[:, k, None] + least[None, k, :])
        if np.diagonal(least).max() > SLACK_S:
            raise DamagedError(
                f"the clocks of hosts ({', '.join(hosts)[:200]}) differ, and by no constant: "
                "diagnose the spans of one host, or of a time in which no clock was set"
            )
        found = np.zeros(len(hosts))
        for at in range(1, len(hosts)):
            low = (found[:at] + least[:at, at]).max()
            high = (found[:at] - least[at, :at]).min()
            found[at] = min(max(0.0, low), max(high, low))
        return {h: float(s) for h, s in zip(hosts, found, strict=True) if abs(s) >= LEAST_S}
