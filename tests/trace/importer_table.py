"""Imports real logs of every format and prints what came of them and what is assumed.

The first table is kept in tests/trace/real_logs.txt, the second in docs/tables.

Usage: python -m tests.trace.importer_table [FOLDER], by default ../shared/raw_samples. Formats of
which the folder has no logs are shown on the small ones of tests/trace/fixtures.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from heddle_trace import open_gaps, read_trace
from heddle_trace.importers import FORMATS, ImportReport, import_trace
from heddle_trace.schema import Trace

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "trace" / "fixtures"
PATTERNS = {"claude-code": "*.trace.jsonl"}
"""Files of a folder that are logs, where not all are."""

OURS = {
    "dynamo": ("dynamo.jsonl", "dynamo_hashes.jsonl", "agentic_mooncake.jsonl"),
    "verl": ("verl.jsonl",),
    "openai-chat": ("openai_chat.jsonl", "openai_chat_calls.jsonl"),
    "openai-responses": ("openai_responses.jsonl",),
    "otel": ("otel_otlp.jsonl", "otel_flat.json"),
    "langfuse": ("langfuse.jsonl", "langfuse_traces.json"),
    "langsmith": ("langsmith.jsonl", "langsmith_tree.json"),
    "atif": ("atif.json",),
    "openhands": ("openhands.jsonl", "openhands_events.json"),
}


def main() -> None:
    """Print a row for each format, then what each takes to be so."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "raw_samples"
    print("\n".join([*rows(folder), "", *assumptions()]))  # noqa: T201


def rows(folder: Path) -> list[str]:
    """The table, a line each."""
    lines = [
        "| format | files | records | trajectories | groups | steps | output tokens | left out | "
        "assumed, counted | not recorded |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in FORMATS:
        files = sorted((folder / name).glob(PATTERNS.get(name, "*")))
        ours = "" if files else " (ours)"
        for part in [files] if files else [[FIXTURES / file] for file in OURS[name]]:
            with tempfile.TemporaryDirectory() as out:
                path = Path(out) / "made.jsonl.gz"
                report = import_trace(part, path, format=name)
                lines.append(_row(report, read_trace(path), ours))
    return lines


def assumptions() -> list[str]:
    """What holds for every import of a format, a line each."""
    rows = [f"| `{name}` | {'; '.join(known.assumes)} |" for name, known in FORMATS.items()]
    return ["| format | assumed, always |", "|---|---|", *rows]


def _row(report: ImportReport, trace: Trace, ours: str) -> str:
    groups = len({record.group_id for record in trace.records})
    gaps = {name: count for name, count in open_gaps(trace).items() if count}
    cells = (
        f"`{report.format}`",
        f"{len(report.files)}{ours}",
        f"{report.read:,}",
        f"{report.trajectories:,}",
        f"{groups:,}",
        f"{report.steps:,}",
        f"{report.output_tokens:,}",
        _listed({**report.dropped, **({"damaged": report.damaged} if report.damaged else {})}),
        _listed(report.assumed),
        _listed(gaps),
    )
    return f"| {' | '.join(cells)} |"


def _listed(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{count:,} {what}" for what, count in counts.items()) or "-"


if __name__ == "__main__":
    main()
