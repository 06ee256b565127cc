"""What an endpoint is, found by calls, before any step runs there."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from heddle_runtime.vllm_http.endpoint import Answer, Endpoint, UnreachableError
from heddle_runtime.vllm_http.metrics import began, cache_labels
from heddle_runtime.vllm_http.stream import ProtocolError, read_chunk

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
FORWARDED = frozenset({RESPONSES, MESSAGES})
"""Endpoints whose answers clients get as an engine sends them; no event has token ids."""

GATEWAY_HEADER = "x-heddle-gateway"
"""A gateway sends it with every answer, so that none takes itself or another for an engine."""
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
PROBES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    COMPLETIONS: {"prompt": [1]},
}
"""Requests of one token."""
_NO_SIZE = 1 << 40
"""No engine has so many tokens, steps or GPUs."""


class ProbeError(Exception):
    """An endpoint cannot be an engine; the message begins with its URL and says how to mend it."""


class EndpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint said of itself, or showed."""

    url: str
    release: str
    """Of vLLM."""
    model: str
    """The name that clients call it by."""
    root: str
    """Where its weights came from."""
    max_context: int
    kv_capacity_tokens: int
    """Of all data-parallel ranks together."""
    longest: int
    """The longest prompt and output together."""
    block_tokens: int
    prefix_caching: bool
    moves_kv: bool
    """Whether it exports KV by a connector."""
    reports_cached_tokens: bool
    dev_mode: bool
    scheduling: str = ""
    """`fcfs` or `priority`; "" where its configuration cannot be read: without dev mode."""
    max_running: int | None = None
    """Its `max_num_seqs`; None where its configuration cannot be read."""
    kv_lease_s: float | None = None
    """None where its configuration cannot be read."""
    tp: int | None = None
    """Its TP degree; None where its configuration cannot be read."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it lists, by the names that requests give."""
    ranks: int = 1
    """Data-parallel ranks."""
    parses: bool = False
    """Whether it has a parser of tool calls or reasoning."""
    began: str = ""
    """When its process and its counters began, which differs from those of all others; "" where it
    does not say both: with several API servers."""
    answers: dict[str, dict[str, Any]] = {}
    """Its whole answer to a request of one token, by path: which fields its release has. None for
    an endpoint that it does not serve: without a chat template there is no chat."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it has not, each with the feature that is off or worse for it."""
        missing = []
        if not self.prefix_caching:
            missing.append("no prefix caching: each step prefills its whole context")
        if not self.moves_kv:
            missing.append("no KV connector: a move is a prefill on the target")
        if not self.reports_cached_tokens:
            missing.append(
                "no --enable-prompt-tokens-details: prefix hits are recorded as 0 tokens"
            )
        if not self.dev_mode:
            missing.append(
                "no dev mode: its TP degree, queue, scheduling and KV lease cannot be read"
            )
        elif self.scheduling != "priority":
            missing.append("first come, first served: what it cannot run at once keeps no order")
        return tuple(missing)

    def is_at(self, other: "EndpointFacts") -> bool:
        """Whether it is the engine that has another URL."""
        return self.url != other.url and "" != self.began == other.began

    @property
    def line(self) -> str:
        """The endpoint, and what it lacks, in one line."""
        about = (
            f"{self.url}: vLLM {self.release}, model {self.model}, {self.kv_capacity_tokens:,} "
            f"tokens of KV, context {self.max_context:,}"
        )
        return "; ".join([about, *self.lacks])


async def probe(endpoint: Endpoint, *, limit_s: float) -> EndpointFacts:
    """Find out what an endpoint is; it generates one token.

    Raises:
        ProbeError: it is no engine that can be used.
    """
    try:
        return await _probe(endpoint, limit_s)
    except UnreachableError as error:
        raise ProbeError(f"{endpoint.url}: {error}; is it vLLM, and ready?") from None


async def _probe(endpoint: Endpoint, limit_s: float) -> EndpointFacts:
    url = endpoint.url
    health = await endpoint.call("/health", limit_s=limit_s)
    _check_no_gateway(url, health)
    if health.status != 200:
        raise ProbeError(f"{url}: /health says {health.status}; is it vLLM, and ready?")
    release = _field(await endpoint.call("/version", limit_s=limit_s), "version")
    models = await endpoint.call("/v1/models", limit_s=limit_s)
    if models.status in (401, 403):
        raise ProbeError(f"{url}: it refuses the key ({models.status}); give its api_key")
    model = _base_model(models)
    if not isinstance(release, str) or model is None:
        raise ProbeError(f"{url} is not vLLM: its /version and /v1/models are not those of vLLM")
    metrics = (await endpoint.call("/metrics", limit_s=limit_s)).data.decode("utf-8", "replace")
    ranks = cache_labels(metrics)
    try:
        blocks = [int(rank["num_gpu_blocks"]) - 1 for rank in ranks]  # one is the null block
        block_tokens = int(ranks[0]["block_size"])
        if min(*blocks, block_tokens) < 1 or _size(sum(blocks) * block_tokens) is None:
            raise ValueError
    except (KeyError, ValueError, IndexError, TypeError):
        raise ProbeError(
            f"{url}: its /metrics has no KV capacity; start it without --disable-log-stats"
        ) from None
    config = await _configuration(endpoint, limit_s)
    transfer, cached = await _generate_once(endpoint, block_tokens, limit_s)
    answers = {path: found for path in PROBES if (found := await _answer(endpoint, path, limit_s))}
    scheduler = _object(config, "scheduler_config")
    connector = _object(_object(config, "kv_transfer_config"), "kv_connector_extra_config")
    max_running, lease_s = scheduler.get("max_num_seqs"), connector.get("kv_lease_duration")
    tp = _object(config, "parallel_config").get("tensor_parallel_size")
    return EndpointFacts(
        url=url,
        release=release,
        model=str(model["id"]),
        root=str(model.get("root") or model["id"]),
        max_context=int(model["max_model_len"]),
        kv_capacity_tokens=sum(blocks) * block_tokens,
        longest=min(int(model["max_model_len"]), min(blocks) * block_tokens),
        block_tokens=block_tokens,
        prefix_caching=ranks[0].get("enable_prefix_caching") == "True",
        moves_kv=transfer,
        reports_cached_tokens=cached,
        dev_mode=bool(config),
        scheduling=str(scheduler.get("policy", "")),
        max_running=_size(max_running),
        kv_lease_s=float(lease_s) if isinstance(lease_s, int | float) else None,
        tp=_size(tp),
        adapters=_adapters(models),
        ranks=len(ranks),
        parses=await _parses(endpoint, limit_s),
        began=began(metrics),
        answers=answers,
    )


async def _answer(endpoint: Endpoint, path: str, limit_s: float) -> dict[str, Any]:
    """The answer to a request of one token; empty if there is none."""
    wanted = {**PROBES[path], "max_tokens": 1, "temperature": 0.0}
    answer = await endpoint.call(path, wanted, limit_s=limit_s)
    if answer.status >= 500 or answer.status == 429:
        raise ProbeError(f"{endpoint.url}: {path} says {answer.status}: {answer.message}")
    found = answer.json() if answer.status == 200 else None
    choices = found.get("choices") if isinstance(found, dict) else None
    complete = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)
    return found if complete and isinstance(found, dict) else {}


async def _parses(endpoint: Endpoint, limit_s: float) -> bool:
    """Whether it has a parser: then it makes no answer of tokens without the request."""
    made = {"request_id": "probe", "choices": [{"index": 0, "token_ids": [1]}]}
    answer = await endpoint.call(f"{CHAT}/derender", {"generate_response": made}, limit_s=limit_s)
    return answer.status == 400


def one_token(ids: Sequence[int], transfer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the request of one token after these, with KV pulled or kept as `transfer` says."""
    sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    if transfer is not None:
        # The field of the request itself is read by newer releases only.
        sampling["extra_args"] = {"kv_transfer_params": transfer}
    return {"token_ids": list(ids), "sampling_params": sampling}


async def makes_a_token(endpoint: Endpoint, *, limit_s: float) -> bool:
    """Whether an endpoint generates."""
    try:
        answer = await endpoint.call(GENERATE, one_token([1]), limit_s=limit_s)
        made = read_chunk(answer.data) if answer.status == 200 else None
    except (UnreachableError, ProtocolError):
        return False
    return made is not None and made.error is None and bool(made.choices)


def _check_no_gateway(url: str, answer: Answer) -> None:
    if GATEWAY_HEADER in answer.headers:
        raise ProbeError(f"{url} is a Heddle gateway, not an engine: give the URL of a vllm serve")


def _field(answer: Answer, name: str) -> Any:
    content = answer.json()
    return content.get(name) if isinstance(content, dict) else None


def _object(of: dict[str, Any], name: str) -> dict[str, Any]:
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def _size(value: Any) -> int | None:
    """A number of tokens, steps or GPUs, if it can be one."""
    plausible = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _NO_SIZE
    return value if plausible else None


def _base_model(answer: Answer) -> dict[str, Any] | None:
    """The model itself, not an adapter of it."""
    listed = _field(answer, "data")
    for model in listed if isinstance(listed, list) else ():
        if (
            isinstance(model, dict)
            and model.get("owned_by") == "vllm"
            and not model.get("parent")
            and _size(model.get("max_model_len")) is not None
            and "id" in model
        ):
            return model
    return None


def _adapters(answer: Answer) -> tuple[str, ...]:
    listed = _field(answer, "data")
    models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return tuple(str(each["id"]) for each in models if each.get("parent") and "id" in each)


async def _configuration(endpoint: Endpoint, limit_s: float) -> dict[str, Any]:
    """vLLM's configuration; empty outside of dev mode. The first call may take seconds."""
    if (await endpoint.call("/is_paused", limit_s=limit_s)).status != 200:
        return {}
    answer = await endpoint.call("/server_info?config_format=json", limit_s=3 * limit_s)
    found = _field(answer, "vllm_config")
    return found if isinstance(found, dict) else {}


async def _generate_once(
    endpoint: Endpoint, block_tokens: int, limit_s: float
) -> tuple[bool, bool]:
    """Make one token; return whether KV can be exported, and whether prefix hits are reported."""
    url = endpoint.url
    body = one_token([1] * (block_tokens + 1), {"do_remote_decode": True})
    answer = await endpoint.call(GENERATE, body, limit_s=limit_s)
    if answer.status in (403, 404, 405):
        raise ProbeError(
            f"{url}: its token endpoints are off; start vllm serve with --enable-scale-out"
        )
    if answer.status != 200:
        raise ProbeError(f"{url}: {GENERATE} says {answer.status}: {answer.message}")
    try:
        made = read_chunk(answer.data)
    except ProtocolError as error:
        raise ProbeError(f"{url}: {error}") from None
    if len(made.choices) != 1 or len(made.choices[0].token_ids or ()) != 1:
        raise ProbeError(f"{url}: {GENERATE} was to make one token, and did not")
    return made.kv_transfer_params is not None, made.cached_tokens is not None
