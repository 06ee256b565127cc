"""Run directories: written during a run, loaded again afterwards; see docs/run-directory.md."""

from heddle.runs.directory import Run as Run
from heddle.runs.directory import RunDirectory as RunDirectory
from heddle.runs.directory import RunFacts as RunFacts
from heddle.runs.directory import load_run as load_run
from heddle.runs.directory import open_run as open_run
from heddle.runs.files import RunError as RunError
