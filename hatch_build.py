"""What a wheel holds besides the packages: a compiled build, Plotly's script, one small trace."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DEMO_TRACE = "coding-512.jsonl.gz"


class WheelContents(BuildHookInterface):
    """Adds files that are elsewhere in a checkout; an editable installation reads the checkout."""

    def dependencies(self) -> list[str]:
        """Packages that a build needs."""
        return ["plotly>=7.0"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built.

        Raises:
            RuntimeError: plotly is not installed where the wheel is built.
        """
        if version == "editable":
            return
        included = build_data["force_include"]
        plotly = find_spec("plotly")
        if plotly is None or plotly.origin is None:
            raise RuntimeError("a wheel of Heddle holds plotly's script: pip install plotly")
        script = Path(plotly.origin).parent / "package_data" / "plotly.min.js"
        included[str(script)] = "heddle/reports/plotly.min.js"
        included[str(Path(self.root) / "traces" / DEMO_TRACE)] = f"heddle/traces/{DEMO_TRACE}"
        self._compiled(build_data)

    def _compiled(self, build_data: dict[str, Any]) -> None:
        """Add extensions beside their sources, and the tag of this platform."""
        sys.path.insert(0, self.root)
        from heddle_compiled import RECORD, ROOT, why_not
        from heddle_compiled.build import built

        if why_not():
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in [*built(), RECORD]:
            build_data["force_include"][str(path)] = str(path.relative_to(ROOT))
