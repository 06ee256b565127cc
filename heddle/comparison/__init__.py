"""Comparisons of policies: runs, settings of baselines, means over seeds, the waterfall."""
