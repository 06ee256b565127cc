"""`python -m heddle.cli` is `heddle`."""

from heddle.cli import main

main(prog_name="heddle")
