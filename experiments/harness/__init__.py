"""Shared by all experiments: sets of runs, results keyed by content, verdicts, the page of results.

An experiment is a folder with ``config.toml`` (which runs), ``run.py`` (``measure`` makes numbers
of finished runs, ``draw`` a figure of the numbers) and ``expected.json`` (what the source claims).
"""
