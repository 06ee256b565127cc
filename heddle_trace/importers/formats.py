"""The formats that can be imported, and their detection."""

from collections.abc import Mapping, Sequence
from typing import Final

from heddle_trace.errors import TraceError
from heddle_trace.importers.atif import Atif
from heddle_trace.importers.claude_code import ClaudeCode
from heddle_trace.importers.dynamo import Dynamo
from heddle_trace.importers.heads import Head, head_of, head_of_bytes
from heddle_trace.importers.inspect_logs import Inspect
from heddle_trace.importers.langfuse import LANGFUSE
from heddle_trace.importers.langsmith import LANGSMITH
from heddle_trace.importers.mooncake import Mooncake
from heddle_trace.importers.openai_chat import OpenaiChat
from heddle_trace.importers.openai_responses import OpenaiResponses
from heddle_trace.importers.openhands import Openhands
from heddle_trace.importers.otel import OTEL
from heddle_trace.importers.protocol import Importer
from heddle_trace.importers.sources import SourceFile
from heddle_trace.importers.swe_agent import SweAgent
from heddle_trace.importers.tau2 import Tau2
from heddle_trace.importers.verl import Verl

FORMATS: Final[Mapping[str, Importer]] = {
    "mooncake": Mooncake(),
    "dynamo": Dynamo(),
    "swe-agent": SweAgent(),
    "tau2": Tau2(),
    "inspect": Inspect(),
    "claude-code": ClaudeCode(),
    "verl": Verl(),
    "openai-chat": OpenaiChat(),
    "openai-responses": OpenaiResponses(),
    "otel": OTEL,
    "langfuse": LANGFUSE,
    "langsmith": LANGSMITH,
    "atif": Atif(),
    "openhands": Openhands(),
}

AUTO: Final = "auto"


def recognised(head: Head) -> list[str]:
    """The formats that a file with this head can be."""
    return [name for name, importer in FORMATS.items() if importer.recognises(head)]


def format_of(sources: Sequence[SourceFile], requested: str) -> str:
    """The format of all files: the requested one, or the one that they show.

    Raises TraceError when they show none or several, or another than the requested one.
    """
    if requested != AUTO and requested not in FORMATS:
        raise TraceError(
            f"format {requested!r} is not known; use auto or one of {', '.join(FORMATS)}"
        )
    shown: dict[str, SourceFile] = {}
    for source in sources:
        head = head_of(source)
        found = recognised(head)
        if requested in found:
            continue
        if found:
            shown.setdefault(found[0], source)
        elif requested == AUTO:
            raise TraceError(f"{source.path}: {_unknown(head)}")
    if requested != AUTO:
        for name, source in shown.items():
            raise TraceError(
                f"{source.path}: this is {name}, not {requested}; use --set logs.format={name}"
            )
        return requested
    if len(shown) > 1:
        (one, first), (other, second) = list(shown.items())[:2]
        raise TraceError(
            f"{first.path} is {one}, {second.path} is {other}; import each format by itself"
        )
    return next(iter(shown))


def suspicion(line: bytes, name: str) -> str:
    """The format that a line shows, if it is damaged as one of format `name`; or nothing."""
    found = recognised(head_of_bytes(line))
    if not found or name in found:
        return ""
    return f"; it looks like {found[0]}: a file that mixes formats has to be split"


def _unknown(head: Head) -> str:
    if head.broken and not head.first_line:
        return head.broken
    if not head.first_line and not head.zipped:
        return "is empty; nothing to import"
    if not head.readable:
        return "is binary, or not UTF-8; give a log in one of the formats of docs/importing.md"
    if head.any_row("trajectory_id", "steps"):
        return "is a trace of Heddle's already; nothing to import"
    known = ", ".join(FORMATS)
    return f"no known format is recognised; name one with --set logs.format=FORMAT: {known}"
