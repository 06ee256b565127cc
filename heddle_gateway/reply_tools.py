"""The tool that a reply calls: what the tool call after a step is named by."""

import re
from collections.abc import Mapping
from typing import Any, Final

from heddle_gateway.identity import readable

LONGEST_NAME: Final = 128
"""Characters of a name, those of parallel calls together."""
SHELL: Final = "bash"
"""Tool of a reply that has a block of shell commands."""
_SHELL_BLOCK: Final = re.compile(r"^```(?:bash|sh|shell|mswea_bash_command)\s*$", re.MULTILINE)


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


def _name(call: Any) -> str:
    """Name of a call of OpenAI's chat completions."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""
