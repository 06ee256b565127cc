"""Request bodies to tokens and back. The gateway has no tokenizer: an engine's own code does it."""

from collections.abc import Sequence
from typing import Any, Protocol

from heddle_runtime.generation import GenerationEnd, Refusal, Rendered


class Renderer(Protocol):
    """Makes prompts of bodies, and responses of generated tokens.

    `endpoint` is ``/v1/chat/completions`` or ``/v1/completions``.
    """

    async def render(self, endpoint: str, body: dict[str, Any]) -> Rendered:
        """Make the prompt of a request.

        Raises:
            RenderError: the body is refused.
        """
        ...

    async def derender(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        output_ids: Sequence[int],
        end: GenerationEnd,
    ) -> dict[str, Any]:
        """Make the whole response object, parsed tool calls included.

        Raises:
            RenderError: the tokens cannot be made a response.
        """
        ...

    async def derender_more(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        new_ids: Sequence[int],
        state: Any,
        end: GenerationEnd | None,
        logprobs: Sequence[Any] = (),
    ) -> tuple[dict[str, Any], Any]:
        """Make the choice of a stream's event of further tokens, and the state after them.

        `state` is None first; `end` comes with the last tokens.

        Raises:
            RenderError: it could not be made.
        """
        ...

    async def refusal(self, endpoint: str, body: bytes, content_type: str) -> Refusal | None:
        """Return what vLLM says of a body that it refuses, however it is written.

        Raises:
            RenderError: it could not be asked.
        """
        ...


class EngineCalls(Protocol):
    """Calls that are only passed on to an engine: ``/tokenize``, ``/detokenize``, ``*/render``."""

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Return the engine's JSON answer.

        Raises:
            RenderError: the engine refused it.
        """
        ...
