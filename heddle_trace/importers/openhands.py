"""OpenHands: `output.jsonl` of its evaluations, a run a line, or the events of one run in an array.

Source: https://docs.openhands.dev/sdk/api-reference/openhands.sdk.event (events with a `kind`),
the events before the SDK (`action`, `observation`, `cause`, `tool_call_metadata`, in
openhands/events/serialization/event.py of All-Hands-AI/OpenHands), and the metrics of a run
(`token_usages` and `response_latencies`, by `response_id`). The time of an action is when its
generation ended, that of an observation when the tool had answered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from heddle_trace.importers.chat import Message, Role, generations_of, prompt_of, text_of
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import UNNAMED, fingerprint, identifier, steps_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.objects import objects_of_parts
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.importers.span_fields import id_in
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_KINDS: Final = ("ActionEvent", "ObservationEvent", "MessageEvent", "SystemPromptEvent")
_NO_TOOL: Final = ("message", "system", "finish", "recall", "change_agent_state", "condensation")
"""Actions before the SDK after which no tool ran."""

_NO_RESULT: Final = ("agent_state_changed", "null", "recall", "agent_condensation")
"""Observations before the SDK that are the runtime's own."""


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    cache_read_tokens: Tokens | None = None
    response_id: str | None = None


class _Latency(msgspec.Struct):
    latency: float | None = None
    response_id: str | None = None


class _Metrics(msgspec.Struct):
    token_usages: list[_Usage] | None = None
    response_latencies: list[_Latency] | None = None
    model_name: str | None = None


class _Row(msgspec.Struct):
    history: list[Any]
    instance_id: str | int | None = None
    metrics: _Metrics | None = None
    metadata: Any = None
    report: Any = None
    test_result: Any = None
    instruction: Any = None


@dataclass(slots=True, kw_only=True)
class _Event:
    """What an event has to do with the context: `text` was generated, returned or said."""

    role: Role
    time_s: float | None
    text: Any
    tool: str | None = None
    response: str | None = None
    usage: _Usage | None = None
    failed: bool | None = None


class Openhands:
    """Runs of OpenHands; those of one instance are a group."""

    assumes = (
        "the time of an action is when its generation ended; a tool's time runs from there to the "
        "observation; a generation's own time is `response_latencies`, where the run has them",
        "actions with one response id are one generation, and each of the others is one",
        "the schemas of the tools are not in the events: without recorded counts prompts are low "
        "by their size",
        "the action 'finish' ends a run and is no tool",
    )

    def recognises(self, head: Head) -> bool:
        """Runs with a history of events, or events."""
        item = head.item()
        if item:
            return _is_event(item) or _is_run(item)
        return any(_is_run(row) for row in head.objects)

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a run."""
        for source in sources:
            runs = objects_of_parts(source, context.notes, "history", _is_event)
            for number, (where, raw) in enumerate(runs, start=1):
                with context.notes.guard(where):
                    row = converted(raw, _Row)
                    record = _record(row, f"{source.label}/{number}", source, context)
                    if record is not None:
                        yield ParsedRecord(where, record)


def _is_event(raw: Any) -> bool:
    if not isinstance(raw, dict) or "timestamp" not in raw:
        return False
    kind = raw.get("kind")
    return (isinstance(kind, str) and kind in _KINDS) or (
        "source" in raw and ("action" in raw or "observation" in raw)
    )


def _is_run(raw: dict[str, Any]) -> bool:
    history = raw.get("history")
    if not isinstance(history, list):
        return False
    events = history[0] if history and isinstance(history[0], list) else history
    return any(_is_event(event) for event in events[:5])


def _record(
    row: _Row, name: str, source: SourceFile, context: ImportContext
) -> TrajectoryRecord | None:
    run = _Run(row.metrics or _Metrics(), context)
    for raw in row.history:
        for event in raw if isinstance(raw, list) else (raw,):
            found = _event(event)
            if found is not None:
                run.add(found)
    messages = run.messages
    generations = generations_of(messages, context.notes, simulated_user=True)
    if not generations:
        context.notes.drop("runs without a generation")
        return None
    first = [event for event in run.first if event]
    instance = None if row.instance_id in (None, "") else str(row.instance_id)
    return TrajectoryRecord(
        trajectory_id=identifier(name),
        group_id=identifier(instance) if instance else f"prompt-{fingerprint(*first)}",
        workload=context.workload_or("coding"),
        prompt_tokens=prompt_of(messages),
        steps=steps_of(generations, context.notes),
        source=source.path.name,
        model=run.model(row),
        agent="openhands",
        outcome=_outcome(row),
    )


def _outcome(row: _Row) -> bool | None:
    for place in (row.report, row.test_result):
        inner = place.get("report") if isinstance(place, dict) else None
        for holder in (place, inner):
            if isinstance(holder, dict) and isinstance(holder.get("resolved"), bool):
                return bool(holder["resolved"])
    return None


def _event(raw: Any) -> _Event | None:
    """An event of either kind; None for one that is no part of the context."""
    if not isinstance(raw, dict):
        raise DamagedError(f"an event of `history` is a {type(raw).__name__}, not an object")
    at_s = seconds(raw.get("timestamp"))
    return _of_sdk(raw, at_s) if "kind" in raw else _before_sdk(raw, at_s)


def _of_sdk(raw: dict[str, Any], at_s: float | None) -> _Event | None:
    match raw["kind"]:
        case "ActionEvent":
            call = raw.get("tool_call")
            written = call.get("arguments") if isinstance(call, dict) else raw.get("action")
            tool = str(raw.get("tool_name") or UNNAMED)
            return _Event(
                role="assistant",
                time_s=at_s,
                text=[raw.get("thought"), raw.get("reasoning_content"), tool, written],
                tool=None if tool == "finish" else tool,
                response=id_in(raw.get("llm_response_id"), "llm_response_id"),
            )
        case "ObservationEvent" | "AgentErrorEvent" | "UserRejectObservation":
            if raw.get("tool_name") == "finish":
                return None
            found = raw.get("observation")
            text = found.get("content", found) if isinstance(found, dict) else found
            failed = found.get("is_error") if isinstance(found, dict) else "error" in raw
            return _Event(
                role="tool",
                time_s=at_s,
                text=[text, raw.get("error"), raw.get("rejection_reason")],
                failed=failed if isinstance(failed, bool) else None,
            )
        case "MessageEvent":
            said = raw.get("llm_message")
            text = said.get("content") if isinstance(said, dict) else None
            role: Role = "assistant" if raw.get("source") == "agent" else "user"
            return _Event(
                role=role,
                time_s=at_s,
                text=text,
                response=id_in(raw.get("llm_response_id"), "llm_response_id"),
            )
        case "SystemPromptEvent":
            return _Event(
                role="system", time_s=at_s, text=[raw.get("system_prompt"), raw.get("tools")]
            )
    return None


def _before_sdk(raw: dict[str, Any], at_s: float | None) -> _Event | None:
    call = raw.get("tool_call_metadata")
    call = call if isinstance(call, dict) else {}
    given = raw.get("args") if isinstance(raw.get("args"), dict) else {}
    action = raw.get("action")
    if isinstance(action, str) and action:
        if action == "system" or (raw.get("source") == "user" and action == "message"):
            role: Role = "system" if action == "system" else "user"
            return _Event(role=role, time_s=at_s, text=(given or {}).get("content"))
        if raw.get("source") != "agent" or action in (
            "recall",
            "change_agent_state",
            "condensation",
        ):
            return None
        answer = call.get("model_response")
        answer = answer if isinstance(answer, dict) else {}
        usage = answer.get("usage")
        return _Event(
            role="assistant",
            time_s=at_s,
            text=[value for key, value in (given or {}).items() if isinstance(value, str)],
            tool=None if action in _NO_TOOL else str(call.get("function_name") or action),
            response=id_in(answer.get("id"), "model_response.id"),
            usage=converted(usage, _Usage) if isinstance(usage, dict) else None,
        )
    observation = raw.get("observation")
    if not isinstance(observation, str) or observation in _NO_RESULT or raw.get("cause") is None:
        return None
    code = raw.get("extras")
    code = code.get("exit_code") if isinstance(code, dict) else None
    failed = observation == "error" or (code != 0 if isinstance(code, int) else None)
    return _Event(role="tool", time_s=at_s, text=raw.get("content"), failed=failed)


@dataclass(slots=True)
class _Run:
    """Events put together to messages."""

    metrics: _Metrics
    context: ImportContext
    messages: list[Message] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    last_response: str | None = None

    def add(self, event: _Event) -> None:
        """Add an event; an action with the response of the one before is part of its generation."""
        tokens = _tokens(event.text, self.context)
        calls = (event.tool,) if event.tool else ()
        if event.role == "assistant":
            if event.response is not None and event.response == self.last_response:
                message = next(m for m in reversed(self.messages) if m.role == "assistant")
                message.calls += calls
                message.tokens += tokens
                return
            self.last_response = event.response
            self.messages.append(self._generation(event, calls, tokens))
            return
        if not any(m.role == "assistant" for m in self.messages):
            self.first.append(msgspec.json.encode(event.text).decode())
        self.messages.append(
            Message(role=event.role, tokens=tokens, time_s=event.time_s, failed=event.failed)
        )

    def _generation(self, event: _Event, calls: tuple[str, ...], tokens: int) -> Message:
        usages = {u.response_id: u for u in self.metrics.token_usages or () if u.response_id}
        usage = event.usage or usages.get(event.response or "") or _Usage()
        latencies = {x.response_id: x.latency for x in self.metrics.response_latencies or ()}
        latency = latencies.get(event.response) if event.response else None
        end_s = event.time_s
        return Message(
            role="assistant",
            tokens=tokens,
            calls=calls,
            time_s=end_s,
            start_s=end_s - latency if end_s is not None and latency is not None else None,
            output=usage.completion_tokens,
            input=usage.prompt_tokens or None,
            cached=usage.cache_read_tokens,
        )

    def model(self, row: _Row) -> str | None:
        """The model of the run, from its metrics or the configuration of the evaluation."""
        config: Mapping[str, Any] = row.metadata if isinstance(row.metadata, dict) else {}
        llm = config.get("llm_config") or config.get("llm")
        named = llm.get("model") if isinstance(llm, dict) else None
        return self.metrics.model_name or (str(named) if named else None)


def _tokens(value: Any, context: ImportContext) -> int:
    """Tokens of all texts of a value."""
    if value is None or isinstance(value, bool | int | float):
        return 0
    if isinstance(value, list):
        return sum(_tokens(item, context) for item in value)
    if isinstance(value, dict) and "text" not in value:
        return context.tokens.count(msgspec.json.encode(value).decode())
    return text_of(value, context.tokens, context.notes)
