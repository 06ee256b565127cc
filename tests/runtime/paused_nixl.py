"""vLLM's command line with a NIXL whose progress threads pause: each would occupy a core."""

from heddle_runtime.vllm.command import main
from heddle_runtime.vllm.nixl_connector import pause_nixl

if __name__ == "__main__":
    pause_nixl()
    main()
