"""Builds the compiled modules beside their sources: ``python -m heddle_compiled.build``.

One source for both builds: mypyc translates the typed modules. It needs a C compiler, mypy and
setuptools. docs/decisions/0024-a-compiled-build.md says why mypyc.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from heddle_compiled import GROUP, RECORD, ROOT, record, source
from heddle_compiled.modules import MODULES


def build() -> None:
    """Translate, compile and record.

    Raises:
        ImportError: mypy or setuptools is missing.
        SystemExit: mypyc refuses a source, or there is no C compiler; the reason is printed.
    """
    from mypyc.build import mypycify
    from setuptools import Distribution

    remove()
    os.chdir(ROOT)
    sources = [str(source(name).relative_to(ROOT)) for name in MODULES]
    with tempfile.TemporaryDirectory() as folder:
        # A cache of its own: mypy may check the same tree meanwhile.
        options = ["--cache-dir=.mypy_cache/compiled", *sources]
        extensions = mypycify(options, opt_level="3", group_name=GROUP, target_dir=folder)
        distribution = Distribution({"name": "heddle", "ext_modules": extensions})
        command = distribution.get_command_obj("build_ext")
        command.inplace = True
        command.build_temp = folder
        command.ensure_finalized()
        command.run()
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")


def remove() -> None:
    RECORD.unlink(missing_ok=True)
    for extension in built():
        extension.unlink()


def built() -> list[Path]:
    """Return the extensions that are here, those of modules that are listed no more included."""
    packages = [init.parent for init in ROOT.glob("heddle*/__init__.py")]
    beside = sorted(path for package in packages for path in package.rglob("*.so"))
    ours = [path for path in beside if path.with_name(f"{path.name.partition('.')[0]}.py").exists()]
    return [*ROOT.glob(f"{GROUP}__mypyc.*.so"), *ours]


if __name__ == "__main__":
    try:
        build()
    except ImportError as error:
        sys.exit(f"The compiled build needs mypy and setuptools: {error}")
    sys.stdout.write(f"{len(MODULES)} modules are compiled; HEDDLE_PURE=1 switches them off.\n")
