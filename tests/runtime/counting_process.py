"""An engine's process without a model: the loop and the wire as for vLLM, tokens that only count.

The next token depends on the whole context and on the weights, so that a token made twice, left
out, or made under other weights shows. KV is found by prefix, in blocks, and can be pulled by other
processes of this kind from a folder; one that was taken back reads as another trajectory's.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heddle_runtime.process import wire
from heddle_runtime.process.connection import connect
from heddle_runtime.process.loop import serve
from heddle_runtime.process.stepped_engine import Activity, IterationOutput
from heddle_runtime.process.wire import Channel, Order
from heddle_runtime.vllm.settings import VllmSettings

BLOCK = 32
CAPACITY = 64_000
ITERATION_S = 0.002


@dataclass(slots=True)
class _Running:
    context: list[int]
    left: int
    salt: str
    kv: dict[str, Any] | None
    export: bool
    scheduled_s: float = 0.0
    cached: int = 0


@dataclass(slots=True)
class CountingCore:
    """Implements `SteppedEngine`."""

    folder: Path
    weights: str
    block_tokens: int = BLOCK
    drafted: tuple[int, ...] = ()
    hold_pulls: bool = False
    """Pulls stay in the queue, as they do without free blocks."""
    requests: dict[str, _Running] = field(default_factory=dict)
    cached: dict[tuple[str, tuple[int, ...]], None] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    def add(
        self,
        request: str,
        prompt: list[int],
        *,
        max_tokens: int,
        exact: bool = True,
        seed: str = "",
        salt: str = "",
        kv: dict[str, Any] | None = None,
        export: bool = False,
        pin: bool = False,
        known: int = 0,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        if len(prompt) + max_tokens > CAPACITY:
            raise ValueError("too long")
        self.requests[request] = _Running(list(prompt), max_tokens, salt, kv, export)

    def abort(self, request: str) -> None:
        running = self.requests.pop(request, None)
        if running is not None and running.scheduled_s:
            self._remember(running, running.context[:-1])

    def step(self) -> Iterator[IterationOutput]:
        time.sleep(ITERATION_S)
        for name, running in list(self.requests.items()):
            if running.kv is not None and self.hold_pulls:
                continue
            first = not running.scheduled_s
            if first:
                running.scheduled_s = time.monotonic()
                if running.kv is not None and not self._pull(running):
                    del self.requests[name]
                    yield IterationOutput(name, [], "error", 0.0, 0, -1, None)
                    continue
                running.cached = self._found(running)
            token = next_token(running.context, self.weights)
            running.context.append(token)
            running.left -= 1
            kv = None
            if not running.left:
                del self.requests[name]
                self._remember(running, running.context[:-1])
                if running.export:
                    kv = {"file": str(self.folder / f"{os.getpid()}-{name}.json")}
                    Path(kv["file"]).write_text(json.dumps(running.context[:-1]))
            yield IterationOutput(
                name,
                [token],
                "" if running.left else "length",
                running.scheduled_s if first else 0.0,
                0,
                running.cached if first else -1,
                kv,
            )

    def _pull(self, running: _Running) -> bool:
        assert running.kv is not None
        try:
            content = json.loads(Path(running.kv["file"]).read_text())
        except OSError:
            return False
        self._remember(running, content)
        return True

    def _remember(self, running: _Running, tokens: list[int]) -> None:
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            self.cached[running.salt, tuple(tokens[:end])] = None

    def _found(self, running: _Running) -> int:
        found = 0
        for end in range(BLOCK, len(running.context), BLOCK):
            if (running.salt, tuple(running.context[:end])) not in self.cached:
                break
            found = end
        return found

    def activity(self) -> Activity:
        return "computing" if self.requests else "idle"

    def has_begun(self, request: str) -> bool:
        running = self.requests.get(request)
        return running is None or running.scheduled_s > 0

    def release(self, exported: str) -> None:
        self.released.append(exported)

    def load_weights(self, path: str, *, keep_kv: bool = False) -> None:
        if not Path(path).is_dir():
            raise FileNotFoundError(f"there are no weights at {path}")
        self.weights = path

    def counters(self) -> tuple[int, int, int]:
        held = sum(len(running.context) for running in self.requests.values())
        return len(self.requests), 0, held

    def sleep(self, level: int) -> None:
        pass

    def wake(self) -> None:
        pass


def next_token(context: list[int], weights: str) -> int:
    """The token that this "model" makes of a context."""
    return (sum(context[-7:]) * 31 + len(context) * 7 + len(weights)) % 1500 + 300


def main(serve: Callable[[CountingCore, Channel[Order], VllmSettings], None] = serve) -> None:
    channel, boot = connect(int(sys.argv[1]), wire.Order, wire.Boot)
    folder = Path(boot.settings.model_dir)
    if not folder.is_dir():
        channel.send(wire.Broken("no such model"))
        sys.exit(70)
    core = CountingCore(folder, str(folder))
    channel.send(
        wire.Ready(
            kv_capacity_tokens=CAPACITY,
            block_tokens=BLOCK,
            kv_bytes_per_token=16,
            max_context=CAPACITY,
            release="0",
            import_s=0.0,
            load_s=0.0,
        )
    )
    try:
        serve(core, channel, boot.settings)
    except OSError as error:
        channel.send(wire.Broken(str(error)))
        sys.exit(70)


if __name__ == "__main__":
    main()
