"""Logs of others, made into traces. One file a format; `formats.py` lists them."""

from heddle_trace.importers.formats import AUTO, FORMATS
from heddle_trace.importers.run import ImportReport, import_trace

__all__ = ["AUTO", "FORMATS", "ImportReport", "import_trace"]
