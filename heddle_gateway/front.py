"""What the HTTP endpoints have in common: settings, who may call, and how requests are answered."""

import asyncio
import hmac
import logging
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec

from heddle_gateway.access import AccessLog
from heddle_gateway.client_step import ClientStep
from heddle_gateway.engine_urls import RegisteredEngines
from heddle_gateway.errors import ApiError, of_renderer
from heddle_gateway.gateway import Gateway
from heddle_gateway.http import HttpRequest, Response
from heddle_gateway.metrics import Metrics
from heddle_gateway.openai_api import ServedModel
from heddle_gateway.passing import passed
from heddle_gateway.prompt_ids import PromptReader, read_fields, split_body
from heddle_gateway.rendering import Renderer
from heddle_gateway.tenants import UNNAMED, Tenants
from heddle_runtime.generation import RenderError
from heddle_runtime.vllm_http.endpoint import Endpoint
from heddle_runtime.vllm_http.probe import MESSAGES, EndpointFacts

if TYPE_CHECKING:
    from heddle_gateway.traces import Traces

Handler: TypeAlias = Callable[["Front", HttpRequest], Awaitable[Response]]
"""Answers a request to a path."""
Answering: TypeAlias = Callable[[HttpRequest], Awaitable[Response]]
Access: TypeAlias = Literal["open", "client", "limited", "admin"]
"""Who may call: everybody, clients, clients below their limit, who has the admin key."""
MOST_OPEN: Final = 65_536
_LONG: Final = 64 << 10
"""Bytes of a body that is read alone between two looks at what else is to be done."""
MOST_MARKS: Final = 2 << 20
"""Brackets and quotes of a body: an empty list of two bytes takes 88 once it is read."""
_JSON: Final = "application/json"
_LOG: Final = logging.getLogger(__name__)


class EngineControl(Protocol):
    """Calls every engine."""

    async def call_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]] | None = None,
        *,
        optional: bool = False,
    ) -> Mapping[str, Any]:
        """Return the answer of each engine by its name, in the order of `names`.

        `bodies` has one for each; None: a GET. Engines that lack the path are left out if it is
        `optional`; there may then be no engine at all.

        Raises:
            ApiError: an engine refused the call, or did not answer; others may have done it.
        """
        ...

    @property
    def names(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Settings of the HTTP side."""

    api_key: str = ""
    """Bearer key of clients; empty: none is needed."""
    admin_key: str = ""
    """Key of engines and control; empty: they are called from this machine only, with the key of
    clients."""
    open_to_all: bool = False
    """Whether everybody who reaches the gateway may use and control it."""
    host: str = ""
    """The address to listen on; a request that needs no key has it in ``Host``, or an IP address,
    or ``localhost``."""
    max_open: int = MOST_OPEN
    """Requests at once; more get status 429."""
    body_bytes: int = 32 << 20
    """Largest body."""
    body_s: float = 60.0
    """Longest time for a body to come. A connection without a request is closed after one to two of
    these."""
    keep_alive_s: float = 10.0
    """Between comments on a stream without tokens."""
    coalesce_s: float = 0.0
    """Between two events of a stream at least."""
    user_is_session: bool = False
    """Whether the body's `user` names a session."""
    lists_itself: bool = False
    """Whether `GET /workers` has the gateway alone: some clients abort at the URLs listed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Front:
    """The gateway as the endpoints see it."""

    gateway: Gateway
    model: ServedModel
    settings: FrontSettings = field(default_factory=FrontSettings)
    renderer: Renderer | None = None
    """None: token ids only."""
    engine_facts: Callable[[], EndpointFacts | None] = lambda: None
    """What engines that answer requests themselves are; None where they only make tokens."""
    engine_urls: RegisteredEngines | None = None
    control: EngineControl | None = None
    """None: engines take no control calls."""
    end: Callable[[], None] = lambda: None
    """Drains the gateway, and ends it."""
    reload: Callable[[], Coroutine[Any, Any, Sequence[str]]] | None = None
    """Reads again what may change while it runs; returns what could not be taken over."""
    tenants: Tenants = field(default_factory=Tenants)
    access_log: AccessLog | None = None
    traces: "Traces | None" = None
    others: Mapping[str, Endpoint] = field(default_factory=dict)
    """Servers of further models, by the names that requests give."""
    metrics: Metrics = field(default_factory=Metrics)
    requests: dict[str, Sequence[ClientStep]] = field(default_factory=dict)
    """Steps under way by the client's id of its request."""
    prompts: PromptReader = field(default_factory=PromptReader)
    _long: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of reading a long body: what is small is answered between two of these."""

    def __post_init__(self) -> None:
        self.gateway.on_decision = self.metrics.decisions.take
        self.gateway.sessions.on_over = self.prompts.forget

    def check_caller(self, request: HttpRequest, *, admin: bool) -> str:
        """Check the caller's key, and that it is no page of another site; return the tenant.

        Raises:
            ApiError: the key is missing or wrong, or a browser sent this for another site.
        """
        settings = self.settings
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise ApiError(403, "requests of other sites are refused", kind="permission_error")
        if request.has_body and request.content_type != "application/json":
            # In vLLM's words.
            text = "Unsupported Media Type: Only 'application/json' is allowed"
            wrong = ApiError(400, f"1 validation error:\n  {text}", kind="Bad Request", code=400)
            wrong.whole = wrong.body  # on every path
            raise wrong
        if admin and not settings.admin_key and not (settings.open_to_all or _is_local(request)):
            raise ApiError(
                403,
                "without an admin key, engines and control are for calls from the gateway's own "
                "machine: start it with HEDDLE_ADMIN_KEY in its environment and give that",
                kind="permission_error",
            )
        key = (settings.admin_key if admin else "") or settings.api_key
        if not key and (admin or self.tenants.path is None):
            if not settings.open_to_all:
                _check_host(request, settings, "HEDDLE_ADMIN_KEY" if admin else "HEDDLE_API_KEY")
            return ""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if not kind:  # as Anthropic's clients send it
            kind, given = "bearer", request.headers.get("X-Api-Key", "")
        if not admin and kind.lower() == "bearer" and (name := self.tenants.name_of(given.strip())):
            return name
        right = hmac.compare_digest(given.strip().encode(errors="replace"), key.encode())
        if kind.lower() != "bearer" or not (right and key):
            which = "admin key" if admin and settings.admin_key else "API key"
            raise ApiError(
                401,
                f"give the {which} as Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return "" if self.tenants.path is None else UNNAMED

    async def body(self, request: HttpRequest, *, has_ids: bool = False) -> dict[str, Any]:
        """Read a request's JSON object, {} without a body; see `split_body` and `read_fields`.

        What it takes counts until its answer.

        Raises:
            ApiError: it is no JSON object, too large, or does not come.
        """
        raw = await self.raw_body(request)
        if len(raw) > _LONG:
            async with self._long:
                await asyncio.sleep(0)
        fields = split_body(raw.removeprefix(BOM_UTF8), has_ids=has_ids) if raw else {}
        return read_fields(fields, lambda more: request.hold(len(raw) + more))

    async def raw_body(self, request: HttpRequest) -> bytes:
        """Read a request's body.

        Raises:
            ApiError: it is too large, has too many parts, or does not come.
        """
        raw = await request.read(self.settings.body_bytes, self.settings.body_s)
        if len(raw) > MOST_MARKS and sum(map(raw.count, (b"[", b"{", b'"'))) > MOST_MARKS:
            text = f"the body has more than {MOST_MARKS:,} brackets and quotes: send less at once"
            raise ApiError(413, text, ours=True)
        return raw

    async def other_endpoint(self, request: HttpRequest) -> Endpoint | None:
        """Return the server of the model that a request names, if it is another than ours."""
        if not self.others or request.method != "POST":
            return None
        try:
            return self.others.get(str((await self.body(request)).get("model")))
        except ApiError:
            return None  # it is refused where it is read

    def for_engines(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the model's name that engines know."""
        facts = self.engine_facts()
        model = body.get("model")
        if facts is None or model in (None, "", facts.model):
            return body
        if not isinstance(model, str) or model in self.model.adapters():
            return body
        return {**body, "model": facts.model}

    def check_model(self, body: Mapping[str, Any]) -> str:
        """Return the model that a body names, or the default.

        Raises:
            ApiError: it is another.
        """
        models = self.model.names
        name = body.get("model")
        if name in (None, "") or not models:
            return models[0] if models else "model"
        if not isinstance(name, str):
            text = "1 validation error:\n  'model': Input should be a valid string"
            raise ApiError(400, text, kind="Bad Request", code=400, param="model")
        adapters = self.model.adapters()
        if name not in models and name not in adapters:
            shown, served = repr(name)[:200], ", ".join(map(repr, (*models, *adapters)))
            raise ApiError(
                404,
                f"the model {shown} is not served; there is {served}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return name


def _is_local(request: HttpRequest) -> bool:
    """Whether a request comes from this machine, and from no proxy on it."""
    if any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "Via")):
        return False
    peer: Any = request.transport and request.transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return True  # a socket of this machine's file system
    try:
        # An IPv4 client of an IPv6 socket has "::ffff:" before its address.
        return ip_address(str(peer[0]).partition("%")[0].removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def _check_host(request: HttpRequest, settings: FrontSettings, key: str) -> None:
    """Refuse a page whose own name resolves to the gateway: for browsers that is one site.

    Raises:
        ApiError: ``Host`` has another name than the gateway's.
    """
    host = request.headers.get("Host", "")
    if not _is_own_host(host, settings.host.lower()):
        raise ApiError(
            403,
            f"a gateway without a key is not called {host[:200]!r}: call it by its IP address or "
            f"localhost, or start it with {key} in its environment and give that",
            kind="permission_error",
        )


@lru_cache(maxsize=256)
def _is_own_host(host: str, own: str) -> bool:
    """No page has an address as its name, and each browser sends a name."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name in ("", "localhost", own) or bool(ip_address(name))
    except ValueError:
        return False


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON answer."""
    body = msgspec.json.encode(value)
    return Response(body, status=status, headers={"Content-Type": _JSON, **(headers or {})})


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Return an error in the envelope of a path: OpenAI's, or Anthropic's."""
    if not path.removesuffix("/count_tokens").endswith(MESSAGES) or error.whole is not None:
        return error.body
    said = {name: error.error[name] for name in ("type", "message")}
    return {"type": "error", "error": said}


def error_response(error: ApiError, path: str = "") -> Response:
    """Return an error in the envelope of a path."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(path, error), status=error.status, headers=headers)


def answering(front: Front, path: str, handle: Handler, access: Access) -> Answering:
    """Return a handler that checks the key, counts, and answers errors in their envelope."""

    async def answer(request: HttpRequest) -> Response:
        metrics, status = front.metrics, 499  # as proxies count clients that went
        metrics.open += 1
        began_s = time.monotonic()
        try:
            if access != "open":
                request.tenant = front.check_caller(request, admin=access == "admin")
                if access == "limited":
                    front.tenants.count(request.tenant, began_s)
            if metrics.open > front.settings.max_open:
                raise ApiError(
                    429,
                    f"{front.settings.max_open:,} requests are open",
                    kind="rate_limit_error",
                    retry_after_s=1,
                )
            other = None if access == "admin" else await front.other_endpoint(request)
            if other is None:
                response = await handle(front, request)
            else:
                raw = await front.raw_body(request)
                with front.tenants.holding(request.tenant, 1):
                    response = await passed(request, raw, other)
            status = response.status
            return response
        except (ApiError, RenderError) as refused:
            # The frames of a traceback have the body, and some of them the error.
            refused.__traceback__ = refused.__context__ = None
            error = of_renderer(refused) if isinstance(refused, RenderError) else refused
            status = error.status
            return error_response(error, path)
        except ConnectionError:
            raise  # the client is gone
        except Exception:
            status = 500
            _LOG.exception("a request to %s failed", path)
            failed = ApiError(500, "the gateway failed", kind="server_error")
            return error_response(failed, path)
        finally:
            if front.access_log is not None and access != "open":
                front.access_log.write(request, status, began_s)
            if front.traces is not None and access != "open":
                front.traces.write(request, path, status, began_s)
            metrics.open -= 1
            metrics.answered(path, status)

    return answer
