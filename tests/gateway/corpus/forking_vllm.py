"""vLLM's command line with an engine that is forked, and so need not import vLLM again.

On CPU vLLM always spawns it, whatever its environment variable says.
"""

import multiprocessing

from heddle_runtime.vllm.command import main

if __name__ == "__main__":
    context_of = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context_of(
        "fork" if method == "spawn" else method
    )
    main()
