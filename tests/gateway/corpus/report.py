"""Reports of a comparison, for people and for programs."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tests.gateway.corpus.answers import Answer
from tests.gateway.corpus.compare import Difference
from tests.gateway.corpus.run import Compared, Outcome

_SHOWN: Final = 1500
"""Characters of a body or an answer in a report for people."""
_PLACES: Final = 12
"""Differences of one answer in a report for people."""


def share(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """Return how many requests were answered equally, and how many count."""
    each = list(outcomes)
    counted = sum(len(outcome.counted) for outcome in each)
    return counted - sum(len(outcome.unequal) for outcome in each), counted


def markdown(outcomes: Sequence[Outcome], *, title: str) -> str:
    """Return the report for people: counts, then each difference with request and answers."""
    equal, counted = share(outcomes)
    percent = f"{equal / counted:.1%}" if counted else "none"
    lines = [
        f"# {title}",
        "",
        f"{equal} of {counted} requests are answered equally ({percent}).",
        "",
    ]
    lines += ["| group | requests | count | equal | alone | among others | seconds |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for outcome in outcomes:
        counted_here = outcome.counted
        lines.append(
            f"| {outcome.group} | {len(outcome.compared)} | {len(counted_here)} "
            f"| {len(counted_here) - len(outcome.unequal)} "
            f"| {sum(not each.of_alone for each in counted_here)} "
            f"| {sum(not each.of_among for each in counted_here)} | {outcome.took_s:.0f} |"
        )
    lines += ["", "| area | count | equal |", "|---|---|---|"]
    every = [each for outcome in outcomes for each in outcome.counted]
    for area in dict.fromkeys(each.request.area for each in every):
        here = [each for each in every if each.request.area == area]
        lines.append(f"| {area} | {len(here)} | {sum(each.equal for each in here)} |")
    lines += ["", "| status of vLLM | requests | equal |", "|---|---|---|"]
    for status, number in sorted(Counter(each.expected.status for each in every).items()):
        equal_here = sum(each.equal for each in every if each.expected.status == status)
        lines.append(f"| {status} | {number} | {equal_here} |")
    lines += ["", "## Fields that differ", "", "| field | requests |", "|---|---|"]
    lines += [f"| `{place}` | {number} |" for place, number in _fields(every).most_common()]
    lines += ["", *_left_out(outcomes), *_chunks(every), "", "## Differences", ""]
    for outcome in outcomes:
        for each in outcome.unequal:
            lines += _shown(outcome.group, each)
    return "\n".join(lines) + "\n"


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Return everything: each request, its answers, and where they differ."""
    return json.dumps(
        [
            {
                "group": outcome.group,
                "name": each.request.name,
                "area": each.request.area,
                "counts": each.counts,
                "equal": each.equal,
                "varying": list(each.varying),
                "chunks": list(each.chunks),
                "request": {
                    "method": each.request.method,
                    "path": each.request.path,
                    "headers": dict(each.request.headers),
                    "content": each.request.content.decode(errors="backslashreplace"),
                },
                "expected": _answer(each.expected),
                "alone": _answer(each.alone),
                "among": _answer(each.among),
                "differences": {
                    "alone": [_difference(one) for one in each.of_alone],
                    "among": [_difference(one) for one in each.of_among],
                },
            }
            for outcome in outcomes
            for each in outcome.compared
        ],
        indent=1,
        ensure_ascii=False,
    )


def one_line(each: Compared) -> str:
    """Return where a request's answers differ, in a line."""
    found = each.of_alone or each.of_among
    when = "" if each.of_alone else " (among others)"
    first = "; ".join(
        f"{one.place}: {_cut(repr(one.expected), 100)} != {_cut(repr(one.found), 100)}"
        for one in found[:3]
    )
    return f"{each.request.area}: {each.request.name}{when}: {first}"


def _fields(compared: Iterable[Compared]) -> Counter[str]:
    fields: Counter[str] = Counter()
    for each in compared:
        found = [*each.of_alone, *each.of_among]
        fields.update({_field(one.place) for one in found})
    return fields


def _field(place: str) -> str:
    """A place without positions and without what follows a field that holds texts."""
    parts = place.replace("[", ".[").split(".")
    kept = [part for part in parts if not part.startswith("[") and part != "length"]
    return ".".join(kept[:4])


def _left_out(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["## Not compared", ""]
    for outcome in outcomes:
        for each in outcome.compared:
            if not each.counts:
                lines.append(
                    f"- {outcome.group}, {each.request.name}: vLLM says {each.expected.status}"
                )
            elif each.varying:
                fields = ", ".join(f"`{place}`" for place in each.varying[:_PLACES])
                lines.append(f"- {outcome.group}, {each.request.name}: vLLM varies in {fields}")
    return [*lines, ""]


def _chunks(compared: Sequence[Compared]) -> list[str]:
    both = [each.chunks for each in compared if None not in each.chunks]
    fewer = sum(other < own for own, other in both)
    more = sum(other > own for own, other in both)
    totals = sum(own for own, _ in both), sum(other for _, other in both)
    return [
        "## Events of streams",
        "",
        f"{len(both)} streams: {totals[0]} events of vLLM, {totals[1]} of the other; "
        f"fewer in {fewer}, more in {more}.",
    ]


def _shown(group: str, each: Compared) -> list[str]:
    request = each.request
    lines = [f"### {group}: {request.area}: {request.name}", ""]
    body = request.content.decode(errors="backslashreplace")
    lines += [f"{request.method} {request.path} {dict(request.headers)}", "", "```"]
    lines += [_cut(body, _SHOWN), "```", ""]
    for when, found in (("alone", each.of_alone), ("among others", each.of_among)):
        if when == "among others" and [one.place for one in found] == [
            one.place for one in each.of_alone
        ]:
            continue
        lines += [
            f"- {when}, `{d.place}`: vLLM `{_cut(repr(d.expected), 300)}`, other "
            f"`{_cut(repr(d.found), 300)}`"
            for d in found[:_PLACES]
        ]
        if len(found) > _PLACES:
            lines.append(f"- {when}: {len(found) - _PLACES} more")
    other = each.alone if each.of_alone else each.among
    lines += [
        "",
        f"vLLM {each.expected.status}:",
        "",
        "```",
        _cut(each.expected.text, _SHOWN),
        "```",
    ]
    lines += ["", f"other {other.status}:", "", "```", _cut(other.text, _SHOWN), "```", ""]
    return lines


def _answer(answer: Answer) -> dict[str, Any]:
    return {"status": answer.status, "media_type": answer.media_type, "text": answer.text}


def _difference(one: Difference) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        try:
            json.dumps(value)
        except TypeError:
            return repr(value)
        return value

    return {"place": one.place, "expected": plain(one.expected), "found": plain(one.found)}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
