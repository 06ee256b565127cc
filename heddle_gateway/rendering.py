"""Request bodies to tokens and back. The gateway has no tokenizer: an engine's own code does it."""

from collections.abc import Sequence
from typing import Any, Protocol

from heddle_runtime.generation import GenerationEnd, Rendered


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
        """Make the whole response object, usage and parsed tool calls included.

        Raises:
            RenderError: the tokens cannot be made a response.
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


class Detokenizer(Protocol):
    """Text of token ids, for streams; special tokens left out."""

    def decode(self, ids: list[int]) -> str:
        """Return the text."""
        ...
