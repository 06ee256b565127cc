"""Prints what `vllm serve` understands of options, as JSON; `NAME,NAME... OPTION...`."""

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    names, options = sys.argv[1].split(","), sys.argv[2:]
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    print(json.dumps({name: getattr(found, name) for name in names}))  # noqa: T201
