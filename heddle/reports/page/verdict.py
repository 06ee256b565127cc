"""The difference of two makespans in one sentence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from heddle.comparison.estimates import estimate

SMALL: Final = 0.1
"""Parts below this share of the largest are left out of the sentence."""

MOST_PARTS: Final = 2
"""Parts named on each side."""


def verdict(rows: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]] | None) -> str:
    """One row alone, or the best against the reference, with the largest parts of the difference.

    `rows` and `steps` are as `heddle.reports.page.why` makes them.
    """
    reference = rows[0]
    if len(rows) == 1:
        return _alone(reference)
    best = rows[1]
    change_s = best["mean_s"] - reference["mean_s"]
    share = abs(change_s) / reference["mean_s"] if reference["mean_s"] else 0.0
    shown = " (it was shown the future: a bound, not a result)" if best["oracle"] else ""
    if round(abs(change_s), 1) == 0.0:
        names = f"{best['label']}{shown} and {reference['label']}"
        return f"{names} take the same time, {_s(reference['mean_s'])}."
    by = f"{_s(abs(change_s))} ({share:.1%})".replace("%", " %")
    if change_s < 0:
        said = f"{best['label']}{shown} ends {by} sooner than {reference['label']}"
    else:
        said = (
            f"No other run ends sooner than {reference['label']}: "
            f"{best['label']}{shown}, the next, ends {by} later"
        )
    because = _because(rows, steps, change_s)
    return f"{said}{_spread(reference, best)}{f': {because}' if because else ''}."


def _alone(row: Mapping[str, Any]) -> str:
    if not row["finished"]:
        return f"{row['label']} did not finish: these are its first {_s(row['mean_s'])}."
    over = f" (± {_s(row['ci95_s'])} at 95 %)" if row["ci95_s"] is not None else ""
    said = f"{row['label']} takes {_s(row['mean_s'])}{over}"
    if row["last"] is None or not row["mean_s"]:
        return f"{said}."
    seconds = row["last"]["seconds"]
    largest = sorted(seconds, key=lambda part: -seconds[part])[:3]
    listed = [
        f"{seconds[part] / row['mean_s']:.0%} {_ALONE[part]}".replace("%", " %")
        for part in largest
        if seconds[part] >= 0.005 * row["mean_s"]
    ]
    return f"{said}; its last trajectory is {_listed(listed)}."


_ALONE: Final = {
    "arrival": "before its arrival",
    "waiting": "waiting",
    "prefill": "in prefill",
    "decode": "in decode",
    "tool": "in tools",
    "lost": "on engines that failed",
    "rest": "in none of these",
}


def _spread(reference: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """Of runs with several seeds in common: the interval of the mean difference, seed by seed."""
    ends = [dict(zip(row["seeds"], row["each_s"], strict=True)) for row in (reference, best)]
    shared = [seed for seed in ends[0] if seed in ends[1]]
    if ends[0].keys() != ends[1].keys():
        return ", means of other seeds" if max(map(len, ends)) > 1 else ""
    if len(shared) < 2:
        return ""
    found = estimate([ends[1][seed] - ends[0][seed] for seed in shared])
    assert found.ci95 is not None
    within = abs(found.mean) <= found.ci95
    doubt = ", so the sign is not certain" if within else ""
    return f" in the mean of {len(shared)} seeds (± {_s(found.ci95)} at 95 %{doubt})"


def _because(
    rows: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]] | None,
    change_s: float,
) -> str:
    """The largest parts of the difference: those that make it, and those against it."""
    if steps is None:
        return ""
    floor = SMALL * max(abs(each["seconds"]) for each in steps)
    large = sorted(
        (each for each in steps if abs(each["seconds"]) >= max(floor, 0.05)),
        key=lambda each: -abs(each["seconds"]),
    )
    parts = [
        [
            _PHRASES[each["part"]](each["seconds"], rows)
            for each in large
            if (each["seconds"] * change_s > 0) is agrees
        ][:MOST_PARTS]
        for agrees in (True, False)
    ]
    made, against = (_listed(each) for each in parts)
    if not made and not against:
        return ""
    return f"its last trajectory {', but '.join(filter(None, (made, against)))}"


def _tokens(seconds: float, rows: Sequence[Mapping[str, Any]]) -> str:
    a, b = (row["last"]["intervals"] for row in rows)
    return f"has {abs(b - a):,.0f} {_less(seconds, 'fewer')} tokens ({_signed(seconds)})"


def _tpot(seconds: float, rows: Sequence[Mapping[str, Any]]) -> str:
    a, b = (row["last"]["tpot_ms"] or 0.0 for row in rows)
    way = "faster" if seconds < 0 else "slower"
    return f"decodes {way}, at {b:.1f} against {a:.1f} ms per token ({_signed(seconds)})"


_PHRASES: Final[Mapping[str, Callable[[float, Sequence[Mapping[str, Any]]], str]]] = {
    "arrival": lambda s, rows: f"arrives {_s(abs(s))} {'earlier' if s < 0 else 'later'}",
    "waiting": lambda s, rows: f"waits {_s(abs(s))} {_less(s)}",
    "prefill": lambda s, rows: f"prefills for {_s(abs(s))} {_less(s)}",
    "tokens": _tokens,
    "tpot": _tpot,
    "tool": lambda s, rows: f"is in tools for {_s(abs(s))} {_less(s)}",
    "lost": lambda s, rows: f"loses {_s(abs(s))} {_less(s)} to failures of engines",
    "rest": lambda s, rows: f"spends {_s(abs(s))} {_less(s)} between its steps",
}


def _less(seconds: float, less: str = "less") -> str:
    return less if seconds < 0 else "more"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _s(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{_s(abs(seconds))}"
