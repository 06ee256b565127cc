"""Admissions: how much KV a step must find free before it may run."""
