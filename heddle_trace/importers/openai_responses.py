"""Logs of OpenAI's Responses API: a request and its response, or the response alone.

Source: OpenAI's API reference, https://platform.openai.com/docs/api-reference/responses, and the
types of its library; the fields around request and response depend on the logger. Read are JSON
lines, a JSON array, or one object: `request` and `response` beside each other (each may be in a
`body`, as in the files of the batch API), response objects, and the last events of streams, which
hold them. A response continues the one that its `previous_response_id` names, else the conversation
or session that the log names, else the call whose input and output its own input begins with.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Final

import msgspec

from heddle_trace.importers.chat import ROLES
from heddle_trace.importers.generations import identifier
from heddle_trace.importers.heads import Head
from heddle_trace.importers.joining import OPEN_PREFIXES, Place, PrefixJoin
from heddle_trace.importers.logged_calls import (
    SESSION_IDS,
    LoggedCall,
    group_of,
    joined,
    named,
    times,
)
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.objects import objects
from heddle_trace.importers.openai_items import (
    CALL,
    RESULT,
    Item,
    block_of,
    calls_by_client,
    tokens_of,
)
from heddle_trace.importers.openai_messages import Usage
from heddle_trace.importers.protocol import ImportContext, Records
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile, converted

_EVENT: Final = "response."
_NOT_ENDED: Final = ("queued", "in_progress")
_WITHOUT_ANSWER: Final = ("failed", "cancelled")


class _Conversation(msgspec.Struct):
    id: str


class _Request(msgspec.Struct):
    input: str | list[Item] | None = None
    instructions: Any = None
    previous_response_id: str | None = None
    conversation: str | _Conversation | None = None
    model: str | None = None


class _Response(msgspec.Struct):
    output: list[Item]
    id: str | None = None
    status: str | None = None
    usage: Usage | None = None
    previous_response_id: str | None = None
    conversation: _Conversation | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A call with its response. `raw` is the logged object, its request and response unpacked."""

    name: str
    where: str
    file: str
    raw: dict[str, Any]
    request: _Request
    response: _Response

    @property
    def previous(self) -> str | None:
        """The response that it continues."""
        return self.request.previous_response_id or self.response.previous_response_id

    @property
    def conversation(self) -> str | None:
        """The conversation that the service keeps and adds it to."""
        found = self.request.conversation or self.response.conversation
        return found.id if isinstance(found, _Conversation) else found

    def items(self) -> list[Item]:
        """The items of the input; reasoning is left out, which not every client sends back."""
        given = self.request.input
        if given is None or isinstance(given, str):
            return [Item(role="user", content=given)] if given is not None else []
        return [item for item in given if item.type != "reasoning"]


class OpenaiResponses:
    """Responses, joined to the trajectories of their chains."""

    assumes = (
        "tools that the service runs are part of the generation, with their time and tokens; a "
        "call of the client's is waited for until the next request of its chain, and words of a "
        "person as 'user'",
        "a second response to one previous response begins a trajectory of its own in its group",
        "calls without a group or task id are a group where they begin with the same instructions "
        "and input, and by themselves where the log lacks the input",
    )

    def recognises(self, head: Head) -> bool:
        """Response objects, alone, beside their request, or in an event."""
        if isinstance(head.document, list):
            return _response_of(head.item()) is not None
        return any(_response_of(row) is not None for row in head.objects)

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a chain."""
        with Sessions(LoggedCall) as sessions:
            chains = _Chains(context)
            for source in sources:
                for number, (where, raw) in enumerate(objects(source, context.notes), start=1):
                    with context.notes.guard(where):
                        name = f"{source.label}/{number}"
                        call = _answered(raw, name, where, source.path.name, context)
                        if call is not None:
                            chains.add(call, sessions)
            chains.join.note_forgotten("calls", context.notes)
            yield from sessions.records(context.notes, partial(joined, context=context))


def _body(value: Any) -> Any:
    inner = value.get("body") if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else value


def _response_of(raw: dict[str, Any]) -> dict[str, Any] | None:
    """The response object of a logged object, if it has one."""
    for value in (_body(raw.get("response")), raw):
        if (
            isinstance(value, dict)
            and isinstance(value.get("output"), list)
            and (value.get("object") == "response" or str(value.get("id")).startswith("resp"))
        ):
            return value
    return None


def _answered(
    raw: dict[str, Any], name: str, where: str, file: str, context: ImportContext
) -> _Answered | None:
    """The call of a logged object; None for one that was not answered.

    Raises DamagedError for an object that is no call.
    """
    found = _response_of(raw)
    if found is None:
        if str(raw.get("type")).startswith(_EVENT):
            context.notes.drop("events of streams that hold no response")
        elif "request" in raw and "response" in raw:
            context.notes.drop("calls without a response, such as refused ones")
        else:
            raise DamagedError("has no response: an object with `output` and an id `resp_...`")
        return None
    response = converted(found, _Response)
    if response.status in _NOT_ENDED:
        context.notes.drop("responses that had not ended")
        return None
    if response.status in _WITHOUT_ANSWER:
        context.notes.drop("responses that failed or were cancelled")
        return None
    request = _body(raw.get("request"))
    if not isinstance(request, dict):
        request = {"input": raw["input"]} if "input" in raw else {}
    return _Answered(
        name=name,
        where=where,
        file=file,
        raw={**raw, "request": request, "response": found},
        request=converted(request, _Request),
        response=response,
    )


@dataclass(slots=True)
class _Link:
    """A response that a later one may continue."""

    trajectory: str
    group: str
    continued: bool = False


class _Chains:
    """Puts calls into trajectories. At most `OPEN_PREFIXES` responses can be continued."""

    def __init__(self, context: ImportContext) -> None:
        self._context = context
        self.join = PrefixJoin()
        self._links: OrderedDict[str, _Link] = OrderedDict()

    def add(self, call: _Answered, sessions: Sessions[LoggedCall]) -> None:
        id = call.response.id
        if id is not None and id in self._links:
            self._context.notes.drop("responses that are logged a second time")
            return
        new = call.items()
        before = self._before(call)
        if before is not None:
            continues = True
            link = before
        else:
            if call.request.instructions is not None:
                new.insert(0, Item(role="system", content=call.request.instructions))
            place = self._placed(call, new)
            continues = place.shared > 0
            link = _Link(self._trajectory(call, place), _group(call, new))
            new = new[place.shared :]
        for key in (id, _kept(call.conversation)):
            if key is not None:
                self._remember(key, link)
        sessions.add(link.trajectory, self._logged(call, link, new, continues))

    def _before(self, call: _Answered) -> _Link | None:
        """The link that a call makes of the one that it continues, if the log has that."""
        if call.previous is None:
            conversation = _kept(call.conversation)
            return self._links.get(conversation) if conversation is not None else None
        before = self._links.get(call.previous)
        if before is None:
            self._context.notes.assume(
                "responses whose previous one the log does not hold before them: they begin a "
                "trajectory"
            )
            return None
        trajectory = identifier(call.name) if before.continued else before.trajectory
        before.continued = True
        return _Link(trajectory, before.group)

    def _placed(self, call: _Answered, items: Sequence[Item]) -> Place:
        """Where a call stands that brings its whole input."""
        if call.previous is not None or call.conversation is not None or not items:
            return Place(call.name, call.name, 0)
        answer = [item for item in call.response.output if item.type != "reasoning"]
        blocks = [block_of(item) for item in (*items, *answer)]
        return self.join.place(
            call.name,
            blocks,
            full=len(blocks),
            input_tokens=len(items),
            output_tokens=len(answer),
        )

    def _trajectory(self, call: _Answered, place: Place) -> str:
        return identifier(call.conversation or named(call.raw, SESSION_IDS) or place.trajectory)

    def _remember(self, key: str, link: _Link) -> None:
        self._links[key] = link
        self._links.move_to_end(key)
        if len(self._links) > OPEN_PREFIXES:
            self._links.popitem(last=False)
            self.join.forgotten += 1

    def _logged(
        self, call: _Answered, link: _Link, new: Sequence[Item], continues: bool
    ) -> LoggedCall:
        response, notes = call.response, self._context.notes
        usage = response.usage or Usage()
        by_client = calls_by_client(response.output)
        if sum(item.type.endswith(CALL) for item in response.output) > len(by_client):
            notes.assume("responses in which the service ran tools")
        added = (
            0 if usage.prompt is not None else sum(tokens_of(item, self._context) for item in new)
        )
        start_s, end_s = times({"response": call.raw["response"]})
        if end_s is None:
            start_s, end_s = times(call.raw)
        return LoggedCall(
            where=call.where,
            group=link.group,
            file=call.file,
            start_s=start_s,
            end_s=end_s,
            output=usage.generated
            if usage.generated is not None
            else sum(tokens_of(item, self._context) for item in response.output),
            input=usage.prompt if usage.prompt is not None or continues else added,
            cached=usage.cached,
            new=added,
            calls=by_client,
            after_tool=any(item.type.endswith(RESULT) for item in new),
            model=response.model or call.request.model,
        )


def _kept(conversation: str | None) -> str | None:
    """The key of a conversation among those of responses."""
    return None if conversation is None else f"conversation {conversation}"


def _group(call: _Answered, items: Sequence[Item]) -> str:
    if not items or call.previous is not None:
        return group_of(call.raw, (call.name,))
    first = takewhile(
        lambda item: item.type == "message" and ROLES.get(item.role or "") != "assistant", items
    )
    return group_of(call.raw, [block_of(item) for item in first] or (call.name,))
