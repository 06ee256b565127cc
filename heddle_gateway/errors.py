"""Errors for clients, in OpenAI's envelope."""

from typing import Any, Final

from heddle_runtime.generation import Refusal, RenderError

NOT_FOUND: Final = "Not Found"


class ApiError(Exception):
    """A request that cannot be answered as the client wants."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: int | None = None,
        ours: bool = False,
    ) -> None:
        """`status` is of HTTP; `kind` OpenAI's `type`; `param` the field that is wrong. `ours`:
        whether it is known that vLLM would not refuse it.
        """
        super().__init__(message)
        self.status, self.ours = status, ours
        self.error: dict[str, Any] = {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
        }
        self.retry_after_s = retry_after_s
        self.in_stream = False
        """Whether a client that streams gets it as an event, after a status of 200."""
        self.whole: dict[str, Any] | None = None
        """The response where it is no error object: vLLM has such, of its web framework."""

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error} if self.whole is None else self.whole


def of_engine(refusal: Refusal) -> ApiError:
    """Return an engine's refusal as the client gets it: in the engine's words."""
    said = refusal.body.get("error")
    message = said.get("message") if isinstance(said, dict) else refusal.body.get("detail")
    error = ApiError(refusal.status, str(message or ""))
    error.whole = refusal.body
    error.in_stream = refusal.in_stream
    if refusal.retry_after_s is not None:
        error.retry_after_s = max(1, round(refusal.retry_after_s))
    elif refusal.status in (429, 503):
        error.retry_after_s = 1
    return error


def not_there(status: int, message: str) -> ApiError:
    """Return the error of a path or method that is not there, as vLLM's web framework has it."""
    error = ApiError(status, message, kind="not_found_error")
    error.whole = {"detail": message}
    return error


def of_renderer(refused: RenderError) -> ApiError:
    """Return a renderer's refusal as the client gets it."""
    error = ApiError(refused.status, str(refused))
    error.error |= refused.error
    return error


def unavailable(message: str, retry_after_s: int = 5) -> ApiError:
    """Return an error after which the client may send the same again."""
    return ApiError(503, message, kind="service_unavailable_error", retry_after_s=retry_after_s)


def no_engine(wait_s: float) -> ApiError:
    """Return the error of a call for which no engine came in `wait_s`."""
    return unavailable(
        f"no engine for {wait_s:g} s: start one, or register it by POST /workers, and send the "
        "same again",
        retry_after_s=30,
    )


def past_deadline() -> ApiError:
    """Return the error of a step that its client waits for no longer."""
    return ApiError(504, "no answer within the time that the request gave", kind="timeout_error")


def too_long(message: str) -> ApiError:
    """Return the error of a context that no engine can hold."""
    return ApiError(400, message, param="messages", code="context_length_exceeded")
