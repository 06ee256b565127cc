"""`vllm serve` without a model: a `FakeVllm` at the address that its command line names.

python -m tests.runtime.fake_serve serve MODEL ... --host HOST --port PORT
"""

import asyncio
import os
import sys

from tests.runtime.fake_vllm import FakeVllm


async def main() -> None:
    words = sys.argv[1:]
    value = {name: words[words.index(name) + 1] for name in ("--host", "--port")}
    assert words[0] == "serve"
    if "--fails" in words:
        sys.exit("no memory for this model")
    vllm = FakeVllm(
        model=words[words.index("--served-model-name") + 1], key=os.environ["VLLM_API_KEY"]
    )
    vllm.host, vllm.port = value["--host"], int(value["--port"])
    await vllm.start()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
