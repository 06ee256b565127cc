"""`heddle serve` as a process, and clients that send a step again until it is answered."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

AGAIN_S = 0.2
"""Between two attempts of a client."""
GIVE_UP_S = 120.0
"""A step that is not answered for so long is lost."""
PASSING = (500, 502, 503)
"""Statuses after which a client may send the same again."""


class LostStepError(Exception):
    """A step was refused for good, or never answered."""


class GatewayProcess:
    """A running `heddle serve`."""

    def __init__(self, *args: object, port: int = 0, log: Path) -> None:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: it ended instead.
        """
        command = (sys.executable, "-m", "heddle.cli", "serve", "--json", "--port", str(port))
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            (*command, *map(str, args)), stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"heddle serve did not start: {log.read_text()[-2000:]}")
        started = json.loads(line)
        self.url, self.run = str(started["url"]), Path(started["run"])
        self.port = int(self.url.rpartition(":")[2])

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, and wait for the end."""
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        self._log.close()

    @property
    def children(self) -> list[int]:
        """Processes that it started, and those that they started."""
        table = subprocess.run(
            ("ps", "-eo", "pid=,ppid="), capture_output=True, text=True, check=True
        )
        pairs = [tuple(map(int, line.split())) for line in table.stdout.splitlines()]
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in pairs if parent == pid]
        return found[1:]


@dataclass(slots=True)
class Client:
    """Sends steps of token ids to a gateway that may be gone for a moment."""

    http: aiohttp.ClientSession
    url: str
    attempts: Counter[str] = field(default_factory=Counter)
    """How attempts ended."""

    async def post(self, path: str, body: Any) -> Any:
        """Make one call that must succeed."""
        async with self.http.post(self.url + path, json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def step(
        self, session: str, prompt: "array[int]", tokens: int, **headers: str
    ) -> tuple[list[int], str]:
        """Return the output of a step, and the name of its trajectory.

        Raises:
            LostStepError: it was refused for good, or not answered in `GIVE_UP_S`.
        """
        body = json.dumps(
            {
                "token_ids": prompt.tolist(),
                "sampling_params": {
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "temperature": 0.0,
                },
            }
        )
        sent = {"Content-Type": "application/json", "X-Session-ID": session, **headers}
        loop = asyncio.get_running_loop()
        until_s = loop.time() + GIVE_UP_S
        while loop.time() < until_s:
            try:
                async with self.http.post(
                    self.url + "/inference/v1/generate", data=body, headers=sent
                ) as answer:
                    content = await answer.json()
                    self.attempts[f"status {answer.status}"] += 1
                    if answer.status == 200:
                        ids: list[int] = content["choices"][0]["token_ids"]
                        return ids, answer.headers["x-heddle-trajectory"]
                    if answer.status not in PASSING:
                        raise LostStepError(f"{session}: {answer.status} {content}")
            except aiohttp.ClientError:
                self.attempts["connection lost"] += 1
            await asyncio.sleep(AGAIN_S)
        raise LostStepError(f"{session}: no answer in {GIVE_UP_S:g} s")


def kill(pids: Sequence[int]) -> None:
    """Kill -9."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
