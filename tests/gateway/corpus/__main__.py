"""Compares the gateway with vLLM by the requests of the corpus.

    python -m tests.gateway.corpus --report differences.md
    python -m tests.gateway.corpus main --direct
    python -m tests.gateway.corpus hermes --reference http://engine:8000 --url http://gateway:8100

Without a URL it starts engines on CPU and `heddle serve` in front of them, group by group.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.gateway.corpus.groups import GROUPS, Group, part
from tests.gateway.corpus.report import as_json, markdown, one_line, share
from tests.gateway.corpus.run import Outcome, compare_servers
from tests.gateway.corpus.serving import gateway_before, nothing_before


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; 1 if answers differ."""
    chosen = _arguments(arguments)
    # The servers end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcomes: list[Outcome] = []
    for name in chosen.groups or GROUPS:
        group = GROUPS[name]
        if group.lacks:
            _say(f"{name}: left out, as {group.lacks} is not installed")
            continue
        asked = part(group.requests(chosen.seed), chosen.part, seed=chosen.seed)
        requests = [each for each in asked if chosen.only in f"{each.area}: {each.name}"]
        _say(f"{name}: {len(requests)} requests")
        with _servers(chosen, group) as (reference, other):
            outcome = compare_servers(name, requests, reference=reference, other=other)
        outcomes.append(outcome)
        for each in outcome.unequal:
            _say(f"  {one_line(each)}")
        equal, counted = share([outcome])
        _say(f"{name}: {equal} of {counted} equal, in {outcome.took_s:.0f} s")
    equal, counted = share(outcomes)
    _say(f"{equal} of {counted} equal")
    if chosen.report:
        chosen.report.write_text(markdown(outcomes, title="Answers compared with vLLM's"))
    if chosen.json:
        chosen.json.write_text(as_json(outcomes))
    return int(equal < counted)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gateway.corpus",
        description="Ask vLLM directly and through the gateway, and compare the answers.",
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} [all]")
    parser.add_argument("--direct", action="store_true", help="a vLLM takes the gateway's place")
    parser.add_argument("--url", help="a gateway that runs already; one group, with --reference")
    parser.add_argument("--reference", help="an engine behind that gateway")
    parser.add_argument("--only", default="", help="requests whose area and name contain this")
    parser.add_argument("--part", type=float, default=1.0, help="share of the requests [1]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="Markdown file of every difference")
    parser.add_argument("--json", type=Path, help="JSON file of every request and answer")
    parser.add_argument("--folder", type=Path, help="where logs stay [a folder that is removed]")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.groups if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}: choose of {', '.join(GROUPS)}")
    if bool(chosen.url) != bool(chosen.reference):
        parser.error("--url and --reference go together")
    if chosen.url and (len(chosen.groups) != 1 or chosen.direct):
        parser.error("--url goes with one group, and not with --direct")
    return chosen


@contextlib.contextmanager
def _servers(chosen: argparse.Namespace, group: Group) -> Iterator[tuple[str, str]]:
    if chosen.url:
        yield chosen.reference.rstrip("/"), chosen.url.rstrip("/")
        return
    with contextlib.ExitStack() as stack:
        if chosen.folder:
            folder = chosen.folder / group.name
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = nothing_before if chosen.direct else gateway_before
        yield stack.enter_context(start(group, folder))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
