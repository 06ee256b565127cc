"""Inspect: a log of one evaluation, as `.json` or as `.eval`, which is a zip of one JSON a sample.

Source: UKGovernmentBEIS/inspect_ai, `log/_log.py` and `event/`. A sample's `events` are
generations and tool calls with times and usage; logs without events have only messages.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.chat import generations_of, prompt_of
from heddle_trace.importers.clocks import elapsed, seconds
from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    derive_added,
    identifier,
    reward_of,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.openai_messages import ChatMessage, message_of
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sources import SourceFile, converted, decoded
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_MAIN: Final = ""


class _Usage(msgspec.Struct):
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    total_tokens: Tokens | None = None
    input_tokens_cache_read: Tokens | None = None


class _Output(msgspec.Struct):
    model: str | None = None
    usage: _Usage | None = None
    time: float | None = None
    error: Any = None


class _Event(msgspec.Struct):
    event: str
    id: Any = None
    timestamp: float | str | None = None
    completed: float | str | None = None
    span_id: str | None = None
    parent_id: str | None = None
    type: Any = None
    name: str | None = None
    output: _Output | None = None
    function: str | None = None
    result: Any = None
    error: Any = None
    events: list[dict[str, Any]] = []


class _Score(msgspec.Struct):
    value: Any = None


class _Sample(msgspec.Struct):
    id: int | str
    epoch: int = 1
    messages: list[Any] = []
    events: list[dict[str, Any]] = []
    scores: dict[str, _Score] | None = None
    attachments: dict[str, str] = {}
    limit: Any = None


class _Eval(msgspec.Struct):
    task: str = "inspect"
    eval_id: str | None = None
    run_id: str | None = None
    model: str | None = None


class _Header(msgspec.Struct):
    eval: _Eval = msgspec.field(default_factory=_Eval)


_SAMPLES = msgspec.json.Decoder(_Sample)
_HEADERS = msgspec.json.Decoder(_Header)


class Inspect:
    """Samples of evaluations; the epochs of a sample, in any log of its task, are a group."""

    assumes = (
        "a tool's time runs from the end of the generation to the end of its last call",
        "generations by scorers are left out; an agent within an agent is a trajectory of its own",
    )

    def recognises(self, head: Head) -> bool:
        """A zip archive, or a document with the evaluation."""
        return head.zipped or (head.has("eval", "version") and "status" in head.document)

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        for source in sources:
            evaluation, samples = _opened(source, context)
            for where, sample in samples:
                with context.notes.guard(where):
                    for record in _records(sample, evaluation, source, context):
                        yield ParsedRecord(where, record)


def _opened(
    source: SourceFile, context: ImportContext
) -> tuple[_Eval, Iterator[tuple[str, _Sample]]]:
    if not source.zipped:
        evaluation = source.first("eval", _Eval) or _Eval()
        return evaluation, source.items(context.notes, "samples.item", _Sample)
    evaluation = _Eval()
    for where, header in source.members(context.notes, r"header\.json|_journal/start\.json"):
        with context.notes.guard(where):
            evaluation = decoded(header, _HEADERS).eval
    return evaluation, _unpacked(source, context)


def _unpacked(source: SourceFile, context: ImportContext) -> Iterator[tuple[str, _Sample]]:
    for where, data in source.members(context.notes, r"samples/.*\.json"):
        context.notes.read += 1
        with context.notes.guard(where):
            yield where, decoded(data, _SAMPLES)


def _records(
    sample: _Sample, evaluation: _Eval, source: SourceFile, context: ImportContext
) -> Iterator[TrajectoryRecord]:
    group = identifier(f"{evaluation.task}/{sample.id}")
    run = evaluation.eval_id or evaluation.run_id or source.label
    base = identifier(f"{group}/{run}/{sample.epoch}")
    lanes = _Lanes(sample, context)
    made = lanes.generations or _from_messages(sample, context)
    if not made:
        context.notes.drop("samples without a generation")
    for number, (lane, generations) in enumerate(made.items()):
        yield TrajectoryRecord(
            trajectory_id=base if not number else identifier(f"{base}/{lanes.name(lane)}-{number}"),
            group_id=group if not number else identifier(f"{group}/{lanes.name(lane)}"),
            workload=context.workload_or(evaluation.task or "inspect"),
            prompt_tokens=generations[0].input,
            steps=steps_of(generations, context.notes),
            source=source.path.name,
            model=evaluation.model,
            agent="inspect",
            outcome=_outcome(sample) if not number else None,
            reward=_reward(sample) if not number else None,
            reward_s=lanes.scoring_s if not number else None,
            parent_id=base if number else None,
            truncated=sample.limit is not None,
        )


def _outcome(sample: _Sample) -> bool | None:
    """The first score, if it is yes or no."""
    match _score(sample):
        case "C" | True | 1:
            return True
        case "I" | "N" | False | 0:
            return False
    return None


def _reward(sample: _Sample) -> float | None:
    """The first score, as a number: correct 1, partly 0.5, incorrect or no answer 0."""
    score = _score(sample)
    return _GRADES.get(score) if isinstance(score, str) else reward_of(score)


def _score(sample: _Sample) -> Any:
    return next((score.value for score in (sample.scores or {}).values()), None)


_GRADES: Final = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}


def _from_messages(sample: _Sample, context: ImportContext) -> dict[str, list[LoggedGeneration]]:
    """Messages of a log without events, which have roles but no times."""
    messages = []
    for raw in sample.messages:
        message = message_of(converted(raw, ChatMessage), context)
        if message.role == "tool":
            message.failed = bool(raw.get("error"))
        messages.append(message)
    generations = generations_of(messages, context.notes, simulated_user=True)
    if not generations:
        return {}
    generations[0].input = generations[0].input or prompt_of(messages)
    return {_MAIN: generations}


class _Lanes:
    """The generations of a sample by agent."""

    def __init__(self, sample: _Sample, context: ImportContext) -> None:
        self.generations: dict[str, list[LoggedGeneration]] = {}
        self._context = context
        self._attachments = sample.attachments
        self._parents: dict[str, str | None] = {}
        self._agents: dict[str, str] = {}
        self._scorers: dict[str, None] = {}
        self._scoring = False
        self._scored_from: dict[str, float] = {}
        self.scoring_s: float | None = None
        """Seconds of the scorers, one after another; None where the log has no times."""
        self._walk(sample.events, _MAIN)
        for generations in self.generations.values():
            derive_added(generations)

    def name(self, lane: str) -> str:
        return identifier(self._agents.get(lane) or "agent")

    def _walk(self, events: Sequence[dict[str, Any]], nested_in: str) -> None:
        for raw in events:
            # The meaning of a key depends on the kind of event.
            match raw.get("event"):
                case "span_begin":
                    self._span(converted(raw, _Event))
                case "span_end" if str(raw.get("id")) in self._scorers:
                    self._scorer(converted(raw, _Event), ends=True)
                case "step" if raw.get("type") == "scorer":
                    self._scoring = raw.get("action") == "begin"
                    self._scorer(converted(raw, _Event), ends=not self._scoring)
                case "model":
                    self._model(converted(raw, _Event), nested_in)
                case "tool":
                    self._tool(converted(raw, _Event), nested_in)

    def _span(self, event: _Event) -> None:
        span = str(event.id)
        self._parents[span] = event.parent_id
        if event.type == "agent":
            self._agents[span] = event.name or "agent"
        elif event.type == "scorer":
            self._scorers[span] = None
            self._scorer(event, ends=False)

    def _scorer(self, event: _Event, *, ends: bool) -> None:
        """Add the time of a scorer once it ends."""
        span, at_s = str(event.id or event.name), seconds(event.timestamp)
        if at_s is None:
            return
        if not ends:
            self._scored_from[span] = at_s
        elif span in self._scored_from:
            since_s = self._scored_from.pop(span)
            lasted_s = elapsed(since_s, at_s, "within a scorer", self._context.notes)
            self.scoring_s = (self.scoring_s or 0.0) + lasted_s

    def _lane(self, event: _Event, nested_in: str) -> str | None:
        """The agent that an event belongs to; None for a scorer."""
        span, seen = event.span_id, 0
        while span is not None and seen <= len(self._parents):
            if span in self._scorers:
                return None
            if span in self._agents:
                return span
            span, seen = self._parents.get(span), seen + 1
        return None if self._scoring else nested_in

    def _model(self, event: _Event, nested_in: str) -> None:
        lane = self._lane(event, nested_in)
        if lane is None:
            self._context.notes.drop("generations by scorers")
            return
        output = event.output
        if output is None or output.usage is None or output.usage.output_tokens is None:
            self._context.notes.drop("generations that failed, or have no usage")
            return
        usage = output.usage
        start_s = seconds(event.timestamp)
        end_s = seconds(event.completed)
        if end_s is None and start_s is not None and output.time is not None:
            end_s = start_s + output.time
        # Some providers count the cached part of a prompt apart, but all of it in the total.
        prompt = max(
            usage.input_tokens or 0, (usage.total_tokens or 0) - (usage.output_tokens or 0)
        )
        self.generations.setdefault(lane, []).append(
            LoggedGeneration(
                output=usage.output_tokens,
                input=prompt or None,
                cached=usage.input_tokens_cache_read,
                start_s=start_s,
                end_s=end_s,
            )
        )

    def _tool(self, event: _Event, nested_in: str) -> None:
        lane = self._lane(event, nested_in)
        mine = self.generations.get(lane) if lane is not None else None
        if mine:
            g = mine[-1]
            failed = event.error is not None
            g.ok = not failed if g.ok is None else g.ok and not failed
            g.tools = (*g.tools, event.function or UNNAMED)
            done_s = seconds(event.completed)
            if done_s is not None:
                g.until_s = done_s if g.until_s is None else max(g.until_s, done_s)
            g.added = (g.added or 0) + self._size(event.result)
        if any(inner.get("event") == "model" for inner in event.events):
            self._agents.setdefault(str(event.id), event.function or "agent")
            self._walk(event.events, str(event.id))

    def _size(self, result: object) -> int:
        """Tokens of a result, whose text may be kept once for the whole sample."""
        text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
        text = self._attachments.get(text.removeprefix("attachment://"), text)
        return self._context.tokens.count(text)
