"""`heddle serve` in a process of its own, and calls of it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

COMMAND = (sys.executable, "-m", "heddle.cli", "serve", "--port", "0", "--json")


class Gateway:
    """A running `heddle serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.started = json.loads(process.stdout.readline())
        self.url = self.started["url"]

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        sent = urllib.request.Request(
            self.url + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(sent, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def end(self, number: int = signal.SIGTERM) -> dict[str, Any]:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        summary: dict[str, Any] = json.loads(out.splitlines()[-1])
        return summary


@contextmanager
def gateway(folder: Path, *args: str, **environment: str) -> Iterator[Gateway]:
    process = subprocess.Popen(
        (*COMMAND, *args),
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Gateway(process)
    finally:
        process.kill()
        process.communicate()
