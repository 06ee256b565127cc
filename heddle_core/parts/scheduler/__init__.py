"""Schedulers: the order of one engine's queue."""
