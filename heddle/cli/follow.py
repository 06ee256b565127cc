"""`heddle diagnose --follow`: each step of logs that a training writes, when it is complete."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import rich_click as click

from heddle.cli.diagnose import found_remedies, read_steps, show_remedies
from heddle.config_error import require

if TYPE_CHECKING:
    from heddle.command_config import Config
    from heddle.diagnosis.following import CompleteStep, Followed
    from heddle.diagnosis.remedies import Remedy
    from heddle_trace.observed.columns import ObservedSteps

RESTS: Final = 20.0
"""Times as long as the logs take to read, no look is taken at them again."""
NAMED: Final = 4
_Files: TypeAlias = Mapping[Path, tuple[int, int, int]]

pause = time.sleep


def follow(folder: Path, config: "Config", *, as_json: bool) -> None:
    """Print steps until a signal ends it.

    Raises:
        ConfigError: it is no folder of logs, or a file is to be written.
    """
    from heddle.diagnosis.following import Followed
    from heddle.runs.files import MANIFEST

    require(folder.is_dir(), f"{folder}: no such folder: --follow takes that of a training's logs")
    require(
        not (folder / MANIFEST).exists(),
        f"{folder}: is a run, whose steps `heddle diagnose` shows: --follow takes a folder of logs",
    )
    require(not config.diagnose.observed, "--follow writes no file: leave diagnose.observed out")
    following = _Following(folder, config, as_json, Followed())
    try:
        while True:
            pause(max(config.diagnose.follow_s, RESTS * following.look()))
    except KeyboardInterrupt:
        if following.followed.left is not None:
            following.show(following.followed.left, "so far")
        raise


@dataclass(slots=True)
class _Following:
    folder: Path
    config: "Config"
    as_json: bool
    followed: "Followed"
    files: _Files = field(default_factory=dict)
    said: str = ""
    searched: "CompleteStep | None" = None
    """The step on which remedies were searched last."""
    setting: str = ""

    def look(self) -> float:
        """Read the files if they have changed, and print what is new. Returns seconds to read."""
        from heddle.diagnosis.verdict import diagnosed
        from heddle_trace.errors import TraceError

        files = _files(self.folder)
        if not files:
            self._say(f"{self.folder}: no file yet")
        if files == self.files or not files:
            return 0.0
        self.files, began_s = files, time.monotonic()
        try:
            steps, name = read_steps([*map(str, files)], self.config.logs, growing=True)
            found = diagnosed(steps, name)
        except TraceError as error:
            self._say(str(error))
            return time.monotonic() - began_s
        if found.steps[-1].label is None and not any(p.phase == "step" for p in steps.phases):
            self._say("the logs number no steps: `heddle diagnose` shows what there is so far")
        more = self.followed.more(steps, found.steps)
        took_s = time.monotonic() - began_s
        for each in more:
            self.show(each)
        if more:
            self._recommend(steps, more[-1])
        return took_s

    def _say(self, message: str) -> None:
        """Once, until something else is to be said."""
        if message != self.said:
            click.echo(message, err=True)
        self.said = message

    def show(self, each: "CompleteStep", note: str = "") -> None:
        from heddle.cli.tables import percent
        from heddle.diagnosis.verdict import WORTH

        lasts_s, self.said = each.step.end_s - each.step.start_s, ""
        if self.as_json:
            kind = "unfinished" if note else "step"
            self._line(kind, seconds=lasts_s, parts=each.step.parts, step=each.number)
            return
        large = [(n, share) for n, share in each.shares.items() if share >= WORTH][:NAMED]
        parts = ", ".join(f"{percent(share)} {name}" for name, share in large)
        click.echo(f"step {each.number:<5}  {lasts_s:>9,.1f} s  {parts} {note}".rstrip())

    def _recommend(self, steps: "ObservedSteps", now: "CompleteStep") -> None:
        """Search remedies of a step if it moved far from the last one that was searched."""
        moved = {} if self.searched is None else now.moved(self.searched)
        far = any(abs(change) > self.config.diagnose.follow_moved for change in moved.values())
        if not self.config.diagnose.budget_s or (self.searched is not None and not far):
            return
        self.searched = now
        remedies, why_none = found_remedies(steps, self.config, now.trajectories)
        setting = remedies[0].setting if remedies else ""
        if why_none:
            self._say(f"step {now.number}: no remedies: {why_none}")
        if setting == self.setting:
            return
        self.setting = setting
        self._show_recommended(now, remedies[:1], moved)

    def _show_recommended(
        self, now: "CompleteStep", remedies: "list[Remedy]", moved: Mapping[str, float]
    ) -> None:
        if self.as_json:
            best = asdict(remedies[0]) if remedies else None
            self._line("recommended", step=now.number, remedy=best, moved=moved)
            return
        why = ", ".join(f"{name} {change * 100.0:+.0f} %" for name, change in moved.items())
        found = "recommended" if remedies else "what runs is recommended"
        click.echo(f"after step {now.number}{f' ({why})' if why else ''}: {found}")
        show_remedies(remedies, "")

    def _line(self, kind: str, **values: object) -> None:
        click.echo(json.dumps({"schema": "heddle.follow/1", "kind": kind, **values}))


def _files(folder: Path) -> _Files:
    """Size, time and number of each file that holds something."""
    from heddle_trace.importers.folders import within

    found = {}
    for path in within(folder):
        try:
            at = path.stat()
        except FileNotFoundError:
            continue
        if at.st_size:
            found[path] = (at.st_size, at.st_mtime_ns, at.st_ino)
    return found
