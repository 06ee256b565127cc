"""`python -m heddle.cli` is `heddle`."""

from heddle.command import main

main()
