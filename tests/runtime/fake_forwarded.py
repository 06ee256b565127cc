"""Bodies and answers of `/v1/messages` and `/v1/responses`, in vLLM's form, of made-up tokens."""

from typing import Any

from heddle_runtime.vllm_http.probe import MESSAGES


def chat_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The chat that a body is rendered as."""
    if path == MESSAGES:
        said = [{"role": "system", "content": body["system"]}] if "system" in body else []
        said, limit = [*said, *body["messages"]], body["max_tokens"]
    else:
        given = body["input"]
        said = [{"role": "user", "content": given}] if isinstance(given, str) else given
        limit = body.get("max_output_tokens", 16)
    same = {name: body[name] for name in ("model", "temperature", "stream") if name in body}
    return {**same, "messages": said, "max_tokens": limit}


def refusal_of(path: str, message: str, status: int) -> dict[str, Any]:
    if path == MESSAGES:
        return {"type": "error", "error": {"type": "BadRequestError", "message": message}}
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return {"error": error}


def delta_of(path: str, text: str) -> dict[str, Any]:
    if path == MESSAGES:
        delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": 0, "delta": delta}
    return {"type": "response.output_text.delta", "delta": text}


def answer_of(path: str, body: dict[str, Any], text: str, prompt: int, made: int) -> dict[str, Any]:
    """The whole answer, which calls a tool if one is offered."""
    usage: dict[str, Any] = {"input_tokens": prompt, "output_tokens": made}
    names = [tool["name"] for tool in body.get("tools", ())[:1]]
    if path == MESSAGES:
        content: list[Any] = [{"type": "text", "text": text}]
        content += [{"type": "tool_use", "id": "t", "name": n, "input": {}} for n in names]
        return {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "content": content,
            "stop_reason": "max_tokens",
            "usage": usage,
        }
    said = {"type": "output_text", "text": text, "annotations": []}
    output: list[Any] = [{"type": "message", "role": "assistant", "content": [said]}]
    output += [{"type": "function_call", "name": n, "arguments": "{}"} for n in names]
    usage["input_tokens_details"] = {"cached_tokens": 0}
    return {
        "id": "resp_1",
        "object": "response",
        "error": None,
        "output": output,
        "model": body.get("model"),
        "status": "completed",
        "usage": usage,
    }


def last_events(path: str, whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that end a stream of such an answer."""
    if path == MESSAGES:
        calls = [b for b in whole["content"] if b["type"] == "tool_use"]
        starts = [{"type": "content_block_start", "index": 1, "content_block": b} for b in calls]
        end = {"stop_reason": whole["stop_reason"]}
        last = {"type": "message_delta", "delta": end, "usage": whole["usage"]}
        return [*starts, last, {"type": "message_stop"}]
    return [{"type": "response.completed", "response": whole}]
