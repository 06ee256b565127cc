"""The cluster of a run: GPU classes, engines and their roles, tools, host memory, failures."""
