"""Answers in vLLM's form: of the events of an engine that answered a request itself.

An engine is asked for a stream with token ids and usage, whatever its client asked for. A client
that streams gets the events without what it did not ask for; another gets one answer made of them,
with the fields that the engine's release has.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from heddle_gateway.identity import readable
from heddle_runtime.vllm_http.probe import CHAT

LONGEST_NAME: Final = 128
"""Characters of a name, those of parallel calls together."""
SHELL: Final = "bash"
"""Tool of a reply that has a block of shell commands."""
_SHELL_BLOCK: Final = re.compile(r"^```(?:bash|sh|shell|mswea_bash_command)\s*$", re.MULTILINE)
_LOGPROB: Final = {"token": "", "logprob": -9999.0, "bytes": None}
_LISTS: Final = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
"""Of a completion's log-probs: one entry for each token."""


class WantedFields:
    """What a client asked to get beside text."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        self.token_ids = bool(body.get("return_token_ids"))
        self.usage = bool(options.get("include_usage"))
        self.usage_each = self.usage and bool(options.get("continuous_usage_stats"))


class EventFilter:
    """Turns an engine's events into those of one client."""

    def __init__(self, body: Mapping[str, Any], name: str, *, as_they_are: bool) -> None:
        """`name` is the answer's id. `as_they_are`: the engine was asked as the client asked."""
        self._wanted, self._name, self._as_they_are = WantedFields(body), name, as_they_are
        self._last: list[dict[str, Any]] = []
        """What ends the answer: it is sent when the step has ended."""

    def take(self, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what the client gets now for an event."""
        event = {**found, "id": self._name}
        if not found["choices"]:
            self._take_usage(event)
            return
        choice = dict(found["choices"][0])
        event["choices"] = [choice]
        ends = choice.get("finish_reason") is not None
        if not self._as_they_are:
            if not self._wanted.usage_each:
                event.pop("usage", None)
            if not self._wanted.token_ids and not self._without_ids(event, choice):
                return
        if ends:
            self._last.append(event)
        else:
            yield event

    def _take_usage(self, event: dict[str, Any]) -> None:
        fingerprint = event.get("system_fingerprint")
        if self._as_they_are or self._wanted.usage:
            self._last.append(event)
        elif self._last and fingerprint:
            self._last[-1]["system_fingerprint"] = fingerprint

    def _without_ids(self, event: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Take out token ids; return whether anything is left."""
        if _only_ids(choice):
            return False
        for place in (event, choice):
            for field in ("token_ids", "prompt_token_ids"):
                if field in place:
                    place[field] = None
        return True

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield what is left when no more comes."""
        yield from self._last
        self._last = []


def _only_ids(choice: Mapping[str, Any]) -> bool:
    """Whether vLLM sends an event only because token ids are asked for."""
    nothing = choice.get("delta") == {} or ("delta" in choice and choice["delta"] is None)
    return nothing and choice.get("finish_reason") is None and choice.get("logprobs") is None


class Reply:
    """What the events of one answer say together."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.head: dict[str, Any] = {}
        self.role = "assistant"
        self.text = ""
        self.echoed = ""
        """Part of the text that is of the prompt."""
        self.reasoning: str | None = None
        self.tool_calls: list[dict[str, Any]] = []
        self.logprobs: Any = None
        self.token_ids: list[int] = []
        self.prompt_token_ids: Any = None
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.usage: dict[str, Any] | None = None
        for found in events:
            self.take(found)

    def take(self, found: Mapping[str, Any]) -> None:
        self.head |= {key: value for key, value in found.items() if key not in _NO_HEAD}
        self.usage = found.get("usage") or self.usage
        self.prompt_token_ids = found.get("prompt_token_ids") or self.prompt_token_ids
        for choice in found["choices"]:
            delta = choice.get("delta")
            if isinstance(delta, dict):
                self._take_delta(delta, ids=bool(choice.get("token_ids")))
            else:
                self.text += choice.get("text") or ""
            self._take_logprobs(choice.get("logprobs"))
            self.token_ids += choice.get("token_ids") or ()
            self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
                self.stop_reason = choice.get("stop_reason")

    def _take_delta(self, delta: Mapping[str, Any], *, ids: bool) -> None:
        self.role = delta.get("role") or self.role
        self.text += delta.get("content") or ""
        if not ids and not self.token_ids and not delta.get("role"):
            self.echoed += delta.get("content") or ""
        if delta.get("reasoning") is not None:
            self.reasoning = (self.reasoning or "") + delta["reasoning"]
        for part in delta.get("tool_calls") or ():
            self._take_call(part)

    def _take_call(self, part: Mapping[str, Any]) -> None:
        index = part.get("index")
        while not isinstance(index, int) or len(self.tool_calls) <= index:
            function: Any = {"name": "", "arguments": ""}
            self.tool_calls.append({"id": None, "type": "function", "function": function})
            index = index if isinstance(index, int) else len(self.tool_calls) - 1
        call = self.tool_calls[index]
        call["id"] = part.get("id") or call["id"]
        for field in ("name", "arguments"):
            call["function"][field] += (part.get("function") or {}).get(field) or ""

    def _take_logprobs(self, logprobs: Any) -> None:
        if not isinstance(logprobs, dict):
            return
        if "content" in logprobs:
            entries = [_whole_logprob(entry) for entry in logprobs["content"] or ()]
            self.logprobs = self.logprobs or {"content": []}
            self.logprobs["content"] += entries
        else:
            self.logprobs = self.logprobs or {name: [] for name in _LISTS}
            for name in _LISTS:
                self.logprobs[name] += logprobs.get(name) or ()

    @property
    def says_anything(self) -> bool:
        """Whether there is more than a role."""
        return bool(self.text or self.reasoning or self.tool_calls or self.token_ids)

    def beyond(self, said: "Reply") -> dict[str, Any] | None:
        """Return what this says after all that `said` does, as fields of a choice.

        None: it has not come so far yet.

        Raises:
            ValueError: it says something else.
        """
        texts = [(self.text, said.text), (self.reasoning or "", said.reasoning or "")]
        for n, call in enumerate(said.tool_calls):
            again = self.tool_calls[n]["function"] if n < len(self.tool_calls) else {}
            fields = ("name", "arguments")
            texts += [(again.get(field, ""), call["function"][field]) for field in fields]
        if not all(new.startswith(old) or old.startswith(new) for new, old in texts):
            raise ValueError("another answer")
        if any(len(new) < len(old) for new, old in texts):
            return None
        rest: dict[str, Any] = {"text": self.text[len(said.text) :]}
        if reasoning := (self.reasoning or "")[len(said.reasoning or "") :]:
            rest["reasoning"] = reasoning
        calls = []
        for n, call in enumerate(self.tool_calls):
            known = n < len(said.tool_calls)
            begun = len(said.tool_calls[n]["function"]["arguments"]) if known else 0
            arguments = call["function"]["arguments"][begun:]
            if known and arguments:
                calls.append({"index": n, "function": {"arguments": arguments}})
            elif not known:
                calls.append({"index": n, **call})
        return rest | ({"tool_calls": calls} if calls else {})

    @property
    def message(self) -> dict[str, Any]:
        """As a chat's message."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning is not None:
            message["reasoning"] = self.reasoning
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


_NO_HEAD: Final = ("choices", "usage", "prompt_token_ids", "object")


def _whole_logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A token's log-prob with the fields that a stream leaves out."""
    top = [_LOGPROB | dict(each) for each in entry.get("top_logprobs") or ()]
    return _LOGPROB | dict(entry) | {"top_logprobs": top}


def whole_answer(
    endpoint: str,
    body: Mapping[str, Any],
    reply: Reply,
    *,
    name: str,
    form: Mapping[str, Any],
    counted: Mapping[str, Any],
    message: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the answer of a client that does not stream.

    `form` is an answer of the same engine, with the fields that its release has. `message` is what
    a parser made of the whole; without one the text is the content. `counted` is the usage where
    the engine said none before it broke off.
    """
    wanted = WantedFields(body)
    model = dict(form["choices"][0])
    choice: dict[str, Any] = dict.fromkeys(model) | {"index": 0, "logprobs": reply.logprobs}
    choice |= {"stop_reason": reply.stop_reason, "finish_reason": reply.finish_reason}
    if wanted.token_ids:
        choice["token_ids"] = reply.token_ids
    answer: dict[str, Any] = dict.fromkeys(form) | reply.head
    if endpoint == CHAT:
        of_form = dict.fromkeys(model.get("message") or {})
        of_form.pop("tool_calls", None)
        said = dict(message) if message is not None else {"content": reply.text}
        if message is not None and reply.echoed:
            said["content"] = reply.echoed + (said.get("content") or "")
        if body.get("parallel_tool_calls") is False and said.get("tool_calls"):
            said["tool_calls"] = said["tool_calls"][:1]
        choice["message"] = of_form | said | {"role": reply.role}
        choice["finish_reason"] = whole_finish(reply.finish_reason, body, said)
        if wanted.token_ids:
            answer["prompt_token_ids"] = reply.prompt_token_ids
    else:
        choice["text"] = reply.text
        if wanted.token_ids:
            choice["prompt_token_ids"] = reply.prompt_token_ids
    usage = _whole_usage(form.get("usage"), reply.usage or counted)
    kind = {"id": name, "object": form.get("object"), "choices": [choice], "usage": usage}
    return answer | kind


def joined_logprobs(first: Any, rest: Any) -> Any:
    """Return the log-probs of an answer of two parts, in the form of either endpoint."""
    if not first or not rest:
        return first or rest
    if "content" in first:
        return {"content": [*first["content"], *(rest.get("content") or ())]}
    at = first["text_offset"][-1] + len(first["tokens"][-1]) if first["tokens"] else 0
    joined = {name: [*first[name], *(rest.get(name) or ())] for name in _LISTS}
    joined["text_offset"] = [*first["text_offset"], *(at + n for n in rest["text_offset"])]
    return joined


def whole_finish(
    finish_reason: str | None, body: Mapping[str, Any], message: Mapping[str, Any]
) -> str | None:
    """The end of a whole chat answer, which is another than that of its stream.

    vLLM says "tool_calls" of a stream that stopped; of a whole answer also where it was cut.
    """
    stopped = "stop" if finish_reason == "tool_calls" else finish_reason
    chosen = body.get("tool_choice")
    called = bool(message.get("tool_calls")) and bool(body.get("tools"))
    if (chosen in (None, "auto") and called) or (chosen == "required" and stopped == "stop"):
        return "tool_calls"
    return stopped


def _whole_usage(form: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    form = form if isinstance(form, dict) else {}
    usage: dict[str, Any] = dict.fromkeys(form)
    for field, value in said.items():
        nested = form.get(field)
        usage[field] = dict.fromkeys(nested) | value if isinstance(nested, dict) else value
    return usage


def tool_of(response: Mapping[str, Any]) -> str:
    """Return the tool that a response object calls; "" if it shows none.

    Parallel calls are "a+b", each name once, in their order. Without a call, a block of shell
    commands is one: agents as mini-swe-agent run it.
    """
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        return ""
    message = choice.get("message")
    message = message if isinstance(message, Mapping) else {}
    calls = message.get("tool_calls")
    names = [_name(call) for call in calls] if isinstance(calls, list) else []
    called = "+".join(dict.fromkeys(name for name in names if name))
    if called:
        return readable(called[:LONGEST_NAME])
    text = message.get("content") or choice.get("text")
    return SHELL if isinstance(text, str) and _SHELL_BLOCK.search(text) else ""


def called_tools(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the tools that a forwarded answer calls, as `tool_of` does."""
    names: dict[str, None] = {}
    for found in events:
        inner = found.get("response")
        source = inner if isinstance(inner, Mapping) else found
        items = [*(source.get("content") or ()), *(source.get("output") or ())]
        for item in (*items, found.get("content_block")):
            if isinstance(item, Mapping) and item.get("type") in ("tool_use", "function_call"):
                names[str(item.get("name") or "")] = None
    return readable("+".join(name for name in names if name)[:LONGEST_NAME])


def _name(call: Any) -> str:
    """Name of a call of OpenAI's chat completions."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""
