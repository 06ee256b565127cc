"""Messages between a driver and the process of an engine, and their format on a socket.

A message is four bytes of length and a msgpack map with its name. There is no message per token: an
engine reports the end of a step, and its new tokens every `progress_s`, so that little is lost when
it is killed.

Token ids are the bytes of an array of 32-bit integers: packing 30,000 of them takes microseconds.

Times are durations, never moments.
"""

import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from heddle_core.events import MoveWay
from heddle_runtime.process.stepped_engine import Finish, TopLogprobs
from heddle_runtime.vllm.settings import VllmSettings


class WireMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the tag is the class's name."""


# -- driver to engine ---------------------------------------------------------------------------


class Boot(WireMessage, frozen=True):
    """The first order: what engine to build. Ends in `Ready` or `Broken`."""

    settings: VllmSettings
    tp: int
    max_running: int
    parent: int
    """Id of the process that started it; the engine ends with it."""
    cores: tuple[int, ...] = ()
    """CPU cores that it may use; empty: any."""


class Start(WireMessage, frozen=True):
    """Run a step. Ends in one `Ended`."""

    id: int
    """Of this step, unique to the engine."""
    trajectory: str
    prompt: bytes
    max_tokens: int
    exact: bool
    sampling: dict[str, Any] | None = None
    """Fields of vLLM's `SamplingParams`; None: those of the settings."""
    salt: str = ""
    """What separates its KV from that of others."""


class Abort(WireMessage, frozen=True):
    """End a step early; ignored if it has ended."""

    id: int


class Forget(WireMessage, frozen=True):
    """A trajectory's KV is not needed any more."""

    trajectory: str


class Export(WireMessage, frozen=True):
    """Keep the KV of a context ready for a pull. Ends in `Exported`."""

    id: int
    trajectory: str
    prompt: bytes
    salt: str = ""


class Import(WireMessage, frozen=True):
    """Bring a context into the prefix cache. Ends in `Placed`."""

    id: int
    prompt: bytes
    kv: dict[str, Any] | None = None
    """The value of `Exported.kv`; None: prefill."""
    remaining_s: float = 0.0
    """No pull may begin later than so many seconds after this was sent."""
    salt: str = ""


class LoadWeights(WireMessage, frozen=True):
    """Load other weights. Ends in `WeightsLoaded`."""

    version: int
    path: str
    keep_kv: bool = False
    """Whether running and later requests go on with the KV that is there."""


class Sleep(WireMessage, frozen=True):
    """Free the accelerator's memory. Ends in `Slept`."""

    level: int


class Wake(WireMessage, frozen=True):
    """Allocate it again. Ends in `Woke`."""


class Stop(WireMessage, frozen=True):
    """End the process."""


Order: TypeAlias = (
    Boot | Start | Abort | Forget | Export | Import | LoadWeights | Sleep | Wake | Stop
)


# -- engine to driver ---------------------------------------------------------------------------


class Ready(WireMessage, frozen=True):
    """The engine accepts steps from now on."""

    kv_capacity_tokens: int
    block_tokens: int
    kv_bytes_per_token: int
    """On all of its GPUs together."""
    max_context: int
    """The longest prompt and output together."""
    release: str
    """Of vLLM."""
    import_s: float
    load_s: float
    dtype: str = ""
    """Of weights and KV."""
    device: str = ""
    """The GPU's name; empty on CPU."""
    notes: tuple[str, ...] = ()
    """What a user should know, such as an unknown release."""


class Made(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of a running step since the last `Progress`."""

    id: int
    tokens: bytes
    prefill_s: float
    decode_s: float
    """Since its first token."""
    logprobs: bytes = b""
    """Of the tokens, if the settings or the step want them."""
    top: list[TopLogprobs] = []
    """Of the tokens, if the step wants them."""


class Progress(WireMessage, frozen=True):
    """Sent at an interval if there are new tokens."""

    made: list[Made]


class Ended(WireMessage, frozen=True):
    """How a step ended; for each value see the driver's step result."""

    id: int
    tokens: bytes
    """Those that no `Progress` has reported."""
    finished: bool
    prefill_s: float
    decode_s: float
    cached_tokens: int
    recomputes: int
    error: str = ""
    logprobs: bytes = b""
    """Of `tokens`, if the settings or the step want them."""
    top: list[TopLogprobs] = []
    """Of `tokens`, if the step wants them."""
    finish: Finish = ""
    stop_reason: int | str | None = None
    """The stop token or string that ended it."""


class Exported(WireMessage, frozen=True):
    """Answer of `Export`; None when there is nothing to pull."""

    id: int
    kv: dict[str, Any] | None
    kv_tokens: int


class Placed(WireMessage, frozen=True):
    """Answer of `Import`."""

    id: int
    way: MoveWay
    tokens: int
    why: str = ""
    """Why a handle was not used."""


class Sampled(WireMessage, frozen=True):
    """Counters, as in `engine.EngineSample`."""

    running: int
    waiting: int
    kv_used_tokens: int
    preemptions: int
    drafted: tuple[int, ...] = ()
    """With speculative decoding: iterations of sequences that decoded, one each, and how many of
    them accepted the first 1, 2, ... drafts."""


class Alive(WireMessage, frozen=True):
    """A heartbeat of the engine's loop, at an interval also while nothing runs."""


class WeightsLoaded(WireMessage, frozen=True):
    """Answer of `LoadWeights`."""

    version: int


class Slept(WireMessage, frozen=True):
    """Answer of `Sleep`."""

    seconds: float


class Woke(WireMessage, frozen=True):
    """Answer of `Wake`."""

    seconds: float


class Broken(WireMessage, frozen=True):
    """The engine ends after a fatal error."""

    reason: str


Report: TypeAlias = (
    Ready
    | Progress
    | Ended
    | Exported
    | Placed
    | Sampled
    | Alive
    | WeightsLoaded
    | Slept
    | Woke
    | Broken
)


# -- on the socket ------------------------------------------------------------------------------

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 18

In = TypeVar("In")


class ClosedError(EOFError):
    """The other side is gone."""


class Channel(Generic[In]):
    """One end of a stream socket; reads messages of one direction, writes those of the other.

    Never blocks: it keeps what the socket does not accept for the next `flush`.
    """

    def __init__(self, sock: socket.socket, reads: Any) -> None:
        """`reads`: the type to decode, such as `Order` or `Report`."""
        sock.setblocking(False)
        self._socket = sock
        self._decode = msgspec.msgpack.Decoder(reads)
        self._encode = msgspec.msgpack.Encoder()
        self._came = bytearray()
        self._to_go = bytearray()
        self._ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def clogged(self) -> bool:
        """Whether data waits to be sent."""
        return bool(self._to_go)

    def send(self, message: WireMessage) -> None:
        """Send a message, or keep it until `flush`.

        Raises:
            ClosedError: the other side is gone.
        """
        body = self._encode.encode(message)
        self._to_go += _LENGTH.pack(len(body))
        self._to_go += body
        self.flush()

    def flush(self) -> None:
        """Send kept data, as much as the socket accepts."""
        try:
            while self._to_go:
                sent = self._socket.send(self._to_go)
                del self._to_go[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ClosedError(str(error)) from None

    def receive(self) -> list[In]:
        """Return every complete message received.

        Raises:
            ClosedError: there is none, and no more can come.
        """
        try:
            while data := self._socket.recv(_READ_BYTES):
                self._came += data
                if len(data) < _READ_BYTES:
                    break
            else:
                self._ended = True
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
        messages, at = [], 0
        while len(self._came) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._came, at)
            end = at + _LENGTH.size + size
            if len(self._came) < end:
                break
            messages.append(self._decode.decode(self._came[at + _LENGTH.size : end]))
            at = end
        del self._came[:at]
        if self._ended and not messages:
            raise ClosedError("the other side has closed the connection")
        return messages

    def close(self) -> None:
        self._socket.close()


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


def pack_floats(numbers: Sequence[float]) -> bytes:
    """Pack numbers as 32-bit floats, which is what engines compute log-probs in."""
    return array("f", numbers).tobytes()


def unpack_floats(packed: bytes) -> list[float]:
    numbers = array("f")
    numbers.frombytes(packed)
    return numbers.tolist()
