"""Puts a compiled build that is here into the wheel; without one the wheel is pure Python."""

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledModules(BuildHookInterface):
    """Adds the extensions beside their sources, and the tag of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; an editable installation reads the checkout itself."""
        sys.path.insert(0, self.root)
        from heddle_compiled import RECORD, ROOT, why_not
        from heddle_compiled.build import built

        if version == "editable" or why_not():
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in [*built(), RECORD]:
            build_data["force_include"][str(path)] = str(path.relative_to(ROOT))
