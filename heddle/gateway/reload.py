"""Keys of tenants and URLs of engines, read again while the gateway runs."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from heddle.config import RunConfig
from heddle_gateway.front import Front
from heddle_runtime.vllm_http.endpoint import UrlError, base_of, without_user


class Reload:
    """Takes over what has changed in the file of keys and in `serve.workers`."""

    def __init__(
        self,
        front: Front,
        read_again: Callable[[], RunConfig] | None,
        on_note: Callable[[str], None],
    ) -> None:
        self._front, self._read_again, self._on_note = front, read_again, on_note
        self._workers: Sequence[str] = ()
        """Of `serve.workers` when it was last read, less what was refused: that is tried again."""

    async def reload(self) -> Sequence[str]:
        """Read keys and engines again, and reopen the log; return what could not be taken over."""
        notes: list[str] = []
        log = self._front.access_log
        try:
            if log is not None:
                log.reopen()
        except OSError as error:
            notes.append(f"serve.access_log: {error}")
        try:
            self._front.tenants.reload()
            if self._read_again is not None:
                workers = (await asyncio.to_thread(self._read_again)).serve.workers
                notes += await self.take_workers(workers)
        except (OSError, ValueError) as error:
            notes.append(str(error))
        for note in notes:
            self._on_note(f"reload: {note}")
        return notes

    async def take_workers(self, workers: Sequence[str]) -> list[str]:
        """Register the engines that `serve.workers` has now, and take out those it had before.

        Nothing where engines are not known by URL. Returns what is wrong with those that cannot be
        registered.
        """
        engines, notes = self._front.engine_urls, list[str]()
        if engines is None:
            return notes
        before, self._workers = self._workers, tuple(map(_written, workers))
        for url in set(before).difference(self._workers):
            engines.remove(url, drain=True)
        new = [(url, dict[str, Any]()) for url in self._workers if url not in before]
        for url, error in await engines.expect(new, self._on_note):
            notes.append(f"serve.workers: {without_user(url)}: {error}")
            self._workers = tuple(each for each in self._workers if each != url)
        return notes


def _written(url: str) -> str:
    """A URL as engines are listed by; what is none stays, to be refused."""
    with suppress(UrlError):
        return base_of(url)
    return url
