"""`python -m tools.profiles lookup`: how much drafts by n-grams accept on traces that have text.

Each recorded answer is replayed as vLLM drafts it: the longest suffix of 5 to 2 tokens that stood
in the context before, and the tokens after its last place. An iteration advances by the drafts
that the answer has, and one token more. With siblings, answers to the same task that were finished
before stand before the context.

Tokens are words of at most six letters, numbers, signs and runs of spaces: near those of a
byte-pair vocabulary, which is not at hand.
"""

import gzip
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

TOKEN = re.compile(r" ?\w{1,6}|\s+|[^\w\s]")
LEAST, MOST = 2, 5
"""Tokens of an n-gram, as `heddle_rollout.speculation.LOOKUP`."""
DRAFTS = 4


@dataclass(slots=True)
class Counted:
    """Iterations, those with drafts, and how many accepted the first 1, 2, ... drafts."""

    iterations: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * DRAFTS)

    def plain(self) -> dict[str, Any]:
        """Chances by position over all iterations, as JSON."""
        chances = [round(each / max(self.iterations, 1), 3) for each in self.accepted]
        share = round(self.drafted / max(self.iterations, 1), 3)
        return {"iterations": self.iterations, "with_drafts": share, "accepted": chances}


class Lookup:
    """Tokens so far, and where each n-gram of them was last followed by another token."""

    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._after: dict[tuple[str, ...], int] = {}

    def push(self, tokens: Sequence[str]) -> None:
        """Append tokens."""
        for token in tokens:
            place = len(self._tokens)
            for n in range(LEAST, min(MOST, place) + 1):
                self._after[tuple(self._tokens[place - n :])] = place
            self._tokens.append(token)

    def drafts(self) -> list[str]:
        """The tokens that followed the longest n-gram that the tokens end with."""
        for n in range(MOST, LEAST - 1, -1):
            place = self._after.get(tuple(self._tokens[-n:])) if len(self._tokens) >= n else None
            if place is not None:
                return self._tokens[place : place + DRAFTS]
        return []


def count(lookup: Lookup, answer: Sequence[str], counted: Counted) -> None:
    """Draft one answer, which the lookup has afterwards."""
    made = 0
    while made < len(answer):
        drafts = lookup.drafts()
        accepted = 0
        while (
            accepted < len(drafts)
            and made + accepted < len(answer)
            and drafts[accepted] == answer[made + accepted]
        ):
            counted.accepted[accepted] += 1
            accepted += 1
        counted.iterations += 1
        counted.drafted += bool(drafts)
        lookup.push(answer[made : made + accepted + 1])
        made += accepted + 1


def measure(rows: Sequence[Mapping[str, Any]], siblings: int, most: int) -> Counted:
    """Draft at most `most` trajectories, each after so many others of the same task and model."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["group_id"], row["model"]].append(row)
    chosen = [group for group in groups.values() if len(group) > siblings]
    random.Random(0).shuffle(chosen)
    counted = Counted()
    for group in chosen[:most]:
        lookup = Lookup()
        for sibling in group[1 : 1 + siblings]:
            lookup.push(_whole(sibling))
        lookup.push(TOKEN.findall(str(group[0]["prompt"])))
        for step in group[0]["steps"]:
            count(lookup, TOKEN.findall(step["out"]), counted)
            lookup.push(TOKEN.findall(step.get("obs") or ""))
    return counted


def _whole(row: Mapping[str, Any]) -> list[str]:
    return [token for step in row["steps"] for token in TOKEN.findall(step["out"])]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


@click.command("lookup")
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--siblings", multiple=True, type=click.IntRange(0), default=(0,))
@click.option("--most", default=300, show_default=True, help="Trajectories of each trace")
def command(traces: tuple[Path, ...], siblings: tuple[int, ...], most: int) -> None:
    """Measure what n-grams accept on TRACES with text, *.text.jsonl.gz."""
    for path in traces:
        rows = list(_rows(path))
        for number in siblings:
            found = measure(rows, number, most).plain()
            click.echo(json.dumps({"trace": path.name, "siblings": number, **found}))
