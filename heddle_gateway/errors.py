"""Errors for clients, in OpenAI's envelope."""

from typing import Any

from heddle_runtime.generation import RenderError


class ApiError(Exception):
    """A request that cannot be answered as the client wants."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """`status` is of HTTP; `kind` OpenAI's `type`; `param` the field that is wrong."""
        super().__init__(message)
        self.status = status
        self.error: dict[str, Any] = {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
        }
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The response."""
        return {"error": self.error}


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


def too_long(message: str) -> ApiError:
    """Return the error of a context that no engine can hold."""
    return ApiError(400, message, param="messages", code="context_length_exceeded")
