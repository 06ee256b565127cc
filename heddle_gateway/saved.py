"""What survives a gateway: sessions with their engines, and answers that clients may ask for again.

A SQLite file in WAL mode: what was written is there after the process is killed.
"""

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from heddle_gateway.client_step import ClientStep
from heddle_runtime.generation import GenerationEnd

BUSY_S: Final = 0.1
"""For another process to let go of the file; nobody else is answered while this one waits."""
_LOG: Final = logging.getLogger(__name__)
_TABLES: Final = """
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = NORMAL;
    CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, url TEXT, seen_s REAL) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS answers (
        session TEXT, key BLOB, until_s REAL, answer BLOB, PRIMARY KEY (session, key)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS due ON answers (until_s);
    CREATE INDEX IF NOT EXISTS old ON sessions (seen_s);
"""


class SavedStateError(ValueError):
    """A file of state cannot be used; the message names it and says why."""


class _Answer(msgspec.Struct, array_like=True):
    """How a step ended."""

    trajectory: str
    output_ids: list[int]
    uncounted: int
    events: list[dict[str, Any]]
    logprobs: list[Any]
    weight_versions: list[Any]
    end: GenerationEnd


class SavedState:
    """One file, which no other gateway may have at the same time."""

    def __init__(self, path: Path, idle_s: float, keep_answer_s: float) -> None:
        """Open a file, or make it.

        Raises:
            SavedStateError: another gateway has it, or it is no such file.
        """
        self._idle_s, self._keep_answer_s = idle_s, keep_answer_s
        self._fails = False
        try:
            place = path.resolve()  # two names of one file have one lock
            self._lock = os.open(f"{place}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            os.close(os.open(place, os.O_CREAT | os.O_RDWR, 0o600))  # answers are for nobody else
        except OSError as error:
            raise SavedStateError(f"serve.state: {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            text = "another gateway uses it: end that, or give this one a file of its own"
            raise SavedStateError(f"serve.state: {path}: {text}") from None
        try:
            self._db = sqlite3.connect(place, timeout=BUSY_S, isolation_level=None)
            self._db.executescript(_TABLES)
            if (found := self._db.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
                raise sqlite3.DatabaseError(found[0])
        except sqlite3.Error as error:
            os.close(self._lock)
            raise SavedStateError(f"serve.state: {path}: {error}; give another file") from None

    def close(self) -> None:
        """Let another gateway have the file."""
        self._db.close()
        os.close(self._lock)

    def url_of(self, session: str) -> str:
        """Return the URL of the engine that a session ran at last, "" if there is none."""
        with self._noted():
            found = self._db.execute("SELECT url FROM sessions WHERE id = ?", (session,)).fetchone()
            return found[0] if found is not None else ""
        return ""

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Log the first of several errors: without the file, the gateway goes on as without one."""
        try:
            yield
        except sqlite3.Error as error:
            if not self._fails:
                _LOG.warning("serve.state: nothing is kept or found while this holds: %s", error)
            self._fails = True

    def keep(self, session: str, step: ClientStep, end: GenerationEnd, url: str) -> None:
        """Write how a step of a session ended, before a client has it."""
        now_s = time.time()
        answer = _Answer(
            step.trajectory,
            list(step.output_ids),
            step.uncounted,
            step.relayed.events,
            step.logprobs,
            step.weight_versions,
            end,
        )
        row = (session, step.key, now_s + self._keep_answer_s, msgspec.msgpack.encode(answer))
        with self._noted():
            with self._db:
                self._db.execute("BEGIN")
                self._db.execute("REPLACE INTO sessions VALUES (?, ?, ?)", (session, url, now_s))
                self._db.execute("REPLACE INTO answers VALUES (?, ?, ?, ?)", row)
            self._fails = False

    def restore(self, session: str, step: ClientStep) -> bool:
        """End a step as an equal one of its session ended; return whether there was one."""
        query = "SELECT answer FROM answers WHERE session = ? AND key = ? AND until_s > ?"
        found = None
        with self._noted():
            found = self._db.execute(query, (session, step.key, time.time())).fetchone()
        if found is None:
            return False
        try:
            answer = msgspec.msgpack.decode(found[0], type=_Answer)
        except msgspec.MsgspecError:  # of another version
            return False
        step.measured = True
        step.trajectory, step.uncounted = answer.trajectory, answer.uncounted
        for event in answer.events:
            step.relayed.take(event)
        step.logprobs += answer.logprobs
        step.weight_versions += answer.weight_versions
        step.take(answer.output_ids)
        step.finish(answer.end)
        return True

    def finish(self, session: str) -> bool:
        """Forget a session; return whether it was there."""
        with self._noted():
            self._db.execute("DELETE FROM answers WHERE session = ?", (session,))
            return self._db.execute("DELETE FROM sessions WHERE id = ?", (session,)).rowcount > 0
        return False

    def sweep(self) -> None:
        """Forget what is due."""
        now_s = time.time()
        with self._noted():
            self._db.execute("DELETE FROM answers WHERE until_s < ?", (now_s,))
            self._db.execute("DELETE FROM sessions WHERE seen_s < ?", (now_s - self._idle_s,))
