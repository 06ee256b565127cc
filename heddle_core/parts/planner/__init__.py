"""Planners: which engines exist, at which TP degree."""
