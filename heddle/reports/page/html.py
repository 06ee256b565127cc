"""The page itself: static files, the plotting library and the data, put into one file."""

import base64
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from heddle.reports.colours import style_sheet
from heddle.reports.page.columns import Columns, columns
from heddle.reports.page.facts import BoundOf, facts, opening, same_trace, summary
from heddle.reports.page.meanings import MEANINGS
from heddle.reports.page.why import Course, course, why
from heddle.reports.plotly_script import plotly_script
from heddle.reports.sample import MAX_DISPATCHES, choose, sample
from heddle.runs import Run
from heddle.runs.comparison_folder import said_of
from heddle.runs.record import record

SCHEMA = "heddle.reports.page/1"
SHARED = ("data", "look", "exports")
SCRIPTS = (
    *SHARED,
    "link",
    "why",
    "overlays",
    "timeline",
    "slots",
    "training",
    "plan",
    "differences",
    "table",
    "life",
    "main",
)


def page(
    runs: Sequence[Run], bound_of: BoundOf, *, on_progress: Callable[[str], None] = lambda _: None
) -> bytes:
    """Make the page about runs of one trace; `on_progress` gets a text about the next stage.

    Raises:
        RunError: the runs are of different traces, or one of them is damaged or empty.
    """
    same_trace(runs)
    most = MAX_DISPATCHES // len(runs)
    choice = choose(runs, most)
    names: dict[str, int] = {}
    parts: list[Columns] = []
    courses: list[Course] = []
    summaries = []
    for run in runs:  # one at a time: a large run fills the memory
        on_progress(f"reading {run.label}")
        found = record(run)
        parts.append(columns(found, sample(found, choice, most), names))
        courses.append(course(found))
        summaries.append(summary(found))
        del found
    on_progress("bounds")
    run_facts = facts(runs, bound_of)
    on_progress("writing")
    reasons = why(runs, [fact["label"] for fact in run_facts], courses, summaries)
    best = reasons["best"]
    head = {
        "schema": SCHEMA,
        "trace": str(runs[0].manifest["trace"]["name"]),
        "names": list(names),
        "opens": opening(parts) if best is None else reasons["rows"][best]["runs"][0],
        "why": reasons,
        "meanings": MEANINGS,
        "compared": said_of([run.path for run in runs]),
        "runs": [
            {**fact, "summary": figures, **part.facts}
            for fact, figures, part in zip(run_facts, summaries, parts, strict=True)
        ],
    }
    title = f"{head['trace']}: {', '.join(fact['label'] for fact in run_facts)}"
    return filled("runs", title, SCRIPTS, packed(head, [part.columns for part in parts]))


def filled(body: str, title: str, scripts: Sequence[str], data: bytes) -> bytes:
    """The file: `static/BODY.html` within the frame of all pages, scripts, and `packed` data."""
    static = files("heddle.reports.page") / "static"

    def read(name: str) -> str:
        return (static / name).read_text(encoding="utf-8")

    slots = {
        "title": escape(title, quote=False),
        "style": style_sheet() + read("page.css"),
        "body": read(f"{body}.html"),
        "plotly": plotly_script(),
        "data": base64.b64encode(data).decode("ascii"),
        "script": "\n".join(read(f"{name}.js") for name in scripts),
    }
    # Split, not replaced one after the other: no filled-in text is searched for a slot again.
    pieces = read("page.html").split("{{")
    made = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        made += [slots[name], rest]
    return "".join(made).encode("utf-8", errors="replace")


def packed(head: Mapping[str, Any], runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> bytes:
    """JSON and columns in one compressed block: length of the JSON, the JSON, the columns.

    The JSON says of each column its type and where it begins, counted from the end of the JSON.
    All is little-endian, and each column begins at a multiple of four bytes.
    """
    body = bytearray()
    listed = []
    for run in runs:
        tables: dict[str, dict[str, list[Any]]] = {}
        for table, own in run.items():
            tables[table] = {}
            for name, values in own.items():
                kind = f"u{8 * values.dtype.itemsize}"
                tables[table][name] = [kind, len(body), len(values)]
                body += values.astype(values.dtype.newbyteorder("<")).tobytes()
                body += b"\0" * (-len(body) % 4)
        listed.append(tables)
    # Names that are not UTF-8 have lone surrogates; escaped, they pass through JSON unharmed.
    text = json.dumps({**head, "columns": listed}, allow_nan=False).encode("ascii")
    text += b" " * (-len(text) % 4)
    block = len(text).to_bytes(4, "little") + text + bytes(body)
    return gzip.compress(block, compresslevel=6, mtime=0)
