"""The page about runs: one HTML file that needs no network; see docs/report.md.

Python gives columns and facts; what is drawn from them is decided in `static/`.
"""
