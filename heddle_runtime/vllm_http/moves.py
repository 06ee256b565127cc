"""KV that leaves and enters an endpoint, by generations of one token that is dropped."""

import asyncio
from collections.abc import Sequence
from typing import Any

from heddle_core.ids import EngineId, TrajectoryId
from heddle_rollout.engines import KvHandle, KvPlaced
from heddle_runtime.vllm_http.endpoint import Endpoint, UnreachableError
from heddle_runtime.vllm_http.probe import GENERATE, EndpointFacts, one_token
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_runtime.vllm_http.stream import GenerateChunk, ProtocolError, read_chunk

KNOWN_TRAJECTORIES = 1 << 13
"""Trajectories that an engine remembers to have KV of, the latest: few caches hold more."""


class KvMoves:
    """Exports and imports of one engine."""

    def __init__(
        self, engine: EngineId, endpoint: Endpoint, facts: EndpointFacts, settings: HttpSettings
    ) -> None:
        self._engine, self._endpoint = engine, endpoint
        self._facts, self._settings = facts, settings
        self._salts: dict[TrajectoryId, str] = {}
        """Of trajectories whose KV may be here."""
        self.count = 0
        """Calls under way."""

    def has_seen(self, trajectory: TrajectoryId) -> bool:
        """Whether KV of it may be here."""
        return trajectory in self._salts

    def remember(self, trajectory: TrajectoryId, salt: str) -> None:
        """KV of a trajectory will be here, separated from others' by `salt`."""
        self._salts.pop(trajectory, None)
        self._salts[trajectory] = salt
        if len(self._salts) > KNOWN_TRAJECTORIES:
            del self._salts[next(iter(self._salts))]

    def forget(self, trajectory: TrajectoryId) -> None:
        """Its KV is of no more use. What is exported goes at the end of its lease."""
        self._salts.pop(trajectory, None)

    async def export(self, trajectory: TrajectoryId, context_ids: Sequence[int]) -> KvHandle | None:
        """Keep a context's KV for a pull; None if there is none."""
        salt = self._salts.get(trajectory, "")
        lease_s = self._facts.kv_lease_s or self._settings.kv_lease_s
        # The real lease begins when the generation has ended, so this end is never too late.
        expires_s = asyncio.get_running_loop().time() + lease_s
        made = await self._one_token(context_ids, salt, {"do_remote_decode": True}, lease_s)
        whole = self._whole_blocks(context_ids)
        if made is None or not made.kv_transfer_params or not whole:
            return None
        return KvHandle(
            source=self._engine,
            trajectory=trajectory,
            kv_tokens=whole,
            kv_bytes=whole,  # no call returns the bytes of a token; they order transfers only
            expires_s=expires_s,
            params={"kv": made.kv_transfer_params, "salt": salt},
        )

    async def place(
        self, trajectory: TrajectoryId, context_ids: Sequence[int], kv: KvHandle | None
    ) -> KvPlaced:
        """Bring a context into the prefix cache, by a pull where `kv` is valid."""
        salt = self._salts.get(trajectory, "")
        way = KvPlaced("none", 0)
        whole = self._whole_blocks(context_ids)
        if kv is not None and kv.source != self._engine:  # its own is in its prefix cache
            salt = str(kv.params.get("salt", ""))
            # Closed before the lease ends: later the blocks may be another's, and nothing says so.
            now_s = asyncio.get_running_loop().time()
            left_s = kv.expires_s - self._settings.kv_margin_s - now_s
            pull = kv.params.get("kv")
            if left_s > 0 and pull and await self._one_token(context_ids, salt, pull, left_s):
                way = KvPlaced("kv", whole)
        if way.way == "none" and await self._one_token(
            context_ids, salt, None, self._settings.silence_limit_s
        ):
            way = KvPlaced("prefill", whole)
        if way.way != "none":
            self.remember(trajectory, salt)
        return way

    async def _one_token(
        self,
        context_ids: Sequence[int],
        salt: str,
        transfer: dict[str, Any] | None,
        limit_s: float,
    ) -> GenerateChunk | None:
        """Make one token, with KV pulled or kept as `transfer` says; None if it was not made."""
        body = one_token(context_ids, transfer) | ({"cache_salt": salt} if salt else {})
        self.count += 1
        try:
            answer = await self._endpoint.call(GENERATE, body, limit_s=limit_s)
            made = read_chunk(answer.data) if answer.status == 200 else None
        except (UnreachableError, ProtocolError):
            return None
        finally:
            self.count -= 1
        if made is None or [choice.finish_reason for choice in made.choices] not in _MADE:
            return None
        return made

    def _whole_blocks(self, context_ids: Sequence[int]) -> int:
        block = self._facts.block_tokens
        return len(context_ids) // block * block


_MADE = (["length"], ["stop"])
"""How the generation of one token ends where it did not fail."""
