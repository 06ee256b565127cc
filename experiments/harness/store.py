"""Finished results on disk, addressed by the content of the question."""

import json
import os
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DECIDES = ("heddle_core", "heddle_predict", "heddle_sim", "heddle_trace")
"""Packages whose code a result depends on."""


class Store:
    """A folder of results. A result is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __contains__(self, key: str) -> bool:
        return self._path(key).exists()

    def get(self, key: str) -> Mapping[str, Any]:
        """Return a result.

        Raises:
            KeyError: there is none under this key.
        """
        found: Mapping[str, Any] = self._read(key)["result"]
        return found

    def put(self, key: str, question: Any, result: Mapping[str, Any]) -> None:
        """Keep a result with its question and the hash of the code."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        kept = {"asked": question, "code": code_key(), "result": result}
        part.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        part.replace(path)

    def forget(self, key: str) -> None:
        """Drop a result, if there is one."""
        self._path(key).unlink(missing_ok=True)

    def outdated(self, key: str) -> bool:
        """Whether a result was made by other code than that of today."""
        return bool(self._read(key)["code"] != code_key())

    def _read(self, key: str) -> dict[str, Any]:
        path = self._path(key)
        if not path.exists():
            raise KeyError(f"no result {key}; run the experiment first")
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept

    def _path(self, key: str) -> Path:
        return self.folder / "runs" / f"{key}.json"


@cache
def code_key() -> str:
    """Hash of the source that decides what a run does."""
    found = sha256()
    for package in DECIDES:
        sources = [*(ROOT / package).rglob("*.py"), *(ROOT / package).rglob("*.heddle")]
        for path in sorted(sources):
            found.update(f"{path.relative_to(ROOT)}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:12]
