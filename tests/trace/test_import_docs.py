"""docs/importing.md, and what came of real logs, say what importers do."""

import re
from pathlib import Path

import pytest

from heddle.cli.trace_import import import_
from heddle_trace.importers import FORMATS
from tests.trace import importer_table
from tests.trace.test_importers_samples import SAMPLES

DOCS = importer_table.ROOT / "docs"
PAGE = (DOCS / "importing.md").read_text(encoding="utf-8")
TABLE = DOCS / "tables" / "importer_assumptions.txt"
REAL_LOGS = Path(__file__).with_name("real_logs.txt")


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="real logs are not at ../shared/raw_samples")
def test_the_table_of_real_logs_is_what_its_command_prints():
    assert "\n".join(importer_table.rows(SAMPLES)) + "\n" == REAL_LOGS.read_text(encoding="utf-8")


def test_what_formats_assume_is_what_their_imports_print():
    assert "\n".join(importer_table.assumptions()) + "\n" == TABLE.read_text(encoding="utf-8")
    assert '--8<-- "docs/tables/importer_assumptions.txt"' in PAGE


def test_every_format_and_option_is_listed():
    formats = PAGE.partition("## Formats")[2].partition("## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", formats, re.MULTILINE) == list(FORMATS)
    for option in import_.params:
        flag = option.opts[0]
        assert flag in PAGE or not flag.startswith("-"), flag
